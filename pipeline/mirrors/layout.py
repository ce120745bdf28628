"""What a mirror looks like: its key, its columns, how it is stored. Owns deciding that from the change table's schema.

A key is, in this order: what the configuration names; what the mirror was built with; the columns that the change
table's comments call `key` (its source declared them); `_cdc_row_id`. A mirror that exists keeps its key, because rows
under another one would be other rows.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from pipeline.errors import PipelineError
from pipeline.mirrors.settings import MirrorMode, MirrorSettings
from writer import columns

# What a mirror keeps of a change beside its row: where it stands, so that only newer ones replace it.
POSITION_COLUMNS = (columns.SOURCE, columns.EPOCH, columns.SEQUENCE, columns.TIMESTAMP, columns.OPERATION)
_KEPT_COLUMNS = (columns.ROW_ID, *POSITION_COLUMNS, columns.RESCUED)

# Names the columns of a row that no change has sent yet: a row read late may still bring them.
UNKNOWN = "_cdc_unknown"

# Names the columns that a row's last change did not send, each with the position of the change that its value is from.
# What comes late then finds its place, whatever has been merged before it.
CARRIED = "_cdc_carried"

# Columns of a history, beside those of a mirror.
VALID_FROM = "valid_from"
VALID_TO = "valid_to"
IS_CURRENT = "is_current"
ENDED_BY = "_cdc_ended_by"

# A name and a position, whose parts are called as a row's own are.
_CARRIED_TYPE = ArrayType(
    StructType(
        [
            StructField("name", StringType()),
            StructField(columns.SOURCE, StringType()),
            StructField(columns.EPOCH, LongType()),
            StructField(columns.SEQUENCE, LongType()),
            StructField(columns.TIMESTAMP, TimestampType()),
            StructField(columns.OPERATION, StringType()),
        ]
    )
)

_OF_HISTORIES = frozenset((VALID_FROM, VALID_TO, IS_CURRENT, ENDED_BY))

_FORMERLY = re.compile(r"(?:^|; )formerly (\[.*\])$", re.DOTALL)
_KEY = re.compile(r"(?:^|; )key$")

_MODE_PROPERTIES = {
    MirrorMode.COPY_ON_WRITE: ("copy-on-write", "2"),
    MirrorMode.MERGE_ON_READ: ("merge-on-read", "2"),
    MirrorMode.DELETION_VECTORS: ("merge-on-read", "3"),
    MirrorMode.HISTORY: ("copy-on-write", "2"),
}


class KeyUnknown(PipelineError):
    """A mirror's key does not fit the table, or the mirror that is there: a person has to name another."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A mirror's key and columns. `change_columns` are those of the change table, which may lack some of ours."""

    key: tuple[str, ...]
    schema: StructType
    change_columns: frozenset[str]
    keeps_history: bool = False

    @property
    def columns(self) -> tuple[str, ...]:
        """Name the columns that come from a change."""
        made_here = {UNKNOWN, CARRIED, *(_OF_HISTORIES if self.keeps_history else ())}
        return tuple(name for name in self.schema.names if name not in made_here)

    @property
    def own_columns(self) -> tuple[str, ...]:
        """Name the columns of the row itself."""
        return tuple(name for name in self.columns if name not in _KEPT_COLUMNS)

    @property
    def renamed(self) -> dict[str, str]:
        """Give the present names of columns by those they had before, as far as no other column has such a name now."""
        return _renamed(self.schema)

    @property
    def key_is_row_id(self) -> bool:
        """Whether rows are told apart by the source's row id, which names a row for its whole life."""
        return self.key == (columns.ROW_ID,)

    @property
    def finds_moves(self) -> bool:
        """Whether a row that got another key can be seen: the image from before the change has the old one."""
        return not self.key_is_row_id and columns.BEFORE in self.change_columns


def plan_layout(changes: StructType, settings: MirrorSettings, *, built_key: tuple[str, ...] = ()) -> Layout:
    """Decide on a mirror's key and columns.

    Raises: KeyUnknown.
    """
    configured, built_key = _present_names(settings.key, changes), _present_names(built_key, changes)
    if configured and built_key and configured != built_key:
        raise KeyUnknown(
            "the mirror was built with another key, drop it or name its key again: "
            f"built={', '.join(built_key)} configured={', '.join(configured)}"
        )
    key = configured or built_key or _declared_key(changes) or (columns.ROW_ID,)
    _check_key(key, changes)
    own = [field for field in changes.fields if not field.name.startswith(columns.RESERVED_PREFIX)]
    kept = [_kept_field(name, changes) for name in _KEPT_COLUMNS]
    kept += [StructField(UNKNOWN, ArrayType(StringType())), StructField(CARRIED, _CARRIED_TYPE)]
    history = _history_fields(own) if settings.keeps_history else []
    fields = [StructField(field.name, field.dataType, True, field.metadata) for field in (*own, *kept, *history)]
    return Layout(key, StructType(fields), frozenset(changes.names), settings.keeps_history)


def _present_names(key: tuple[str, ...], changes: StructType) -> tuple[str, ...]:
    """Follow columns of a key that were renamed since somebody wrote it down."""
    renamed = _renamed(changes)
    return tuple(renamed.get(name, name) for name in key)


def _renamed(schema: StructType) -> dict[str, str]:
    present = set(schema.names)
    return {old: field.name for field in schema.fields for old in former_names(field) if old not in present}


def _declared_key(changes: StructType) -> tuple[str, ...]:
    return tuple(field.name for field in changes.fields if _KEY.search(_FORMERLY.sub("", comment_of(field))))


def _check_key(key: tuple[str, ...], changes: StructType) -> None:
    for name in key:
        if name not in changes.names:
            raise KeyUnknown(f"the key names a column that the table does not have: column={name}")
        if isinstance(changes[name].dataType, StructType | ArrayType | MapType):
            raise KeyUnknown(f"a key is made of single values: column={name} type={changes[name].dataType}")


def _kept_field(name: str, changes: StructType) -> StructField:
    found = changes[name] if name in changes.names else StructField(name, StringType())
    if name == columns.EPOCH:
        # Whatever a table's own column can hold: an epoch may be a time in milliseconds.
        return StructField(name, LongType(), True, found.metadata)
    return found


def _history_fields(own: list[StructField]) -> list[StructField]:
    taken = [field.name for field in own if field.name.lower() in _OF_HISTORIES]
    if taken:
        raise PipelineError(
            "a history has a column of this name of its own, rename the table's or choose another mode: "
            f"column={min(taken)}"
        )
    ended_by = StructType(
        [
            StructField("source", StringType()),
            StructField("epoch", LongType()),
            StructField("sequence", LongType()),
            StructField("timestamp", TimestampType()),
            StructField("operation", StringType()),
        ]
    )
    return [
        StructField(VALID_FROM, TimestampType()),
        StructField(VALID_TO, TimestampType()),
        StructField(IS_CURRENT, BooleanType()),
        StructField(ENDED_BY, ended_by),
    ]


def comment_of(field: StructField) -> str:
    """Give a column's comment."""
    return str((field.metadata or {}).get("comment") or "")


def former_names(field: StructField) -> tuple[str, ...]:
    """Give the names that a column had before, as the writer notes them in its comment."""
    found = _FORMERLY.search(comment_of(field))
    try:
        names = json.loads(found[1]) if found else []
    except ValueError:
        return ()
    return tuple(name for name in names if isinstance(name, str))


def storage_properties(settings: MirrorSettings) -> dict[str, str]:
    """Give the table properties by which a mode is stored."""
    mode, version = _MODE_PROPERTIES[settings.mode]
    return {
        "format-version": version,
        "write.merge.mode": mode,
        "write.update.mode": mode,
        "write.delete.mode": mode,
        # Two merges that insert the same key must not both succeed; the second is repeated and finds the row.
        "write.merge.isolation-level": "serializable",
        "write.parquet.compression-codec": "zstd",
        **retention_properties(settings),
    }


def retention_properties(settings: MirrorSettings) -> dict[str, str]:
    """Give the table properties by which old versions of a mirror, and of its tombstones, go."""
    return {
        "history.expire.max-snapshot-age-ms": str(int(settings.snapshot_age_s * 1000)),
        # Of a mirror that is seldom merged, a query that began before the merge still finds its files.
        "history.expire.min-snapshots-to-keep": "2",
        # A metadata file a merge would be left behind otherwise.
        "write.metadata.delete-after-commit.enabled": "true",
        "write.metadata.previous-versions-max": "20",
    }
