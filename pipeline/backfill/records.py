"""What a run remembers in the table, and what is committed of it. Owns the record and the decision.

A run is remembered by a property of the table, written before each chunk:

    lakefeed.backfill.<run>   {"next":4,"after":8206...,"at":1794830861170000,"owner":"7f...","facts":{...},
                               "source":"shop","key":["id"],"rows":3000,"checksum":"9d0e...","done":false}

Chunks before `next` are committed. Of chunk `next` that is not known: it was to be committed after snapshot `after`,
its rows received at `at`. Whoever goes on has to look:

    from main back to `after` there is a snapshot of this chunk     COMMITTED
    from main back to `after` there is none                         ABSENT
    snapshots in between are expired                                UNKNOWN    look for rows received at `at`

The owner is the process that runs it. One that finds another owner stops: the later start goes on.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pipeline.tables import Snapshot
from writer.json_texts import as_hex, as_number, as_object, decode_object, encode, member
from writer.verification.backfills import RUN_PROPERTY_PREFIX, chunk_mark_of

_MODULUS = 1 << 64


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """How far a run has come. Without a checksum its rows are not recorded. Old records do not tell the key."""

    run: str
    source: str
    key: tuple[str, ...] | None = None
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
        """The table property that it is kept in."""
        return RUN_PROPERTY_PREFIX + self.run

    def counting(self, rows: int, checksum: int | None) -> RunRecord:
        """Go on behind the next chunk, which had these rows."""
        both = None if self.checksum is None or checksum is None else (self.checksum + checksum) % _MODULUS
        return replace(self, next=self.next + 1, rows=self.rows + rows, checksum=both)

    def to_text(self) -> str:
        """Render the property."""
        document = {
            "source": self.source,
            "key": None if self.key is None else list(self.key),
            "owner": self.owner,
            "facts": dict(self.facts),
            "next": self.next,
            "after": self.after,
            "at": self.at_us,
            "rows": self.rows,
            "done": self.is_done,
        }
        return encode(document if self.checksum is None else {**document, "checksum": f"{self.checksum:016x}"})


def record_from_text(run: str, text: str) -> RunRecord:
    """Read a run's property.

    Raises: ValueError.
    """
    document = decode_object(text)
    after, checksum, key = document.get("after"), document.get("checksum"), document.get("key")
    return RunRecord(
        run=run,
        source=str(member(document, "source")),
        key=tuple(map(str, key)) if isinstance(key, list) else None,
        owner=str(member(document, "owner")),
        facts=as_object(member(document, "facts")),
        next=as_number(member(document, "next")),
        after=None if after is None else as_number(after),
        at_us=as_number(member(document, "at")),
        rows=as_number(member(document, "rows")),
        checksum=None if checksum is None else as_hex(checksum),
        is_done=member(document, "done") is True,
    )


class Fate(enum.Enum):
    """What became of a chunk; drawn in the module's head."""

    COMMITTED = "committed"
    ABSENT = "absent"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Looked:
    """What the snapshots say of a chunk; if it is there, all snapshots that are it, which should be one."""

    fate: Fate
    snapshots: Sequence[Snapshot] = ()


def look_for_chunk(
    snapshots: Sequence[Snapshot], head_id: int | None, *, run: str, chunk: int, after: int | None
) -> Looked:
    """Find out from a table's snapshots whether a chunk is committed; `head_id` is where main is."""
    by_id = {snapshot.snapshot_id: snapshot for snapshot in snapshots}
    found: list[Snapshot] = []
    at = head_id
    while at is not None and at != after and at in by_id:
        mark = chunk_mark_of(by_id[at].summary)
        if mark is not None and (mark.run, mark.chunk) == (run, chunk):
            found.append(by_id[at])
        at = by_id[at].parent_id
    if found:
        return Looked(Fate.COMMITTED, found)
    return Looked(Fate.ABSENT if at == after else Fate.UNKNOWN)
