"""Record of a backfill run: what it has committed, and how a process that resumes finds out. Pure.

A run is a property of the table, written before each chunk:

    lakefeed.backfill.<run>    {"next":4,"after":8206...,"at":1794830861170000,"owner":"7f...","facts":{...},
                                "source":"shop","key":["id"],"rows":3000,"checksum":"9d0e...","done":false}

Chunks before `next` are committed. Chunk `next` was to be committed after snapshot `after`, with rows received at `at`;
a process that resumes has to find out whether it was:

    between main and `after` there is a snapshot of this chunk    COMMITTED
    between main and `after` there is none                        ABSENT
    snapshots in between have expired                             UNKNOWN    search for rows received at `at`

`owner` is the process that runs it. A process that finds another owner stops: the later start resumes the run.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lakefeed.contract.ledger import RUN_PROPERTY_PREFIX, chunk_mark_of
from lakefeed.contract.progress import as_hex, as_number, as_object, decode_object, encode, member
from lakefeed.pipeline.spark.tables import Snapshot

_MODULUS = 1 << 64


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """The progress of a run. Without a checksum its rows are not recorded in ledgers."""

    run: str
    source: str
    key: tuple[str, ...]
    owner: str
    facts: Mapping[str, Any]
    next: int = 0
    after: int | None = None
    at_us: int = 0
    rows: int = 0
    checksum: int | None = 0
    is_done: bool = False

    @property
    def property_name(self) -> str:
        """Return the name of the table property."""
        return RUN_PROPERTY_PREFIX + self.run

    def after_chunk(self, rows: int, checksum: int | None) -> RunRecord:
        """Return the record after the next chunk, which had these rows."""
        both = None if self.checksum is None or checksum is None else (self.checksum + checksum) % _MODULUS
        return replace(self, next=self.next + 1, rows=self.rows + rows, checksum=both)

    def to_text(self) -> str:
        """Render the property's value."""
        document = {
            "source": self.source,
            "key": list(self.key),
            "owner": self.owner,
            "facts": dict(self.facts),
            "next": self.next,
            "after": self.after,
            "at": self.at_us,
            "rows": self.rows,
            "done": self.is_done,
        }
        return encode(document if self.checksum is None else {**document, "checksum": f"{self.checksum:016x}"})


def parse_record(run: str, text: str) -> RunRecord:
    """Parse a run's property.

    Raises: ValueError.
    """
    document = decode_object(text)
    after, checksum, key = document.get("after"), document.get("checksum"), member(document, "key")
    return RunRecord(
        run=run,
        source=str(member(document, "source")),
        key=tuple(map(str, _as_list(key))),
        owner=str(member(document, "owner")),
        facts=as_object(member(document, "facts")),
        next=as_number(member(document, "next")),
        after=None if after is None else as_number(after),
        at_us=as_number(member(document, "at")),
        rows=as_number(member(document, "rows")),
        checksum=None if checksum is None else as_hex(checksum),
        is_done=member(document, "done") is True,
    )


def _as_list(value: object) -> list[object]:
    if not isinstance(value, list):
        raise ValueError(f"not a list: {value!r}")  # noqa: TRY004 - the caller handles damaged texts alike
    return value


class ChunkState(enum.Enum):
    """State of a chunk, as the module header describes."""

    COMMITTED = "committed"
    ABSENT = "absent"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class FoundChunk:
    """The state of a chunk by the table's snapshots, and the snapshots that commit it, which should be one."""

    state: ChunkState
    snapshots: Sequence[Snapshot] = ()


def find_chunk(
    snapshots: Sequence[Snapshot], head_id: int | None, *, run: str, chunk: int, after: int | None
) -> FoundChunk:
    """Find a chunk in a table's snapshots; `head_id` is the newest one of main."""
    by_id = {snapshot.snapshot_id: snapshot for snapshot in snapshots}
    found: list[Snapshot] = []
    at = head_id
    while at is not None and at != after and at in by_id:
        mark = chunk_mark_of(by_id[at].summary)
        if mark is not None and (mark.run, mark.chunk) == (run, chunk):
            found.append(by_id[at])
        at = by_id[at].parent_id
    if found:
        return FoundChunk(ChunkState.COMMITTED, found)
    return FoundChunk(ChunkState.ABSENT if at == after else ChunkState.UNKNOWN)
