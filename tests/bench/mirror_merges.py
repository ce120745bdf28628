"""Seconds of one merge, by mode and size of the mirror, and what reading a mirror costs beside a plain table.

The change table is written by Spark: a bootstrap of so many rows, then batches of changes whose keys are spread over
all of them (five updates, four inserts, one delete of ten), each merged by `mirror run --once`.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pyspark.sql import SparkSession

from lakefeed.pipeline.mirrors.commands import run_mirrors
from lakefeed.pipeline.mirrors.settings import MirrorConfig, MirrorMode

_COLUMNS = (
    "id bigint, name string, city string, note string, amount double, active boolean, "
    "created_at timestamp, price decimal(18,2), tier int, score bigint, "
    "_cdc_sequence bigint, _cdc_timestamp timestamp, _cdc_operation string, _cdc_row_id string, _cdc_source string, "
    "_cdc_ingested_at timestamp"
)
_ROW = (
    "{key} AS id, substr(sha1(string({key})), 1, 20), substr(sha1(string({key} + 1)), 1, 20), "
    "repeat(substr(sha1(string({key} + {sequence})), 1, 30), 2), rand(1) * 1000, {key} % 2 = 0, "
    "timestamp_millis(1794787200000 + {key}), CAST(({key} % 100000) / 100 AS decimal(18,2)), "
    "CAST({key} % 5 AS int), {sequence}, {sequence}, timestamp_millis(1794787200000 + {sequence}), {operation}, "
    "string({key}), 'bench', now()"
)
_READS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeFigures:
    """One mirror of one mode and size."""

    mode: str
    rows: int
    changes: int
    bootstrap_s: float
    merge_s: float
    read_s: float
    plain_read_s: float


class _Merges(logging.Handler):
    """Takes the seconds from the log lines of merges."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage() == "mirror_merged":
            self.seconds.append(record.seconds)


def measure_merges(
    spark: SparkSession,
    *,
    modes: Sequence[MirrorMode],
    rows: int,
    changes: int,
    merges: int,
    directory: Path,
    tell: Callable[[str], None],
) -> Iterator[MergeFigures]:
    """Build a change table and merge into its mirror, mode by mode."""
    handler = _Merges()
    logger = logging.getLogger("lakefeed.pipeline.mirrors.follower")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        for mode in modes:
            tell(f"{mode.value}, {rows:,} rows")
            yield _measure(spark, mode, rows, changes, merges, directory, handler)
    finally:
        logger.removeHandler(handler)


def _measure(
    spark: SparkSession, mode: MirrorMode, rows: int, changes: int, merges: int, directory: Path, log: _Merges
) -> MergeFigures:
    name = f"m{rows}_{mode.name.lower()}"
    table = f"default.{name}"
    spark.sql(
        f"CREATE TABLE {table} ({_COLUMNS}) USING iceberg "
        "TBLPROPERTIES ('format-version' = '2', 'lakefeed.append-only' = 'true')"
    )
    inserted = _ROW.format(key="id", sequence="id", operation="'INSERT'")
    spark.sql(f"INSERT INTO {table} SELECT {inserted} FROM range({rows})")
    config = MirrorConfig(checkpoints=str(directory / "checkpoints"), tables={table: {"key": ("id",), "mode": mode}})
    log.seconds.clear()
    _run(spark, name, config)
    bootstrap_s = log.seconds[0]
    seconds = []
    for number in range(merges):
        _append(spark, table, rows=rows, changes=changes, first=rows + number * changes)
        log.seconds.clear()
        _run(spark, name, config)
        seconds.append(sum(log.seconds))
    mirror = f"{table}_{'history' if mode is MirrorMode.HISTORY else 'current'}"
    spark.sql(f"CREATE TABLE {table}_plain USING iceberg AS SELECT * FROM {mirror}")
    figures = MergeFigures(
        mode=mode.value,
        rows=rows,
        changes=changes,
        bootstrap_s=round(bootstrap_s, 2),
        # The first one in a session pays for compiling its plans.
        merge_s=round(statistics.median(seconds[1:] or seconds), 2),
        read_s=_read_s(spark, mirror),
        plain_read_s=_read_s(spark, f"{table}_plain"),
    )
    for each in (table, mirror, f"{mirror}_tombstones", f"{table}_plain"):
        spark.sql(f"DROP TABLE {each} PURGE")
    return figures


def _run(spark: SparkSession, name: str, config: MirrorConfig) -> None:
    failures = run_mirrors(spark, [name], config, once=True)
    assert not failures, failures


def _append(spark: SparkSession, table: str, *, rows: int, changes: int, first: int) -> None:
    """Append changes; the keys of updates and deletes are spread over all rows by a large step."""
    operation = "CASE WHEN id % 10 < 5 THEN 'UPDATE' WHEN id % 10 < 9 THEN 'INSERT' ELSE 'DELETE' END"
    sequence = f"({first} + id)"
    key = f"CASE WHEN id % 10 BETWEEN 5 AND 8 THEN {sequence} ELSE ({sequence} * 7919) % {rows} END"
    changed = _ROW.format(key="key", sequence="sequence", operation="operation")
    spark.sql(
        f"INSERT INTO {table} SELECT {changed} FROM "
        f"(SELECT {key} AS key, {sequence} AS sequence, {operation} AS operation FROM range({changes}))"
    )


def _read_s(spark: SparkSession, table: str) -> float:
    seconds = []
    for _ in range(_READS):
        started = time.perf_counter()
        spark.sql(f"SELECT count(*), sum(amount), max(name), max(note) FROM {table}").collect()
        seconds.append(time.perf_counter() - started)
    return round(min(seconds), 3)
