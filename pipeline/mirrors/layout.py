"""Layout of a mirror: its key, its columns, how it is stored, and how it follows its change table's columns. Pure.

The key is the first of these that exists: the configured one; the one that the mirror was built with; the columns that
the change table's comments call `key`, because the source declared them; `_cdc_row_id`. An existing mirror keeps its
key, because rows under another key would be other rows.

Columns are added and widened, also inside structs, lists and maps. A column whose comment records a former name which
the mirror still has is renamed together with its comment; another column may then take the old name. Columns that the
change table has lost stay in the mirror.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

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
from lakefeed.pipeline.mirrors.settings import MirrorMode, MirrorSettings
from lakefeed.pipeline.spark.tables import quoted, text_literal, type_sql

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
    """Decide on a mirror's key and columns.

    Raises: InvalidKey.
    """
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


class ColumnMismatch(PipelineError):
    """A column of the change table can no longer be mirrored: the user has to decide about the mirror's column."""


def plan_evolution(target: str, *, has: StructType, needs: StructType) -> list[str]:
    """Return the statements after which the mirror has all columns that it needs.

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
