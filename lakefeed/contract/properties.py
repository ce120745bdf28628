"""Table properties, and names in the quarantine: its table, its columns, the marks that its commits move.

People and other engines write properties: a value that cannot be read counts as not set, and never stops a table.

A table's marks mean "everything of this source up to here". In the quarantine that does not hold for a source, because
its tables arrive there out of its order. It holds for each of its tables, so there the source of a mark (and of
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

MAIN_BRANCH = "main"

WRITE_DATA_PATH = "write.data.path"
WRITE_METADATA_PATH = "write.metadata.path"
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

# Iceberg's own default. A streaming reader that was absent for longer has to start over.
SNAPSHOT_MAX_AGE_DEFAULT_MS = 5 * DAY_MS
# A table that rarely changes keeps this much history, however old it is.
SNAPSHOTS_MIN_DEFAULT = 100
# Every commit writes the metadata of all snapshots, about 1 KB each, so that commits would grow slower with a table's
# age: with these, the last one takes at most half longer than the first. At a commit every ten seconds they are the
# last 80 minutes. A table whose streaming readers may be away for longer sets more, or commits less often.
SNAPSHOTS_MAX_DEFAULT = 500
# Bytes of all snapshot summaries. Each has about 180 bytes per source, and every metadata file has all summaries: with
# a thousand sources, 500 snapshots would be 90 MB per commit.
SUMMARIES_MAX_BYTES_DEFAULT = 8 * 1024 * 1024
# Snapshots that are kept for consumers that are behind. Every commit writes the metadata of all of them, here about 10
# MB; at a commit every ten seconds they are a bit more than a day.
CONSUMER_SNAPSHOTS_MAX_DEFAULT = 10_000
# Earlier metadata files, for a manual rollback; nothing reads them. Each is as large as the current one.
OLD_METADATA_MAX_DEFAULT = 20

# Properties of a new change table, so that operators find the names and other engines respect the same limits.
UPKEEP_PROPERTIES: Mapping[str, str] = {
    DELETE_OLD_METADATA: "true",
    OLD_METADATA_MAX: str(OLD_METADATA_MAX_DEFAULT),
    SNAPSHOT_MAX_AGE_MS: str(SNAPSHOT_MAX_AGE_DEFAULT_MS),
    SNAPSHOTS_MIN: str(SNAPSHOTS_MIN_DEFAULT),
    SNAPSHOTS_MAX: str(SNAPSHOTS_MAX_DEFAULT),
    SUMMARIES_MAX_BYTES: str(SUMMARIES_MAX_BYTES_DEFAULT),
    # For other engines: a writer that commits several times a second soon uses up Iceberg's four attempts.
    COMMIT_RETRIES: "30",
    COMMIT_RETRY_MAX_WAIT_MS: "1000",
}


def read_number(properties: Mapping[str, str], name: str, default: int) -> int:
    """Return a property that is a whole number of at least 0; anything else counts as not set."""
    text = properties.get(name, "")
    return int(text) if text.isascii() and text.isdecimal() else default


def is_enabled(properties: Mapping[str, str], name: str) -> bool:
    """Return a switch, which is on unless its text is false, in upper or lower case."""
    return properties.get(name, "true").lower() != "false"


# -- quarantine

TABLE: Final = "lakefeed_quarantine"

# Bytes of a row's id: with 128 bits, no two changes share one.
_ID_BYTES = 16
_SEPARATOR = "\x1f"

# Columns besides `_cdc_`: the change, why it is here, and what became of it.

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
    """Kind of a quarantine row: a change was quarantined, or, under the same id, replayed or dropped."""

    QUARANTINED = "quarantined"
    REPLAYED = "replayed"
    DROPPED = "dropped"


class Refusal(enum.Enum):
    """Why a table cannot take a row."""

    UNDECODABLE = "undecodable"  # decoding it fails, alone and again
    LOG_SHARE = "log_share"  # its table failed for so long that its share of the log was used up


def quarantine_of(table: TableName) -> TableName:
    """Return the quarantine for a table's rows: there is one in each namespace."""
    return TableName(table.namespace, TABLE)


def is_quarantine(table: TableName) -> bool:
    """Return whether a table is a quarantine."""
    return table.name == TABLE


def mark_of(source: SourceId, table: TableName) -> SourceId:
    """Return the mark of a source's rows of one table, which come in order."""
    return SourceId(_SEPARATOR.join((source, str(table))))


def command_mark(verb: str) -> SourceId:
    """Return the mark of a command's commits, which it numbers like the changes of a source."""
    return SourceId(f"lakefeed{_SEPARATOR}{verb}")


def is_own_mark(source: SourceId) -> bool:
    """Return whether a mark belongs to the quarantine or a command; only sources resume from their marks."""
    return _SEPARATOR in source


def change_id(source: SourceId, *, epoch: int, sequence: int, table: TableName) -> str:
    """Return the id of a change in the quarantine. It is always the same, so writing a change twice is found."""
    text = _SEPARATOR.join((source, str(epoch), str(sequence), str(table)))
    return hashlib.blake2b(text.encode(), digest_size=_ID_BYTES).hexdigest()


def moved_marks(marks: Mapping[SourceId, Position], table: TableName) -> dict[SourceId, Position]:
    """Return, from the quarantine's marks, up to where the rows of a table are in the table or in quarantine.

    Up to there the table has nothing left to write, although its own marks may be behind.
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
