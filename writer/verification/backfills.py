"""What backfills leave in a table beside their rows. Owns the two texts; pipeline/backfill writes them.

    snapshot summary   lakefeed.backfill          {"chunk":3,"chunks":10,"run":"orders-2026"}
    table property     lakefeed.backfill.<run>    {"next":4,"source":"shop","rows":3000,"checksum":"9d0e...", and what
                                                   the run itself needs to go on}

A chunk is one snapshot, with a ledger of its own. Spark cannot move a property in the act that appends rows, so the
property follows: it speaks of all chunks before `next`, and what is committed of later ones is in the snapshots. Where
those that followed `after` are expired and the run is not `done`, nobody knows whether chunk `next` is in the table.
Rows of backfills are not in the table's totals, which the service alone writes. Standard library only, for the
pipeline.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from writer.changes import SourceId
from writer.json_texts import as_hex, as_number, decode_object, encode, member
from writer.verification.ledger import Ledger, SourceTotal

BACKFILL_KEY = "lakefeed.backfill"
RUN_PROPERTY_PREFIX = "lakefeed.backfill."


@dataclass(frozen=True, slots=True)
class ChunkMark:
    """Which chunk of which run a snapshot is."""

    run: str
    chunk: int
    chunks: int

    def to_text(self) -> str:
        """Render the summary's value."""
        return encode({"run": self.run, "chunk": self.chunk, "chunks": self.chunks})


def chunk_mark_of(summary: Mapping[str, str]) -> ChunkMark | None:
    """Read which chunk a snapshot is; None if it is none, or its mark is not one of ours."""
    text = summary.get(BACKFILL_KEY)
    if text is None:
        return None
    try:
        document = decode_object(text)
        run = member(document, "run")
        return ChunkMark(str(run), as_number(member(document, "chunk")), as_number(member(document, "chunks")))
    except ValueError:
        return None


@dataclass(slots=True)
class Backfilled:
    """Rows that backfills have appended, by source; `is_known` unless a run has not recorded all of them."""

    sources: dict[SourceId, SourceTotal] = field(default_factory=dict)
    is_known: bool = True

    def add(self, source: SourceId, total: SourceTotal) -> None:
        """Count rows of a source."""
        self.sources[source] = self.sources.get(source, SourceTotal()).plus(total)


@dataclass(frozen=True, slots=True)
class _Run:
    """A run speaks of its chunks before `next`. That one was begun after snapshot `after`, unless the run is done."""

    next: int = 0
    is_done: bool = True
    after: int | None = None


def count_backfilled(
    properties: Mapping[str, str],
    snapshots: Iterable[tuple[ChunkMark | None, Ledger | None]],
    *,
    known_after: Collection[int | None],
) -> Backfilled:
    """Add up what the runs of a table say of themselves, and their snapshots of which they do not speak yet.

    `known_after` are the snapshots after which none is expired; None stands for the table's start.
    """
    counted = Backfilled()
    runs = {
        name.removeprefix(RUN_PROPERTY_PREFIX): _count_run(text, counted)
        for name, text in properties.items()
        if name.startswith(RUN_PROPERTY_PREFIX)
    }
    found = set()
    for mark, ledger in snapshots:
        if mark is None or mark.chunk < runs.get(mark.run, _Run()).next:
            continue
        found.add((mark.run, mark.chunk))
        counted.is_known = counted.is_known and ledger is not None
        for source, facts in (ledger.facts if ledger else {}).items():
            counted.add(source, SourceTotal(facts.rows, facts.checksum))
    for name, run in runs.items():
        is_seen = None in known_after or run.after in known_after
        if not (run.is_done or is_seen or (name, run.next) in found):
            counted.is_known = False
    return counted


def _count_run(text: str, counted: Backfilled) -> _Run:
    """Count what a run says of itself."""
    try:
        document = decode_object(text)
        rows, checksum, after = as_number(member(document, "rows")), document.get("checksum"), document.get("after")
        run = _Run(
            next=as_number(member(document, "next")),
            is_done=document.get("done") is True,
            after=None if after is None else as_number(after),
        )
        if checksum is not None:
            counted.add(SourceId(str(member(document, "source"))), SourceTotal(rows, as_hex(checksum)))
        elif rows:
            counted.is_known = False
    except ValueError:
        counted.is_known = False
        return _Run()
    return run
