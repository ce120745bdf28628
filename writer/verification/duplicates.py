"""Looks for changes that are in a table more than once, in bounded memory. Owns the search; reading is the caller's.

Files come in the order of their lowest sequence. What lies below the next file's lowest can meet nobody any more: it is
looked through and forgotten, so only rows of files that overlap are held. Where those are too many, the rows are dealt
out into parts by their sequence, and each part is a search of its own over all files.

    a source that never started over     two rows with one sequence
    any other                            two rows with one sequence that were received at the same moment: a sequence
                                         comes once in each epoch, and old rows do not say theirs
    rows that were only READ             two of one row that were received at the same moment: a backfill gives all
                                         rows of a chunk the position as of which it has read them
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from writer import columns as cdc
from writer.types import FIELD_ID_KEY
from writer.verification.row_hash import hash_rows
from writer.verification.xxh64 import hash_longs

# Rows of files that overlap, of about 30 bytes each; up to twice as many are held.
HELD_MAX_ROWS = 8_000_000
# Sequences that a report names of each source; all are counted.
EXAMPLES_MAX = 10

# The row id of rows that were READ; null of changes, which have a sequence of their own.
READ_ROW = "read_row"
KEY_COLUMNS = (cdc.SOURCE, cdc.SEQUENCE, cdc.INGESTED_AT, READ_ROW)

_READ_ROW_FIELD = pa.field(READ_ROW, pa.string(), metadata={FIELD_ID_KEY: b"1"})
_AGAIN = "again"
_SEED = 7


@dataclass(slots=True)
class Doubled:
    """Rows of one source that are there again."""

    rows: int = 0
    examples: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Extent:
    """The sequences that a file may hold, and how many rows."""

    lowest: int
    highest: int
    rows: int


def count_parts(extents: Sequence[Extent], *, held_max: int) -> int:
    """Tell into how many parts to deal the rows so that those held at once are within the limit."""
    ends = [(extent.lowest, 0, extent.rows) for extent in extents]
    ends += [(extent.highest, 1, -extent.rows) for extent in extents]
    held = most = 0
    for _, _, rows in sorted(ends):
        held += rows
        most = max(most, held)
    return max(1, -(-most // held_max))


class DuplicateSearch:
    """A search through one part of a table's rows. Give it files in the order of their lowest sequence."""

    def __init__(self, *, one_epoch: Set[str], part: int = 0, parts: int = 1) -> None:
        self.found: dict[str, Doubled] = {}
        self._one_epoch = one_epoch
        self._part = part
        self._parts = parts
        self._held: list[pa.Table] = []
        self._held_rows = 0
        self._settle_at = 0

    def add(self, keys: pa.Table, *, lowest: int) -> None:
        """Take the keys of a file's rows; no file after it has a sequence below this file's lowest."""
        if self._held_rows > self._settle_at:
            self._settle(lowest)
        keys = self._own_part(keys)
        self._held.append(keys)
        self._held_rows += keys.num_rows

    def finish(self) -> Mapping[str, Doubled]:
        """Look through what is left, and tell all that was found."""
        self._look_through(self._joined())
        self._held = []
        return self.found

    def _own_part(self, keys: pa.Table) -> pa.Table:
        if self._parts == 1:
            return keys
        hashes = hash_longs(keys.column(cdc.SEQUENCE).combine_chunks().cast(pa.int64()).to_numpy(), _SEED)
        if keys.column(READ_ROW).null_count < len(keys):
            hashes ^= hash_rows(keys.select([READ_ROW]), [_READ_ROW_FIELD])
        return keys.filter(pa.array(hashes % np.uint64(self._parts) == np.uint64(self._part)))

    def _settle(self, below: int) -> None:
        """Let go of what can meet nobody any more; the next time only when as many again have come."""
        held = self._joined()
        is_open = pc.greater_equal(held.column(cdc.SEQUENCE), below)
        self._look_through(held.filter(pc.invert(is_open)))
        left = held.filter(is_open)
        self._held, self._held_rows, self._settle_at = [left], left.num_rows, 2 * left.num_rows

    def _joined(self) -> pa.Table:
        return pa.concat_tables(self._held) if self._held else pa.table({name: [] for name in KEY_COLUMNS})

    def _look_through(self, keys: pa.Table) -> None:
        if not keys.num_rows:
            return
        counted = keys.group_by([cdc.SOURCE, cdc.SEQUENCE, READ_ROW]).aggregate(
            [(cdc.SEQUENCE, "count"), (cdc.INGESTED_AT, "count_distinct")]
        )
        one_epoch = pc.is_in(counted.column(cdc.SOURCE), pa.array(sorted(self._one_epoch), pa.string()))
        once = pc.and_(one_epoch, pc.is_null(counted.column(READ_ROW)))
        allowed = pc.if_else(once, 1, counted.column(f"{cdc.INGESTED_AT}_count_distinct"))
        again = pc.subtract(counted.column(f"{cdc.SEQUENCE}_count"), allowed)
        doubled = counted.append_column(_AGAIN, again).filter(pc.greater(again, 0))
        for source in pc.unique(doubled.column(cdc.SOURCE)).to_pylist():
            self._note(source, doubled.filter(pc.equal(doubled.column(cdc.SOURCE), source)))

    def _note(self, source: str, doubled: pa.Table) -> None:
        known = self.found.setdefault(source, Doubled())
        known.rows += pc.sum(doubled.column(_AGAIN)).as_py()
        examples = doubled.column(cdc.SEQUENCE).slice(0, EXAMPLES_MAX - len(known.examples))
        known.examples += sorted(examples.to_pylist())
