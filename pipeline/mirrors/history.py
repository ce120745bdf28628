"""History: every version of each row, with the time in which it was valid (SCD type 2).

    events of a key, in order      insert@1   update@4   delete@6   insert@9
    versions                       [1, 4)     [4, 6)                [9, open)

A version ends at the next event of its key, or at a truncate of its source. All versions of the keys in a batch are
computed together: the stored ones, those of the batch, and every known end. So late changes are placed between others,
and a repeated batch changes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812 - the usual name

from lakefeed.contract import changes as cdc
from lakefeed.pipeline.mirrors.fold import (
    DELETE,
    ORDER_COLUMNS,
    READ,
    TRUNCATE,
    Truncate,
    carried,
    column,
    entries,
    is_delete,
    ordered,
    precedes,
    same_key,
    unknown_names,
)
from lakefeed.pipeline.mirrors.table import (
    CARRIED,
    ENDED_BY,
    ENDED_BY_FIELDS,
    ENDED_BY_TYPE,
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
_NUMBER = "_cdc_number"


def versions_of(
    events: DataFrame,
    *,
    stored: DataFrame,
    tombstones: DataFrame | None,
    layout: Layout,
    unchanged: Collection[str],
    truncates: Sequence[Truncate],
    earlier_truncates: Sequence[Truncate] = (),
) -> DataFrame:
    """Return the versions that are new, and stored ones that change. `events` are without truncates.

    `truncates` are the batch's own; earlier ones matter to rows that come late.
    """
    known = _affected(stored, events, layout, truncates)
    rows = _stored_versions(known, layout).unionByName(_stored_ends(known, layout))
    rows = rows.unionByName(_new_events(events, layout))
    if tombstones is not None:
        touched = tombstones.alias("tombstone").join(
            _keys(events, layout), on=F.expr(same_key("tombstone", "key", layout)), how="left_semi"
        )
        rows = rows.unionByName(_end_events(touched, layout))
    all_truncates = (*truncates, *earlier_truncates)
    placed = ordered(_deduplicated(rows, layout), layout, sources_differ=True)
    filled = carried(placed, layout, unchanged, F.expr(f"size({_truncates_after(all_truncates)})"))
    ended = _ended(filled, layout, all_truncates).where(column(_IS_VERSION))
    is_changed = ~column(_IS_STORED) | ~column(ENDED_BY).eqNullSafe(column(_STORED_END))
    # A stored version takes values that come late between it and the changes that its values are from.
    is_changed = is_changed | ~column(UNKNOWN).eqNullSafe(column(_STORED_UNKNOWN))
    is_changed = is_changed | ~column(CARRIED).eqNullSafe(column(_STORED_CARRIED))
    return ended.where(is_changed).select(*map(column, layout.schema.names))


def _affected(stored: DataFrame, events: DataFrame, layout: Layout, truncates: Sequence[Truncate]) -> DataFrame:
    """Return the stored versions of all keys in the batch, and the open ones of sources that emptied the table."""
    same = F.expr(same_key("version", "key", layout))
    of_keys = stored.alias("version").join(_keys(events, layout), on=same, how="left_semi")
    sources = sorted({each.source for each in truncates})
    if not sources:
        return of_keys
    emptied = column(IS_CURRENT) & column(cdc.SOURCE).isin(sources)
    others = stored.alias("version").join(_keys(events, layout), on=same, how="left_anti")
    return of_keys.unionByName(others.where(emptied))


def _keys(events: DataFrame, layout: Layout) -> DataFrame:
    return events.select(*map(column, layout.key)).distinct().alias("key")


def _new_events(events: DataFrame, layout: Layout) -> DataFrame:
    return events.select(
        *map(column, layout.columns),
        column(cdc.UNCHANGED),
        (column(cdc.OPERATION) != DELETE).alias(_IS_VERSION),
        *_not_stored(layout),
    )


def _not_stored(layout: Layout) -> list[Column]:
    entries_type = layout.schema[CARRIED].dataType
    return [
        F.lit(False).alias(_IS_STORED),
        F.lit(None).cast(ENDED_BY_TYPE).alias(_STORED_END),
        F.lit(None).cast("array<string>").alias(_STORED_UNKNOWN),
        F.lit(None).cast(entries_type).alias(_STORED_CARRIED),
        F.lit(None).cast(entries_type).alias(CARRIED),
    ]


def _stored_versions(known: DataFrame, layout: Layout) -> DataFrame:
    unknown, carried_before = F.expr(unknown_names("stored", layout)), F.expr(entries("stored", layout))
    names = F.transform(carried_before, lambda entry: entry["name"])
    return known.alias("stored").select(
        *map(column, layout.columns),
        F.concat(unknown, names).alias(cdc.UNCHANGED),
        F.lit(True).alias(_IS_VERSION),
        F.lit(True).alias(_IS_STORED),
        column(ENDED_BY).cast(ENDED_BY_TYPE).alias(_STORED_END),
        F.when(F.size(unknown) > 0, unknown).alias(_STORED_UNKNOWN),
        F.when(F.size(carried_before) > 0, carried_before).alias(_STORED_CARRIED),
        carried_before.alias(CARRIED),
    )


def _stored_ends(known: DataFrame, layout: Layout) -> DataFrame:
    """Return the stored ends as events: a deleted version stays deleted, whatever comes before its end."""
    fields = {name: column(ENDED_BY)[field] for name, field in ENDED_BY_FIELDS.items()}
    fields |= {name: column(name) for name in layout.key}
    ended = known.where(column(ENDED_BY).isNotNull())
    return _end_events(ended.select(*(value.alias(name) for name, value in fields.items())), layout)


def _end_events(rows: DataFrame, layout: Layout) -> DataFrame:
    """Return events that end versions and start none. An end by the start of another version has no values."""
    kept = {*layout.key, *ENDED_BY_FIELDS}
    values = {
        name: column(name) if name in kept else F.lit(None).cast(layout.schema[name].dataType)
        for name in layout.columns
    }
    sends_nothing = F.array(*map(F.lit, layout.row_columns)).cast("array<string>")
    return rows.select(
        *(value.alias(name) for name, value in values.items()),
        F.when(~is_delete(), sends_nothing).alias(cdc.UNCHANGED),
        F.lit(False).alias(_IS_VERSION),
        *_not_stored(layout),
    )


def _deduplicated(rows: DataFrame, layout: Layout) -> DataFrame:
    """Keep the stored one of events that occur twice."""
    is_read = column(cdc.OPERATION) == READ
    position = [column(name) for name in POSITION_COLUMNS if name != cdc.OPERATION]
    same = Window.partitionBy(*map(column, layout.key), *position, is_read, column(_IS_VERSION))
    number = F.row_number().over(same.orderBy(F.desc(_IS_STORED)))
    return rows.withColumn(_NUMBER, number).where(column(_NUMBER) == 1).drop(_NUMBER)


def _ended(rows: DataFrame, layout: Layout, truncates: Sequence[Truncate]) -> DataFrame:
    # If a version starts where another one ends, that end is ordered first: it is not the version's own.
    order = (*ORDER_COLUMNS, _IS_VERSION)
    in_order = Window.partitionBy(*map(column, layout.key)).orderBy(*map(F.asc, order))
    here = F.struct(*(column(name).alias(field) for name, field in ENDED_BY_FIELDS.items())).cast(ENDED_BY_TYPE)
    end = _earlier(F.lead(here).over(in_order), F.expr(_next_truncate(truncates)).cast(ENDED_BY_TYPE))
    ended = rows.withColumn(ENDED_BY, end)
    valid_to = column(ENDED_BY)["timestamp"]
    return (
        ended.withColumn(VALID_TO, valid_to)
        # A READ has the time at which it was read, which may be later than changes after its position.
        .withColumn(VALID_FROM, F.least(column(cdc.TIMESTAMP), valid_to))
        .withColumn(IS_CURRENT, column(ENDED_BY).isNull())
    )


def _earlier(following: Column, emptied: Column) -> Column:
    same_source = following["source"] == emptied["source"]
    # A READ at a truncate's own position was read after it.
    by_position = F.struct(following["epoch"], following["sequence"]) < F.struct(emptied["epoch"], emptied["sequence"])
    by_time = following["timestamp"] <= emptied["timestamp"]
    comes_first = F.when(same_source, by_position).otherwise(by_time)
    return F.when(emptied.isNull() | (following.isNotNull() & comes_first), following).otherwise(emptied)


def _next_truncate(truncates: Sequence[Truncate]) -> str:
    """Return the first truncate of a row's source after the row, among those given as literals."""
    if not truncates:
        return "NULL"
    first = f"array_min({_truncates_after(truncates)})"
    named = ", ".join(f"'{field}', truncate_.{field}" for field in ENDED_BY_FIELDS.values())
    return f"transform(array({first}), truncate_ -> IF(truncate_ IS NULL, NULL, named_struct({named})))[0]"


def _truncates_after(truncates: Sequence[Truncate]) -> str:
    """Return the truncates of a row's source after the row: rows with different ones are different rows."""
    literals = ", ".join(
        f"named_struct('epoch', CAST({each.epoch} AS bigint), 'sequence', CAST({each.sequence} AS bigint), "
        f"'source', {text_literal(each.source)}, "
        f"'timestamp', CAST({'NULL' if each.time is None else text_literal(each.time)} AS timestamp), "
        f"'operation', '{TRUNCATE}')"
        for each in truncates
    )
    is_after = (
        f"x.source = {cdc.SOURCE} AND (x.epoch > {cdc.EPOCH} OR (x.epoch = {cdc.EPOCH} AND {precedes('x.sequence')}))"
    )
    return f"filter(array({literals}), x -> {is_after})" if truncates else "array()"


def merge_history(layout: Layout, *, target: str, view: str) -> str:
    """Write the statement that adds new versions and changes others."""
    is_read = f"({{}}.{cdc.OPERATION} = '{READ}')"
    position = [name for name in POSITION_COLUMNS if name != cdc.OPERATION]
    conditions = [
        *(f"t.{quoted(name)} = s.{quoted(name)}" for name in dict.fromkeys((*layout.key, *position))),
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
