"""A disk that does what it is told, one thing at a time: it can be slow, full or broken, and lose power.

The log's threads are taken away: what they would do is done at once or, while the disk is held, when it is let go. So
a whole run is one sequence of steps, and the same choices lead to the same run.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any
from unittest import mock

from lakefeed.writer.config import LogConfig
from lakefeed.writer.wal.log import FileLog
from tests.writer.wal.crashes import CrashingFilesystem

KIB = 1024


class TinyLogConfig(LogConfig):
    """Settings below what a service would be allowed: rotations and full logs within a few batches."""

    def __post_init__(self) -> None:
        """Check nothing."""


TINY_LOG = TinyLogConfig(segment_max_bytes=16 * KIB, max_bytes=64 * KIB)


class ModelDisk(CrashingFilesystem):
    """A filesystem with a journal, as it is after a crash, that can also be full."""

    no_room = False

    def write(self, descriptor: int, parts: Sequence[bytes | memoryview], position: int) -> int:
        if self.no_room:
            whole = b"".join(parts)
            if len(whole) > 1:
                super().write(descriptor, [whole[: len(whole) // 2]], position)
            raise OSError(errno.ENOSPC, "injected into write")
        return super().write(descriptor, parts, position)


class Turns:
    """Stands in for the log's threads: their jobs, in the order in which they were given out."""

    def __init__(self) -> None:
        self.held = False
        self._jobs: deque[Callable[[], None]] = deque()

    def submit(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()

        def run() -> None:
            try:
                done.set_result(work(*args, **kwargs))
            except Exception as error:  # noqa: BLE001 - as a thread does it: the caller hears of it
                done.set_exception(error)

        self._jobs.append(run)
        self._maybe_work()
        return done

    def let_go(self) -> None:
        self.held = False
        self._maybe_work()

    def shutdown(self) -> None:
        """End; nothing is left to do."""

    def _maybe_work(self) -> None:
        while self._jobs and not self.held:
            self._jobs.popleft()()


def open_log(files: CrashingFilesystem, turns: Turns) -> FileLog:
    """Open the log of a disk, with `turns` in place of its threads."""
    with mock.patch("lakefeed.writer.wal.log.ThreadPoolExecutor", return_value=turns):
        return FileLog.open(files.directory, TINY_LOG, files=files)
