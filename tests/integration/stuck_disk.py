"""A disk on which no sync ends while a file exists: nothing that a service receives becomes durable."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from tests.lakefeed_process import run_main


@dataclass(frozen=True, slots=True)
class StuckDisk:
    """The disk of a service that is started with `serve`."""

    directory: Path

    @property
    def _stuck(self) -> Path:
        return self.directory / "stuck"

    @property
    def _waiting(self) -> Path:
        return self.directory / "waiting"

    @property
    def has_waiting_sync(self) -> bool:
        return self._waiting.exists()

    def stick(self) -> None:
        self._stuck.touch()

    def release(self) -> None:
        self._stuck.unlink()

    def serve(self, arguments: list[str]) -> None:
        """Run the command line on this disk."""
        sync = os.fdatasync

        def sync_when_released(descriptor: int) -> None:
            while self._stuck.exists():
                self._waiting.touch()
                time.sleep(0.01)
            sync(descriptor)

        os.fdatasync = sync_when_released
        run_main(arguments)
