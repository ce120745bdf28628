"""What a mirror looks like: its key, its columns, how it is stored. Owns deciding that from the change table's schema.

A key is, in this order: what the configuration names; what the mirror was built with; the columns that the change
table's comments call `key` (its source declared them); `_cdc_row_id`. A mirror that exists keeps its key, because rows
under another one would be other rows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DataType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from lakefeed.contract import changes as columns
from lakefeed.pipeline.errors import PipelineError
from lakefeed.pipeline.mirrors.marker import MIRROR_KEY, MIRROR_MODE, Marker, find_marker, load_lineage
from lakefeed.pipeline.mirrors.settings import MirrorMode, MirrorNames, MirrorSettings
from lakefeed.pipeline.spark.tables import exists, load_uuid, properties, property_pairs, quoted, text_literal

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


# --- pipeline.mirrors.layout ------------------------------------------------------------------------------------------


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


# --- pipeline.mirrors.evolution ---------------------------------------------------------------------------------------
#
# How a mirror follows its change table's columns. Owns which statements that takes; nothing is run here.
#
# Columns are added and widened, inside structs, lists and maps too. A column whose comment says that it was formerly
# another, which the mirror still has, is renamed, and takes its comment along; then another may come under its old
# name.
# What a change table has lost stays in the mirror as it is.


class ColumnMismatch(PipelineError):
    """A column of the change table can no longer be mirrored: a person has to decide about the mirror's."""


def plan_evolution(target: str, *, has: StructType, needs: StructType) -> list[str]:
    """List the statements after which the mirror has all columns that it needs.

    Raises: ColumnMismatch.
    """
    return list(_struct_changes(target, has, needs, path=()))


def _struct_changes(target: str, has: StructType, needs: StructType, path: tuple[str, ...]) -> Iterator[str]:
    if not path:
        _check_no_swap(has, needs)
    old_names = _renames(has, needs)
    for new_name, old_name in old_names.items():
        yield f"ALTER TABLE {target} RENAME COLUMN {_sql((*path, old_name))} TO {quoted(new_name)}"
        yield f"ALTER TABLE {target} ALTER COLUMN {_sql((*path, new_name))}{_comment(needs[new_name])}"
    has_left = set(has.names) - set(old_names.values())
    for field in needs.fields:
        column = (*path, field.name)
        if field.name in old_names:
            yield from _type_changes(target, has[old_names[field.name]].dataType, field.dataType, column)
        elif field.name in has_left:
            yield from _type_changes(target, has[field.name].dataType, field.dataType, column)
        else:
            yield f"ALTER TABLE {target} ADD COLUMN {_sql(column)} {type_sql(field.dataType)}{_comment(field)}"


def _renames(has: StructType, needs: StructType) -> dict[str, str]:
    """Find the old names of columns by their new ones, in an order in which each new name is free.

    A column that takes its old name from another leaves that one to look for its own, or to be added.
    """
    renames: dict[str, str] = {}
    left, needed = set(has.names), set(needs.names)
    waiting = [field for field in needs.fields if field.name not in left]
    while waiting:
        field = waiting.pop(0)
        names = [name for name in former_names(field) if name in left]
        # One that nothing else needs is surely meant; the last name comes first.
        old_name = next((name for name in names if name not in needed), next(iter(names), None))
        if old_name is not None:
            renames[field.name] = old_name
            left.remove(old_name)
            waiting += [needs[old_name]] if old_name in needed else []
    return renames


def _check_no_swap(has: StructType, needs: StructType) -> None:
    """Refuse columns that have taken each other's names unless the mirror's own comments say that it has followed."""
    both = set(has.names) & set(needs.names)
    came_from = {name: (set(former_names(needs[name])) & both) - {*former_names(has[name])} for name in both}
    for name in sorted(both):
        reached, following = set[str](), came_from[name]
        while following:
            reached |= following
            following = set().union(*(came_from[each] for each in following)) - reached
        if name in reached:
            raise ColumnMismatch(
                "columns have taken each other's names, drop the mirror and it is built anew: "
                f"columns={', '.join(sorted({name, *came_from[name]}))}"
            )


def _type_changes(target: str, has: DataType, needs: DataType, path: tuple[str, ...]) -> Iterator[str]:
    if isinstance(has, StructType) and isinstance(needs, StructType):
        yield from _struct_changes(target, has, needs, path)
    elif isinstance(has, ArrayType) and isinstance(needs, ArrayType):
        yield from _type_changes(target, has.elementType, needs.elementType, (*path, "element"))
    elif isinstance(has, MapType) and isinstance(needs, MapType):
        yield from _type_changes(target, has.valueType, needs.valueType, (*path, "value"))
    elif _widens(has, needs):
        yield f"ALTER TABLE {target} ALTER COLUMN {_sql(path)} TYPE {type_sql(needs)}"
    elif has != needs and not _widens(needs, has):
        raise ColumnMismatch(
            "a column has another type in the mirror, drop the mirror or the column: "
            f"column={'.'.join(path)} mirror={has.simpleString()} table={needs.simpleString()}"
        )


def _widens(narrow: DataType, wide: DataType) -> bool:
    if isinstance(narrow, DecimalType) and isinstance(wide, DecimalType):
        return narrow.scale == wide.scale and narrow.precision < wide.precision
    pairs = ((IntegerType, LongType), (FloatType, DoubleType))
    return any(isinstance(narrow, one) and isinstance(wide, other) for one, other in pairs)


def columns_sql(schema: StructType) -> str:
    """Write a schema as the columns of a CREATE TABLE."""
    return ", ".join(f"{quoted(field.name)} {type_sql(field.dataType)}{_comment(field)}" for field in schema.fields)


def type_sql(kind: DataType) -> str:
    """Write a type for SQL, with the names inside it quoted."""
    if isinstance(kind, StructType):
        return f"STRUCT<{', '.join(f'{quoted(field.name)}: {type_sql(field.dataType)}' for field in kind.fields)}>"
    if isinstance(kind, ArrayType):
        return f"ARRAY<{type_sql(kind.elementType)}>"
    if isinstance(kind, MapType):
        return f"MAP<{type_sql(kind.keyType)}, {type_sql(kind.valueType)}>"
    return kind.simpleString()


def _sql(path: tuple[str, ...]) -> str:
    return ".".join(map(quoted, path))


def _comment(field: StructField) -> str:
    comment = comment_of(field)
    return f" COMMENT {text_literal(comment)}" if comment else ""


# --- pipeline.mirrors.origins -----------------------------------------------------------------------------------------
#
# Which change table a mirror, or its tombstones, are made from. Owns the properties that say so, and their check.
#
# A change table that was dropped and made anew has the name of the old one and other rows: its positions begin again,
# and
# old rows with higher ones would keep the new out. So a mirror also keeps the table's uuid, which no other table has.
# Mirrors that were made before they did so take it on when they are next brought up to date.


MIRROR_OF = "lakefeed.mirror.of"
MIRROR_OF_UUID = "lakefeed.mirror.of-uuid"


class NotAMirror(PipelineError):
    """A table with the mirror's name is something else: a person has to name another target."""


class OtherChangeTable(PipelineError):
    """The change table is not the one that the mirror was built from: a person has to decide about the mirror."""


@dataclass(frozen=True, slots=True)
class Origin:
    """A change table by name and uuid; None where the uuid cannot be seen, as over Spark Connect."""

    table: str
    uuid: str | None

    def to_properties(self) -> dict[str, str]:
        """Give what a table made from this one says of it."""
        return {MIRROR_OF: self.table} | ({MIRROR_OF_UUID: self.uuid} if self.uuid else {})


def check_origin(present: Mapping[str, str], origin: Origin, *, name: str) -> None:
    """Check by the properties of a mirror, or of its tombstones, that they are of this change table.

    Raises: NotAMirror, OtherChangeTable.
    """
    if present.get(MIRROR_OF) != origin.table:
        raise NotAMirror(
            "the table exists and is no mirror of this one, set target for another name: "
            f"table={origin.table} target={name} mirror_of={present.get(MIRROR_OF)}"
        )
    built_from = present.get(MIRROR_OF_UUID)
    if built_from and origin.uuid and built_from != origin.uuid:
        raise OtherChangeTable(
            "the change table was dropped and made anew since its mirror was built, drop the mirror and its tombstones "
            f"or set target for another name: table={origin.table} mirror={name} built_from={built_from} "
            f"now={origin.uuid}"
        )


def is_of(present: Mapping[str, str], origin: Origin) -> bool:
    """Tell whether a table is made from this change table."""
    try:
        check_origin(present, origin, name="")
    except (NotAMirror, OtherChangeTable):
        return False
    return True


# --- pipeline.mirrors.mirror_table ------------------------------------------------------------------------------------
#
# A mirror as a table: made, checked, and brought to the columns and storage that it needs. Owns how.


class OtherKindOfMirror(PipelineError):
    """The mirror is a history and should show current rows, or the other way round: a person has to decide."""


def load_origin(spark: SparkSession, names: MirrorNames) -> Origin:
    """Find out which table the change table is now."""
    return Origin(str(names.table), load_uuid(spark, names.table_sql))


def load_built_key(spark: SparkSession, names: MirrorNames) -> tuple[str, ...]:
    """Read the key that the mirror was built with; empty if there is no mirror yet.

    Raises: NotAMirror, OtherChangeTable.
    """
    if not exists(spark, names.mirror_sql):
        return ()
    found = properties(spark, names.mirror_sql)
    check_origin(found, load_origin(spark, names), name=str(names.mirror))
    return tuple(json.loads(found[MIRROR_KEY]))


def prepare_mirror(
    spark: SparkSession, names: MirrorNames, layout: Layout, settings: MirrorSettings, *, origin: Origin
) -> None:
    """Create the mirror, or bring the one that is there to the layout and the mode.

    Raises: ColumnMismatch, OtherKindOfMirror.
    """
    wanted = storage_properties(settings) | origin.to_properties()
    wanted |= {MIRROR_MODE: settings.mode.value, MIRROR_KEY: json.dumps(layout.key)}
    if not exists(spark, names.mirror_sql):
        spark.sql(_create(names, layout, settings, wanted))
        return
    present = properties(spark, names.mirror_sql)
    check_mode(present, names, settings)
    for statement in plan_evolution(names.mirror_sql, has=spark.table(names.mirror_sql).schema, needs=layout.schema):
        spark.sql(statement)
    changed = {key: value for key, value in wanted.items() if present.get(key) != value}
    # A table's format never goes back.
    if int(present.get("format-version", "2")) > int(wanted["format-version"]):
        changed.pop("format-version", None)
    if changed:
        spark.sql(f"ALTER TABLE {names.mirror_sql} SET TBLPROPERTIES ({property_pairs(changed)})")


def check_mode(present: Mapping[str, str], names: MirrorNames, settings: MirrorSettings) -> None:
    """Check that a mirror keeps of each row what it was built to keep: its versions, or its last state.

    Raises: OtherKindOfMirror.
    """
    built = present.get(MIRROR_MODE, settings.mode.value)
    if (built == MirrorMode.HISTORY.value) != settings.keeps_history:
        raise OtherKindOfMirror(
            "a history cannot become a mirror of current rows, nor the other way round, set target for another name or "
            f"drop the mirror and its tombstones: mirror={names.mirror} built={built} configured={settings.mode.value}"
        )


def _create(names: MirrorNames, layout: Layout, settings: MirrorSettings, table_properties: dict[str, str]) -> str:
    parts = f" PARTITIONED BY (bucket({settings.buckets}, {quoted(layout.key[0])}))" if settings.buckets else ""
    return (
        f"CREATE TABLE {names.mirror_sql} ({columns_sql(layout.schema)}) USING iceberg{parts} "
        f"TBLPROPERTIES ({property_pairs(table_properties)})"
    )


def load_marker(spark: SparkSession, names: MirrorNames) -> Marker | None:
    """Read how far the mirror has come."""
    lineage = load_lineage(spark, names.mirror_sql)
    marker = find_marker(lineage, {})
    return marker or find_marker((), properties(spark, names.mirror_sql))
