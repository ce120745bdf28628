"""One batch of changes into a mirror. Owns the steps and their order.

    1. look at the batch: sources, truncates, columns that were not sent, rows without a key
    2. fold it to one row per key and leave out what tombstones block
    3. append its deletes and truncates to the tombstones     crash: they are of rows that are still there, harmless
    4. note columns that were never unsent before             crash: more are named than rows lack, harmless
    5. merge, with the marker in the same commit              crash before: as after 4; behind: the batch is known

Whatever is merged again changes nothing: tombstones and the positions of rows and values block it. `seen` is the mirror
as it was before all that; if another application has merged into it since, the merge is given up.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass

from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody names it

from pipeline.commit_properties import commit_with_properties
from pipeline.conflicts import repeat_on_conflict
from pipeline.mirrors.batches import Batch, Measured, measure, take_batch, truncates_in
from pipeline.mirrors.history import merge_history, versions_of
from pipeline.mirrors.layout import CARRIED, UNKNOWN, Layout
from pipeline.mirrors.lineage import MARKER
from pipeline.mirrors.markers import Marker
from pipeline.mirrors.merge_sql import merge_current
from pipeline.mirrors.names import MirrorNames
from pipeline.mirrors.ownership import Seen, check_alone, note_unsent
from pipeline.mirrors.positions import Truncate
from pipeline.mirrors.settings import MirrorSettings
from pipeline.mirrors.sql_text import text_literal
from pipeline.mirrors.tombstones import Tombstones
from pipeline.mirrors.transforms import DELETE, IS_DELETED, column, fold, unblocked, without_truncated
from writer import columns

# A merge fails when a compaction of the mirror commits first, and when the catalog's answer is lost. Repeating it is
# harmless, so the only limit is patience.
_ATTEMPTS_MAX = 8
_PAUSE_S = 1.0


@dataclass(frozen=True, slots=True)
class Merged:
    """What one merge has done."""

    rows: int
    keys: int
    deletes: int


def merge_changes(
    changes: DataFrame,
    *,
    names: MirrorNames,
    layout: Layout,
    settings: MirrorSettings,
    tombstones: Tombstones,
    marker: Marker,
    seen: Seen,
) -> Merged:
    """Bring changes into a mirror, and with them the marker.

    Raises: RowsHaveNoKey, TwoApplications, MirrorRolledBack.
    """
    spark, view = changes.sparkSession, _view()
    batch = take_batch(changes, names=names, layout=layout, settings=settings, truncates=tombstones.truncates)
    facts = batch.facts
    stones = tombstones.deletes(spark)
    folded = source = _fold(batch, layout, stones).persist(StorageLevel.MEMORY_AND_DISK)
    try:
        measured = measure(folded, layout)
        if measured.deletes or facts.truncates or (facts.has_deletes and layout.keeps_history):
            tombstones.add(_deletes(batch, folded, layout), facts.truncates, now=time.time())
        unsent = _note_unsent(spark, names, layout, seen=seen, unchanged=facts.unchanged)
        source = _versions(batch, stones, names, layout) if layout.keeps_history else folded
        source.createOrReplaceTempView(view)
        statement = _statement(batch, measured, layout, target=names.mirror_sql, view=view, unsent=unsent)
        commit_marked(spark, statement, names, marker=marker, seen=seen)
    finally:
        folded.unpersist()
        source.unpersist()
        spark.catalog.dropTempView(view)
    return Merged(facts.rows, measured.keys, measured.deletes)


def _deletes(batch: Batch, folded: DataFrame, layout: Layout) -> DataFrame:
    """Find what to remember. Of a history every delete ends a version, which may come late; else the last will do."""
    is_delete = column(columns.OPERATION) == DELETE
    return batch.events.where(is_delete) if layout.keeps_history else folded.where(IS_DELETED)


def _fold(batch: Batch, layout: Layout, stones: DataFrame | None) -> DataFrame:
    rows = without_truncated(batch.events, batch.truncates)
    facts = batch.facts
    # Values must not be taken from before a delete either. Where no column is unsent, it is enough to look at the last
    # change of each key, and cheaper.
    looks_first = stones is not None and bool(facts.unchanged)
    if stones is not None and looks_first:
        rows = unblocked(rows, stones, layout)
    folded = fold(rows, layout, unchanged=facts.unchanged, sources_differ=facts.sources_differ)
    return folded if stones is None or looks_first else unblocked(folded, stones, layout)


def _note_unsent(
    spark: SparkSession, names: MirrorNames, layout: Layout, *, seen: Seen, unchanged: frozenset[str]
) -> frozenset[str]:
    """Tell which columns rows may lack, those of this batch included; columns of before are called as they are now."""
    known, own = frozenset(layout.renamed.get(name, name) for name in seen.unsent), frozenset(layout.own_columns)
    unsent = known | (unchanged & own)
    if unsent != known:
        note_unsent(spark, names, unsent)
    return unsent & own


def _versions(batch: Batch, stones: DataFrame | None, names: MirrorNames, layout: Layout) -> DataFrame:
    """Find what changes in a history.

    The result is cut off from what it was read from: a merge reads its source twice, and Spark 4.1 refuses one that
    reads the target. (A read as of the last snapshot would have the columns of then, and renamed ones would be empty.)
    """
    stored = batch.events.sparkSession.table(names.mirror_sql)
    lacking = F.concat(F.coalesce(UNKNOWN, F.array()), F.coalesce(column(CARRIED)["name"], F.array()))
    has_gaps = column(UNKNOWN).isNotNull() | column(CARRIED).isNotNull()
    gaps = stored.where(has_gaps).select(F.explode(lacking)).distinct().collect()
    versions = versions_of(
        without_truncated(batch.events, ()),
        stored=stored,
        stones=stones,
        layout=layout,
        unchanged=batch.facts.unchanged | {layout.renamed.get(row[0], row[0]) for row in gaps},
        truncates=batch.facts.truncates,
        earlier_truncates=_all_truncates(batch, names) if batch.truncates else (),
    )
    return versions.localCheckpoint()


def _all_truncates(batch: Batch, names: MirrorNames) -> tuple[Truncate, ...]:
    """Find every truncate that a row of the batch may have gone with: a late one ended with the first behind it."""
    first = F.min(F.struct(columns.EPOCH, columns.SEQUENCE))
    begins = {row[0]: tuple(row[1]) for row in batch.events.groupBy(columns.SOURCE).agg(first).collect()}
    found = truncates_in(batch.events.sparkSession.table(names.tombstones_sql))
    late = (each for each in found if each.source in begins and (each.epoch, each.sequence) >= begins[each.source])
    return tuple(dict.fromkeys((*batch.truncates, *late)))


def _statement(
    batch: Batch, measured: Measured, layout: Layout, *, target: str, view: str, unsent: frozenset[str]
) -> str:
    if layout.keeps_history:
        return merge_history(layout, target=target, view=view)
    return merge_current(
        layout,
        target=target,
        view=view,
        bounds=measured.bounds,
        unchanged=batch.facts.unchanged,
        truncates=batch.facts.truncates,
        # Where every change has sent all columns no row lacks one, and looking for gaps would cost all batches: with
        # merge-on-read, the reading of all columns. Mirrors of before do not say what they lack; reads may fill it.
        fills=unsent or (layout.own_columns if batch.facts.has_reads else ()),
    )


def _view() -> str:
    """Name a view of one merge alone: all tables share the session."""
    return f"lakefeed_batch_{uuid.uuid4().hex}"


def commit_marked(spark: SparkSession, statement: str, names: MirrorNames, *, marker: Marker, seen: Seen) -> None:
    """Run a statement whose snapshot carries the marker, again where another commit came first.

    Raises: TwoApplications, MirrorRolledBack.
    """

    def attempt() -> None:
        check_alone(spark, names, seen=seen, run=marker.run)
        commit_with_properties(spark, {MARKER: marker.to_text()}, statement)

    repeat_on_conflict(
        attempt,
        what=f"merge into {names.mirror_sql}",
        attempts_max=_ATTEMPTS_MAX,
        pause_s=_PAUSE_S,
        is_idempotent=True,
    )


def set_marker_property(spark: SparkSession, mirror: str, marker: Marker) -> None:
    """Copy the marker to the mirror's properties."""
    spark.sql(f"ALTER TABLE {mirror} SET TBLPROPERTIES ('{MARKER}' = {text_literal(marker.to_text())})")
