"""Compares a mirror with its change table. Owns the comparison; what a mirror should show is pipeline/mirrors/'s.

The change table is folded as of the snapshot that the mirror says it has merged, so that neither has to stand still.
Rows are compared by key and by the hash of their values, not by position: a row that was merged again is the same row.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as sql

from pipeline import tables
from pipeline.mirrors.expected import Expected, expected_mirror
from pipeline.mirrors.mirror_table import NotAMirror
from pipeline.mirrors.names import mirror_names
from pipeline.mirrors.settings import MirrorConfig
from pipeline.settings import load_section
from pipeline.spark_errors import is_spark_error, message_of
from pipeline.table_documents import current_fields, load_document
from pipeline.tables import TableName, quoted
from pipeline.verification.row_hash import row_hash
from writer.columns import RESERVED_PREFIX
from writer.verification.findings import Finding, Kind, Report

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

# Keys that a finding names; all are counted.
KEYS_MAX = 5
# Looks at a mirror that moves on while its marker is read.
LOOKS_MAX = 5

_EXPECTED, _FOUND, _KEY, _COUNT = "expected", "found", "key", "count"


@dataclass(frozen=True, slots=True)
class _Mirror:
    """A mirror at one of its snapshots, and the rows that it should have there."""

    name: TableName
    rows: DataFrame
    expected: Expected


def compare_mirror(
    spark: SparkSession, name: TableName, catalog: str, *, report: Report, options: Mapping[str, Any]
) -> None:
    """Compare the mirror of a change table with it, if there is one, and add what was found to the table's report."""
    settings = load_section(options.get("config_path"), os.environ, "mirror", MirrorConfig).settings_of(str(name))
    names = mirror_names(name, settings, catalog)
    if not tables.exists(spark, names.mirror_sql):
        return
    if settings.keeps_history:
        report.notes.append(f"mirror {names.mirror} keeps history: it is not compared")
        return
    try:
        mirror = _open(spark, names.mirror, names.mirror_sql, lambda: expected_mirror(spark, names, settings))
    except NotAMirror:
        report.notes.append(f"{names.mirror} is no mirror of this table: it is not compared")
        return
    except Exception as error:
        if not is_spark_error(error):
            raise
        report.notes.append(f"mirror {names.mirror} cannot be compared: {message_of(error)}")
        return
    if mirror is None:
        report.notes.append(
            f"mirror {names.mirror} has merged nothing yet, or does not stand still: it is not compared"
        )
        return
    _compare(mirror, current_fields(load_document(spark, names.table_sql)), report)


def _open(spark: SparkSession, name: TableName, mirror_sql: str, expect: Any) -> _Mirror | None:
    """Find a snapshot of the mirror and the rows that belong to it, though it may be merged into meanwhile."""
    for _ in range(LOOKS_MAX):
        before = tables.current_snapshot(spark, mirror_sql)
        expected: Expected | None = expect()
        after = tables.current_snapshot(spark, mirror_sql)
        if before is None or after is None or expected is None:
            return None
        if before.snapshot_id == after.snapshot_id:
            rows = spark.sql(f"SELECT * FROM {mirror_sql} VERSION AS OF {after.snapshot_id}")
            return _Mirror(name, rows, expected)
    return None


def _compare(mirror: _Mirror, fields: Sequence[Mapping[str, Any]], report: Report) -> None:
    wanted = {name for name in mirror.expected.rows.columns if not name.startswith(RESERVED_PREFIX)}
    if lacking := sorted(wanted - set(mirror.rows.columns)):
        report.findings.append(Finding(Kind.LOSS, f"mirror {mirror.name} lacks columns: {', '.join(lacking)}"))
    values = [field for field in fields if field["name"] in wanted and field["name"] in mirror.rows.columns]
    key = mirror.expected.layout.key
    left = _hashed(mirror.expected.rows, key, values, _EXPECTED)
    right = _hashed(mirror.rows, key, values, _FOUND)
    right = right.groupBy(_KEY).agg(sql.min(_FOUND).alias(_FOUND), sql.count(sql.lit(1)).alias(_COUNT))
    joined = left.join(right, on=_KEY, how="full_outer").cache()
    try:
        compared = joined.count()
        report.notes.append(
            f"mirror {mirror.name}: {compared:,} rows compared, as of snapshot {mirror.expected.snapshot} of the table"
        )
        is_missing, is_extra = sql.col(_FOUND).isNull(), sql.col(_EXPECTED).isNull()
        differs = sql.col(_FOUND) != sql.col(_EXPECTED)
        for kind, condition, text in (
            (Kind.LOSS, is_missing, "rows are missing from"),
            (Kind.SURPLUS, is_extra, "rows are too many in"),
            (Kind.DIFFERENCE, ~is_missing & ~is_extra & differs, "rows are different in"),
            (Kind.DUPLICATE, sql.col(_COUNT) > 1, "keys are there more than once in"),
        ):
            report.findings += _found(joined, condition, kind, f"{text} mirror {mirror.name}")
    finally:
        joined.unpersist()


def _hashed(rows: DataFrame, key: Sequence[str], values: Sequence[Mapping[str, Any]], name: str) -> DataFrame:
    """Give the key of each row as text, and the hash of its values."""
    text = sql.to_json(sql.struct(*(sql.col(quoted(each)) for each in key)))
    return rows.select(text.alias(_KEY), row_hash(values).alias(name))


def _found(joined: DataFrame, condition: Column, kind: Kind, text: str) -> list[Finding]:
    rows = joined.where(condition)
    count = rows.count()
    if not count:
        return []
    shown = ", ".join(row[0] for row in rows.select(_KEY).orderBy(_KEY).limit(KEYS_MAX).collect())
    return [Finding(kind, f"{count:,} {text}, such as {shown}")]
