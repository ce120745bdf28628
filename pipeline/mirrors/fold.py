"""Fold: changes to the last change of each row. DataFrame to DataFrame, with Spark's built-in functions only.

    prepare              the columns of the mirror, the same for every table; messages are left out
    with_key_changes     an update that changes a row's key also deletes the row under its old key
    fold                 one row per key: the newest change, with unsent values taken from the changes before it
    without_tombstoned   without rows that are older than a tombstone of their key

Between fold and merge a row has more columns: IS_DELETED, UNKNOWN, CARRIED, and for each column that some change did
not send, the position of the change that its value is from. The mirror's value stays if no change of the batch has sent
one, or if the mirror's is newer.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pyspark.sql import Column, DataFrame, Window, WindowSpec
from pyspark.sql import functions as F  # noqa: N812 - the usual name
from pyspark.sql.types import BinaryType, DataType, StringType

from lakefeed.contract import changes as columns
from lakefeed.pipeline.mirrors.layout import CARRIED, POSITION_COLUMNS, UNKNOWN, Layout
from lakefeed.pipeline.mirrors.positions import READ, Truncate, newer, truncated
from lakefeed.pipeline.spark.sql import quoted, text_literal

IS_DELETED = "_cdc_is_deleted"

DELETE = "DELETE"
TRUNCATE = "TRUNCATE"
MESSAGE = "MESSAGE"

_ORDER_TIME = "_cdc_order_time"
_RANK = "_cdc_rank"
_NUMBER = "_cdc_number"
_VALUE = "_cdc_value"
_NAMES_TYPE = "array<string>"

# The order of a key's rows; `ordered` adds the first and the fifth.
ORDER_COLUMNS = (_ORDER_TIME, columns.SOURCE, columns.EPOCH, columns.SEQUENCE, _RANK, columns.TIMESTAMP)

_BIG_NUMBER = "^__bigint__:"


def column(name: str) -> Column:
    """Refer to a column, whatever characters its name has."""
    return F.col(quoted(name))


# -- before the fold


def prepare(changes: DataFrame, layout: Layout) -> DataFrame:
    """Select the columns of the mirror, UNCHANGED and BEFORE. Messages are left out, because they belong to no row."""
    present = set(changes.columns)
    selected = [_mirror_column(name, layout, present) for name in layout.columns]
    unchanged = column(columns.UNCHANGED) if columns.UNCHANGED in present else F.lit(None)
    before = column(columns.BEFORE) if columns.BEFORE in present else F.lit(None)
    return changes.where(column(columns.OPERATION) != MESSAGE).select(
        *selected,
        _present_names(unchanged.cast(_NAMES_TYPE), layout).alias(columns.UNCHANGED),
        before.cast("string").alias(columns.BEFORE),
    )


def _mirror_column(name: str, layout: Layout, present: Collection[str]) -> Column:
    value = column(name) if name in present else F.lit(None).cast(layout.schema[name].dataType)
    if name == columns.EPOCH:
        value = F.coalesce(value, F.lit(0))
    elif name == columns.SOURCE:
        value = F.coalesce(value, F.lit(""))
    return value.alias(name)


def _present_names(names: Column, layout: Layout) -> Column:
    """Replace names of columns that were renamed after the list was written."""
    renamed = layout.renamed

    def present(name: Column) -> Column:
        found = name
        for old, new in renamed.items():
            found = F.when(name == old, F.lit(new)).otherwise(found)
        return found

    return F.transform(names, present) if renamed else names


def lacks_key(layout: Layout) -> Column:
    """Return the condition that a change lacks a part of its key."""
    missing = F.lit(False)
    for name in layout.key:
        missing = missing | column(name).isNull()
        if name == columns.ROW_ID:
            missing = missing | (column(name) == "")
    return missing & (column(columns.OPERATION) != TRUNCATE)


def with_key_changes(changes: DataFrame, layout: Layout) -> DataFrame:
    """Add a delete under the old key for each update whose image from before has another key."""
    if not layout.finds_key_changes:
        return changes
    old_key = [_old_value(name, layout) for name in layout.key]
    has_changed, is_known = F.lit(False), F.lit(True)
    for name, old in zip(layout.key, old_key, strict=True):
        has_changed = has_changed | (column(name) != old)
        is_known = is_known & old.isNotNull()
    is_update = column(columns.OPERATION) == "UPDATE"
    moved = changes.where(is_update & column(columns.BEFORE).isNotNull()).where(is_known & has_changed)
    kept = {*POSITION_COLUMNS, columns.ROW_ID}
    values = dict(zip(layout.key, old_key, strict=True))
    deletes = moved.select(
        *(
            F.lit(DELETE).alias(name)
            if name == columns.OPERATION
            else values.get(name, column(name) if name in kept else F.lit(None))
            .cast(changes.schema[name].dataType)
            .alias(name)
            for name in changes.columns
        )
    )
    return changes.unionByName(deletes)


def _old_value(name: str, layout: Layout) -> Column:
    """Return a key column from the image before the change; null if it is missing or not a value of its type.

    The image is as the source sent it, so the column may have a former name.
    """
    names = (name, *(old for old, new in layout.renamed.items() if new == name))
    return F.coalesce(*(_image_value(each, layout.schema[name].dataType) for each in names))


def _image_value(name: str, kind: DataType) -> Column:
    path = f"$['{name}']"
    text = f"get_json_object({columns.BEFORE}, {text_literal(path)})"
    if isinstance(kind, StringType):
        return F.expr(text)
    if isinstance(kind, BinaryType):
        return F.expr(f"unbase64({text})")
    return F.expr(f"try_cast(regexp_replace({text}, '{_BIG_NUMBER}', '') AS {kind.simpleString()})")


def without_truncated(changes: DataFrame, truncates: Sequence[Truncate]) -> DataFrame:
    """Leave out truncates, and the changes that they deleted."""
    rows = changes.where(column(columns.OPERATION) != TRUNCATE)
    return rows.where(f"NOT {truncated(truncates)}") if truncates else rows


def without_tombstoned(rows: DataFrame, tombstones: DataFrame, layout: Layout) -> DataFrame:
    """Leave out rows that are not newer than a tombstone of their key. Deletes stay: the mirror may have the row."""
    same_key = " AND ".join(f"change.{quoted(name)} = tombstone.{quoted(name)}" for name in layout.key)
    stays = f"change.{columns.OPERATION} IN ('{DELETE}', '{TRUNCATE}') OR {newer('change', 'tombstone')}"
    condition = F.expr(f"{same_key} AND NOT ({stays})")
    return rows.alias("change").join(tombstones.alias("tombstone"), on=condition, how="left_anti")


# -- the fold


def fold(
    changes: DataFrame, layout: Layout, *, unchanged: Collection[str] = (), sources_differ: bool = True
) -> DataFrame:
    """Keep the newest change of each key. `unchanged` are the columns that some change did not send."""
    rows = carried(ordered(changes, layout, sources_differ=sources_differ), layout, unchanged)
    newest_first = Window.partitionBy(*map(column, layout.key)).orderBy(*map(F.desc, ORDER_COLUMNS))
    last = rows.withColumn(_NUMBER, F.row_number().over(newest_first)).where(column(_NUMBER) == 1)
    sent_at = [column(sent_at_column(name)) for name in layout.row_columns if name in unchanged]
    return last.select(*map(column, (*layout.columns, UNKNOWN, CARRIED)), is_delete().alias(IS_DELETED), *sent_at)


def ordered(changes: DataFrame, layout: Layout, *, sources_differ: bool) -> DataFrame:
    """Add the columns by which the rows of a key are ordered; `in_order` returns the window.

    The times of one source are made to rise with its positions, so that all changes of a row have one order.
    """
    operation = column(columns.OPERATION)
    # At one position a READ comes after a truncate, and may be older than any other change.
    rank = F.when(operation == TRUNCATE, 0).when(operation == READ, 1).otherwise(2)
    rows = changes.withColumn(_RANK, rank)
    if not sources_differ:
        return rows.withColumn(_ORDER_TIME, F.lit(0))
    of_source = (
        Window.partitionBy(*map(column, layout.key), column(columns.SOURCE))
        .orderBy(columns.EPOCH, columns.SEQUENCE, _RANK, columns.TIMESTAMP)
        .rowsBetween(Window.unboundedPreceding, Window.currentRow)
    )
    # By the key alone, so that one exchange serves this window and the next.
    spread = rows.repartition(*map(column, layout.key))
    return spread.withColumn(_ORDER_TIME, F.max(columns.TIMESTAMP).over(of_source))


def in_order(layout: Layout, *apart: Column) -> WindowSpec:
    """Return the window of a key's rows, oldest first, separate for different values of `apart`."""
    return Window.partitionBy(*map(column, layout.key), *apart).orderBy(*map(F.asc, ORDER_COLUMNS))


def carried(rows: DataFrame, layout: Layout, unchanged: Collection[str], *apart: Column) -> DataFrame:
    """Fill columns that a change did not send from earlier changes of its row, and record which change they are from.

    Nothing is taken from before a delete, because what follows it is another row, nor from rows that differ in `apart`.
    A stored row, which has CARRIED, keeps the values it was given unless there are newer ones.
    """
    names = [name for name in layout.row_columns if name in unchanged]
    so_far = in_order(layout, *apart).rowsBetween(Window.unboundedPreceding, Window.currentRow)
    for name in names:
        was_sent = ~F.coalesce(F.array_contains(columns.UNCHANGED, name), F.lit(False))
        value = F.when(~is_delete(), column(name)).alias(_VALUE)
        known = F.struct(value, *(column(each) for each in POSITION_COLUMNS))
        last_known = F.last(F.when(was_sent | is_delete(), known), ignorenulls=True).over(so_far)
        if CARRIED in rows.columns:
            last_known = F.coalesce(last_known, _stored_value(name, layout))
        rows = rows.withColumn(sent_at_column(name), last_known)
    for name in names:
        # A delete keeps the image that came with it.
        found = column(sent_at_column(name))[_VALUE]
        rows = rows.withColumn(name, F.when(is_delete(), column(name)).otherwise(found))
    unsent = [F.when(column(sent_at_column(name)).isNull(), F.lit(name)) for name in names]
    unknown = F.array_compact(F.array(*unsent)) if names else F.array()
    entries = F.array_compact(F.array(*(_carried_entry(name) for name in names))) if names else F.array()
    entries_type = layout.schema[CARRIED].dataType
    return rows.withColumn(UNKNOWN, F.when(F.size(unknown) > 0, unknown.cast(_NAMES_TYPE))).withColumn(
        CARRIED, F.when(F.size(entries) > 0, entries.cast(entries_type)).otherwise(F.lit(None).cast(entries_type))
    )


def _carried_entry(name: str) -> Column:
    """Return the entry of a value; null if the row's own change sent it, or none did."""
    sent_at, is_own = column(sent_at_column(name)), F.lit(True)
    for part in POSITION_COLUMNS:
        is_own = is_own & sent_at[part].eqNullSafe(column(part))
    entry = F.struct(F.lit(name).alias("name"), *(sent_at[part].alias(part) for part in POSITION_COLUMNS))
    return F.when(sent_at.isNotNull() & ~is_own, entry)


def _stored_value(name: str, layout: Layout) -> Column:
    """Return a stored row's value with its position; null if the row's own change sent it, or none did."""
    entry = F.get(F.filter(column(CARRIED), lambda each: each["name"] == name), F.lit(0))
    position = (entry[part].cast(layout.schema[part].dataType).alias(part) for part in POSITION_COLUMNS)
    return F.when(entry.isNotNull(), F.struct(column(name).alias(_VALUE), *position))


def sent_at_column(name: str) -> str:
    """Return the column that has the position of a value; null if no change of the batch sent it."""
    return f"_cdc_sent_at_{name}"


def is_delete() -> Column:
    """Return the condition that a change deletes its row."""
    return column(columns.OPERATION).isin(DELETE, TRUNCATE)
