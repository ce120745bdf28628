"""Names in the quarantine: its table, its columns, the marks that its commits move. Owns them and nothing else.

A table's marks say "everything of this source up to here". In the quarantine that does not hold for a source, whose
tables come there out of its order. It holds for each of its tables, so there the source of a mark (and of
`_cdc_source`) is

    source U+001F table        shop-1, sales.orders

Earlier versions also wrote marks of one record and table, with the record's sequence as a third part.

No source has a control character in its name, so a name with one is ours and its first part is the source itself.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from lakefeed.contract.changes import Position, SourceId, TableName

# --- writer.iceberg.properties ----------------------------------------------------------------------------------------
#
# Table properties that the commit path reads. Owns their names, defaults and how their text is understood.
#
# A property is written by people and by other engines: what cannot be read counts as not set, and never stops a table.


MERGE_ENABLED = "commit.manifest-merge.enabled"
MERGE_MIN_COUNT = "commit.manifest.min-count-to-merge"
MERGE_TARGET_BYTES = "commit.manifest.target-size-bytes"
SNAPSHOT_MAX_AGE_MS = "history.expire.max-snapshot-age-ms"
SNAPSHOTS_MIN = "history.expire.min-snapshots-to-keep"
SNAPSHOTS_MAX = "lakefeed.snapshots-max"
SUMMARIES_MAX_BYTES = "lakefeed.summaries-max-bytes"
CONSUMER_SNAPSHOTS_MAX = "lakefeed.consumer-snapshots-max"
GC_ENABLED = "gc.enabled"
DELETE_OLD_METADATA = "write.metadata.delete-after-commit.enabled"
OLD_METADATA_MAX = "write.metadata.previous-versions-max"
COMMIT_RETRIES = "commit.retry.num-retries"
COMMIT_RETRY_MAX_WAIT_MS = "commit.retry.max-wait-ms"

DAY_MS = 24 * 60 * 60 * 1000

# Iceberg's own default. A streaming reader that was away for longer has to start over.
SNAPSHOT_MAX_AGE_DEFAULT_MS = 5 * DAY_MS
# Of a table that rarely changes, history stays however old it is.
SNAPSHOTS_MIN_DEFAULT = 100
# Every commit writes the metadata of all snapshots, about 1 KB each, so that commits would grow slower with a table's
# age: with these, the last one takes at most half longer than the first. At a commit every ten seconds they are the
# last 80 minutes. A table whose streaming readers may be away for longer sets more, or commits less often.
SNAPSHOTS_MAX_DEFAULT = 500
# Summaries of the snapshots that are kept. Each says of every source in it what it covers, some 180 bytes, and all of
# them are in every metadata file: of a thousand sources, 500 snapshots would be 90 MB a commit.
SUMMARIES_MAX_BYTES_DEFAULT = 8 * 1024 * 1024
# Snapshots that are kept for consumers that are behind. Every commit writes the metadata of all of them, here about 10
# MB; at a commit every ten seconds they are a bit more than a day.
CONSUMER_SNAPSHOTS_MAX_DEFAULT = 10_000
# Older versions of the metadata file, to go back to by hand; nothing reads them. Each is as large as the current one.
OLD_METADATA_MAX_DEFAULT = 20

# What a new change table says of itself, so that operators find the names and other engines keep to the same limits.
UPKEEP_PROPERTIES: Mapping[str, str] = {
    DELETE_OLD_METADATA: "true",
    OLD_METADATA_MAX: str(OLD_METADATA_MAX_DEFAULT),
    SNAPSHOT_MAX_AGE_MS: str(SNAPSHOT_MAX_AGE_DEFAULT_MS),
    SNAPSHOTS_MIN: str(SNAPSHOTS_MIN_DEFAULT),
    SNAPSHOTS_MAX: str(SNAPSHOTS_MAX_DEFAULT),
    SUMMARIES_MAX_BYTES: str(SUMMARIES_MAX_BYTES_DEFAULT),
    # Of other engines: Iceberg's four tries are soon used up beside a writer that commits several times a second.
    COMMIT_RETRIES: "30",
    COMMIT_RETRY_MAX_WAIT_MS: "1000",
}


def read_number(properties: Mapping[str, str], name: str, default: int) -> int:
    """Read a whole number that is not negative; anything else counts as not set."""
    text = properties.get(name, "")
    return int(text) if text.isascii() and text.isdecimal() else default


def is_enabled(properties: Mapping[str, str], name: str) -> bool:
    """Read a switch that is on unless it says false, in any case."""
    return properties.get(name, "true").lower() != "false"


# --- writer.quarantine.names ------------------------------------------------------------------------------------------


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


def mark_of(source: SourceId, table: TableName) -> SourceId:
    """Return the mark of a source's rows of one table, which come in order."""
    return SourceId(_SEPARATOR.join((source, str(table))))


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


@dataclass(frozen=True, slots=True)
class Reason:
    """Why rows are in quarantine: the kind of refusal, and the facts for people, without values of rows."""

    refusal: Refusal
    text: str


MAIN_BRANCH = "main"

WRITE_DATA_PATH = "write.data.path"
WRITE_METADATA_PATH = "write.metadata.path"
