"""A log in memory that implements `protocol.Log`: the seam for a log that is not on local files."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence

from lakefeed.contract.errors import WalCorrupt, WalFull
from lakefeed.writer.wal.payload import Payload
from lakefeed.writer.wal.protocol import Log
from lakefeed.writer.wal.records import Record, record_bytes


class MemoryTail:
    """Reads a MemoryLog in order."""

    def __init__(self, log: MemoryLog, offset: int) -> None:
        self.offset = offset
        self._log = log

    def read(self, *, until: int, max_bytes: int) -> list[Record]:
        if self.offset < self._log.first_offset:
            raise WalCorrupt(f"record was trimmed before it was read: offset={self.offset}")
        records: list[Record] = []
        size_bytes = 0
        for record in self._log.records[self.offset - self._log.first_offset :]:
            if record.offset >= until or (records and size_bytes + len(record.payload) > max_bytes):
                break
            records.append(record)
            size_bytes += len(record.payload)
        self.offset += len(records)
        return records

    def close(self) -> None:
        """Do nothing: no file is open."""


class MemoryLog:
    """Every append is durable at once; a trim frees single records."""

    def __init__(self, *, max_bytes: int = 2**24) -> None:
        self.max_bytes = max_bytes
        self.failed: str | None = None
        self.head: bytes | None = None
        self.first_offset = 0
        self.records: list[Record] = []
        self.group_max_bytes = max_bytes
        self._advanced = asyncio.Event()

    @property
    def durable_end(self) -> int:
        return self.first_offset + len(self.records)

    @property
    def size_bytes(self) -> int:
        return self.bytes_below(self.durable_end)

    def bytes_below(self, offset: int) -> int:
        return sum(record_bytes((record.payload,)) for record in self.records if record.offset < offset)

    def newest_records(self) -> Iterator[Record]:
        return iter(list(self.records))

    def tail(self, offset: int) -> MemoryTail:
        return MemoryTail(self, offset)

    async def append(self, payloads: Sequence[Payload], *, head: Callable[[], bytes]) -> int:
        if self.size_bytes + sum(map(record_bytes, payloads)) > self.max_bytes:
            raise WalFull("log has used up its budget")
        self.head = self.head or head()
        first = self.durable_end
        self.records += [Record(first + index, b"".join(payload)) for index, payload in enumerate(payloads)]
        self._advanced.set()
        self._advanced = asyncio.Event()
        return first

    async def wait_beyond(self, offset: int) -> None:
        while self.durable_end <= offset:
            await self._advanced.wait()

    async def trim(self, offset: int) -> None:
        count = max(0, min(offset, self.durable_end) - self.first_offset)
        del self.records[:count]
        self.first_offset += count

    async def close(self) -> None:
        """Do nothing: nothing is open."""


def as_log(log: MemoryLog) -> Log:
    """Return the log as the protocol, which the type checker verifies here."""
    return log
