"""Processes that run `lakefeed`.

    ForkedProcess     test --> fork server with the commands imported --> child: output, environment, main()
    InstalledProcess  test --> .venv/bin/lakefeed

Each pytest process has one fork server. A start from it takes 0.05 s of CPU instead of 1.2 s, most of it for imports.
A forked process is a process like any other: it has its own pid, handles signals, can be killed, and shares no state
with the test.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path

from lakefeed.ingest.cli.main import COMMANDS
from lakefeed.ingest.cli.main import main as lakefeed

LAKEFEED = str(Path(sysconfig.get_path("scripts")) / "lakefeed")

COMMAND_TIMEOUT_S = 300.0

Main = Callable[[list[str]], None]

_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(
    [
        *(COMMANDS[name].module for name in ("serve", "push", "catalog", "quarantine", "verify")),
        "aiobotocore.session",  # which a service imports when its files are on S3
    ]
)


def run_main(arguments: list[str]) -> None:
    """Run the command line."""
    lakefeed(arguments)


class LakefeedProcess(ABC):
    """A process that runs a command of `lakefeed`."""

    @property
    @abstractmethod
    def pid(self) -> int: ...

    @property
    @abstractmethod
    def exit_status(self) -> int | None:
        """The exit status, negative for a signal; None while the process runs."""

    @abstractmethod
    def wait(self, timeout_s: float) -> int:
        """Wait until the process ends, and return its exit status."""

    def send_signal(self, number: signal.Signals) -> None:
        assert self.exit_status is None, "the process has ended"
        os.kill(self.pid, number)


class ForkedProcess(LakefeedProcess):
    """A process that runs `main(arguments)` in a directory, an environment and with standard streams of its own."""

    def __init__(
        self,
        arguments: list[str],
        *,
        directory: Path,
        environ: Mapping[str, str],
        output: Path,
        errors: Path | None = None,
        stdin: Path = Path(os.devnull),
        main: Main = run_main,
    ) -> None:
        streams = (stdin, output, errors or output)
        self._process = _forks.Process(
            target=_run, args=(main, arguments, directory, dict(environ), streams), daemon=True
        )
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def exit_status(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout_s: float) -> int:
        self._process.join(timeout_s)
        assert self._process.exitcode is not None, f"the process still runs after {timeout_s} s"
        return self._process.exitcode


def _run(main: Main, arguments: list[str], directory: Path, environ: dict[str, str], streams: tuple[Path, ...]) -> None:
    append = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    for number, (path, flags) in enumerate(zip(streams, (os.O_RDONLY, append, append), strict=True)):
        opened = os.open(path, flags, 0o644)
        os.dup2(opened, number)
        os.close(opened)
    sys.stdin = os.fdopen(0, encoding="utf-8")  # multiprocessing has replaced it
    sys.argv = [LAKEFEED, *arguments]
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environ)
    main(arguments)


class InstalledProcess(LakefeedProcess):
    """A process that the installed command starts."""

    def __init__(self, arguments: list[str], *, directory: Path, environ: Mapping[str, str], output: Path) -> None:
        with output.open("ab") as opened:
            self._process = subprocess.Popen(
                [LAKEFEED, *arguments], stdout=opened, stderr=opened, cwd=directory, env=environ
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_status(self) -> int | None:
        return self._process.poll()

    def wait(self, timeout_s: float) -> int:
        return self._process.wait(timeout_s)


def run_lakefeed(
    *arguments: str,
    directory: Path | None = None,
    settings: Mapping[str, object] | None = None,
    stdin: str = "",
    main: Main = run_main,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="lakefeed-command-") as scratch:
        streams = {name: Path(scratch, name) for name in ("stdin", "output", "errors")}
        streams["stdin"].write_text(stdin, encoding="utf-8")
        process = ForkedProcess(
            [*arguments], directory=directory or Path.cwd(), environ=clean_environment(settings), main=main, **streams
        )
        try:
            status = process.wait(COMMAND_TIMEOUT_S)
        finally:
            if process.exit_status is None:
                process.send_signal(signal.SIGKILL)
        output, errors = (streams[name].read_text(encoding="utf-8") for name in ("output", "errors"))
        return subprocess.CompletedProcess(arguments, status, output, errors)


def clean_environment(settings: Mapping[str, object] | None = None) -> dict[str, str]:
    """Return the environment with these settings, given as `section.key`, and none of the developer's shell."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("LAKEFEED_")}
    own = {f"LAKEFEED_{key.replace('.', '_').upper()}": str(value) for key, value in (settings or {}).items()}
    return inherited | own
