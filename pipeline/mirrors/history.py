"""Every version of each row, with the time in which it held (SCD type 2). Owns how versions follow from changes.

    events of a key, in order      insert@1   update@4   delete@6   insert@9
    versions                       [1, 4)     [4, 6)                [9, open)

A version ends at the next event of its key, or at a truncate of its source. All versions of the keys that a batch
touches are looked at together: those that are stored, those that the batch brings, and every end that is known. So late
changes find their place between others, and a repeated batch finds all as it is.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812 - as everybody names it

from lakefeed.contract import changes
from lakefeed.pipeline.mirrors.fold import (
    DELETE,
    ORDER_COLUMNS,
    READ,
    TRUNCATE,
    Truncate,
    carried,
    column,
    entries,
    ordered,
    taken_with,
    unknown_names,
)
from lakefeed.pipeline.mirrors.table import (
    CARRIED,
    ENDED_BY,
    IS_CURRENT,
    POSITION_COLUMNS,
    UNKNOWN,
    VALID_FROM,
    VALID_TO,
    Layout,
)
from lakefeed.pipeline.spark.tables import quoted, text_literal

_IS_VERSION = "_cdc_is_version"
_IS_STORED = "_cdc_is_stored"
_STORED_END = "_cdc_stored_end"
_STORED_UNKNOWN = "_cdc_stored_unknown"
_STORED_CARRIED = "_cdc_stored_carried"
_PLACE = "_cdc_place"
_END_TYPE = "struct<source: string, epoch: bigint, sequence: bigint, timestamp: timestamp, operation: string>"
_END_FIELDS = {
    changes.SOURCE: "source",
    changes.EPOCH: "epoch",
    changes.SEQUENCE: "sequence",
    changes.TIMESTAMP: "timestamp",
    changes.OPERATION: "operation",
}


def versions_of(
    events: DataFrame,
    *,
    stored: DataFrame,
    stones: DataFrame | None,
    layout: Layout,
    unchanged: Collection[str],
    truncates: Sequence[Truncate],
    earlier_truncates: Sequence[Truncate] = (),
) -> DataFrame:
    """Find the versions that are new, and those that end otherwise than is stored. `events` are without truncates.

    `truncates` are the batch's own; earlier ones matter to rows that come late.
    """
    known = _touched(stored, events, layout, truncates)
    rows = _stored_versions(known, layout).unionByName(_stored_ends(known, layout))
    rows = rows.unionByName(_new_events(events, layout))
    if stones is not None:
        touched = stones.alias("stone").join(
            _keys(events, layout), on=_same_key("stone", "key", layout), how="left_semi"
        )
        rows = rows.unionByName(_enders(touched, layout))
    all_truncates = (*truncates, *earlier_truncates)
    placed = ordered(_once(rows, layout), layout, sources_differ=True)
    filled = carried(placed, layout, unchanged, F.expr(f"size({_truncates_behind(all_truncates)})"))
    ended = _ended(filled, layout, all_truncates).where(column(_IS_VERSION))
    is_news = ~column(_IS_STORED) | ~column(ENDED_BY).eqNullSafe(column(_STORED_END))
    # A stored version gets what comes late between it and the changes that its values are from.
    is_news = is_news | ~column(UNKNOWN).eqNullSafe(column(_STORED_UNKNOWN))
    is_news = is_news | ~column(CARRIED).eqNullSafe(column(_STORED_CARRIED))
    return ended.where(is_news).select(*map(column, layout.schema.names))


def _touched(stored: DataFrame, events: DataFrame, layout: Layout, truncates: Sequence[Truncate]) -> DataFrame:
    """Read the stored versions of all keys in the batch, and the open ones of sources that emptied the table."""
    same = _same_key("version", "key", layout)
    of_keys = stored.alias("version").join(_keys(events, layout), on=same, how="left_semi")
    sources = sorted({each.source for each in truncates})
    if not sources:
        return of_keys
    emptied = column(IS_CURRENT) & column(changes.SOURCE).isin(sources)
    others = stored.alias("version").join(_keys(events, layout), on=same, how="left_anti")
    return of_keys.unionByName(others.where(emptied))


def _keys(events: DataFrame, layout: Layout) -> DataFrame:
    return events.select(*map(column, layout.key)).distinct().alias("key")


def _same_key(one: str, other: str, layout: Layout) -> Column:
    return F.expr(" AND ".join(f"{one}.{quoted(name)} = {other}.{quoted(name)}" for name in layout.key))


def _new_events(events: DataFrame, layout: Layout) -> DataFrame:
    return events.select(
        *map(column, layout.columns),
        column(changes.UNCHANGED),
        (column(changes.OPERATION) != DELETE).alias(_IS_VERSION),
        *_not_stored(layout),
    )


def _not_stored(layout: Layout) -> list[Column]:
    entries_type = layout.schema[CARRIED].dataType
    return [
        F.lit(False).alias(_IS_STORED),
        F.lit(None).cast(_END_TYPE).alias(_STORED_END),
        F.lit(None).cast("array<string>").alias(_STORED_UNKNOWN),
        F.lit(None).cast(entries_type).alias(_STORED_CARRIED),
        F.lit(None).cast(entries_type).alias(CARRIED),
    ]


def _stored_versions(known: DataFrame, layout: Layout) -> DataFrame:
    unknown, carried_before = F.expr(unknown_names("stored", layout)), F.expr(entries("stored", layout))
    names = F.transform(carried_before, lambda entry: entry["name"])
    return known.alias("stored").select(
        *map(column, layout.columns),
        F.concat(unknown, names).alias(changes.UNCHANGED),
        F.lit(True).alias(_IS_VERSION),
        F.lit(True).alias(_IS_STORED),
        column(ENDED_BY).cast(_END_TYPE).alias(_STORED_END),
        F.when(F.size(unknown) > 0, unknown).alias(_STORED_UNKNOWN),
        F.when(F.size(carried_before) > 0, carried_before).alias(_STORED_CARRIED),
        carried_before.alias(CARRIED),
    )


def _stored_ends(known: DataFrame, layout: Layout) -> DataFrame:
    """Read the stored ends as events: a version that was deleted stays so, whatever is put before its end."""
    fields = {name: column(ENDED_BY)[field] for name, field in _END_FIELDS.items()}
    fields |= {name: column(name) for name in layout.key}
    ended = known.where(column(ENDED_BY).isNotNull())
    return _enders(ended.select(*(value.alias(name) for name, value in fields.items())), layout)


def _enders(rows: DataFrame, layout: Layout) -> DataFrame:
    """Make events that end versions and are none. One that stands for the begin of another version has no values."""
    kept = {*layout.key, *_END_FIELDS}
    values = {
        name: column(name) if name in kept else F.lit(None).cast(layout.schema[name].dataType)
        for name in layout.columns
    }
    is_gone = column(changes.OPERATION).isin(DELETE, TRUNCATE)
    sends_nothing = F.array(*map(F.lit, layout.own_columns)).cast("array<string>")
    return rows.select(
        *(value.alias(name) for name, value in values.items()),
        F.when(~is_gone, sends_nothing).alias(changes.UNCHANGED),
        F.lit(False).alias(_IS_VERSION),
        *_not_stored(layout),
    )


def _once(rows: DataFrame, layout: Layout) -> DataFrame:
    """Keep one of what is stored and comes again."""
    is_read = column(changes.OPERATION) == READ
    position = [column(name) for name in POSITION_COLUMNS if name != changes.OPERATION]
    same = Window.partitionBy(*map(column, layout.key), *position, is_read, column(_IS_VERSION))
    place = F.row_number().over(same.orderBy(F.desc(_IS_STORED)))
    return rows.withColumn(_PLACE, place).where(column(_PLACE) == 1).drop(_PLACE)


def _ended(rows: DataFrame, layout: Layout, truncates: Sequence[Truncate]) -> DataFrame:
    # Where a version begins at the end of another, that end comes first: it is not its own.
    order = (*ORDER_COLUMNS, _IS_VERSION)
    in_order = Window.partitionBy(*map(column, layout.key)).orderBy(*map(F.asc, order))
    here = F.struct(*(column(name).alias(field) for name, field in _END_FIELDS.items())).cast(_END_TYPE)
    end = _earlier(F.lead(here).over(in_order), F.expr(_next_truncate(truncates)).cast(_END_TYPE))
    ended = rows.withColumn(ENDED_BY, end)
    valid_to = column(ENDED_BY)["timestamp"]
    return (
        ended.withColumn(VALID_TO, valid_to)
        # A READ has the time at which it was read, which may be later than changes behind its position.
        .withColumn(VALID_FROM, F.least(column(changes.TIMESTAMP), valid_to))
        .withColumn(IS_CURRENT, column(ENDED_BY).isNull())
    )


def _earlier(following: Column, emptied: Column) -> Column:
    same_source = following["source"] == emptied["source"]
    # What stands at a truncate's own position was read behind it.
    by_position = F.struct(following["epoch"], following["sequence"]) < F.struct(emptied["epoch"], emptied["sequence"])
    by_time = following["timestamp"] <= emptied["timestamp"]
    comes_first = F.when(same_source, by_position).otherwise(by_time)
    return F.when(emptied.isNull() | (following.isNotNull() & comes_first), following).otherwise(emptied)


def _next_truncate(truncates: Sequence[Truncate]) -> str:
    """Find the first truncate of a row's source behind it, among those given as literals."""
    if not truncates:
        return "NULL"
    first = f"array_min({_truncates_behind(truncates)})"
    named = ", ".join(f"'{field}', truncate_.{field}" for field in _END_FIELDS.values())
    return f"transform(array({first}), truncate_ -> IF(truncate_ IS NULL, NULL, named_struct({named})))[0]"


def _truncates_behind(truncates: Sequence[Truncate]) -> str:
    """Find the truncates of a row's source that took it: rows with different ones are different rows."""
    literals = ", ".join(
        f"named_struct('epoch', CAST({each.epoch} AS bigint), 'sequence', CAST({each.sequence} AS bigint), "
        f"'source', {text_literal(each.source)}, 'timestamp', CAST({_text_or_null(each.time)} AS timestamp), "
        f"'operation', '{TRUNCATE}')"
        for each in truncates
    )
    behind = (
        f"x.source = {changes.SOURCE} AND (x.epoch > {changes.EPOCH} "
        f"OR (x.epoch = {changes.EPOCH} AND {taken_with('x.sequence')}))"
    )
    return f"filter(array({literals}), x -> {behind})" if truncates else "array()"


def _text_or_null(text: str | None) -> str:
    return "NULL" if text is None else text_literal(text)


def merge_history(layout: Layout, *, target: str, view: str) -> str:
    """Write the statement that adds new versions and ends others."""
    is_read = f"({{}}.{changes.OPERATION} = '{READ}')"
    place = [name for name in POSITION_COLUMNS if name != changes.OPERATION]
    conditions = [
        *(f"t.{quoted(name)} = s.{quoted(name)}" for name in dict.fromkeys((*layout.key, *place))),
        f"{is_read.format('t')} = {is_read.format('s')}",
    ]
    updates = ", ".join(f"{quoted(name)} = s.{quoted(name)}" for name in layout.schema.names)
    names = ", ".join(map(quoted, layout.schema.names))
    values = ", ".join(f"s.{quoted(name)}" for name in layout.schema.names)
    return (
        f"MERGE INTO {target} t USING {view} s ON {' AND '.join(conditions)}\n"
        f"WHEN MATCHED THEN UPDATE SET {updates}\n"
        f"WHEN NOT MATCHED THEN INSERT ({names}) VALUES ({values})"
    )
