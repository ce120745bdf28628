"""Names in the quarantine: its table, its columns, the marks that its commits move. Owns them and nothing else.

A table's marks say "everything of this source up to here". In the quarantine that does not hold for a source, whose
tables come there out of its order. It holds for each of its tables, so there the source of a mark (and of
`_cdc_source`) is

    source U+001F table        shop-1, sales.orders

Changes out of a record that could not be read come there in no order, when the record is replayed (records.py): those
of one record and table at once, under a mark that is theirs alone

    source U+001F table U+001F sequence of the record

No source has a control character in its name, so a name with one is ours and its first part is the source itself.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Mapping
from typing import Final

from writer.changes import Position, SourceId, TableName

TABLE: Final = "lakefeed_quarantine"

# Bytes of a row's id. At 128 bits no two changes of this world share one.
_ID_BYTES = 16
_SEPARATOR = "\x1f"

# -- columns beside `_cdc_`: the change that is kept, why, and what became of it

KIND = "kind"
TABLE_NAME = "table_name"
SOURCE = "source"
EPOCH = "epoch"
SEQUENCE = "sequence"
OPERATION = "operation"
ROW_ID = "row_id"
ROW = "row_image"
BEFORE = "before_image"
UNCHANGED = "unchanged"
METADATA = "metadata"
DECLARED = "declared"
ENCODING = "encoding"
REASON = "reason"
REASON_TEXT = "reason_text"
NODE = "node"
LOG_OFFSET = "log_offset"
RECORDED_AT = "recorded_at"


class Kind(enum.Enum):
    """What a row of the quarantine says: a change was put there, or what became of it, under the same id."""

    QUARANTINED = "quarantined"
    REPLAYED = "replayed"
    DROPPED = "dropped"


class Refusal(enum.Enum):
    """Why a table cannot take a row."""

    UNDECODABLE = "undecodable"  # decoding it fails, alone and again
    LOG_SHARE = "log_share"  # its table stood still for so long that its share of the log was used up


def quarantine_of(table: TableName) -> TableName:
    """Name the quarantine that keeps a table's rows: there is one in each namespace."""
    return TableName(table.namespace, TABLE)


def is_quarantine(table: TableName) -> bool:
    """Tell a quarantine from a table whose rows sources bring."""
    return table.name == TABLE


def mark_of(source: SourceId, table: TableName, *, record: int | None = None) -> SourceId:
    """Name the mark of a source's rows of one table, which come in order; or of those out of one record."""
    return SourceId(_SEPARATOR.join((source, str(table), *(() if record is None else (str(record),)))))


def command_mark(verb: str) -> SourceId:
    """Name the mark of what a command appends: it numbers its commits as a source does its changes."""
    return SourceId(f"lakefeed{_SEPARATOR}{verb}")


def is_own_mark(source: SourceId) -> bool:
    """Tell marks of the quarantine and its commands from those of a source, which alone can resume from one."""
    return _SEPARATOR in source


def source_of_mark(source: SourceId) -> SourceId:
    """Give the source that a mark speaks of; a source's own name is its mark."""
    return SourceId(source.partition(_SEPARATOR)[0])


def change_id(source: SourceId, *, epoch: int, sequence: int, table: TableName) -> str:
    """Name a change in the quarantine: always the same, so that commands can, and so that twice is once."""
    text = _SEPARATOR.join((source, str(epoch), str(sequence), str(table)))
    return hashlib.blake2b(text.encode(), digest_size=_ID_BYTES).hexdigest()


def moved_marks(marks: Mapping[SourceId, Position], table: TableName) -> dict[SourceId, Position]:
    """Tell, from the quarantine's marks, up to where each source's rows of a table are in the table or there.

    Up to there a table has nothing to write any more, though its own marks may be behind.
    """
    moved = {}
    for mark, position in marks.items():
        source, _, name = mark.partition(_SEPARATOR)
        if name == str(table):
            moved[SourceId(source)] = position
    return moved
