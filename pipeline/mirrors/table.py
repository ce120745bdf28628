"""A mirror as a table: its key and columns, how it is stored, where it comes from, how it follows its change table.

The key is the first of these that exists: the configured one; the one that the mirror was built with; the columns that
the change table's comments call `key`, because the source declared them; `_cdc_row_id`. An existing mirror keeps its
key, because rows under another key would be other rows.

Columns are added and widened, also inside structs, lists and maps. A column whose comment records a former name which
the mirror still has is renamed together with its comment; another column may then take the old name. Columns that the
change table has lost stay in the mirror.

A change table that was dropped and recreated has the name of the old one but other rows: its positions start again, and
old rows with higher positions would keep the new ones out. So a mirror also records the uuid of its change table.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pyspark.sql import SparkSession
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

from lakefeed.contract import changes as cdc
from lakefeed.pipeline.errors import PipelineError
from lakefeed.pipeline.mirrors.settings import MirrorMode, MirrorNames, MirrorSettings
from lakefeed.pipeline.spark.tables import (
    exists,
    load_uuid,
    properties,
    property_pairs,
    quoted,
    set_properties,
    text_literal,
    type_sql,
)

# Properties of a mirror.
MIRROR_OF = "lakefeed.mirror.of"
MIRROR_OF_UUID = "lakefeed.mirror.of-uuid"
MIRROR_KEY = "lakefeed.mirror.key"
MIRROR_MODE = "lakefeed.mirror.mode"

# The position of a row's last change, which a mirror keeps so that only newer changes replace the row.
POSITION_COLUMNS = (cdc.SOURCE, cdc.EPOCH, cdc.SEQUENCE, cdc.TIMESTAMP, cdc.OPERATION)
_KEPT_COLUMNS = (cdc.ROW_ID, *POSITION_COLUMNS, cdc.RESCUED)

# The columns of a row that no change has sent yet: a row that is read late may still provide them.
UNKNOWN = "_cdc_unknown"

# The columns that a row's last change did not send, each with the position of the change that its value is from, so
# that a change that comes late replaces older values only.
CARRIED = "_cdc_carried"

# Further columns of a history.
VALID_FROM = "valid_from"
VALID_TO = "valid_to"
IS_CURRENT = "is_current"
ENDED_BY = "_cdc_ended_by"

# The parts of a position, in the end of a version without our prefix, and in an entry of CARRIED after its column.
_POSITION_TYPES = (StringType(), LongType(), LongType(), TimestampType(), StringType())
_POSITION_FIELDS = [StructField(*each) for each in zip(POSITION_COLUMNS, _POSITION_TYPES, strict=True)]
ENDED_BY_FIELDS = {name: name.removeprefix(cdc.RESERVED_PREFIX) for name in POSITION_COLUMNS}
ENDED_BY_TYPE = StructType([StructField(ENDED_BY_FIELDS[each.name], each.dataType) for each in _POSITION_FIELDS])
_CARRIED_TYPE = ArrayType(StructType([StructField("name", StringType()), *_POSITION_FIELDS]))

_HISTORY_COLUMNS = frozenset((VALID_FROM, VALID_TO, IS_CURRENT, ENDED_BY))

_FORMERLY = re.compile(r"(?:^|; )formerly (\[.*\])$", re.DOTALL)
_KEY = re.compile(r"(?:^|; )key$")

_MODE_PROPERTIES = {
    MirrorMode.COPY_ON_WRITE: ("copy-on-write", "2"),
    MirrorMode.MERGE_ON_READ: ("merge-on-read", "2"),
    MirrorMode.DELETION_VECTORS: ("merge-on-read", "3"),
    MirrorMode.HISTORY: ("copy-on-write", "2"),
}


class InvalidKey(PipelineError):
    """The key does not fit the table, or the existing mirror: the user has to configure another one."""


class ColumnMismatch(PipelineError):
    """A column of the change table can no longer be mirrored: the user has to decide about the mirror's column."""


class NotAMirror(PipelineError):
    """The table with the mirror's name is not a mirror: the user has to configure another target."""


class ChangeTableReplaced(PipelineError):
    """The change table is not the one that the mirror was built from: the user has to decide about the mirror."""


class MirrorModeMismatch(PipelineError):
    """The mirror is a history but should have current rows, or vice versa: the user has to decide about it."""


# -- layout: key and columns


@dataclass(frozen=True, slots=True)
class Layout:
    """A mirror's key and columns.

    `change_columns` are those of the change table, which may lack some of the mirror's.
    """

    key: tuple[str, ...]
    schema: StructType
    change_columns: frozenset[str]
    keeps_history: bool = False

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the columns that come from a change."""
        added = {UNKNOWN, CARRIED, *(_HISTORY_COLUMNS if self.keeps_history else ())}
        return tuple(name for name in self.schema.names if name not in added)

    @property
    def row_columns(self) -> tuple[str, ...]:
        """Return the columns of the source's row."""
        return tuple(name for name in self.columns if name not in _KEPT_COLUMNS)

    @property
    def renamed(self) -> dict[str, str]:
        """Return the present names of columns by their former names, unless another column has such a name now."""
        return _renamed(self.schema)

    @property
    def key_is_row_id(self) -> bool:
        """Return whether the key is the source's row id, which a row keeps for its whole life."""
        return self.key == (cdc.ROW_ID,)

    @property
    def finds_key_changes(self) -> bool:
        """Return whether changes of a row's key can be found: the image from before the change has the old key."""
        return not self.key_is_row_id and cdc.BEFORE in self.change_columns


def plan_layout(changes: StructType, settings: MirrorSettings, *, built_key: tuple[str, ...] = ()) -> Layout:
    """Decide on a mirror's key and columns. Raise InvalidKey if the key does not fit the table or the mirror."""
    configured, built_key = _present_names(settings.key, changes), _present_names(built_key, changes)
    if configured and built_key and configured != built_key:
        raise InvalidKey(
            "the mirror was built with another key, configure that one or drop the mirror: "
            f"built={', '.join(built_key)} configured={', '.join(configured)}"
        )
    declared = (each.name for each in changes.fields if _KEY.search(_FORMERLY.sub("", comment_of(each))))
    key = configured or built_key or tuple(declared) or (cdc.ROW_ID,)
    for name in key:
        if name not in changes.names:
            raise InvalidKey(f"the table has no such column, change the key: column={name}")
        if isinstance(changes[name].dataType, StructType | ArrayType | MapType):
            raise InvalidKey(
                f"a key column must not be a struct, list or map: column={name} type={changes[name].dataType}"
            )
    own = [field for field in changes.fields if not field.name.startswith(cdc.RESERVED_PREFIX)]
    kept = [_kept_field(name, changes) for name in _KEPT_COLUMNS]
    kept += [StructField(UNKNOWN, ArrayType(StringType())), StructField(CARRIED, _CARRIED_TYPE)]
    history = _history_fields(own) if settings.keeps_history else []
    fields = [StructField(field.name, field.dataType, True, field.metadata) for field in (*own, *kept, *history)]
    return Layout(key, StructType(fields), frozenset(changes.names), settings.keeps_history)


def _present_names(key: tuple[str, ...], changes: StructType) -> tuple[str, ...]:
    """Replace names in a key by the present names of renamed columns."""
    renamed = _renamed(changes)
    return tuple(renamed.get(name, name) for name in key)


def _renamed(schema: StructType) -> dict[str, str]:
    present = set(schema.names)
    return {old: field.name for field in schema.fields for old in former_names(field) if old not in present}


def _kept_field(name: str, changes: StructType) -> StructField:
    found = changes[name] if name in changes.names else StructField(name, StringType())
    if name == cdc.EPOCH:
        # Even if the table's own column is an int: an epoch may be a time in milliseconds.
        return StructField(name, LongType(), True, found.metadata)
    return found


def _history_fields(own: list[StructField]) -> list[StructField]:
    taken = [field.name for field in own if field.name.lower() in _HISTORY_COLUMNS]
    if taken:
        raise PipelineError(
            "a history has its own column of this name, rename the table's column or choose another mode: "
            f"column={min(taken)}"
        )
    return [
        StructField(VALID_FROM, TimestampType()),
        StructField(VALID_TO, TimestampType()),
        StructField(IS_CURRENT, BooleanType()),
        StructField(ENDED_BY, ENDED_BY_TYPE),
    ]


def comment_of(field: StructField) -> str:
    """Return a column's comment."""
    return str((field.metadata or {}).get("comment") or "")


def former_names(field: StructField) -> tuple[str, ...]:
    """Return the former names of a column, which the writer records in its comment."""
    found = _FORMERLY.search(comment_of(field))
    try:
        names = json.loads(found[1]) if found else []
    except ValueError:
        return ()
    return tuple(name for name in names if isinstance(name, str))


# -- storage


def storage_properties(settings: MirrorSettings) -> dict[str, str]:
    """Return the table properties of a mode."""
    mode, version = _MODE_PROPERTIES[settings.mode]
    return {
        "format-version": version,
        "write.merge.mode": mode,
        "write.update.mode": mode,
        "write.delete.mode": mode,
        # Of two merges that insert the same key the second must fail; it is repeated and finds the row.
        "write.merge.isolation-level": "serializable",
        "write.parquet.compression-codec": "zstd",
        **retention_properties(settings),
    }


def retention_properties(settings: MirrorSettings) -> dict[str, str]:
    """Return the table properties by which old snapshots of a mirror, and of its tombstones, expire."""
    return {
        "history.expire.max-snapshot-age-ms": str(int(settings.snapshot_age_s * 1000)),
        # A query that started before a merge still finds its files, also if merges are rare.
        "history.expire.min-snapshots-to-keep": "2",
        # Otherwise each merge would leave a metadata file behind.
        "write.metadata.delete-after-commit.enabled": "true",
        "write.metadata.previous-versions-max": "20",
    }


# -- evolution


def plan_evolution(target: str, *, has: StructType, needs: StructType) -> list[str]:
    """Return the statements that give a mirror all columns that it needs. Raise ColumnMismatch if none can."""
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
    """Return the old names of renamed columns by their new ones, in an order in which each new name is free.

    If a column takes its old name from another one, that one is renamed from a former name of its own, or added.
    """
    renames: dict[str, str] = {}
    left, needed = set(has.names), set(needs.names)
    open_fields = [field for field in needs.fields if field.name not in left]
    while open_fields:
        field = open_fields.pop(0)
        names = [name for name in former_names(field) if name in left]
        # Prefer a name that no other column needs. Former names are ordered from the last to the first.
        old_name = next((name for name in names if name not in needed), next(iter(names), None))
        if old_name is not None:
            renames[field.name] = old_name
            left.remove(old_name)
            open_fields += [needs[old_name]] if old_name in needed else []
    return renames


def _check_no_swap(has: StructType, needs: StructType) -> None:
    """Raise ColumnMismatch if columns have swapped names, unless the mirror's comments show that it has followed."""
    both = set(has.names) & set(needs.names)
    came_from = {name: (set(former_names(needs[name])) & both) - {*former_names(has[name])} for name in both}
    for name in sorted(both):
        reached, following = set[str](), came_from[name]
        while following:
            reached |= following
            following = set().union(*(came_from[each] for each in following)) - reached
        if name in reached:
            raise ColumnMismatch(
                "columns have swapped their names, drop the mirror and it is rebuilt: "
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
            "a column has another type in the mirror, drop the mirror or its column: "
            f"column={'.'.join(path)} mirror={has.simpleString()} table={needs.simpleString()}"
        )


def _widens(narrow: DataType, wide: DataType) -> bool:
    if isinstance(narrow, DecimalType) and isinstance(wide, DecimalType):
        return narrow.scale == wide.scale and narrow.precision < wide.precision
    pairs = ((IntegerType, LongType), (FloatType, DoubleType))
    return any(isinstance(narrow, one) and isinstance(wide, other) for one, other in pairs)


def columns_sql(schema: StructType) -> str:
    """Write a schema as the columns of a CREATE TABLE statement."""
    return ", ".join(f"{quoted(field.name)} {type_sql(field.dataType)}{_comment(field)}" for field in schema.fields)


def _sql(path: tuple[str, ...]) -> str:
    return ".".join(map(quoted, path))


def _comment(field: StructField) -> str:
    comment = comment_of(field)
    return f" COMMENT {text_literal(comment)}" if comment else ""


# -- origin


@dataclass(frozen=True, slots=True)
class MirrorOrigin:
    """The change table of a mirror, by name and uuid; the uuid is None over Spark Connect."""

    table: str
    uuid: str | None

    def to_properties(self) -> dict[str, str]:
        """Return the properties of a table that is made from this one."""
        return {MIRROR_OF: self.table} | ({MIRROR_OF_UUID: self.uuid} if self.uuid else {})


def check_origin(present: Mapping[str, str], origin: MirrorOrigin, *, name: str) -> None:
    """Raise NotAMirror or ChangeTableReplaced unless the properties of a table name this change table."""
    if present.get(MIRROR_OF) != origin.table:
        raise NotAMirror(
            "a table with the mirror's name exists and is not a mirror of this table, set another target: "
            f"table={origin.table} target={name} mirror_of={present.get(MIRROR_OF)}"
        )
    built_from = present.get(MIRROR_OF_UUID)
    if built_from and origin.uuid and built_from != origin.uuid:
        raise ChangeTableReplaced(
            "the change table was recreated since its mirror was built, drop the mirror and its tombstones or set "
            f"another target: table={origin.table} mirror={name} built_from={built_from} "
            f"now={origin.uuid}"
        )


def is_of(present: Mapping[str, str], origin: MirrorOrigin) -> bool:
    """Return whether a table is made from this change table."""
    try:
        check_origin(present, origin, name="")
    except (NotAMirror, ChangeTableReplaced):
        return False
    return True


def load_origin(spark: SparkSession, names: MirrorNames) -> MirrorOrigin:
    """Return the present identity of the change table."""
    return MirrorOrigin(str(names.table), load_uuid(spark, names.table_sql))


def load_built_key(spark: SparkSession, names: MirrorNames) -> tuple[str, ...]:
    """Return the key that the mirror was built with, after `check_origin`; empty if there is no mirror yet."""
    found = load_properties(spark, names.mirror_sql)
    if found is None:
        return ()
    check_origin(found, load_origin(spark, names), name=str(names.mirror))
    return tuple(json.loads(found[MIRROR_KEY]))


# -- the table


def prepare_mirror(
    spark: SparkSession, names: MirrorNames, layout: Layout, settings: MirrorSettings, *, origin: MirrorOrigin
) -> None:
    """Create the mirror, or alter the existing one to the layout and the mode."""
    wanted = storage_properties(settings) | origin.to_properties()
    wanted |= {MIRROR_MODE: settings.mode.value, MIRROR_KEY: json.dumps(layout.key)}
    present = load_properties(spark, names.mirror_sql)
    if present is not None:
        check_mode(present, names, settings)
    buckets = f"bucket({settings.buckets}, {quoted(layout.key[0])})" if settings.buckets else ""
    create_or_alter(spark, names.mirror_sql, layout.schema, partition=buckets, wanted=wanted, present=present)


def load_properties(spark: SparkSession, table: str) -> dict[str, str] | None:
    """Return a table's properties; None if it does not exist."""
    return properties(spark, table) if exists(spark, table) else None


def create_or_alter(
    spark: SparkSession,
    table: str,
    schema: StructType,
    *,
    partition: str,
    wanted: Mapping[str, str],
    present: Mapping[str, str] | None,
) -> None:
    """Create a table of a mirror, or alter the existing one, which has the properties `present`."""
    if present is None:
        partitioned = f" PARTITIONED BY ({partition})" if partition else ""
        spark.sql(
            f"CREATE TABLE {table} ({columns_sql(schema)}) USING iceberg{partitioned} "
            f"TBLPROPERTIES ({property_pairs(wanted)})"
        )
        return
    for statement in plan_evolution(table, has=spark.table(table).schema, needs=schema):
        spark.sql(statement)
    changed = {key: value for key, value in wanted.items() if present.get(key) != value}
    # A table's format version cannot be lowered.
    if int(present.get("format-version", "2")) > int(wanted["format-version"]):
        changed.pop("format-version", None)
    set_properties(spark, table, changed)


def check_mode(present: Mapping[str, str], names: MirrorNames, settings: MirrorSettings) -> None:
    """Raise MirrorModeMismatch if a mirror of current rows is configured as a history, or vice versa."""
    built = present.get(MIRROR_MODE, settings.mode.value)
    if (built == MirrorMode.HISTORY.value) != settings.keeps_history:
        raise MirrorModeMismatch(
            "a history cannot become a mirror of current rows or vice versa, set another target or drop the mirror and "
            f"its tombstones: mirror={names.mirror} built={built} configured={settings.mode.value}"
        )
