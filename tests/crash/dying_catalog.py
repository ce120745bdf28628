"""The catalog with a death sentence: runs `lakefeed` as it is, and kills the process at the first call of a function.

python -m tests.crash.dying_catalog before lakefeed.catalog.store.store:Store.swap_pointer catalog serve ...
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from tests.crash.dying_service import _wrap


def die(*_: Any) -> None:
    """End the process: it gets no chance to do anything more."""
    os.kill(os.getpid(), signal.SIGKILL)


def live(*_: Any) -> None:
    """Go on."""


def command(moment: str, where: str) -> list[str]:
    """Build the command that runs `lakefeed` until it dies before or after its first call of a function."""
    return [sys.executable, "-m", "tests.crash.dying_catalog", moment, where]


def main() -> None:
    """Run the command line under the sentence."""
    moment, where, *arguments = sys.argv[1:]
    _wrap(where, die if moment == "before" else live, die if moment == "after" else live)
    from lakefeed.ingest.cli.main import main as lakefeed  # noqa: PLC0415 - not needed by those who only want the command

    lakefeed(arguments)


if __name__ == "__main__":
    main()
