"""One batch of changes into a mirror. Owns the steps and their order.

    1. look at the batch: sources, truncates, columns that were not sent, rows without a key
    2. fold it to one row per key and leave out what tombstones block
    3. append its deletes and truncates to the tombstones     crash: they are of rows that are still there, harmless
    4. merge, with the marker in the same commit              crash before: as after 3; behind: the batch is known

Whatever is merged again changes nothing: tombstones and the rows' own positions block it.
"""

from __future__ import annotations

import logging
import random
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody names it
from pyspark.sql.types import BinaryType

from pipeline.commit_properties import commit_with_properties
from pipeline.errors import PipelineError
from pipeline.mirrors.history import merge_history, versions_of
from pipeline.mirrors.layout import UNKNOWN, Layout
from pipeline.mirrors.lineage import MARKER
from pipeline.mirrors.markers import Marker
from pipeline.mirrors.merge_sql import Bounds, merge_current
from pipeline.mirrors.names import MirrorNames
from pipeline.mirrors.positions import READ, Truncate, latest_truncates
from pipeline.mirrors.settings import MirrorSettings, RowsWithoutKey
from pipeline.mirrors.sql_text import text_literal
from pipeline.mirrors.tombstones import Tombstones
from pipeline.mirrors.transforms import (
    IS_DELETED,
    TRUNCATE,
    column,
    fold,
    names_no_row,
    prepare,
    unblocked,
    with_moves,
    without_truncated,
)
from pipeline.spark_errors import is_spark_error, message_of
from writer import columns

_log = logging.getLogger(__name__)

# A merge fails when a compaction of the mirror commits first, and when the catalog's answer is lost. Repeating it is
# harmless, so the only limit is patience.
_TRIES_MAX = 8
_PAUSE_S = 1.0
_REPEATABLE = ("ValidationException", "CommitFailedException", "CommitStateUnknownException")


class RowsHaveNoKey(PipelineError):
    """Changes of a table name no row: a person has to name the key, or to let them be passed over."""


@dataclass(frozen=True, slots=True)
class Merged:
    """What one merge has done."""

    rows: int
    keys: int
    deletes: int


@dataclass(frozen=True, slots=True)
class _Facts:
    rows: int
    sources_differ: bool
    unchanged: frozenset[str]
    truncates: tuple[Truncate, ...]
    without_key: int
    has_reads: bool


@dataclass(frozen=True, slots=True)
class _Batch:
    """Changes, what was found in them, and the last truncate of each source, those before the batch included."""

    events: DataFrame
    facts: _Facts
    truncates: tuple[Truncate, ...]


@dataclass(frozen=True, slots=True)
class _Measured:
    """What a fold has come to."""

    keys: int
    deletes: int
    bounds: tuple[Bounds, ...]


def merge_changes(
    changes: DataFrame,
    *,
    names: MirrorNames,
    layout: Layout,
    settings: MirrorSettings,
    tombstones: Tombstones,
    marker: Marker,
) -> Merged:
    """Bring changes into a mirror, and with them the marker.

    Raises: RowsHaveNoKey.
    """
    spark, view = changes.sparkSession, _view()
    events = with_moves(prepare(changes, layout), layout)
    facts = _look_at(events, layout)
    _check_keys(facts, names, settings)
    if facts.without_key:
        events = events.where(~names_no_row(layout))
    batch = _Batch(events, facts, latest_truncates((*tombstones.truncates, *facts.truncates)))
    stones = tombstones.deletes(spark)
    folded = source = _fold(batch, layout, stones).persist(StorageLevel.MEMORY_AND_DISK)
    try:
        measured = _measure(folded, layout)
        if measured.deletes or facts.truncates:
            tombstones.add(folded.where(IS_DELETED), facts.truncates, now=time.time())
        source = _versions(batch, stones, names, layout) if layout.keeps_history else folded
        source.createOrReplaceTempView(view)
        statement = _statement(batch, measured, layout, target=names.mirror_sql, view=view)
        commit_marked(spark, statement, names.mirror_sql, marker)
    finally:
        folded.unpersist()
        source.unpersist()
        spark.catalog.dropTempView(view)
    return Merged(facts.rows, measured.keys, measured.deletes)


def _fold(batch: _Batch, layout: Layout, stones: DataFrame | None) -> DataFrame:
    rows = without_truncated(batch.events, batch.truncates)
    facts = batch.facts
    folded = fold(rows, layout, unchanged=facts.unchanged, sources_differ=facts.sources_differ)
    return folded if stones is None else unblocked(folded, stones, layout)


def _versions(batch: _Batch, stones: DataFrame | None, names: MirrorNames, layout: Layout) -> DataFrame:
    """Find what changes in a history.

    The result is cut off from what it was read from: a merge reads its source twice, and Spark 4.1 refuses one that
    reads the target. (A read as of the last snapshot would have the columns of then, and renamed ones would be empty.)
    """
    stored = batch.events.sparkSession.table(names.mirror_sql)
    gaps = stored.where(column(UNKNOWN).isNotNull()).select(F.explode(UNKNOWN)).distinct().collect()
    versions = versions_of(
        without_truncated(batch.events, ()),
        stored=stored,
        stones=stones,
        layout=layout,
        unchanged=batch.facts.unchanged | {layout.renamed.get(row[0], row[0]) for row in gaps},
        truncates=batch.facts.truncates,
        earlier_truncates=batch.truncates,
    )
    return versions.localCheckpoint()


def _statement(batch: _Batch, measured: _Measured, layout: Layout, *, target: str, view: str) -> str:
    if layout.keeps_history:
        return merge_history(layout, target=target, view=view)
    return merge_current(
        layout,
        target=target,
        view=view,
        bounds=measured.bounds,
        unchanged=batch.facts.unchanged,
        truncates=batch.facts.truncates,
        # A late row is nearly always one that was read; looking into every row for gaps would cost all batches.
        fills=batch.facts.has_reads,
    )


def _view() -> str:
    """Name a view of one merge alone: all tables share the session."""
    return f"lakefeed_batch_{uuid.uuid4().hex}"


def _look_at(events: DataFrame, layout: Layout) -> _Facts:
    is_truncate = column(columns.OPERATION) == TRUNCATE
    found = events.agg(
        F.count(F.lit(1)),
        F.min(columns.SOURCE) != F.max(columns.SOURCE),
        F.array_distinct(F.flatten(F.collect_set(columns.UNCHANGED))),
        F.count_if(is_truncate),
        F.count_if(names_no_row(layout)),
        F.count_if(column(columns.OPERATION) == READ) > 0,
    ).collect()[0]
    truncates: Sequence[Truncate] = ()
    if found[3]:
        time_text = column(columns.TIMESTAMP).cast("string")
        told = events.where(is_truncate).select(columns.SOURCE, columns.EPOCH, columns.SEQUENCE, time_text)
        truncates = [Truncate(*row) for row in told.distinct().collect()]
    return _Facts(found[0], bool(found[1]), frozenset(found[2] or ()), tuple(truncates), found[4], found[5])


def _check_keys(facts: _Facts, names: MirrorNames, settings: MirrorSettings) -> None:
    if not facts.without_key:
        return
    if settings.rows_without_key is RowsWithoutKey.STOP:
        raise RowsHaveNoKey(
            'changes name no row: set key for this table, or rows_without_key = "skip" to pass over them: '
            f"table={names.table} changes={facts.without_key}"
        )
    _log.warning("rows_without_key_passed_over", extra={"table": str(names.table), "rows": facts.without_key})


def _measure(folded: DataFrame, layout: Layout) -> _Measured:
    """Count keys and deletes and find the bounds of the keys; this fills the cache on the way."""
    bounded = [name for name in layout.key if not isinstance(layout.schema[name].dataType, BinaryType)]
    extremes = [each(column(name)).cast("string") for name in bounded for each in (F.min, F.max)]
    found = folded.agg(F.count(F.lit(1)), F.count_if(column(IS_DELETED)), *extremes).collect()[0]
    kinds = (layout.schema[name].dataType.simpleString() for name in bounded)
    pairs = zip(bounded, kinds, found[2::2], found[3::2], strict=True)
    bounds = (Bounds(name, kind, low, high) for name, kind, low, high in pairs if low is not None)
    return _Measured(found[0], found[1], tuple(bounds))


def commit_marked(spark: SparkSession, statement: str, mirror: str, marker: Marker) -> None:
    """Run a statement whose snapshot carries the marker, again where another commit came first."""
    for attempt in range(1, _TRIES_MAX + 1):
        try:
            commit_with_properties(spark, {MARKER: marker.to_text()}, statement)
        except Exception as error:
            if attempt == _TRIES_MAX or not _is_repeatable(error):
                raise
            _log.warning("merge_repeated", extra={"mirror": mirror, "attempt": attempt, "reason": message_of(error)})
            time.sleep(_PAUSE_S * attempt * random.uniform(0.5, 1.5))  # noqa: S311 - jitter
        else:
            return


def set_marker_property(spark: SparkSession, mirror: str, marker: Marker) -> None:
    """Copy the marker to the mirror's properties."""
    spark.sql(f"ALTER TABLE {mirror} SET TBLPROPERTIES ('{MARKER}' = {text_literal(marker.to_text())})")


def _is_repeatable(error: Exception) -> bool:
    return is_spark_error(error) and any(name in str(error) for name in _REPEATABLE)
