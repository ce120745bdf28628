"""What the tests of the log share: small settings, opening and closing, reading everything back."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from lakefeed.settings import MIB
from lakefeed.writer.config import LogConfig
from lakefeed.writer.wal.directory import Filesystem
from lakefeed.writer.wal.log import FileLog
from lakefeed.writer.wal.tail import Tail

SMALL = LogConfig(segment_max_bytes=MIB, max_bytes=4 * MIB)

# Two records of this size fill most of a segment, so that a third begins the next one.
LARGE = 400_000


@asynccontextmanager
async def opened(path: Path, config: LogConfig = SMALL, *, files: Filesystem | None = None) -> AsyncIterator[FileLog]:
    log = FileLog.open(path, config, files=files)
    try:
        yield log
    finally:
        await log.close()


def head_of(log: FileLog):
    """A head that says where its segment begins."""
    return lambda: str(log.durable_end).encode()


async def append(log: FileLog, *payloads: bytes) -> int:
    return await log.append([(payload,) for payload in payloads], head=head_of(log))


async def append_large(log: FileLog, count: int) -> list[bytes]:
    """Append groups of one record each, two of which fill a segment."""
    payloads = [large(log.durable_end + index) for index in range(count)]
    for payload in payloads:
        await append(log, payload)
    return payloads


def large(seed: int) -> bytes:
    return (b"%09d " % seed) * (LARGE // 10)


def read_all(log: FileLog, *, offset: int | None = None, max_bytes: int = 64 * 1024) -> list[bytes]:
    """Read every durable record and check their numbers."""
    tail = Tail(log, log.first_offset if offset is None else offset)
    payloads = []
    try:
        while records := tail.read(until=log.durable_end, max_bytes=max_bytes):
            for record in records:
                assert record.offset == (log.first_offset if offset is None else offset) + len(payloads)
                payloads.append(record.payload)
    finally:
        tail.close()
    return payloads


async def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for something that happens on another thread, for ten seconds at most."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - no event is set for it
            await asyncio.sleep(0)


async def wait_for_spare(log: FileLog) -> None:
    """Wait until the log has made a spare, and does nothing in the background any more."""
    await wait_until(lambda: log._preparing is None or log._preparing.done())


def segments(path: Path) -> list[Path]:
    return sorted(path.glob("*.wal"))


def spares(path: Path) -> list[Path]:
    return sorted(path.glob("*.spare"))


def disk_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in [*segments(path), *spares(path)])


def flip(path: Path, *positions: int) -> None:
    """Damage bytes of a file."""
    data = bytearray(path.read_bytes())
    for position in positions:
        data[position] ^= 0xFF
    path.write_bytes(data)


def die(path: Path, copy: Path) -> Path:
    """Copy an open log as the next process would find it if this one died now: without the mark of a clean close."""
    return shutil.copytree(path, copy)
