"""What a mirror should show, computed anew from its change table. For whoever verifies mirrors.

The whole table is folded at once, without the mirror's rows, markers or tombstones, as of the snapshot that the
mirror's marker names. Rows are compared by value: a row that was merged again may stand at another position.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812 - as everybody names it

from pipeline.mirrors.layout import Layout, plan_layout
from pipeline.mirrors.mirror_table import load_built_key, load_marker
from pipeline.mirrors.names import MirrorNames
from pipeline.mirrors.positions import Truncate, latest_truncates
from pipeline.mirrors.settings import MirrorSettings
from pipeline.mirrors.transforms import (
    IS_DELETED,
    TRUNCATE,
    column,
    fold,
    names_no_row,
    prepare,
    with_moves,
    without_truncated,
)
from pipeline.tables import read_as_of
from writer import columns

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@dataclass(frozen=True, slots=True)
class Expected:
    """The rows that a mirror should have as of a snapshot of its change table; `layout` names its key and columns."""

    rows: DataFrame
    layout: Layout
    snapshot: int


def expected_mirror(
    spark: SparkSession,
    names: MirrorNames,
    settings: MirrorSettings,
    *,
    read: Callable[[int], DataFrame] | None = None,
) -> Expected | None:
    """Fold a change table as of what its mirror says it has; None if there is no mirror, or it has merged nothing.

    `read` reads the table as of a snapshot, if that is to be done otherwise than with the columns of then.

    Raises: NotAMirror, OtherChangeTable, KeyUnknown.
    """
    built_key = load_built_key(spark, names)
    marker = load_marker(spark, names) if built_key else None
    if marker is None:
        return None
    changes = read(marker.snapshot) if read else read_as_of(spark, names.table_sql, marker.snapshot)
    layout = plan_layout(changes.schema, settings, built_key=built_key)
    return Expected(expected_rows(changes, layout), layout, marker.snapshot)


def expected_rows(changes: DataFrame, layout: Layout) -> DataFrame:
    """Fold changes to the rows that are there after them, in the columns of a mirror of current rows."""
    events = with_moves(prepare(changes, layout), layout).where(~names_no_row(layout))
    found = events.agg(
        F.min(columns.SOURCE) != F.max(columns.SOURCE),
        F.array_distinct(F.flatten(F.collect_set(columns.UNCHANGED))),
    ).collect()[0]
    emptied = events.where(column(columns.OPERATION) == TRUNCATE)
    told = emptied.select(columns.SOURCE, columns.EPOCH, columns.SEQUENCE).distinct().collect()
    rows = without_truncated(events, latest_truncates(Truncate(*row) for row in told))
    folded = fold(rows, layout, unchanged=frozenset(found[1] or ()), sources_differ=bool(found[0]))
    return folded.where(~column(IS_DELETED)).select(*map(column, layout.columns))
