"""Merge of one batch of changes into a mirror.

    1. inspect the batch: sources, truncates, unsent columns, changes without a key
    2. fold it to one row per key, and leave out rows older than a tombstone
    3. append its deletes and truncates to the tombstones     crash after: tombstones of rows that still exist, harmless
    4. record columns that were never unsent before           crash after: more columns than rows lack, harmless
    5. merge, with the marker in the same commit              crash before: as after 4; after: the batch is merged

Merging a batch again changes nothing: tombstones keep deleted rows out, and the MERGE statement replaces a row, or a
value that the row's last change did not send, only by a newer one. The bounds of the batch's keys are literals in the
statement, so that Iceberg skips files outside of them.

One application owns a mirror. A merge folds its changes with the tombstones of the moment at which it began; if another
application deleted a row since then, the merge would bring the row back. So each attempt first checks whether the
mirror's snapshot is still the one of `MirrorState`, and if not, who has committed since: a compaction does no harm, a
merge of another run is an error. A commit to the same files while MERGE runs is rejected by Iceberg, and the next
attempt checks again. Not covered is the moment between the check and MERGE's own read of the current snapshot.
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
from pyspark.sql import functions as F  # noqa: N812 - the usual name
from pyspark.sql.types import BinaryType

from lakefeed.backoff import Backoff
from lakefeed.contract import changes as cdc
from lakefeed.pipeline.errors import PipelineError
from lakefeed.pipeline.mirrors.fold import (
    DELETE,
    IS_DELETED,
    NO_NAMES,
    TRUNCATE,
    Truncate,
    column,
    entries,
    entry_of,
    fold,
    is_newer_entry,
    lacks_key,
    latest_truncates,
    newer,
    newer_columns,
    no_entries,
    prepare,
    same_key,
    sent_at_column,
    truncated,
    truncates_in,
    unknown_names,
    value_position,
    with_key_changes,
    without_tombstoned,
    without_truncated,
)
from lakefeed.pipeline.mirrors.history import merge_history, versions_of
from lakefeed.pipeline.mirrors.marker import MARKER, Marker, load_lineage, parse_marker
from lakefeed.pipeline.mirrors.settings import MirrorNames, MirrorSettings, RowsWithoutKey
from lakefeed.pipeline.mirrors.table import CARRIED, UNKNOWN, Layout
from lakefeed.pipeline.mirrors.tombstones import Tombstones
from lakefeed.pipeline.spark.failures import retry_on_conflict
from lakefeed.pipeline.spark.tables import (
    Snapshot,
    commit_with_properties,
    current_snapshot_id,
    properties,
    quoted,
    set_properties,
    text_literal,
)

_log = logging.getLogger(__name__)

# The columns that some change did not send, by their names at that time: rows of the mirror may lack them.
UNSENT = "lakefeed.mirror.unsent"

# A merge fails if a compaction of the mirror commits first, or if the catalog's response is lost. Repeating is
# harmless.
_ATTEMPTS_MAX = 8
_BACKOFF = Backoff(first_s=2.0, max_s=8.0)

# Iceberg truncates its bounds of texts to fewer characters, so longer literals prune no more files.
_BOUND_MAX_CHARACTERS = 200


class ChangesWithoutKey(PipelineError):
    """Changes of a table have no key: the user has to configure the key, or to skip such changes."""


class ConcurrentMirror(PipelineError):
    """Another application merges into the same mirror: the user has to stop one of them."""

    def __init__(self, mirror: str) -> None:
        super().__init__(f"another application merges into this mirror, stop one of them: mirror={mirror}")


class MirrorRolledBack(PipelineError):
    """The mirror was rolled back during a merge: it resumes from the marker."""


@dataclass(frozen=True, slots=True)
class MirrorState:
    """A mirror's snapshot at the start of a merge, and the columns that its rows may lack."""

    snapshot: int | None
    unsent: frozenset[str]


@dataclass(frozen=True, slots=True)
class ChangeBatch:
    """Prepared changes, and what they contain.

    `unchanged` are the columns that some change did not send, `truncates` the batch's own ones, `last_truncates` the
    last one of each source, earlier ones included.
    """

    events: DataFrame
    rows: int
    sources_differ: bool
    unchanged: frozenset[str]
    has_deletes: bool
    truncates: tuple[Truncate, ...]
    last_truncates: tuple[Truncate, ...]


@dataclass(frozen=True, slots=True)
class KeyBounds:
    """The lowest and highest value of a key column in a batch, as text that casts back to its type."""

    column: str
    type_name: str
    lowest: str
    highest: str


@dataclass(frozen=True, slots=True)
class MergeResult:
    """What one merge did."""

    rows: int
    keys: int
    deletes: int


def merge_changes(
    batch_changes: DataFrame,
    *,
    names: MirrorNames,
    layout: Layout,
    settings: MirrorSettings,
    tombstones: Tombstones,
    marker: Marker,
    state: MirrorState,
) -> MergeResult:
    """Merge changes into a mirror, together with the marker.

    Raises: ChangesWithoutKey, ConcurrentMirror, MirrorRolledBack.
    """
    spark = batch_changes.sparkSession
    view = f"lakefeed_batch_{uuid.uuid4().hex}"  # of this merge alone: all tables share the session
    batch = prepare_batch(batch_changes, names=names, layout=layout, settings=settings, truncates=tombstones.truncates)
    deletes = tombstones.deletes(spark)
    folded = source = _fold(batch, layout, deletes).persist(StorageLevel.MEMORY_AND_DISK)
    try:
        keys, delete_count, bounds = measure(folded, layout)
        if delete_count or batch.truncates or (batch.has_deletes and layout.keeps_history):
            # In a history every delete ends a version, which may come late; otherwise the last one is enough.
            is_delete = column(cdc.OPERATION) == DELETE
            deleted = batch.events.where(is_delete) if layout.keeps_history else folded.where(IS_DELETED)
            tombstones.add(deleted, batch.truncates, now=time.time())
        gaps = _record_unsent(spark, names, layout, state=state, unchanged=batch.unchanged)
        if layout.keeps_history:
            source = _versions(batch, deletes, names, layout)
            statement = merge_history(layout, target=names.mirror_sql, view=view)
        else:
            statement = merge_current(
                layout,
                target=names.mirror_sql,
                view=view,
                bounds=bounds,
                unchanged=batch.unchanged,
                truncates=batch.truncates,
                gaps=gaps,
            )
        source.createOrReplaceTempView(view)
        commit_marked(spark, statement, names, marker=marker, state=state)
    finally:
        folded.unpersist()
        source.unpersist()
        spark.catalog.dropTempView(view)
    return MergeResult(batch.rows, keys, delete_count)


# -- 1. the batch


def prepare_batch(
    batch_changes: DataFrame,
    *,
    names: MirrorNames,
    layout: Layout,
    settings: MirrorSettings,
    truncates: Sequence[Truncate],
) -> ChangeBatch:
    """Prepare changes and inspect them; `truncates` are the earlier ones. Raise ChangesWithoutKey as configured."""
    events = with_key_changes(prepare(batch_changes, layout), layout)
    operation = column(cdc.OPERATION)
    rows, sources_differ, unchanged, truncate_count, without_key, has_deletes = events.agg(
        F.count(F.lit(1)),
        F.min(cdc.SOURCE) != F.max(cdc.SOURCE),
        F.array_distinct(F.flatten(F.collect_set(cdc.UNCHANGED))),
        F.count_if(operation == TRUNCATE),
        F.count_if(lacks_key(layout)),
        F.count_if(operation == DELETE) > 0,
    ).collect()[0]
    own_truncates = truncates_in(events) if truncate_count else ()
    if without_key and settings.rows_without_key is RowsWithoutKey.STOP:
        raise ChangesWithoutKey(
            'changes have no key, set key for this table, or rows_without_key = "skip" to skip them: '
            f"table={names.table} changes={without_key}"
        )
    if without_key:
        _log.warning("rows_without_key_skipped", extra={"table": str(names.table), "rows": without_key})
        events = events.where(~lacks_key(layout))
    return ChangeBatch(
        events,
        rows,
        sources_differ=bool(sources_differ),
        unchanged=frozenset(unchanged or ()),
        has_deletes=has_deletes,
        truncates=own_truncates,
        last_truncates=latest_truncates((*truncates, *own_truncates)),
    )


# -- 2. the fold


def _fold(batch: ChangeBatch, layout: Layout, deletes: DataFrame | None) -> DataFrame:
    rows = without_truncated(batch.events, batch.last_truncates)
    # Values must not be taken from before a delete either. If no column is unsent, it is enough, and cheaper, to
    # compare the last change of each key.
    blocks_first = deletes is not None and bool(batch.unchanged)
    if deletes is not None and blocks_first:
        rows = without_tombstoned(rows, deletes, layout)
    folded = fold(rows, layout, unchanged=batch.unchanged, sources_differ=batch.sources_differ)
    return folded if deletes is None or blocks_first else without_tombstoned(folded, deletes, layout)


def measure(folded: DataFrame, layout: Layout) -> tuple[int, int, list[KeyBounds]]:
    """Count keys and deletes, and find the bounds of the keys. This fills the cache."""
    bounded = [name for name in layout.key if not isinstance(layout.schema[name].dataType, BinaryType)]
    extremes = [each(column(name)).cast("string") for name in bounded for each in (F.min, F.max)]
    found = folded.agg(F.count(F.lit(1)), F.count_if(column(IS_DELETED)), *extremes).collect()[0]
    kinds = (layout.schema[name].dataType.simpleString() for name in bounded)
    pairs = zip(bounded, kinds, found[2::2], found[3::2], strict=True)
    bounds = [KeyBounds(name, kind, low, high) for name, kind, low, high in pairs if low is not None]
    return found[0], found[1], bounds


# -- 4. unsent columns


def _record_unsent(
    spark: SparkSession, names: MirrorNames, layout: Layout, *, state: MirrorState, unchanged: frozenset[str]
) -> frozenset[str]:
    """Return the columns that rows may lack, this batch included, and record new ones before they are merged.

    If every change has sent all columns, no row lacks one. Searching for gaps would cost every batch, and with
    merge-on-read it would read all columns.
    """
    known, own = frozenset(layout.renamed.get(name, name) for name in state.unsent), frozenset(layout.row_columns)
    unsent = known | (unchanged & own)
    if unsent != known:
        set_properties(spark, names.mirror_sql, {UNSENT: json.dumps(sorted(unsent))})
    return unsent & own


# -- 5. the merge


def _versions(batch: ChangeBatch, deletes: DataFrame | None, names: MirrorNames, layout: Layout) -> DataFrame:
    """Return the versions of a history that are new or change.

    The result is cut off from its input by a checkpoint: a merge reads its source twice, and Spark 4.1 rejects a source
    that reads the target. (A read as of the last snapshot would have the columns of that time, so that renamed ones
    would be empty.)
    """
    stored = batch.events.sparkSession.table(names.mirror_sql)
    lacking = F.concat(F.coalesce(UNKNOWN, F.array()), F.coalesce(column(CARRIED)["name"], F.array()))
    has_gaps = column(UNKNOWN).isNotNull() | column(CARRIED).isNotNull()
    gaps = stored.where(has_gaps).select(F.explode(lacking)).distinct().collect()
    versions = versions_of(
        without_truncated(batch.events, ()),
        stored=stored,
        tombstones=deletes,
        layout=layout,
        unchanged=batch.unchanged | {layout.renamed.get(row[0], row[0]) for row in gaps},
        truncates=batch.truncates,
        earlier_truncates=_all_truncates(batch, names) if batch.last_truncates else (),
    )
    return versions.localCheckpoint()


def _all_truncates(batch: ChangeBatch, names: MirrorNames) -> tuple[Truncate, ...]:
    """Return every truncate that can have ended a row of the batch: a late row ended with the first one after it."""
    first = F.min(F.struct(cdc.EPOCH, cdc.SEQUENCE))
    starts = {row[0]: tuple(row[1]) for row in batch.events.groupBy(cdc.SOURCE).agg(first).collect()}
    found = truncates_in(batch.events.sparkSession.table(names.tombstones_sql))
    late = (each for each in found if each.source in starts and (each.epoch, each.sequence) >= starts[each.source])
    return tuple(dict.fromkeys((*batch.last_truncates, *late)))


def commit_marked(
    spark: SparkSession, statement: str, names: MirrorNames, *, marker: Marker, state: MirrorState
) -> None:
    """Run a statement whose snapshot carries the marker, and retry if another commit came first."""

    def attempt() -> None:
        if current_snapshot_id(properties(spark, names.mirror_sql)) != state.snapshot:
            snapshots = load_lineage(spark, names.mirror_sql)
            check_commits(snapshots, state=state, run=marker.run, mirror=str(names.mirror))
        commit_with_properties(spark, {MARKER: marker.to_text()}, statement)

    retry_on_conflict(
        attempt,
        what=f"merge into {names.mirror_sql}",
        attempts_max=_ATTEMPTS_MAX,
        backoff=_BACKOFF,
        is_idempotent=True,
    )


def check_commits(snapshots: Sequence[Snapshot], *, state: MirrorState, run: str, mirror: str) -> None:
    """Raise ConcurrentMirror or MirrorRolledBack, by the commits since `state` among `snapshots`, newest first."""
    for snapshot in snapshots:
        if snapshot.snapshot_id == state.snapshot:
            return
        marker = parse_marker(snapshot.summary.get(MARKER))
        if marker is not None and marker.run != run:
            raise ConcurrentMirror(mirror)
    if state.snapshot is not None:
        raise MirrorRolledBack(f"the mirror was rolled back during a merge, which is repeated: mirror={mirror}")


# -- the MERGE statement of current rows


def within(bounds: Sequence[KeyBounds], alias: str) -> str:
    """Return the condition that a row can have a key of the batch."""
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
    bounds: Sequence[KeyBounds] = (),
    unchanged: Collection[str] = (),
    truncates: Sequence[Truncate] = (),
    gaps: Collection[str] = (),
) -> str:
    """Write the statement. `unchanged` are the columns that some change of the batch did not send.

    `gaps` are the columns for which rows of the mirror may lack a value, or have an older one than a change that comes
    late.
    """
    gone = truncated(truncates, "t")
    applies = f"({newer('s', 't')} OR {gone})" if truncates else newer("s", "t")
    stored = (*layout.columns, UNKNOWN, CARRIED)
    clauses = [
        f"MERGE INTO {target} t USING {view} s ON {same_key('t', 's', layout)} AND {within(bounds, 't')}",
        f"WHEN MATCHED AND s.{IS_DELETED} AND {applies} THEN DELETE",
        f"WHEN MATCHED AND NOT s.{IS_DELETED} AND {applies} THEN UPDATE SET {_updates(layout, unchanged, gone)}",
    ]
    if gaps:
        has_gaps = f"(t.{UNKNOWN} IS NOT NULL OR t.{CARRIED} IS NOT NULL)"
        filled = newer_columns("s", "t", layout, among=gaps)
        fills = _fills(layout, filled, gaps)
        clauses.append(f"WHEN MATCHED AND {has_gaps} AND size({filled}) > 0 THEN UPDATE SET {fills}")
    names = ", ".join(map(quoted, stored))
    values = ", ".join(f"s.{quoted(name)}" for name in stored)
    clauses.append(f"WHEN NOT MATCHED AND NOT s.{IS_DELETED} THEN INSERT ({names}) VALUES ({values})")
    if truncates:
        clauses.append(f"WHEN NOT MATCHED BY SOURCE AND {gone} THEN DELETE")
    return "\n".join(clauses)


def _updates(layout: Layout, unchanged: Collection[str], gone: str) -> str:
    """Assign the newer change, except values that it did not send and the mirror has newer ones of."""
    unsent = [name for name in layout.row_columns if name in unchanged]
    keeps = {name: f"NOT {gone} AND {_stays(name, layout)}" for name in unsent}
    values = {
        name: f"CASE WHEN {keeps[name]} THEN t.{quoted(name)} ELSE s.{quoted(name)} END"
        if name in keeps
        else f"s.{quoted(name)}"
        for name in layout.columns
    }
    still_unknown = f"nullif(array_intersect(s.{UNKNOWN}, {unknown_names('t', layout)}), {NO_NAMES})"
    values[UNKNOWN] = f"CASE WHEN {gone} THEN s.{UNKNOWN} ELSE {still_unknown} END"
    found = [
        f"CASE WHEN {kept} THEN {value_position('t', text_literal(name), layout)} "
        f"ELSE {entry_of('s', text_literal(name), layout)} END"
        for name, kept in keeps.items()
    ]
    values[CARRIED] = f"nullif(array_compact(array({', '.join(found)})), {no_entries(layout)})" if found else "NULL"
    return _assignments(values)


def _stays(name: str, layout: Layout) -> str:
    """Return the condition that the mirror's value stays: it has one, and no change of the batch sent a newer one."""
    sent_at, stored = f"s.{quoted(sent_at_column(name))}", value_position("t", text_literal(name), layout)
    return f"({stored}) IS NOT NULL AND NOT {is_newer_entry(sent_at, stored)}"


def _fills(layout: Layout, filled: str, gaps: Collection[str]) -> str:
    """Assign only the values of an older change that the mirror lacks, or has older ones of."""
    values = {
        name: f"CASE WHEN array_contains({filled}, {text_literal(name)}) THEN "
        f"CASE WHEN NOT s.{IS_DELETED} THEN s.{quoted(name)} END ELSE t.{quoted(name)} END"
        for name in layout.row_columns
        if name in gaps
    }
    values[UNKNOWN] = f"nullif(array_except({unknown_names('t', layout)}, {filled}), {NO_NAMES})"
    kept = f"filter({entries('t', layout)}, _cdc_kept -> NOT array_contains({filled}, _cdc_kept.name))"
    added = f"transform({filled}, _cdc_added -> {value_position('s', '_cdc_added', layout)})"
    values[CARRIED] = f"nullif(concat({kept}, {added}), {no_entries(layout)})"
    return _assignments(values)


def _assignments(values: Mapping[str, str]) -> str:
    return ", ".join(f"{quoted(name)} = {value}" for name, value in values.items())


# -- properties of a mirror


def load_state(spark: SparkSession, names: MirrorNames) -> MirrorState:
    """Load a mirror's snapshot and the columns that its rows may lack."""
    found = properties(spark, names.mirror_sql)
    return MirrorState(current_snapshot_id(found), frozenset(json.loads(found.get(UNSENT, "[]"))))
