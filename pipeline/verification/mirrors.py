"""Compares a mirror with its change table. Owns the comparison; what a mirror should show is pipeline/mirrors/'s.

The change table is folded as of the snapshot that the mirror says it has merged, so that neither has to stand still.
Rows are compared by key and by the hash of their values, not by position: a row that was merged again is the same row.
What keeps one mirror from being compared is told with its table, and the others are compared all the same.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as sql

from pipeline import tables
from pipeline.errors import PipelineError
from pipeline.mirrors.expected import Expected, expected_mirror
from pipeline.mirrors.names import MirrorNames, mirror_names
from pipeline.mirrors.settings import MirrorConfig, MirrorSettings
from pipeline.settings import load_section
from pipeline.spark_errors import is_spark_error, message_of
from pipeline.table_documents import current_fields, load_document
from pipeline.tables import TableName, quoted
from pipeline.verification.renames import Fields, fields_as_of, fields_in
from pipeline.verification.row_hash import row_hash
from writer.columns import RESERVED_PREFIX
from writer.verification.findings import Finding, Kind, Report

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

# Keys that a finding names; all are counted.
KEYS_MAX = 5
# Looks at a mirror that moves on while its marker is read.
LOOKS_MAX = 5

_EXPECTED, _FOUND, _KEY, _COUNT = "expected", "found", "key", "count"
# Moments that differ in microseconds are different keys, and are shown so.
_SHOWN = {"timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX", "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS"}


@dataclass(frozen=True, slots=True)
class _Mirror:
    """A mirror at one of its snapshots, and the rows that it should have there.

    `fields` are the same columns of both, which differ at most in names inside of structs.
    """

    name: TableName
    snapshot: int
    rows: DataFrame
    expected: Expected
    fields: Fields
    expected_fields: Fields


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
        mirror = _open(spark, names, settings)
    except PipelineError as error:
        report.notes.append(f"mirror {names.mirror} is not compared: {error}")
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
    try:
        _compare(mirror, report)
    except Exception as error:
        if not is_spark_error(error):
            raise
        if _has_expired(spark, names, mirror):
            report.notes.append(f"mirror {names.mirror} is not compared: what was read expired meanwhile")
        else:
            text = f"mirror {names.mirror} cannot be read: {message_of(error)}"
            report.findings.append(Finding(Kind.UNREADABLE, text))


def _has_expired(spark: SparkSession, names: MirrorNames, mirror: _Mirror) -> bool:
    read = {names.mirror_sql: mirror.snapshot, names.table_sql: mirror.expected.snapshot}
    return any(
        snapshot not in (each.snapshot_id for each in tables.snapshots(spark, table))
        for table, snapshot in read.items()
    )


def _open(spark: SparkSession, names: MirrorNames, settings: MirrorSettings) -> _Mirror | None:
    """Find a snapshot of the mirror and the rows that belong to it, though it may be merged into meanwhile."""
    for _ in range(LOOKS_MAX):
        before = tables.current_snapshot(spark, names.mirror_sql)
        if before is None:
            return None
        rows = _mirror_rows(spark, names.mirror_sql, before.snapshot_id)
        read = partial(_changes_of_then, spark, names.table_sql, rows.schema)
        expected = expected_mirror(spark, names, settings, read=read)
        after = tables.current_snapshot(spark, names.mirror_sql)
        if after is None or expected is None:
            return None
        if before.snapshot_id == after.snapshot_id:
            document = load_document(spark, names.table_sql)
            fields = fields_in(rows.schema, document, expected.snapshot)
            then = fields_as_of(document, expected.snapshot)
            shown = [{**old, "name": new["name"]} for old, new in zip(then, fields, strict=True)]
            return _Mirror(names.mirror, before.snapshot_id, rows, expected, fields, shown)
    return None


def _mirror_rows(spark: SparkSession, mirror_sql: str, snapshot_id: int) -> DataFrame:
    """Read a mirror as of a snapshot, under the names that its columns have now: its key is kept by these."""
    document = load_document(spark, mirror_sql)
    present = {field["id"]: field["name"] for field in current_fields(document)}
    names = {field["name"]: present.get(field["id"]) for field in fields_as_of(document, snapshot_id)}
    rows = tables.read_as_of(spark, mirror_sql, snapshot_id)
    return rows.select(*(sql.col(quoted(name)).alias(names.get(name) or name) for name in rows.columns))


def _changes_of_then(spark: SparkSession, table_sql: str, mirror: StructType, snapshot_id: int) -> DataFrame:
    """Read a change table as of a snapshot, under the names that the mirror has for its columns."""
    document = load_document(spark, table_sql)
    now = spark.table(table_sql).schema
    shown = []
    for then, field in zip(fields_as_of(document, snapshot_id), fields_in(mirror, document, snapshot_id), strict=True):
        old, new = then["name"], field["name"]
        # The comment comes along: it has the former names, by which changes say what they did not send.
        metadata = now[new].metadata if old != new and new in now.names else None
        shown.append(sql.col(quoted(old)).alias(new, **({"metadata": metadata} if metadata else {})))
    changes = tables.read_as_of(spark, table_sql, snapshot_id)
    if not set(changes.columns) <= set(now.names):
        # Iceberg looks for the columns of a condition among those of now, and fails. A sample of all rows keeps
        # conditions from it.
        changes = changes.sample(1.0)
    return changes.select(*shown)


def _compare(mirror: _Mirror, report: Report) -> None:
    key = mirror.expected.layout.key
    own = {field["name"] for field in mirror.fields if not field["name"].startswith(RESERVED_PREFIX)}
    lacking = sorted((own | set(key)) - set(mirror.rows.columns))
    if lacking:
        report.findings.append(Finding(Kind.LOSS, f"mirror {mirror.name} lacks columns: {', '.join(lacking)}"))
    if set(lacking) & set(key):
        return
    names = own - set(lacking)
    left = _hashed(mirror.expected.rows, key, _only(mirror.expected_fields, names), _EXPECTED)
    right = _hashed(mirror.rows, key, _only(mirror.fields, names), _FOUND)
    by = [_key_column(number) for number in range(len(key))]
    right = right.groupBy(*by).agg(sql.min(_FOUND).alias(_FOUND), sql.count(sql.lit(1)).alias(_COUNT))
    joined = left.join(right, on=by, how="full_outer").cache()
    try:
        _note_differences(joined, mirror, report)
    finally:
        joined.unpersist()


def _only(fields: Fields, names: Set[str]) -> Fields:
    return [field for field in fields if field["name"] in names]


def _note_differences(joined: DataFrame, mirror: _Mirror, report: Report) -> None:
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
        if found := _found(joined.where(condition), mirror.expected.layout.key):
            count, keys = found
            report.findings.append(Finding(kind, f"{count:,} {text} mirror {mirror.name}, such as {keys}"))


def _hashed(rows: DataFrame, key: Sequence[str], values: Fields, name: str) -> DataFrame:
    """Give the key of each row, under names that no other column has, and the hash of its values."""
    keys = (sql.col(quoted(each)).alias(_key_column(number)) for number, each in enumerate(key))
    return rows.select(*keys, row_hash(values).alias(name))


def _key_column(number: int) -> str:
    return f"{_KEY}_{number}"


def _found(rows: DataFrame, key: Sequence[str]) -> tuple[int, str] | None:
    """Count rows, and show the keys of some; None if there are none."""
    count = rows.count()
    if not count:
        return None
    by = [_key_column(number) for number in range(len(key))]
    text = sql.to_json(sql.struct(*(sql.col(each).alias(name) for each, name in zip(by, key, strict=True))), _SHOWN)
    return count, ", ".join(row[0] for row in rows.orderBy(*by).limit(KEYS_MAX).select(text).collect())
