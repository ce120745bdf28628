"""A batch of changes before it is merged: what is in it, and what its fold comes to. Owns looking."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - as everybody names it
from pyspark.sql.types import BinaryType

from pipeline.errors import PipelineError
from pipeline.mirrors.layout import Layout
from pipeline.mirrors.merge_sql import Bounds
from pipeline.mirrors.names import MirrorNames
from pipeline.mirrors.positions import READ, Truncate, latest_truncates
from pipeline.mirrors.settings import MirrorSettings, RowsWithoutKey
from pipeline.mirrors.transforms import DELETE, IS_DELETED, TRUNCATE, column, names_no_row, prepare, with_moves
from writer import columns

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
    is_truncate = column(columns.OPERATION) == TRUNCATE
    found = events.agg(
        F.count(F.lit(1)),
        F.min(columns.SOURCE) != F.max(columns.SOURCE),
        F.array_distinct(F.flatten(F.collect_set(columns.UNCHANGED))),
        F.count_if(is_truncate),
        F.count_if(names_no_row(layout)),
        F.count_if(column(columns.OPERATION) == READ) > 0,
        F.count_if(column(columns.OPERATION) == DELETE) > 0,
    ).collect()[0]
    truncates = truncates_in(events) if found[3] else ()
    return Facts(found[0], bool(found[1]), frozenset(found[2] or ()), truncates, *found[4:])


def truncates_in(rows: DataFrame) -> tuple[Truncate, ...]:
    """Read the truncates among changes or tombstones."""
    told = rows.where(column(columns.OPERATION) == TRUNCATE)
    time_text = column(columns.TIMESTAMP).cast("string")
    found = told.select(columns.SOURCE, columns.EPOCH, columns.SEQUENCE, time_text).distinct().collect()
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
