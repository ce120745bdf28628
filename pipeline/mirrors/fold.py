"""From changes to the last state of each row. Owns these steps, each from DataFrame to DataFrame, built-ins only.

    prepare      the columns that a mirror has, in every table alike; messages are left out
    with_moves   a row that got another key is also deleted under its old one
    fold         one row per key: the last by position, with values that were not sent taken from the changes before it
    unblocked    without rows that are older than a tombstone of their key

Between fold and merge a row has columns more: IS_DELETED, UNKNOWN, CARRIED, and for each column that some change did
not send, which change the value is from. If that is none of the batch, or one that the mirror's own value is newer
than, the mirror's stays.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from pyspark.sql import Column, DataFrame, Window, WindowSpec
from pyspark.sql import functions as F  # noqa: N812 - as everybody names it
from pyspark.sql.types import BinaryType, DataType, StringType

from lakefeed.contract import changes
from lakefeed.contract import changes as columns
from lakefeed.pipeline.mirrors.table import CARRIED, POSITION_COLUMNS, UNKNOWN, Layout
from lakefeed.pipeline.spark.tables import quoted, text_literal

# --- pipeline.mirrors.positions ---------------------------------------------------------------------------------------
#
# Which of two changes to a row is the later one. Owns that order, as expressions of Spark SQL.
#
#     same source          epoch, then sequence; at one position a change that was streamed is later than a READ
#     different sources    time of the change, then the source's name
#
# A READ stands at the position up to which its source was known when the row was read, so what was streamed at that
# very
# position may be newer than the row and is never older; a truncate there took what was in the table before the row was
# read. The order is one of all changes as long as the times of a source
# that shares rows with another do not fall. Every frame read here has passed transforms.prepare, or is a mirror.


READ = "READ"


@dataclass(frozen=True, slots=True)
class Truncate:
    """A moment at which a source emptied the table; `time` is the change's own, as text that casts to a timestamp."""

    source: str
    epoch: int
    sequence: int
    time: str | None = None


def newer(one: str, other: str) -> str:
    """Tell whether the change in alias `one` is later than that in alias `other`."""
    same = f"{one}.{changes.SOURCE} <=> {other}.{changes.SOURCE}"
    within = f"{_within_source(one)} > {_within_source(other)}"
    between = f"{_between_sources(one)} > {_between_sources(other)}"
    return f"(CASE WHEN {same} THEN {within} ELSE {between} END)"


def _within_source(alias: str) -> str:
    # An alias stands before each name, also where a struct has such a field: the names are ours alone.
    is_live = f"coalesce({alias}.{changes.OPERATION}, '') <> '{READ}'"
    parts = (f"coalesce({alias}.{changes.EPOCH}, 0)", f"{alias}.{changes.SEQUENCE}", is_live)
    return f"struct({', '.join(parts)}, {alias}.{changes.TIMESTAMP})"


def _between_sources(alias: str) -> str:
    return f"struct({alias}.{changes.TIMESTAMP}, coalesce({alias}.{changes.SOURCE}, ''))"


def truncated(truncates: Iterable[Truncate], alias: str = "") -> str:
    """Tell whether a row is gone with one of the truncates."""
    prefix = f"{alias}." if alias else ""
    epoch = f"coalesce({prefix}{changes.EPOCH}, 0)"
    conditions = [
        f"({prefix}{changes.SOURCE} <=> {text_literal(each.source)} AND "
        f"({epoch} < {each.epoch} OR ({epoch} = {each.epoch} AND {taken_with(str(each.sequence), alias)})))"
        for each in truncates
    ]
    return f"({' OR '.join(conditions)})" if conditions else "false"


def taken_with(sequence: str, alias: str = "") -> str:
    """Tell whether a truncate at a sequence takes a row of the same epoch: one that was read there came behind it."""
    prefix = f"{alias}." if alias else ""
    is_read = f"coalesce({prefix}{changes.OPERATION}, '') = '{READ}'"
    return f"({sequence} > {prefix}{changes.SEQUENCE} OR ({sequence} = {prefix}{changes.SEQUENCE} AND NOT {is_read}))"


def latest_truncates(truncates: Iterable[Truncate]) -> tuple[Truncate, ...]:
    """Keep the last truncate of each source: it covers those before it."""
    latest: dict[str, Truncate] = {}
    for each in truncates:
        known = latest.get(each.source)
        if known is None or (each.epoch, each.sequence) > (known.epoch, known.sequence):
            latest[each.source] = each
    return tuple(latest[source] for source in sorted(latest))


# --- pipeline.mirrors.transforms --------------------------------------------------------------------------------------


IS_DELETED = "_cdc_is_deleted"

DELETE = "DELETE"
TRUNCATE = "TRUNCATE"
MESSAGE = "MESSAGE"

_ORDER_TIME = "_cdc_order_time"
_RANK = "_cdc_rank"
_PLACE = "_cdc_place"
_VALUE = "_cdc_value"
_NO_COLUMNS = "array<string>"

# By these the rows of a key lie in order, once `ordered` has added two of them.
ORDER_COLUMNS = (_ORDER_TIME, columns.SOURCE, columns.EPOCH, columns.SEQUENCE, _RANK, columns.TIMESTAMP)

_BIG_NUMBER = "^__bigint__:"


def column(name: str) -> Column:
    """Refer to a column, whatever signs its name has."""
    return F.col(quoted(name))


def prepare(changes: DataFrame, layout: Layout) -> DataFrame:
    """Bring changes into the columns of the mirror, with those that say how to read them; messages concern no row."""
    present = set(changes.columns)
    selected = [_own_value(name, layout, present) for name in layout.columns]
    unchanged = column(columns.UNCHANGED) if columns.UNCHANGED in present else F.lit(None)
    before = column(columns.BEFORE) if columns.BEFORE in present else F.lit(None)
    return changes.where(column(columns.OPERATION) != MESSAGE).select(
        *selected,
        present_names(unchanged.cast(_NO_COLUMNS), layout).alias(columns.UNCHANGED),
        before.cast("string").alias(columns.BEFORE),
    )


def present_names(names: Column, layout: Layout) -> Column:
    """Put present names of columns where a list of names was written before they were renamed."""
    renamed = layout.renamed

    def present(name: Column) -> Column:
        found = name
        for old, new in renamed.items():
            found = F.when(name == old, F.lit(new)).otherwise(found)
        return found

    return F.transform(names, present) if renamed else names


def _own_value(name: str, layout: Layout, present: Collection[str]) -> Column:
    value = column(name) if name in present else F.lit(None).cast(layout.schema[name].dataType)
    if name == columns.EPOCH:
        value = F.coalesce(value, F.lit(0))
    elif name == columns.SOURCE:
        value = F.coalesce(value, F.lit(""))
    return value.alias(name)


def names_no_row(layout: Layout) -> Column:
    """Tell whether a change lacks a part of its key."""
    missing = F.lit(False)
    for name in layout.key:
        missing = missing | column(name).isNull()
        if name == columns.ROW_ID:
            missing = missing | (column(name) == "")
    return missing & (column(columns.OPERATION) != TRUNCATE)


def with_moves(changes: DataFrame, layout: Layout) -> DataFrame:
    """Add a delete under the old key for each update whose image from before has another key."""
    if not layout.finds_moves:
        return changes
    old_key = [_old_value(name, layout) for name in layout.key]
    has_moved, is_known = F.lit(False), F.lit(True)
    for name, old in zip(layout.key, old_key, strict=True):
        has_moved = has_moved | (column(name) != old)
        is_known = is_known & old.isNotNull()
    is_update = column(columns.OPERATION) == "UPDATE"
    moved = changes.where(is_update & column(columns.BEFORE).isNotNull()).where(is_known & has_moved)
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
    """Read a key column from the image before the change; null if it is not there or no such value.

    The image is as the source sent it, so it may have a column under a name of before.
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
    """Leave out truncates themselves, and the changes that went with them."""
    rows = changes.where(column(columns.OPERATION) != TRUNCATE)
    return rows.where(f"NOT {truncated(truncates)}") if truncates else rows


def ordered(changes: DataFrame, layout: Layout, *, sources_differ: bool) -> DataFrame:
    """Add what rows of a key are ordered by; `in_order` gives the window.

    Times of one source are made to rise with its positions, so that the order is one of all changes of a row.
    """
    operation = column(columns.OPERATION)
    # At one position: what was read there was read behind a truncate, and may be older than another change.
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
    """Give the window of a key's rows, earliest first; those that differ in `apart` do not see each other."""
    return Window.partitionBy(*map(column, layout.key), *apart).orderBy(*map(F.asc, ORDER_COLUMNS))


def fold(
    changes: DataFrame, layout: Layout, *, unchanged: Collection[str] = (), sources_differ: bool = True
) -> DataFrame:
    """Keep the last change of each key. `unchanged` are the columns that some change says it does not send."""
    rows = carried(ordered(changes, layout, sources_differ=sources_differ), layout, unchanged)
    latest_first = Window.partitionBy(*map(column, layout.key)).orderBy(*map(F.desc, ORDER_COLUMNS))
    last = rows.withColumn(_PLACE, F.row_number().over(latest_first)).where(column(_PLACE) == 1)
    sent_at = [column(sent_at_column(name)) for name in layout.own_columns if name in unchanged]
    return last.select(*map(column, (*layout.columns, UNKNOWN, CARRIED)), is_delete().alias(IS_DELETED), *sent_at)


def carried(rows: DataFrame, layout: Layout, unchanged: Collection[str], *apart: Column) -> DataFrame:
    """Fill columns that a change did not send from the changes of its row before it, and say where those stand.

    A delete ends that: what comes behind it is another row, whose unsent columns are null. Nor is anything taken from
    rows that differ in `apart`. A row that was stored (it has CARRIED) keeps what it was given, unless there is newer.
    """
    names = [name for name in layout.own_columns if name in unchanged]
    so_far = in_order(layout, *apart).rowsBetween(Window.unboundedPreceding, Window.currentRow)
    for name in names:
        was_sent = ~F.coalesce(F.array_contains(columns.UNCHANGED, name), F.lit(False))
        value = F.when(~is_delete(), column(name)).alias(_VALUE)
        known = F.struct(value, *(column(each) for each in POSITION_COLUMNS))
        last_known = F.last(F.when(was_sent | is_delete(), known), ignorenulls=True).over(so_far)
        if CARRIED in rows.columns:
            last_known = F.coalesce(last_known, _given_before(name, layout))
        rows = rows.withColumn(sent_at_column(name), last_known)
    for name in names:
        # A delete keeps the image that came with it.
        found = column(sent_at_column(name))[_VALUE]
        rows = rows.withColumn(name, F.when(is_delete(), column(name)).otherwise(found))
    unsent = [F.when(column(sent_at_column(name)).isNull(), F.lit(name)) for name in names]
    unknown = F.array_compact(F.array(*unsent)) if names else F.array()
    entries = F.array_compact(F.array(*(_carried_entry(name) for name in names))) if names else F.array()
    entries_type = layout.schema[CARRIED].dataType
    return rows.withColumn(UNKNOWN, F.when(F.size(unknown) > 0, unknown.cast(_NO_COLUMNS))).withColumn(
        CARRIED, F.when(F.size(entries) > 0, entries.cast(entries_type)).otherwise(F.lit(None).cast(entries_type))
    )


def _carried_entry(name: str) -> Column:
    """Say where a value is from; null if it is of the row's own change, or not known."""
    sent_at, is_own = column(sent_at_column(name)), F.lit(True)
    for part in POSITION_COLUMNS:
        is_own = is_own & sent_at[part].eqNullSafe(column(part))
    entry = F.struct(F.lit(name).alias("name"), *(sent_at[part].alias(part) for part in POSITION_COLUMNS))
    return F.when(sent_at.isNotNull() & ~is_own, entry)


def _given_before(name: str, layout: Layout) -> Column:
    """Give a stored row's value with where it is from; null if its own change sent it, or none."""
    entry = F.get(F.filter(column(CARRIED), lambda each: each["name"] == name), F.lit(0))
    place = (entry[part].cast(layout.schema[part].dataType).alias(part) for part in POSITION_COLUMNS)
    return F.when(entry.isNotNull(), F.struct(column(name).alias(_VALUE), *place))


def sent_at_column(name: str) -> str:
    """Name the column that says which change a value comes from; null there means that none of the batch sent it."""
    return f"_cdc_sent_at_{name}"


def is_delete() -> Column:
    """Tell whether a change takes its row away."""
    return column(columns.OPERATION).isin(DELETE, TRUNCATE)


def unblocked(rows: DataFrame, tombstones: DataFrame, layout: Layout) -> DataFrame:
    """Leave out rows that are not newer than a tombstone of their key. Deletes stay: the mirror may have the row."""
    same_key = " AND ".join(f"change.{quoted(name)} = stone.{quoted(name)}" for name in layout.key)
    stays = f"change.{columns.OPERATION} IN ('{DELETE}', '{TRUNCATE}') OR {newer('change', 'stone')}"
    condition = F.expr(f"{same_key} AND NOT ({stays})")
    return rows.alias("change").join(tombstones.alias("stone"), on=condition, how="left_anti")


# --- pipeline.mirrors.cells -------------------------------------------------------------------------------------------
#
# Which change each value of a row is from. Owns how that is read from a row, as expressions of Spark SQL.
#
#     UNKNOWN names the column      no change has sent it yet
#     CARRIED has an entry for it   the change that the entry names
#     otherwise                     the row's own last change
#
# A value is replaced by one from a newer change only, so in whatever order changes come, the same values stay.


NO_NAMES = "CAST(array() AS array<string>)"

# Names of lambda variables are ours alone, as all that begins so.
_ENTRY, _NAME, _ONE, _OTHER = "_cdc_entry", "_cdc_name", "_cdc_one", "_cdc_other"


def unknown_names(alias: str, layout: Layout) -> str:
    """Name the columns that a row lacks, as they are called now."""
    names = f"coalesce({alias}.{UNKNOWN}, {NO_NAMES})"
    return f"transform({names}, {_NAME} -> {_present(_NAME, layout)})" if layout.renamed else names


def entries(alias: str, layout: Layout) -> str:
    """Give the entries of a row, with columns named as they are called now."""
    found = f"coalesce({alias}.{CARRIED}, {no_entries(layout)})"
    if not layout.renamed:
        return found
    parts = ", ".join(f"'{part}', {_ENTRY}.{part}" for part in POSITION_COLUMNS)
    return f"transform({found}, {_ENTRY} -> named_struct('name', {_present(f'{_ENTRY}.name', layout)}, {parts}))"


def no_entries(layout: Layout) -> str:
    """Give a list without entries."""
    return f"CAST(array() AS {layout.schema[CARRIED].dataType.simpleString()})"


def entry_of(alias: str, name: str, layout: Layout) -> str:
    """Find a column's entry, or null; `name` is an expression."""
    return f"get(filter({entries(alias, layout)}, {_ENTRY} -> {_ENTRY}.name = {name}), 0)"


def cell(alias: str, name: str, layout: Layout) -> str:
    """Give the position of the change that a value is from, as an entry; null if none has sent it."""
    is_unknown = f"array_contains({unknown_names(alias, layout)}, {name})"
    parts = ", ".join(f"'{part}', {alias}.{part}" for part in POSITION_COLUMNS)
    own = f"array(named_struct('name', {name}, {parts}))"
    own_entry = f"CAST({own} AS {layout.schema[CARRIED].dataType.simpleString()})[0]"
    return f"CASE WHEN NOT {is_unknown} THEN coalesce({entry_of(alias, name, layout)}, {own_entry}) END"


def is_newer(one: str, other: str) -> str:
    """Tell whether one entry is of a later change than another; what is known is later than what is not."""
    # Bound to names, because each is written down many times in a comparison.
    later = f"{_ONE} IS NOT NULL AND ({_OTHER} IS NULL OR {newer(_ONE, _OTHER)})"
    return f"exists(array({one}), {_ONE} -> exists(array({other}), {_OTHER} -> {later}))"


def overtaken(older: str, row: str, layout: Layout, *, among: Collection[str]) -> str:
    """Name the columns of a row that another, whose last change is older, has a newer value of."""
    named = f"transform({entries(row, layout)}, {_ENTRY} -> {_ENTRY}.name)"
    literals = ", ".join(text_literal(name) for name in layout.own_columns if name in among)
    candidates = f"array_intersect(concat({unknown_names(row, layout)}, {named}), array({literals}))"
    later = is_newer(cell(older, _NAME, layout), cell(row, _NAME, layout))
    return f"filter({candidates}, {_NAME} -> {later})"


def _present(name: str, layout: Layout) -> str:
    cases = " ".join(f"WHEN {text_literal(old)} THEN {text_literal(new)}" for old, new in layout.renamed.items())
    return f"CASE {name} {cases} ELSE {name} END"
