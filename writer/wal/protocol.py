"""Log protocol: what intake and the table feed need from a write-ahead log.

`FileLog` (log.py) implements it on local files. A replicated log can take its place: whatever implements this protocol
keeps appended groups in order, and calls a record durable once it survives the failures that it promises to survive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from lakefeed.writer.wal.payload import Payload
from lakefeed.writer.wal.records import Record


class LogTail(Protocol):
    """Reads the records of a log in order, from any thread but one at a time. `offset` is the next one to read."""

    offset: int

    def read(self, *, until: int, max_bytes: int) -> list[Record]:
        """Return durable records below `until`: about `max_bytes`, at least one if there is any. Blocks.

        Raises: WalCorrupt if a record is damaged, or was trimmed before it was read.
        """

    def close(self) -> None:
        """Release what the tail holds open. It can be read again after that."""


class Log(Protocol):
    """Records with rising offsets. One task appends; `append`, `trim` and `close` may overlap."""

    # The bytes that the log may use.
    max_bytes: int
    # Why the log accepts nothing more, None while it works.
    failed: str | None

    @property
    def head(self) -> bytes | None:
        """The newest head passed to `append`, which is kept when older records are trimmed; None before the first."""

    @property
    def first_offset(self) -> int:
        """The offset of the oldest record that is still there."""

    @property
    def durable_end(self) -> int:
        """The offset below which every record is durable. Safe to read on any thread."""

    @property
    def size_bytes(self) -> int:
        """The bytes of `max_bytes` that are used."""

    @property
    def group_max_bytes(self) -> int:
        """The maximum sum of `record_bytes` of one append."""

    def bytes_below(self, offset: int) -> int:
        """Return how many bytes a trim at `offset` would free."""

    def newest_records(self) -> Iterator[Record]:
        """Yield the records after the newest head. Blocks."""

    def tail(self, offset: int) -> LogTail:
        """Return a reader that starts at `offset`, which must not be above `durable_end`."""

    async def append(self, payloads: Sequence[Payload], *, head: Callable[[], bytes]) -> int:
        """Append one group and return its first offset, once it is durable.

        `head` returns what readers of the group must still know about older records; it is called if it is needed.

        Raises:
            WalFull: there is no space; the group is not in the log.
            WalFailed: writing failed, now or earlier. The group may or may not be found at the next open.
        """

    async def wait_beyond(self, offset: int) -> None:
        """Wait until the record at `offset` is durable."""

    async def trim(self, offset: int) -> None:
        """Free the space of records below `offset`, as far as that is possible.

        Raises: WalFailed if it is not possible now. Try again later.
        """

    async def close(self) -> None:
        """Finish writing and release the log."""
