"""Write-ahead log on local files: append and sync, rotate, trim.

    append -> [segment] [segment] [newest]  -> tail
                 |                    ^
                 +-> trim -> [spare] -+

The state belongs to the event loop. Threads only run single steps and report back: `wal-append` writes and syncs
groups, `wal-files` prepares spares and retires segments, so that neither delays an ack. Readers on other threads see
the state through `durable_end` and `segment_of`, which are atomic.

`LogConfig.sync` decides how far two ends reach. A process that dies loses nothing below `durable_end` in any mode:

    mode       durable_end                      synced_end: what a power loss leaves
    always     synced: an append waits for it   the same
    interval   written                          written an interval ago, or before the last rotation or close
    none       written                          written before the last rotation or close, or more
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import dataclasses
import secrets
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from operator import attrgetter
from pathlib import Path
from typing import ParamSpec, TypeVar

from lakefeed.contract.errors import WalCorrupt, WalFailed, WalFull
from lakefeed.writer.config import LogConfig
from lakefeed.writer.wal.directory import (
    SPARES_MAX,
    DirectoryContents,
    Filesystem,
    LogDirectory,
    Newest,
    is_disk_full,
    write_all,
)
from lakefeed.writer.wal.payload import Payload
from lakefeed.writer.wal.records import (
    GROUP_MAX_BYTES,
    MARK_BYTES,
    Header,
    Record,
    Segment,
    encode_group,
    encode_mark,
    record_bytes,
)
from lakefeed.writer.wal.tail import SegmentReader, Tail

_SALT_BITS = 64
_FIRST_SEGMENT = 1
_RECOVERY_READ_BYTES = 8 * 1024 * 1024

P = ParamSpec("P")
T = TypeVar("T")


class BackgroundSync:
    """Syncs the newest segment every `interval_s`; without an interval, only in `finish`.

        idle --note--> waiting --interval--> syncing --> idle, or waiting again if more was written meanwhile

    A sync covers what was written before it began, so `synced_end` moves to where the log ended then. The state belongs
    to the event loop; the thread, `wal-sync`, only syncs.
    """

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
        """Record that the file of `descriptor` now holds everything below `end_offset`."""
        self._descriptor = descriptor
        self._written_end = end_offset
        self._maybe_wait()

    async def wait_if_late(self) -> None:
        """Wait while a sync takes longer than the interval, so that a slow disk does not put ever more data at risk."""
        while self._interval_s is not None and self._running is not None:
            if asyncio.get_running_loop().time() - self._started_at < self._interval_s:
                return
            await asyncio.wait([self._running])

    async def finish(self) -> None:
        """Sync what is not synced yet. Nothing may be written meanwhile.

        Raises: OSError if this sync has failed, or an earlier one.
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
        """Start the timer unless all is synced, the timer or a sync is running, or syncing has failed."""
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
        if done.cancelled():  # only at the end of the event loop
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


class FileLog:
    """A log in one directory; implements `protocol.Log`."""

    def __init__(self, directory: LogDirectory, contents: DirectoryContents, config: LogConfig) -> None:
        self.failed: str | None = None
        self.files = directory.files
        self.max_bytes = config.max_bytes
        self._segment_bytes = config.segment_max_bytes
        self._directory = directory
        self._older = contents.older
        self._older_bytes = sum(segment.file_bytes for segment in contents.older)
        self._newest = contents.newest
        self._spares = list(contents.spares)
        self._preparing: Future[Path] | None = None
        self._sync_each = config.sync == "always"
        self._background = BackgroundSync(
            directory.files,
            synced_end=self.durable_end,
            interval_s=config.sync_interval_ms / 1000 if config.sync == "interval" else None,
            on_failure=self._fail,
        )
        # The newest segment ends in the remains of a write for which the disk had no space: nothing may follow them.
        self._abandoned = False
        self._closed = False
        self._appending = asyncio.Lock()
        self._trimming = asyncio.Lock()
        self._advanced = asyncio.Event()
        self._append_thread = ThreadPoolExecutor(1, thread_name_prefix="wal-append")
        self._files_thread = ThreadPoolExecutor(1, thread_name_prefix="wal-files")
        self._maybe_prepare_spare()

    @classmethod
    def open(cls, directory: Path, config: LogConfig, *, files: Filesystem | None = None) -> FileLog:
        """Open or create a log, and cut off a torn tail. Blocks; reads the newest segment into memory.

        Everything that is found is synced, whatever the mode in which it was written.

        Raises:
            WalCorrupt: a durable record is damaged.
            WalLocked: another process has the log open.
            WalVersionUnknown: another version of Lakefeed has written it.
        """
        locked = LogDirectory(directory, segment_bytes=config.segment_max_bytes, files=files or Filesystem())
        try:
            return cls(locked, locked.load(files_max=config.max_bytes // config.segment_max_bytes), config)
        except BaseException:
            locked.close()
            raise

    @property
    def head(self) -> bytes | None:
        """The head of the newest segment; None before the first append."""
        return None if self._newest is None else self._newest.head

    @property
    def first_offset(self) -> int:
        """The offset of the oldest record that is still there."""
        if self._older:
            return self._older[0].base_offset
        return 0 if self._newest is None else self._newest.segment.base_offset

    @property
    def durable_end(self) -> int:
        """The offset below which every record is durable, as the sync mode defines it."""
        return 0 if self._newest is None else self._newest.segment.end_offset

    @property
    def synced_end(self) -> int:
        """The offset below which every record is on disk and survives a power loss."""
        return self.durable_end if self._sync_each else self._background.synced_end

    @property
    def size_bytes(self) -> int:
        """The bytes of the budget in use: older segments whole, the newest as far as it is written."""
        newest_bytes = 0 if self._newest is None else self._newest.segment.end_position
        return self._older_bytes + newest_bytes

    def bytes_below(self, offset: int) -> int:
        """Return how many bytes a trim at `offset` would free."""
        return sum(segment.file_bytes for segment in self._older if segment.end_offset <= offset)

    @property
    def group_max_bytes(self) -> int:
        """The maximum sum of `record_bytes` of one append. The other half of a segment is for the head."""
        return min(self._segment_bytes // 2, GROUP_MAX_BYTES)

    def newest_records(self) -> Iterator[Record]:
        """Yield the records of the newest segment, which are those after its head. Blocks."""
        if self._newest is None:
            return
        segment = self._newest.segment
        reader = SegmentReader(segment, self.files)
        try:
            while records := reader.read(
                until=segment.end_offset, end_position=segment.end_position, max_bytes=_RECOVERY_READ_BYTES
            ):
                yield from records
        finally:
            reader.close()

    def segment_of(self, offset: int) -> Segment:
        """Return the segment that holds a durable record. Safe on any thread.

        Raises: WalCorrupt if the record was trimmed.
        """
        newest = self._newest  # read first: a rotation in between moves it to the older ones, where it is then found
        if newest is not None and offset >= newest.segment.base_offset:
            return newest.segment
        older = self._older
        index = bisect.bisect_right(older, offset, key=attrgetter("base_offset")) - 1
        if index < 0:
            raise WalCorrupt(f"record was trimmed before it was read: offset={offset}")
        return older[index]

    def tail(self, offset: int) -> Tail:
        """Return a reader that starts at `offset`."""
        return Tail(self, offset)

    async def append(self, payloads: Sequence[Payload], *, head: Callable[[], bytes]) -> int:
        """Append one group and return its first offset; see `Log`. `head` is called if a new segment begins.

        Cancellation takes effect once the group has been written or has failed, so that nothing is in flight:
        `durable_end` then shows whether the group is in the log. After WalFull, an open before the next append may find
        a part of the group. Raise ValueError if the group is empty or too large, or a payload is empty.
        """
        self._check_usable()
        if not payloads or not all(any(payload) for payload in payloads):
            raise ValueError(f"group or payload is empty: records={len(payloads)}")
        group_bytes = sum(map(record_bytes, payloads))
        if group_bytes > self.group_max_bytes:
            raise ValueError(f"group is too large: bytes={group_bytes} group_max_bytes={self.group_max_bytes}")
        return await _uncancelled(self._append(payloads, group_bytes, head))

    async def wait_beyond(self, offset: int) -> None:
        """Wait until the record at `offset` is durable."""
        while self.durable_end <= offset:
            await self._advanced.wait()

    async def trim(self, offset: int) -> None:
        """Free the segments whose records are all below `offset`; the newest always stays.

        A failed log is left unchanged. Cancellation takes effect between two segments.

        Raises: WalFailed if a segment could not be freed: it is still there, unless the log has `failed`.
        """
        async with self._trimming:
            while self._older and self._older[0].end_offset <= offset and self.failed is None and not self._closed:
                await _uncancelled(self._retire_oldest())

    async def close(self) -> None:
        """Finish what is being written, sync it and release the lock. Cancellation waits for the end.

        Raises: WalFailed if durable records could not be synced. The log is closed nevertheless.
        """
        await _uncancelled(self._close())

    async def _append(self, payloads: Sequence[Payload], group_bytes: int, head: Callable[[], bytes]) -> int:
        async with self._appending:
            await self._background.wait_if_late()
            self._check_usable()
            newest = self._newest
            # Closing writes a mark.
            if newest is None or self._abandoned or newest.free_bytes < group_bytes + MARK_BYTES:
                newest = await self._rotate(newest, head)
            segment = newest.segment
            try:
                await self._run(self._append_thread, self._write_group, newest, payloads, self.synced_end)
            except WalFull:
                self._abandoned = True
                raise
            end_offset, end_position = segment.end_offset + len(payloads), segment.end_position + group_bytes
            written = dataclasses.replace(segment, end_offset=end_offset, end_position=end_position)
            self._newest = dataclasses.replace(newest, segment=written, marked=False)
            if not self._sync_each:
                self._background.note(newest.descriptor, end_offset)
            self._advanced.set()  # wakes the tasks that wait now; the next append sets another event
            self._advanced = asyncio.Event()
            return segment.end_offset

    def _write_group(self, newest: Newest, payloads: Sequence[Payload], synced: int) -> None:
        segment = newest.segment
        parts = encode_group(payloads, first_offset=segment.end_offset, synced=synced, salt=segment.salt)
        try:
            write_all(self.files, newest.descriptor, parts, segment.end_position)
        except OSError as error:
            # The blocks were allocated, but not every file system writes to the same ones again.
            if is_disk_full(error):
                raise WalFull(f"disk is full, the group was not written: {error}") from error
            raise
        if self._sync_each:
            self.files.sync(newest.descriptor)

    async def _rotate(self, newest: Newest | None, head: Callable[[], bytes]) -> Newest:
        """Begin a new segment; directory.py lists what a crash in between leaves."""
        spare = await self._ready_spare()
        header = Header(
            number=_FIRST_SEGMENT if newest is None else newest.number + 1,
            base_offset=self.durable_end,
            file_bytes=self._segment_bytes,
            salt=secrets.randbits(_SALT_BITS),
            head=head(),
        )
        if header.records_start + self.group_max_bytes + MARK_BYTES > self._segment_bytes:
            head_bytes = len(header.head)
            raise ValueError(f"head is too large for a segment: bytes={head_bytes} segment_bytes={self._segment_bytes}")
        await self._finish_sync()
        try:
            begun = await self._call(self._append_thread, self._directory.begin, spare, header)
        except OSError as error:
            raise self._refused(error) from error
        self._spares.remove(spare)
        await self._run(self._append_thread, self._directory.sync_names)
        if newest is not None:
            self._older = (*self._older, newest.segment)
            self._older_bytes += newest.segment.file_bytes
            self.files.close(newest.descriptor)
        self._newest = begun
        self._abandoned = False
        self._maybe_prepare_spare()
        return begun

    async def _finish_sync(self) -> None:
        try:
            await self._background.finish()
        except OSError as error:
            raise self._fail(error) from error

    async def _ready_spare(self) -> Path:
        """Return a spare; it stays a spare until a segment begins with it."""
        if not self._has_space():
            raise WalFull(f"log has used up its budget: size_bytes={self.size_bytes} max_bytes={self.max_bytes}")
        if self._preparing is not None and self._preparing.done() and self._preparing.exception() is not None:
            self._preparing = None  # it failed some time ago: there may be space by now
        self._maybe_prepare_spare()
        if self._preparing is not None and not self._spares:
            preparing, self._preparing = self._preparing, None
            try:
                self._spares.append(await asyncio.wrap_future(preparing))
            except OSError as error:
                raise self._refused(error) from error
        return self._spares[-1]

    def _maybe_prepare_spare(self) -> None:
        """Start preparing a spare unless there is one, one is being prepared, or the budget has no space for it."""
        if not self._spares and self._preparing is None and self._has_space():
            self._preparing = self._files_thread.submit(self._directory.prepare_spare)

    def _has_space(self) -> bool:
        """Return whether the budget allows one more segment."""
        newest_bytes = 0 if self._newest is None else self._newest.segment.file_bytes
        return self._older_bytes + newest_bytes + self._segment_bytes <= self.max_bytes

    async def _retire_oldest(self) -> None:
        segment = self._older[0]
        spares = len(self._spares) + (self._preparing is not None)
        keep = spares < SPARES_MAX and segment.file_bytes == self._segment_bytes
        try:
            spare = await self._call(self._files_thread, self._directory.retire, segment, keep=keep)
        except OSError as error:
            raise WalFailed(f"log cannot be trimmed, it is tried again: {error}") from error
        await self._run(self._files_thread, self._directory.sync_names)
        self._older = self._older[1:]
        self._older_bytes -= segment.file_bytes
        if spare is not None:
            self._spares.append(spare)

    async def _close(self) -> None:
        async with self._appending, self._trimming:
            if self._closed:
                return
            self._closed = True
            try:
                if self.failed is None:
                    await self._finish_sync()
                    if self._newest is not None and not self._newest.marked and not self._abandoned:
                        with contextlib.suppress(OSError):  # nothing is lost without the mark, or with a torn one
                            await self._call(self._append_thread, self._write_mark, self._newest)
            finally:
                await self._release()

    def _write_mark(self, newest: Newest) -> None:
        """Write a mark after the last record: as all is synced, a bad record before it is damage, not a torn tail."""
        segment = newest.segment
        mark = encode_mark(segment.end_offset, segment.end_offset, salt=segment.salt)
        write_all(self.files, newest.descriptor, [mark], segment.end_position)
        self.files.sync(newest.descriptor)

    async def _release(self) -> None:
        if self._preparing is not None:
            await asyncio.gather(asyncio.wrap_future(self._preparing), return_exceptions=True)
        self._background.close()
        self._append_thread.shutdown()
        self._files_thread.shutdown()
        if self._newest is not None:
            self.files.close(self._newest.descriptor)
        self._directory.close()

    async def _run(self, thread: ThreadPoolExecutor, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run work on a thread. If it fails, the state of the disk is unknown, and so the log has failed."""
        try:
            return await self._call(thread, work, *args, **kwargs)
        except OSError as error:
            raise self._fail(error) from error

    async def _call(self, thread: ThreadPoolExecutor, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return await asyncio.wrap_future(thread.submit(work, *args, **kwargs))
        except asyncio.CancelledError:
            # Only at the end of the event loop: the thread continues, and its result is lost.
            self.failed = "log was abandoned while writing"
            raise

    def _refused(self, error: OSError) -> WalFull | WalFailed:
        """Return the error for a full disk, which a trim can cure, or for a failing one. The log has not changed."""
        if is_disk_full(error):
            return WalFull(f"disk is full, no segment can be added: {error}")
        return self._fail(error)

    def _fail(self, error: OSError) -> WalFailed:
        """Accept nothing more: only the next open finds out what the disk holds."""
        if self.failed is None:
            self.failed = f"log cannot be written, restart the service once the disk is well: {error}"
        return WalFailed(self.failed)

    def _check_usable(self) -> None:
        if self.failed is not None:
            raise WalFailed(self.failed)
        if self._closed:
            raise WalFailed(f"log is closed: directory={self._directory.path}")


async def _uncancelled(work: Coroutine[None, None, T]) -> T:
    """Finish the work; a cancellation takes effect only after that."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not task.cancelled():
            task.exception()  # retrieved; what it means for the log is in `failed`
        raise cancelled
    return task.result()
