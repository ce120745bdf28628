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

import json
import logging
import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody names it
from pyspark.sql.types import BinaryType

from lakefeed.contract import changes
from lakefeed.pipeline.errors import PipelineError
from lakefeed.pipeline.mirrors.fold import (
    DELETE,
    IS_DELETED,
    NO_NAMES,
    READ,
    TRUNCATE,
    Truncate,
    cell,
    column,
    entries,
    entry_of,
    fold,
    is_newer,
    latest_truncates,
    names_no_row,
    newer,
    no_entries,
    overtaken,
    prepare,
    sent_at_column,
    truncated,
    unblocked,
    unknown_names,
    with_moves,
    without_truncated,
)
from lakefeed.pipeline.mirrors.history import merge_history, versions_of
from lakefeed.pipeline.mirrors.marker import MARKER, Marker, Version, load_lineage, read_marker
from lakefeed.pipeline.mirrors.settings import MirrorNames, MirrorSettings, RowsWithoutKey
from lakefeed.pipeline.mirrors.table import CARRIED, UNKNOWN, Layout
from lakefeed.pipeline.mirrors.tombstones import Tombstones
from lakefeed.pipeline.spark.failures import repeat_on_conflict
from lakefeed.pipeline.spark.tables import commit_with_properties, properties, property_pairs, quoted, text_literal

# --- pipeline.mirrors.merge_sql ---------------------------------------------------------------------------------------
#
# The statements that change a mirror. Owns their text; running them belongs to merging.py.
#
# The guard makes a repeated merge harmless: a row is changed by newer changes only, and so is each of its values that
# its last change did not send. Bounds of the batch's keys stand in the condition as literals, so that files outside of
# them are not read.


# A longer text is no help in a plan, and Iceberg's bounds of text are shorter than that anyway.
_BOUND_MAX_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class Bounds:
    """The lowest and highest value of a key column in a batch, as text that casts back to its type."""

    column: str
    type_name: str
    lowest: str
    highest: str


def within(bounds: Sequence[Bounds], alias: str) -> str:
    """Tell whether a row can have a key of the batch."""
    useful = [each for each in bounds if max(len(each.lowest), len(each.highest)) <= _BOUND_MAX_CHARACTERS]
    conditions = [
        f"{alias}.{quoted(each.column)} {sign} CAST({text_literal(value)} AS {each.type_name})"
        for each in useful
        for sign, value in ((">=", each.lowest), ("<=", each.highest))
    ]
    return " AND ".join(conditions) or "true"


def merge_current(
    layout: Layout,
    *,
    target: str,
    view: str,
    bounds: Sequence[Bounds] = (),
    unchanged: Collection[str] = (),
    truncates: Sequence[Truncate] = (),
    fills: Collection[str] = (),
) -> str:
    """Merge folded changes into the current rows. `unchanged` are columns that some of them did not send.

    Of columns in `fills` rows of the mirror may lack values, or have older ones than a row that comes late.
    """
    same_key = " AND ".join(f"t.{quoted(name)} = s.{quoted(name)}" for name in layout.key)
    gone = truncated(truncates, "t")
    applies = f"({newer('s', 't')} OR {gone})" if truncates else newer("s", "t")
    stored = (*layout.columns, UNKNOWN, CARRIED)
    clauses = [
        f"MERGE INTO {target} t USING {view} s ON {same_key} AND {within(bounds, 't')}",
        f"WHEN MATCHED AND s.{IS_DELETED} AND {applies} THEN DELETE",
        f"WHEN MATCHED AND NOT s.{IS_DELETED} AND {applies} THEN UPDATE SET {_updates(layout, unchanged, gone)}",
    ]
    if fills:
        has_gaps = f"(t.{UNKNOWN} IS NOT NULL OR t.{CARRIED} IS NOT NULL)"
        filled = overtaken("s", "t", layout, among=fills)
        updates = _fillings(layout, filled, fills)
        clauses.append(f"WHEN MATCHED AND {has_gaps} AND size({filled}) > 0 THEN UPDATE SET {updates}")
    names = ", ".join(map(quoted, stored))
    values = ", ".join(f"s.{quoted(name)}" for name in stored)
    clauses.append(f"WHEN NOT MATCHED AND NOT s.{IS_DELETED} THEN INSERT ({names}) VALUES ({values})")
    if truncates:
        clauses.append(f"WHEN NOT MATCHED BY SOURCE AND {gone} THEN DELETE")
    return "\n".join(clauses)


def _updates(layout: Layout, unchanged: Collection[str], gone: str) -> str:
    unsent = [name for name in layout.own_columns if name in unchanged]
    keeps = {name: f"NOT {gone} AND {_stays(name, layout)}" for name in unsent}
    values = {
        name: f"CASE WHEN {keeps[name]} THEN t.{quoted(name)} ELSE s.{quoted(name)} END"
        if name in keeps
        else f"s.{quoted(name)}"
        for name in layout.columns
    }
    still_unknown = f"nullif(array_intersect(s.{UNKNOWN}, {unknown_names('t', layout)}), {NO_NAMES})"
    values[UNKNOWN] = f"CASE WHEN {gone} THEN s.{UNKNOWN} ELSE {still_unknown} END"
    values[CARRIED] = _carried(layout, keeps)
    return _assignments(values)


def _stays(name: str, layout: Layout) -> str:
    """Tell whether a value that the last change did not send stays: no change of the batch has sent a newer one."""
    sent_at, stored = f"s.{quoted(sent_at_column(name))}", cell("t", text_literal(name), layout)
    return f"({stored}) IS NOT NULL AND NOT {is_newer(sent_at, stored)}"


def _carried(layout: Layout, keeps: Mapping[str, str]) -> str:
    if not keeps:
        return "NULL"
    found = (
        f"CASE WHEN {kept} THEN {cell('t', text_literal(name), layout)} "
        f"ELSE {entry_of('s', text_literal(name), layout)} END"
        for name, kept in keeps.items()
    )
    return f"nullif(array_compact(array({', '.join(found)})), {no_entries(layout)})"


def _fillings(layout: Layout, filled: str, fills: Collection[str]) -> str:
    values = {
        name: f"CASE WHEN array_contains({filled}, {text_literal(name)}) THEN "
        f"CASE WHEN NOT s.{IS_DELETED} THEN s.{quoted(name)} END ELSE t.{quoted(name)} END"
        for name in layout.own_columns
        if name in fills
    }
    values[UNKNOWN] = f"nullif(array_except({unknown_names('t', layout)}, {filled}), {NO_NAMES})"
    kept = f"filter({entries('t', layout)}, _cdc_kept -> NOT array_contains({filled}, _cdc_kept.name))"
    brought = f"transform({filled}, _cdc_brought -> {cell('s', '_cdc_brought', layout)})"
    values[CARRIED] = f"nullif(concat({kept}, {brought}), {no_entries(layout)})"
    return _assignments(values)


def _assignments(values: Mapping[str, str]) -> str:
    return ", ".join(f"{quoted(name)} = {value}" for name, value in values.items())


# --- pipeline.mirrors.ownership ---------------------------------------------------------------------------------------
#
# What a merge knew of its mirror when it began, and whether that still holds.
#
# Owns noticing other applications, and the property that names columns which rows may lack.
#
# A merge folds its changes with the tombstones of that moment. Had another application deleted a row since then, the
# merge would bring it back. So each attempt looks first whether the mirror's snapshot is still the one that was seen,
# and
# if not, who has committed since: a compaction does no harm. A commit to the same files while MERGE runs is refused by
# Iceberg, and the next attempt looks again. What is left is the moment from that look until MERGE has read where the
# mirror stands.


# The columns that some change did not send, as they were called then: rows of the mirror may lack them.
UNSENT = "lakefeed.mirror.unsent"
# What Iceberg shows among the properties.
_SNAPSHOT = "current-snapshot-id"
_NO_SNAPSHOT = "none"


class TwoApplications(PipelineError):
    """Another application merges into the same mirror: a person has to stop one of them."""


class MirrorRolledBack(PipelineError):
    """The mirror is not what it was when the merge began: it has to begin again from the marker."""


def two_applications(mirror: str) -> TwoApplications:
    """Say what a person has to do."""
    return TwoApplications(f"another application merges into this mirror, stop one of them: mirror={mirror}")


@dataclass(frozen=True, slots=True)
class Seen:
    """A mirror's snapshot at some moment, and the columns that its rows may lack."""

    snapshot: int | None
    unsent: frozenset[str]


def look_at_mirror(spark: SparkSession, names: MirrorNames) -> Seen:
    """See where a mirror stands."""
    found = properties(spark, names.mirror_sql)
    return Seen(_snapshot_in(found), frozenset(json.loads(found.get(UNSENT, "[]"))))


def note_unsent(spark: SparkSession, names: MirrorNames, unsent: frozenset[str]) -> None:
    """Write down, before they are merged, which columns rows may lack from now on."""
    pairs = property_pairs({UNSENT: json.dumps(sorted(unsent))})
    spark.sql(f"ALTER TABLE {names.mirror_sql} SET TBLPROPERTIES ({pairs})")


def check_alone(spark: SparkSession, names: MirrorNames, *, seen: Seen, run: str) -> None:
    """Check that no other application has merged since the mirror was seen.

    Raises: TwoApplications, MirrorRolledBack.
    """
    if _snapshot_in(properties(spark, names.mirror_sql)) != seen.snapshot:
        check_commits(load_lineage(spark, names.mirror_sql), seen=seen, run=run, mirror=str(names.mirror))


def check_commits(lineage: Sequence[Version], *, seen: Seen, run: str, mirror: str) -> None:
    """Check the commits since a mirror was seen; `lineage` are its snapshots, newest first.

    Raises: TwoApplications, MirrorRolledBack.
    """
    for version in lineage:
        if version.snapshot_id == seen.snapshot:
            return
        marker = read_marker(version.summary.get(MARKER))
        if marker is not None and marker.run != run:
            raise two_applications(mirror)
    if seen.snapshot is not None:
        raise MirrorRolledBack(f"the mirror was rolled back during a merge, which begins again: mirror={mirror}")


def _snapshot_in(table_properties: Mapping[str, str]) -> int | None:
    text = table_properties.get(_SNAPSHOT, _NO_SNAPSHOT)
    return None if text == _NO_SNAPSHOT else int(text)


# --- pipeline.mirrors.batches -----------------------------------------------------------------------------------------
#
# A batch of changes before it is merged: what is in it, and what its fold comes to. Owns looking.


_log = logging.getLogger(__name__)


class RowsHaveNoKey(PipelineError):
    """Changes of a table name no row: a person has to name the key, or to let them be passed over."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What was found in a batch; `unchanged` are the columns that some change did not send."""

    rows: int
    sources_differ: bool
    unchanged: frozenset[str]
    truncates: tuple[Truncate, ...]
    without_key: int
    has_reads: bool
    has_deletes: bool


@dataclass(frozen=True, slots=True)
class Batch:
    """Changes, what was found in them, and the last truncate of each source, those before the batch included."""

    events: DataFrame
    facts: Facts
    truncates: tuple[Truncate, ...]


@dataclass(frozen=True, slots=True)
class Measured:
    """What a fold has come to."""

    keys: int
    deletes: int
    bounds: tuple[Bounds, ...]


def take_batch(
    changes: DataFrame,
    *,
    names: MirrorNames,
    layout: Layout,
    settings: MirrorSettings,
    truncates: Sequence[Truncate],
) -> Batch:
    """Prepare changes and look at them; `truncates` are those known before.

    Raises: RowsHaveNoKey.
    """
    events = with_moves(prepare(changes, layout), layout)
    facts = _look_at(events, layout)
    _check_keys(facts, names, settings)
    if facts.without_key:
        events = events.where(~names_no_row(layout))
    return Batch(events, facts, latest_truncates((*truncates, *facts.truncates)))


def _look_at(events: DataFrame, layout: Layout) -> Facts:
    is_truncate = column(changes.OPERATION) == TRUNCATE
    found = events.agg(
        F.count(F.lit(1)),
        F.min(changes.SOURCE) != F.max(changes.SOURCE),
        F.array_distinct(F.flatten(F.collect_set(changes.UNCHANGED))),
        F.count_if(is_truncate),
        F.count_if(names_no_row(layout)),
        F.count_if(column(changes.OPERATION) == READ) > 0,
        F.count_if(column(changes.OPERATION) == DELETE) > 0,
    ).collect()[0]
    truncates = truncates_in(events) if found[3] else ()
    return Facts(found[0], bool(found[1]), frozenset(found[2] or ()), truncates, *found[4:])


def truncates_in(rows: DataFrame) -> tuple[Truncate, ...]:
    """Read the truncates among changes or tombstones."""
    told = rows.where(column(changes.OPERATION) == TRUNCATE)
    time_text = column(changes.TIMESTAMP).cast("string")
    found = told.select(changes.SOURCE, changes.EPOCH, changes.SEQUENCE, time_text).distinct().collect()
    return tuple(Truncate(*row) for row in found)


def _check_keys(facts: Facts, names: MirrorNames, settings: MirrorSettings) -> None:
    if not facts.without_key:
        return
    if settings.rows_without_key is RowsWithoutKey.STOP:
        raise RowsHaveNoKey(
            'changes name no row: set key for this table, or rows_without_key = "skip" to pass over them: '
            f"table={names.table} changes={facts.without_key}"
        )
    _log.warning("rows_without_key_passed_over", extra={"table": str(names.table), "rows": facts.without_key})


def measure(folded: DataFrame, layout: Layout) -> Measured:
    """Count keys and deletes and find the bounds of the keys; this fills the cache on the way."""
    bounded = [name for name in layout.key if not isinstance(layout.schema[name].dataType, BinaryType)]
    extremes = [each(column(name)).cast("string") for name in bounded for each in (F.min, F.max)]
    found = folded.agg(F.count(F.lit(1)), F.count_if(column(IS_DELETED)), *extremes).collect()[0]
    kinds = (layout.schema[name].dataType.simpleString() for name in bounded)
    pairs = zip(bounded, kinds, found[2::2], found[3::2], strict=True)
    bounds = (Bounds(name, kind, low, high) for name, kind, low, high in pairs if low is not None)
    return Measured(found[0], found[1], tuple(bounds))


# --- pipeline.mirrors.merging -----------------------------------------------------------------------------------------


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
    is_delete = column(changes.OPERATION) == DELETE
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
    first = F.min(F.struct(changes.EPOCH, changes.SEQUENCE))
    begins = {row[0]: tuple(row[1]) for row in batch.events.groupBy(changes.SOURCE).agg(first).collect()}
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
