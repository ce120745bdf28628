"""Verification of a mirror: compared with its change table, folded anew as of the snapshot that the mirror has merged.

    change table as of the merged snapshot --fold--> expected rows --+
                                                                     +-- full join by key --> findings of the table
    mirror as of one of its snapshots ------------------------------+

The whole table is folded at once, without the mirror's rows, markers or tombstones. Rows are compared by key and by the
hash of their values, not by position: a row that was merged again is the same row. Neither table has to stand still. A
mirror that cannot be compared is a note of its table, and other mirrors are still compared.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sql
from pyspark.sql.types import ArrayType, DataType, MapType, StructType

from lakefeed.contract import changes as cdc
from lakefeed.contract.changes import RESERVED_PREFIX
from lakefeed.contract.verification import Finding, Kind, Report
from lakefeed.pipeline.errors import PipelineError
from lakefeed.pipeline.mirrors.fold import (
    IS_DELETED,
    column,
    fold,
    lacks_key,
    latest_truncates,
    prepare,
    truncates_in,
    with_key_changes,
    without_truncated,
)
from lakefeed.pipeline.mirrors.marker import load_marker
from lakefeed.pipeline.mirrors.settings import MirrorConfig, MirrorNames, MirrorSettings, mirror_names
from lakefeed.pipeline.mirrors.table import Layout, load_built_key, plan_layout
from lakefeed.pipeline.spark import tables
from lakefeed.pipeline.spark.failures import message_of, spark_errors
from lakefeed.pipeline.spark.tables import (
    TableIdentifier,
    fields_of,
    inner_fields,
    load_metadata,
    names_by_id,
    quoted,
)
from lakefeed.pipeline.verification.scan import row_hash
from lakefeed.settings import load_section

Fields = Sequence[Mapping[str, Any]]

# Keys that a finding names; all are counted.
KEYS_MAX = 5
# Attempts to read a mirror and its marker without a merge in between.
ATTEMPTS_MAX = 5

_EXPECTED, _FOUND, _KEY, _COUNT = "expected", "found", "key", "count"
# Timestamps that differ in microseconds are different keys, and are shown as such.
_SHOWN = {"timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX", "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS"}


@dataclass(frozen=True, slots=True)
class _Mirror:
    """A mirror at one of its snapshots, and the rows that it should have there.

    `fields` and `expected_fields` are the same columns, which differ at most in names inside of structs.
    """

    name: TableIdentifier
    snapshot: int
    rows: DataFrame
    fields: Fields
    merged_snapshot: int
    expected_rows: DataFrame
    expected_fields: Fields
    layout: Layout


def compare_mirror(
    spark: SparkSession, name: TableIdentifier, catalog: str, *, report: Report, options: Mapping[str, Any]
) -> None:
    """Compare the mirror of a change table with it, if there is one, and add the result to the table's report."""
    config = load_section(options.get("config_path"), os.environ, "pipeline.mirror", MirrorConfig)
    settings = config.settings_of(str(name))
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
    except spark_errors() as error:
        report.notes.append(f"mirror {names.mirror} cannot be compared: {message_of(error)}")
        return
    if mirror is None:
        report.notes.append(f"mirror {names.mirror} has merged nothing yet, or merges all the time: it is not compared")
        return
    try:
        _compare(mirror, report)
    except spark_errors() as error:
        read = {names.mirror_sql: mirror.snapshot, names.table_sql: mirror.merged_snapshot}
        if any(
            snapshot not in (each.snapshot_id for each in tables.snapshots(spark, table))
            for table, snapshot in read.items()
        ):
            report.notes.append(f"mirror {names.mirror} is not compared: what was read expired meanwhile")
        else:
            text = f"mirror {names.mirror} cannot be read: {message_of(error)}"
            report.findings.append(Finding(Kind.UNREADABLE, text))


def _open(spark: SparkSession, names: MirrorNames, settings: MirrorSettings) -> _Mirror | None:
    """Find a snapshot of the mirror and the rows that belong to it, though it may be merged into meanwhile.

    Raises: NotAMirror, ChangeTableReplaced, InvalidKey.
    """
    for _ in range(ATTEMPTS_MAX):
        before = tables.current_snapshot_id(tables.properties(spark, names.mirror_sql))
        if before is None:
            return None
        rows = _mirror_rows(spark, names.mirror_sql, before)
        built_key = load_built_key(spark, names)
        marker = load_marker(spark, names.mirror_sql) if built_key else None
        if marker is None:
            return None
        changes = _changes_as_of(spark, names.table_sql, rows.schema, marker.snapshot)
        layout = plan_layout(changes.schema, settings, built_key=built_key)
        expected = _expected_rows(changes, layout)
        if tables.current_snapshot_id(tables.properties(spark, names.mirror_sql)) == before:
            document = load_metadata(spark, names.table_sql)
            fields = fields_in(rows.schema, document, marker.snapshot)
            then = fields_as_of(document, marker.snapshot)
            return _Mirror(
                name=names.mirror,
                snapshot=before,
                rows=rows,
                fields=fields,
                merged_snapshot=marker.snapshot,
                expected_rows=expected,
                expected_fields=[{**old, "name": new["name"]} for old, new in zip(then, fields, strict=True)],
                layout=layout,
            )
    return None


def _mirror_rows(spark: SparkSession, mirror_sql: str, snapshot_id: int) -> DataFrame:
    """Read a mirror as of a snapshot, under the names that its columns have now: its key is stored by these."""
    document = load_metadata(spark, mirror_sql)
    present = {field["id"]: field["name"] for field in fields_of(document)}
    names = {field["name"]: present.get(field["id"]) for field in fields_as_of(document, snapshot_id)}
    rows = tables.read_as_of(spark, mirror_sql, snapshot_id)
    return rows.select(*(sql.col(quoted(name)).alias(names.get(name) or name) for name in rows.columns))


def _changes_as_of(spark: SparkSession, table_sql: str, mirror: StructType, snapshot_id: int) -> DataFrame:
    """Read a change table as of a snapshot, under the names that the mirror has for its columns."""
    document = load_metadata(spark, table_sql)
    now = spark.table(table_sql).schema
    shown = []
    for then, field in zip(fields_as_of(document, snapshot_id), fields_in(mirror, document, snapshot_id), strict=True):
        old, new = then["name"], field["name"]
        # The comment is kept: it has the former names, by which changes list the columns that they did not send.
        metadata = now[new].metadata if old != new and new in now.names else None
        shown.append(sql.col(quoted(old)).alias(new, **({"metadata": metadata} if metadata else {})))
    changes = tables.read_as_of(spark, table_sql, snapshot_id)
    if not set(changes.columns) <= set(now.names):
        # Iceberg looks up the columns of a pushed-down condition in the current schema, and fails. Conditions are not
        # pushed below a sample, here of all rows.
        changes = changes.sample(1.0)
    return changes.select(*shown)


def _expected_rows(changes: DataFrame, layout: Layout) -> DataFrame:
    """Fold changes to the rows that remain after them, in the columns of a mirror of current rows."""
    events = with_key_changes(prepare(changes, layout), layout).where(~lacks_key(layout))
    found = events.agg(
        sql.min(cdc.SOURCE) != sql.max(cdc.SOURCE),
        sql.array_distinct(sql.flatten(sql.collect_set(cdc.UNCHANGED))),
    ).collect()[0]
    rows = without_truncated(events, latest_truncates(truncates_in(events)))
    folded = fold(rows, layout, unchanged=frozenset(found[1] or ()), sources_differ=bool(found[0]))
    return folded.where(~column(IS_DELETED)).select(*map(column, layout.columns))


def _compare(mirror: _Mirror, report: Report) -> None:
    key = mirror.layout.key
    own = {field["name"] for field in mirror.fields if not field["name"].startswith(RESERVED_PREFIX)}
    lacking = sorted((own | set(key)) - set(mirror.rows.columns))
    if lacking:
        report.findings.append(Finding(Kind.LOSS, f"mirror {mirror.name} lacks columns: {', '.join(lacking)}"))
    if set(lacking) & set(key):
        return
    values = own - set(lacking)
    by = _key_columns(key)
    left = _hashed(mirror.expected_rows, key, mirror.expected_fields, values, _EXPECTED)
    right = _hashed(mirror.rows, key, mirror.fields, values, _FOUND)
    right = right.groupBy(*by).agg(sql.min(_FOUND).alias(_FOUND), sql.count(sql.lit(1)).alias(_COUNT))
    joined = left.join(right, on=by, how="full_outer").cache()
    try:
        report.notes.append(
            f"mirror {mirror.name}: {joined.count():,} rows compared, as of snapshot {mirror.merged_snapshot} of the"
            " table"
        )
        report.findings += _differences(joined, mirror)
    finally:
        joined.unpersist()


def _hashed(rows: DataFrame, key: Sequence[str], fields: Fields, names: Set[str], hash_name: str) -> DataFrame:
    """Return the key of each row, under names that no other column has, and the hash of its values."""
    keys = (sql.col(quoted(each)).alias(name) for each, name in zip(key, _key_columns(key), strict=True))
    return rows.select(*keys, row_hash([field for field in fields if field["name"] in names]).alias(hash_name))


def _key_columns(key: Sequence[str]) -> list[str]:
    return [f"{_KEY}_{number}" for number in range(len(key))]


def _differences(joined: DataFrame, mirror: _Mirror) -> Iterator[Finding]:
    key = mirror.layout.key
    by = _key_columns(key)
    shown = sql.to_json(sql.struct(*(sql.col(each).alias(name) for each, name in zip(by, key, strict=True))), _SHOWN)
    is_missing, is_extra = sql.col(_FOUND).isNull(), sql.col(_EXPECTED).isNull()
    differs = sql.col(_FOUND) != sql.col(_EXPECTED)
    for kind, condition, text in (
        (Kind.LOSS, is_missing, "rows are missing from"),
        (Kind.SURPLUS, is_extra, "rows are too many in"),
        (Kind.DIFFERENCE, ~is_missing & ~is_extra & differs, "rows are different in"),
        (Kind.DUPLICATE, sql.col(_COUNT) > 1, "keys exist more than once in"),
    ):
        rows = joined.where(condition)
        if count := rows.count():
            keys = ", ".join(row[0] for row in rows.orderBy(*by).limit(KEYS_MAX).select(shown).collect())
            yield Finding(kind, f"{count:,} {text} mirror {mirror.name}, for example {keys}")


# -- columns of a change table by the names that its mirror has for them, found by field ids
#
# A mirror is compared as of the snapshot that it has merged, with the columns of then. It follows renames before the
# first batch after them. So for a while it has names that the snapshot does not have, or that the table no longer has:
# always those of one of the table's schemas, as a whole.


def fields_as_of(document: Mapping[str, Any], snapshot_id: int) -> Fields:
    """Return the columns that a table had at one of its snapshots."""
    found: Mapping[str, Any] = next((each for each in document["snapshots"] if each["snapshot-id"] == snapshot_id), {})
    return fields_of(document, found.get("schema-id"))


def fields_in(mirror: StructType, document: Mapping[str, Any], snapshot_id: int) -> Fields:
    """Return the columns of then under the mirror's names for them; unchanged if no schema fits the mirror."""
    then = fields_as_of(document, snapshot_id)
    current = document["current-schema-id"]
    newest_first = sorted(
        document["schemas"], key=lambda each: (each["schema-id"] == current, each["schema-id"]), reverse=True
    )
    for schema in newest_first:
        renamed = _renamed(then, names_by_id(schema["fields"]))
        if len({field["name"] for field in renamed}) == len(renamed) and _has_all(mirror, renamed):
            return renamed
    return then


def _renamed(fields: Fields, names: Mapping[int, str]) -> Fields:
    return [
        {**field, "name": names.get(field["id"], field["name"]), "type": _type_renamed(field["type"], names)}
        for field in fields
    ]


def _type_renamed(type_: Any, names: Mapping[int, str]) -> Any:
    if not isinstance(type_, Mapping):
        return type_
    if type_["type"] == "struct":
        return {**type_, "fields": _renamed(type_["fields"], names)}
    return {**type_, **{part["name"]: _type_renamed(part["type"], names) for part in inner_fields(type_)}}


def _has_all(schema: StructType, fields: Fields) -> bool:
    present = set(schema.names)
    return all(
        field["name"] in present and _has_inside(schema[field["name"]].dataType, field["type"])
        for field in fields
        if not field["name"].startswith(RESERVED_PREFIX)  # a mirror has only some of our own columns
    )


def _has_inside(kind: DataType, type_: Any) -> bool:
    if isinstance(kind, StructType) and isinstance(type_, Mapping) and type_["type"] == "struct":
        return _has_all(kind, type_["fields"])
    inside = {part["name"]: part["type"] for part in inner_fields(type_)}
    if isinstance(kind, ArrayType) and "element" in inside:
        return _has_inside(kind.elementType, inside["element"])
    if isinstance(kind, MapType) and "value" in inside:
        return _has_inside(kind.keyType, inside["key"]) and _has_inside(kind.valueType, inside["value"])
    return True
