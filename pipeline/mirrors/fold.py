"""Fold: changes to the last change of each row, and which change is the newer one. Built-in functions of Spark only.

    prepare              the columns of the mirror, the same for every table; messages are left out
    with_key_changes     an update that changes a row's key also deletes the row under its old key
    fold                 one row per key: the newest change, with unsent values taken from the changes before it
    without_tombstoned   without rows that are older than a tombstone of their key

Which of two changes is newer:

    same source          epoch, then sequence; at the same position a streamed change is newer than a READ
    different sources    time of the change, then the name of the source

A READ has the last position that was known of its source when the row was read. A change streamed at this very position
may be newer than the row and is never older; a truncate at this position emptied the table before the row was read. The
order is total as long as the times of a source that shares rows with another one do not fall.

Which change a value of a row is from:

    UNKNOWN contains the column       no change has sent it yet
    CARRIED has an entry for it       the change that the entry names
    otherwise                         the row's own last change

A value is replaced only by one from a newer change, so the result does not depend on the order in which changes arrive.
Between fold and merge a row also has IS_DELETED and, for each column that some change did not send, the position of the
change that its value is from. Functions that return text return expressions of Spark SQL, for frames that have passed
`prepare` and for mirrors.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812 - the usual name
from pyspark.sql.types import BinaryType, DataType, StringType

from lakefeed.contract import changes as cdc
from lakefeed.contract.changes import Operation
from lakefeed.pipeline.mirrors.table import CARRIED, POSITION_COLUMNS, UNKNOWN, Layout
from lakefeed.pipeline.spark.tables import quoted, text_literal

IS_DELETED = "_cdc_is_deleted"

READ = Operation.READ.value
DELETE = Operation.DELETE.value
TRUNCATE = Operation.TRUNCATE.value

_ORDER_TIME = "_cdc_order_time"
_RANK = "_cdc_rank"
_NUMBER = "_cdc_number"
_VALUE = "_cdc_value"
_NAMES_TYPE = "array<string>"

# The order of a key's rows; `ordered` adds the first and the fifth.
ORDER_COLUMNS = (_ORDER_TIME, cdc.SOURCE, cdc.EPOCH, cdc.SEQUENCE, _RANK, cdc.TIMESTAMP)

_BIG_NUMBER = "^__bigint__:"

NO_NAMES = f"CAST(array() AS {_NAMES_TYPE})"

# Names of lambda variables: the prefix is reserved, so no column has such a name.
_ENTRY, _NAME, _ONE, _OTHER = "_cdc_entry", "_cdc_name", "_cdc_one", "_cdc_other"


@dataclass(frozen=True, slots=True)
class Truncate:
    """The position at which a source emptied the table; `time` is text that casts to a timestamp."""

    source: str
    epoch: int
    sequence: int
    time: str | None = None


def column(name: str) -> Column:
    """Refer to a column, whatever characters its name has."""
    return F.col(quoted(name))


def same_key(one: str, other: str, layout: Layout) -> str:
    """Return the condition that the rows in two aliases have the same key."""
    return " AND ".join(f"{one}.{quoted(name)} = {other}.{quoted(name)}" for name in layout.key)


# -- before the fold


def prepare(changes: DataFrame, layout: Layout) -> DataFrame:
    """Select the columns of the mirror, UNCHANGED and BEFORE. Messages are left out, because they belong to no row."""
    present = set(changes.columns)
    selected = [_mirror_column(name, layout, present) for name in layout.columns]
    unchanged = cdc.UNCHANGED if cdc.UNCHANGED in present else "NULL"
    before = column(cdc.BEFORE) if cdc.BEFORE in present else F.lit(None)
    return changes.where(column(cdc.OPERATION) != Operation.MESSAGE.value).select(
        *selected,
        F.expr(_present_names(f"CAST({unchanged} AS {_NAMES_TYPE})", layout)).alias(cdc.UNCHANGED),
        before.cast("string").alias(cdc.BEFORE),
    )


def _mirror_column(name: str, layout: Layout, present: Collection[str]) -> Column:
    value = column(name) if name in present else F.lit(None).cast(layout.schema[name].dataType)
    if name == cdc.EPOCH:
        value = F.coalesce(value, F.lit(0))
    elif name == cdc.SOURCE:
        value = F.coalesce(value, F.lit(""))
    return value.alias(name)


def lacks_key(layout: Layout) -> Column:
    """Return the condition that a change lacks a part of its key."""
    missing = F.lit(False)
    for name in layout.key:
        missing = missing | column(name).isNull()
        if name == cdc.ROW_ID:
            missing = missing | (column(name) == "")
    return missing & (column(cdc.OPERATION) != TRUNCATE)


def with_key_changes(changes: DataFrame, layout: Layout) -> DataFrame:
    """Add a delete under the old key for each update whose image from before has another key."""
    if not layout.finds_key_changes:
        return changes
    old_key = [_old_value(name, layout) for name in layout.key]
    has_changed, is_known = F.lit(False), F.lit(True)
    for name, old in zip(layout.key, old_key, strict=True):
        has_changed = has_changed | (column(name) != old)
        is_known = is_known & old.isNotNull()
    is_update = column(cdc.OPERATION) == Operation.UPDATE.value
    moved = changes.where(is_update & column(cdc.BEFORE).isNotNull()).where(is_known & has_changed)
    kept = {*POSITION_COLUMNS, cdc.ROW_ID}
    values = dict(zip(layout.key, old_key, strict=True))
    deletes = moved.select(
        *(
            F.lit(DELETE).alias(name)
            if name == cdc.OPERATION
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
    text = f"get_json_object({cdc.BEFORE}, {text_literal(path)})"
    if isinstance(kind, StringType):
        return F.expr(text)
    if isinstance(kind, BinaryType):
        return F.expr(f"unbase64({text})")
    return F.expr(f"try_cast(regexp_replace({text}, '{_BIG_NUMBER}', '') AS {kind.simpleString()})")


def without_truncated(changes: DataFrame, truncates: Sequence[Truncate]) -> DataFrame:
    """Leave out truncates, and the changes that they deleted."""
    rows = changes.where(column(cdc.OPERATION) != TRUNCATE)
    return rows.where(f"NOT {truncated(truncates)}") if truncates else rows


def without_tombstoned(rows: DataFrame, tombstones: DataFrame, layout: Layout) -> DataFrame:
    """Leave out rows that are not newer than a tombstone of their key. Deletes stay: the mirror may have the row."""
    stays = f"change.{cdc.OPERATION} IN ('{DELETE}', '{TRUNCATE}') OR {newer('change', 'tombstone')}"
    condition = F.expr(f"{same_key('change', 'tombstone', layout)} AND NOT ({stays})")
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
    """Add the columns by which the rows of a key are ordered, ORDER_COLUMNS.

    The times of one source are made to rise with its positions, so that all changes of a row have one order.
    """
    operation = column(cdc.OPERATION)
    # At one position a READ comes after a truncate, and may be older than any other change.
    rank = F.when(operation == TRUNCATE, 0).when(operation == READ, 1).otherwise(2)
    rows = changes.withColumn(_RANK, rank)
    if not sources_differ:
        return rows.withColumn(_ORDER_TIME, F.lit(0))
    of_source = (
        Window.partitionBy(*map(column, layout.key), column(cdc.SOURCE))
        .orderBy(cdc.EPOCH, cdc.SEQUENCE, _RANK, cdc.TIMESTAMP)
        .rowsBetween(Window.unboundedPreceding, Window.currentRow)
    )
    # By the key alone, so that one exchange serves this window and the next.
    spread = rows.repartition(*map(column, layout.key))
    return spread.withColumn(_ORDER_TIME, F.max(cdc.TIMESTAMP).over(of_source))


def carried(rows: DataFrame, layout: Layout, unchanged: Collection[str], *apart: Column) -> DataFrame:
    """Fill columns that a change did not send from earlier changes of its row, and record which change they are from.

    Nothing is taken from before a delete, because what follows it is another row, nor from rows that differ in `apart`.
    A stored row, which has CARRIED, keeps the values it was given unless there are newer ones.
    """
    names = [name for name in layout.row_columns if name in unchanged]
    in_order = Window.partitionBy(*map(column, layout.key), *apart).orderBy(*map(F.asc, ORDER_COLUMNS))
    so_far = in_order.rowsBetween(Window.unboundedPreceding, Window.currentRow)
    for name in names:
        was_sent = ~F.coalesce(F.array_contains(cdc.UNCHANGED, name), F.lit(False))
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
    taken = F.array_compact(F.array(*(_carried_entry(name) for name in names))) if names else F.array()
    entries_type = layout.schema[CARRIED].dataType
    return rows.withColumn(UNKNOWN, F.when(F.size(unknown) > 0, unknown.cast(_NAMES_TYPE))).withColumn(
        CARRIED, F.when(F.size(taken) > 0, taken.cast(entries_type)).otherwise(F.lit(None).cast(entries_type))
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
    return column(cdc.OPERATION).isin(DELETE, TRUNCATE)


# -- which of two changes is newer


def newer(one: str, other: str) -> str:
    """Return the condition that the change in alias `one` is newer than the one in alias `other`."""
    same = f"{one}.{cdc.SOURCE} <=> {other}.{cdc.SOURCE}"
    within = f"{_within_source(one)} > {_within_source(other)}"
    between = f"{_between_sources(one)} > {_between_sources(other)}"
    return f"(CASE WHEN {same} THEN {within} ELSE {between} END)"


def _within_source(alias: str) -> str:
    # The alias precedes each name, also where a struct has such a field: names with our prefix are unambiguous.
    is_live = f"coalesce({alias}.{cdc.OPERATION}, '') <> '{READ}'"
    parts = (f"coalesce({alias}.{cdc.EPOCH}, 0)", f"{alias}.{cdc.SEQUENCE}", is_live)
    return f"struct({', '.join(parts)}, {alias}.{cdc.TIMESTAMP})"


def _between_sources(alias: str) -> str:
    return f"struct({alias}.{cdc.TIMESTAMP}, coalesce({alias}.{cdc.SOURCE}, ''))"


def truncated(truncates: Iterable[Truncate], alias: str = "") -> str:
    """Return the condition that one of the truncates has deleted a row."""
    prefix = f"{alias}." if alias else ""
    epoch = f"coalesce({prefix}{cdc.EPOCH}, 0)"
    conditions = [
        f"({prefix}{cdc.SOURCE} <=> {text_literal(each.source)} AND "
        f"({epoch} < {each.epoch} OR ({epoch} = {each.epoch} AND {precedes(str(each.sequence), alias)})))"
        for each in truncates
    ]
    return f"({' OR '.join(conditions)})" if conditions else "false"


def precedes(sequence: str, alias: str = "") -> str:
    """Return the condition that a row comes before a truncate of its epoch; a READ at the same position comes after."""
    prefix = f"{alias}." if alias else ""
    is_read = f"coalesce({prefix}{cdc.OPERATION}, '') = '{READ}'"
    return f"({sequence} > {prefix}{cdc.SEQUENCE} OR ({sequence} = {prefix}{cdc.SEQUENCE} AND NOT {is_read}))"


def truncates_in(rows: DataFrame) -> tuple[Truncate, ...]:
    """Return the truncates among changes or tombstones."""
    time_text = column(cdc.TIMESTAMP).cast("string")
    found = rows.where(column(cdc.OPERATION) == TRUNCATE)
    found = found.select(cdc.SOURCE, cdc.EPOCH, cdc.SEQUENCE, time_text).distinct()
    return tuple(Truncate(*row) for row in found.collect())


def latest_truncates(truncates: Iterable[Truncate]) -> tuple[Truncate, ...]:
    """Return the last truncate of each source, which covers those before it."""
    latest: dict[str, Truncate] = {}
    for each in truncates:
        known = latest.get(each.source)
        if known is None or (each.epoch, each.sequence) > (known.epoch, known.sequence):
            latest[each.source] = each
    return tuple(latest[source] for source in sorted(latest))


# -- which change a value is from


def unknown_names(alias: str, layout: Layout) -> str:
    """Return the columns that no change of a row has sent, by their present names."""
    return _present_names(f"coalesce({alias}.{UNKNOWN}, {NO_NAMES})", layout)


def entries(alias: str, layout: Layout) -> str:
    """Return the CARRIED entries of a row, with the present names of columns."""
    found = f"coalesce({alias}.{CARRIED}, {no_entries(layout)})"
    if not layout.renamed:
        return found
    parts = ", ".join(f"'{part}', {_ENTRY}.{part}" for part in POSITION_COLUMNS)
    name = _present_name(f"{_ENTRY}.name", layout)
    return f"transform({found}, {_ENTRY} -> named_struct('name', {name}, {parts}))"


def no_entries(layout: Layout) -> str:
    """Return an empty list of entries."""
    return f"CAST(array() AS {layout.schema[CARRIED].dataType.simpleString()})"


def entry_of(alias: str, name: str, layout: Layout) -> str:
    """Return a column's entry, or null. `name` is an expression."""
    return f"get(filter({entries(alias, layout)}, {_ENTRY} -> {_ENTRY}.name = {name}), 0)"


def value_position(alias: str, name: str, layout: Layout) -> str:
    """Return the position of the change that a value is from, as an entry; null if no change has sent it."""
    is_unknown = f"array_contains({unknown_names(alias, layout)}, {name})"
    parts = ", ".join(f"'{part}', {alias}.{part}" for part in POSITION_COLUMNS)
    own = f"array(named_struct('name', {name}, {parts}))"
    own_entry = f"CAST({own} AS {layout.schema[CARRIED].dataType.simpleString()})[0]"
    return f"CASE WHEN NOT {is_unknown} THEN coalesce({entry_of(alias, name, layout)}, {own_entry}) END"


def is_newer_entry(one: str, other: str) -> str:
    """Return the condition that one entry is from a newer change than another; null is older than any entry."""
    # Bound to variables, because a comparison repeats each of them many times.
    condition = f"{_ONE} IS NOT NULL AND ({_OTHER} IS NULL OR {newer(_ONE, _OTHER)})"
    return f"exists(array({one}), {_ONE} -> exists(array({other}), {_OTHER} -> {condition}))"


def newer_columns(older: str, row: str, layout: Layout, *, among: Collection[str]) -> str:
    """Return the columns for which a row with an older last change has a newer value than `row`."""
    named = f"transform({entries(row, layout)}, {_ENTRY} -> {_ENTRY}.name)"
    literals = ", ".join(text_literal(name) for name in layout.row_columns if name in among)
    candidates = f"array_intersect(concat({unknown_names(row, layout)}, {named}), array({literals}))"
    condition = is_newer_entry(value_position(older, _NAME, layout), value_position(row, _NAME, layout))
    return f"filter({candidates}, {_NAME} -> {condition})"


def _present_names(names: str, layout: Layout) -> str:
    """Replace names of columns that were renamed after the list was written."""
    return f"transform({names}, {_NAME} -> {_present_name(_NAME, layout)})" if layout.renamed else names


def _present_name(name: str, layout: Layout) -> str:
    cases = " ".join(f"WHEN {text_literal(old)} THEN {text_literal(new)}" for old, new in layout.renamed.items())
    return f"CASE {name} {cases} ELSE {name} END"
