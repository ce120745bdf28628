"""Syncing behind appends, for the modes in which an append does not wait for it. Owns one thread and the timer.

    idle --note--> waiting --interval--> syncing --> idle, or waiting again if more was written meanwhile

A sync covers what was written before it began and nothing else, so `synced_end` moves to where the log ended then.
Belongs to the event loop; the thread, `wal-sync`, only syncs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from writer.wal.files import Filesystem


class BackgroundSync:
    """Brings the newest segment to disk every `interval_s`; without an interval, only when told to `finish`."""

    def __init__(
        self,
        files: Filesystem,
        *,
        synced_end: int,
        interval_s: float | None,
        on_failure: Callable[[OSError], object],
    ) -> None:
        self.synced_end = synced_end
        self._files = files
        self._interval_s = interval_s
        self._on_failure = on_failure
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="wal-sync")
        self._descriptor = -1
        self._written_end = synced_end
        self._timer: asyncio.TimerHandle | None = None
        self._running: asyncio.Future[None] | None = None
        self._started_at = 0.0
        self._error: OSError | None = None

    def note(self, descriptor: int, end_offset: int) -> None:
        """Take note that the file behind `descriptor` now holds everything below `end_offset`."""
        self._descriptor = descriptor
        self._written_end = end_offset
        self._maybe_wait()

    async def wait_if_late(self) -> None:
        """Wait while a sync takes longer than the interval: a slow disk must not let more and more be at risk."""
        while self._interval_s is not None and self._running is not None:
            if asyncio.get_running_loop().time() - self._started_at < self._interval_s:
                return
            await asyncio.wait([self._running])

    async def finish(self) -> None:
        """Sync what is not synced yet. Nothing may be written meanwhile.

        Raises:
            OSError: this sync has failed, or an earlier one.

        """
        self._stop_timer()
        if self._running is not None:
            await asyncio.wait([self._running])
            self._stop_timer()
        if self._written_end > self.synced_end and self._error is None:
            await asyncio.wait([self._start()])
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """End the thread."""
        self._stop_timer()
        self._thread.shutdown()

    def _maybe_wait(self) -> None:
        """Start the timer unless all is synced, or timer or sync is running, or syncing has failed."""
        busy = self._timer is not None or self._running is not None or self._error is not None
        if self._interval_s is not None and not busy and self._written_end > self.synced_end:
            self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._start)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None

    def _start(self) -> asyncio.Future[None]:
        self._timer = None
        end_offset = self._written_end
        self._started_at = asyncio.get_running_loop().time()
        self._running = asyncio.wrap_future(self._thread.submit(self._files.sync, self._descriptor))
        self._running.add_done_callback(lambda done: self._finished(done, end_offset))
        return self._running

    def _finished(self, done: asyncio.Future[None], end_offset: int) -> None:
        self._running = None
        if done.cancelled():  # only the end of the event loop gets here
            return
        error = done.exception()
        if isinstance(error, OSError):
            self._error = error
            self._on_failure(error)
        elif error is not None:
            raise error
        else:
            self.synced_end = end_offset
            self._maybe_wait()
