"""Compares a mirror with its change table. Owns the comparison; what a mirror should show is pipeline/mirrors/'s.

The change table is folded as of the snapshot that the mirror says it has merged, so that neither has to stand still.
Rows are compared by key and by the hash of their values, not by position: a row that was merged again is the same row.
What keeps one mirror from being compared is told with its table, and the others are compared all the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F  # noqa: N812 - as everybody names it
from pyspark.sql.types import ArrayType, DataType, MapType, StructType

from lakefeed.contract import changes as columns
from lakefeed.contract.changes import RESERVED_PREFIX
from lakefeed.contract.verification import Finding, Kind, Report
from lakefeed.pipeline.errors import PipelineError
from lakefeed.pipeline.mirrors.fold import (
    IS_DELETED,
    TRUNCATE,
    column,
    fold,
    lacks_key,
    prepare,
    with_key_changes,
    without_truncated,
)
from lakefeed.pipeline.mirrors.layout import Layout, plan_layout
from lakefeed.pipeline.mirrors.positions import Truncate, latest_truncates
from lakefeed.pipeline.mirrors.settings import MirrorConfig, MirrorNames, MirrorSettings, mirror_names
from lakefeed.pipeline.mirrors.table import load_built_key, load_marker
from lakefeed.pipeline.spark import tables
from lakefeed.pipeline.spark.failures import is_spark_error, message_of
from lakefeed.pipeline.spark.metadata import current_fields, fields_of, load_metadata
from lakefeed.pipeline.spark.sql import quoted
from lakefeed.pipeline.spark.tables import TableIdentifier, read_as_of
from lakefeed.pipeline.verification.scan import row_hash
from lakefeed.settings import load_section

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


# --- pipeline.verification.renames ------------------------------------------------------------------------------------
#
# Columns of a change table by the names that its mirror has for them. Core: owns finding these, by field ids.
#
# A mirror is compared as of the snapshot that it has merged, with the columns of then. It follows renames before the
# first batch behind them, so that for a while it has names that the snapshot has not, or that the table has no longer:
# it
# has those of one of the table's schemas, as a whole.


Fields = Sequence[Mapping[str, Any]]


def fields_as_of(document: Mapping[str, Any], snapshot_id: int) -> Fields:
    """Give the columns that a table had at one of its snapshots."""
    found: Mapping[str, Any] = next((each for each in document["snapshots"] if each["snapshot-id"] == snapshot_id), {})
    schema_id = found.get("schema-id")
    return current_fields(document) if schema_id is None else fields_of(document, schema_id)


def fields_in(mirror: StructType, document: Mapping[str, Any], snapshot_id: int) -> Fields:
    """Give the columns of then under the names that a mirror has for them; as they were if it has none of them all."""
    then = fields_as_of(document, snapshot_id)
    for schema in _newest_first(document):
        renamed = _renamed(then, dict(_names(schema["fields"])))
        if len({field["name"] for field in renamed}) == len(renamed) and _has_all(mirror, renamed):
            return renamed
    return then


def _newest_first(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    current = document["current-schema-id"]
    return sorted(document["schemas"], key=lambda each: (each["schema-id"] == current, each["schema-id"]), reverse=True)


def _inner(type_: Any) -> Iterator[tuple[str, Any]]:
    """Give the types inside of one, by where they stand."""
    match type_:
        case {"type": "list", "element": element}:
            yield "element", element
        case {"type": "map", "key": key, "value": value}:
            yield "key", key
            yield "value", value


def _names(fields: Fields) -> Iterator[tuple[int, str]]:
    for field in fields:
        yield field["id"], field["name"]
        yield from _names_inside(field["type"])


def _names_inside(type_: Any) -> Iterator[tuple[int, str]]:
    if isinstance(type_, Mapping) and type_["type"] == "struct":
        yield from _names(type_["fields"])
    for _, each in _inner(type_):
        yield from _names_inside(each)


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
    return {**type_, **{place: _type_renamed(each, names) for place, each in _inner(type_)}}


def _has_all(schema: StructType, fields: Fields) -> bool:
    present = set(schema.names)
    return all(
        field["name"] in present and _has_inside(schema[field["name"]].dataType, field["type"])
        for field in fields
        if not field["name"].startswith(RESERVED_PREFIX)  # a mirror has but some of our own, and they keep their names
    )


def _has_inside(kind: DataType, type_: Any) -> bool:
    if isinstance(kind, StructType) and isinstance(type_, Mapping) and type_["type"] == "struct":
        return _has_all(kind, type_["fields"])
    inside = dict(_inner(type_))
    if isinstance(kind, ArrayType) and "element" in inside:
        return _has_inside(kind.elementType, inside["element"])
    if isinstance(kind, MapType) and "value" in inside:
        return _has_inside(kind.keyType, inside["key"]) and _has_inside(kind.valueType, inside["value"])
    return True


# --- pipeline.mirrors.expected ----------------------------------------------------------------------------------------
#
# What a mirror should show, computed anew from its change table. For whoever verifies mirrors.
#
# The whole table is folded at once, without the mirror's rows, markers or tombstones, as of the snapshot that the
# mirror's marker names. Rows are compared by value: a row that was merged again may stand at another position.


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

    Raises: NotAMirror, ChangeTableReplaced, InvalidKey.
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
    events = with_key_changes(prepare(changes, layout), layout).where(~lacks_key(layout))
    found = events.agg(
        F.min(columns.SOURCE) != F.max(columns.SOURCE),
        F.array_distinct(F.flatten(F.collect_set(columns.UNCHANGED))),
    ).collect()[0]
    emptied = events.where(column(columns.OPERATION) == TRUNCATE)
    told = emptied.select(columns.SOURCE, columns.EPOCH, columns.SEQUENCE).distinct().collect()
    rows = without_truncated(events, latest_truncates(Truncate(*row) for row in told))
    folded = fold(rows, layout, unchanged=frozenset(found[1] or ()), sources_differ=bool(found[0]))
    return folded.where(~column(IS_DELETED)).select(*map(column, layout.columns))


# --- pipeline.verification.mirrors ------------------------------------------------------------------------------------


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

    name: TableIdentifier
    snapshot: int
    rows: DataFrame
    expected: Expected
    fields: Fields
    expected_fields: Fields


def compare_mirror(
    spark: SparkSession, name: TableIdentifier, catalog: str, *, report: Report, options: Mapping[str, Any]
) -> None:
    """Compare the mirror of a change table with it, if there is one, and add what was found to the table's report."""
    settings = load_section(options.get("config_path"), os.environ, "pipeline.mirror", MirrorConfig).settings_of(
        str(name)
    )
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
            document = load_metadata(spark, names.table_sql)
            fields = fields_in(rows.schema, document, expected.snapshot)
            then = fields_as_of(document, expected.snapshot)
            shown = [{**old, "name": new["name"]} for old, new in zip(then, fields, strict=True)]
            return _Mirror(names.mirror, before.snapshot_id, rows, expected, fields, shown)
    return None


def _mirror_rows(spark: SparkSession, mirror_sql: str, snapshot_id: int) -> DataFrame:
    """Read a mirror as of a snapshot, under the names that its columns have now: its key is kept by these."""
    document = load_metadata(spark, mirror_sql)
    present = {field["id"]: field["name"] for field in current_fields(document)}
    names = {field["name"]: present.get(field["id"]) for field in fields_as_of(document, snapshot_id)}
    rows = tables.read_as_of(spark, mirror_sql, snapshot_id)
    return rows.select(*(F.col(quoted(name)).alias(names.get(name) or name) for name in rows.columns))


def _changes_of_then(spark: SparkSession, table_sql: str, mirror: StructType, snapshot_id: int) -> DataFrame:
    """Read a change table as of a snapshot, under the names that the mirror has for its columns."""
    document = load_metadata(spark, table_sql)
    now = spark.table(table_sql).schema
    shown = []
    for then, field in zip(fields_as_of(document, snapshot_id), fields_in(mirror, document, snapshot_id), strict=True):
        old, new = then["name"], field["name"]
        # The comment comes along: it has the former names, by which changes say what they did not send.
        metadata = now[new].metadata if old != new and new in now.names else None
        shown.append(F.col(quoted(old)).alias(new, **({"metadata": metadata} if metadata else {})))
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
    right = right.groupBy(*by).agg(F.min(_FOUND).alias(_FOUND), F.count(F.lit(1)).alias(_COUNT))
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
    is_missing, is_extra = F.col(_FOUND).isNull(), F.col(_EXPECTED).isNull()
    differs = F.col(_FOUND) != F.col(_EXPECTED)
    for kind, condition, text in (
        (Kind.LOSS, is_missing, "rows are missing from"),
        (Kind.SURPLUS, is_extra, "rows are too many in"),
        (Kind.DIFFERENCE, ~is_missing & ~is_extra & differs, "rows are different in"),
        (Kind.DUPLICATE, F.col(_COUNT) > 1, "keys are there more than once in"),
    ):
        if found := _found(joined.where(condition), mirror.expected.layout.key):
            count, keys = found
            report.findings.append(Finding(kind, f"{count:,} {text} mirror {mirror.name}, such as {keys}"))


def _hashed(rows: DataFrame, key: Sequence[str], values: Fields, name: str) -> DataFrame:
    """Give the key of each row, under names that no other column has, and the hash of its values."""
    keys = (F.col(quoted(each)).alias(_key_column(number)) for number, each in enumerate(key))
    return rows.select(*keys, row_hash(values).alias(name))


def _key_column(number: int) -> str:
    return f"{_KEY}_{number}"


def _found(rows: DataFrame, key: Sequence[str]) -> tuple[int, str] | None:
    """Count rows, and show the keys of some; None if there are none."""
    count = rows.count()
    if not count:
        return None
    by = [_key_column(number) for number in range(len(key))]
    text = F.to_json(F.struct(*(F.col(each).alias(name) for each, name in zip(by, key, strict=True))), _SHOWN)
    return count, ", ".join(row[0] for row in rows.orderBy(*by).limit(KEYS_MAX).select(text).collect())
