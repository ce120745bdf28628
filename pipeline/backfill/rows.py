"""Rows of an input as READ changes, all at one position, with the row ids that live changes have.

A row id is the key as Debezium's events with schemas, and `lakefeed push`, write it:

    type                      one column                   in a list of several
    byte, short, int, long    7                            7
    boolean                   true                         true
    string                    itself                       "itself"
    uuid                      in lower case                "in lower case"
    decimal(p, s)             12.50, s digits              "12.50"
    date                      2026-11-16                   "2026-11-16"
    timestamp                 2026-11-16T05:28:00.12       "2026-11-16T05:28:00.12"
    binary                    AP+A, base64                 "AP+A"

The input's value is written, not the table's: a source's `decimal(9, 2)` has two digits after the point, whatever the
table has. Other types have ids too, each value its own, but the input does not show in which form the source writes
them. If a mirror would identify rows by row ids, target.py rejects such a key.

Columns that the input lacks are listed as unchanged, so that mirrors keep their values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pyspark.sql import Column, DataFrame, types
from pyspark.sql import functions as sql

from lakefeed.contract import changes as cdc
from lakefeed.contract.changes import Operation, Position
from lakefeed.pipeline.backfill.types import FittedColumn, read_text
from lakefeed.pipeline.spark.tables import quoted
from lakefeed.settings import SettingsError

_NESTED = (types.StructType, types.ArrayType, types.MapType)


# Spark reads a database's numbers without declared digits as 38 digits, some of them after the point.
_UNDECLARED_DIGITS = 38

_DIGITS_MAX = 38
_SMALLEST_PLAIN = "0.000001"

_BARE_IN_JSON = (types.IntegralType, types.BooleanType, types.FractionalType)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadContext:
    """How rows are read: from which source, by which key, as of which position, and when."""

    source: str
    key: Sequence[str]
    position: Position
    at_us: int


def as_changes(
    rows: DataFrame, columns: Sequence[FittedColumn], table: types.StructType, context: ReadContext
) -> DataFrame:
    """Return rows of an input as rows of a table, with all of its columns."""
    values = {column.name: _value(column) for column in columns}
    own = _cdc_columns(columns, table, context)
    made = [
        (own[field.name] if field.name in own else values.get(field.name, sql.lit(None)))
        .cast(field.dataType)
        .alias(field.name)
        for field in table.fields
    ]
    return rows.select(*made)


def _cdc_columns(columns: Sequence[FittedColumn], table: types.StructType, context: ReadContext) -> dict[str, Column]:
    read_at = sql.timestamp_micros(sql.lit(context.at_us).cast("long"))
    given = {column.name for column in columns}
    lacking = [name for name in table.names if name not in given and not name.startswith(cdc.RESERVED_PREFIX)]
    return {
        cdc.SEQUENCE: sql.lit(context.position.sequence),
        cdc.TIMESTAMP: read_at,
        cdc.OPERATION: sql.lit(Operation.READ.value),
        cdc.ROW_ID: row_id(key_columns(columns, context.key)),
        cdc.SOURCE: sql.lit(context.source),
        cdc.INGESTED_AT: read_at,
        cdc.UNCHANGED: sql.array(*map(sql.lit, lacking)) if lacking else sql.lit(None),
        cdc.RESCUED: _rescued(columns),
        cdc.EPOCH: sql.lit(context.position.epoch or None),
    }


def _value(column: FittedColumn) -> Column:
    if not column.is_text:
        value = sql.col(quoted(column.given))
        return value if column.convert is None else column.convert(value)
    return read_text(quoted(column.given), column.type)


def _rescued(columns: Sequence[FittedColumn]) -> Column:
    """Return the texts that are not values of their column's type, as JSON."""
    texts = [column for column in columns if column.is_text]
    if not texts:
        return sql.lit(None)
    kept = [sql.when(_value(column).isNull(), sql.col(quoted(column.given))).alias(column.name) for column in texts]
    return sql.nullif(sql.to_json(sql.struct(*kept)), sql.lit("{}"))


def key_columns(columns: Sequence[FittedColumn], key: Sequence[str]) -> list[FittedColumn]:
    """Return the columns of the input that form the key. Raise SettingsError if it lacks one, or one is nested."""
    by_name = {name.lower(): column for column in columns for name in (column.given, column.name)}
    missing = [name for name in key if name.lower() not in by_name]
    if missing:
        have = ", ".join(column.given for column in columns)
        raise SettingsError(f"the input has no such column: key={','.join(missing)} columns={have}")
    found = [by_name[name.lower()] for name in key]
    if nested := [column.given for column in found if isinstance(column.type, _NESTED)]:
        raise SettingsError(f"a key column must not be a struct, list or map: key={','.join(nested)}")
    return found


# -- row ids


def row_id(key: Sequence[FittedColumn]) -> Column:
    """Return the row id of a key; null if a part of the key is null."""
    if len(key) == 1:
        return _text(key[0])
    # Not concat_ws, which leaves out nulls: concat is null if any part is.
    parts = [part for column in key for part in (sql.lit(","), _json_text(column))]
    return sql.concat(sql.lit("["), *parts[1:], sql.lit("]"))


def form_problem(column: FittedColumn) -> str | None:
    """Return why the form of live row ids cannot be known from the input; None if it can."""
    type_ = _type(column)
    match type_:
        case types.FloatType() | types.DoubleType():
            return "floating point numbers have several text forms"
        case types.TimestampType():
            return "the precision of the source's column is unknown"
        case types.DecimalType() if type_.scale and (column.is_text or type_.precision == _UNDECLARED_DIGITS):
            return "the scale of the source's column is unknown"
    return None


def column_text(column: FittedColumn) -> str:
    """Write a column of a key with its type, for messages."""
    return f"{column.given} {_type(column).simpleString()}"


def _type(column: FittedColumn) -> types.DataType:
    return column.type if column.is_text else column.given_type


def _text(column: FittedColumn) -> Column:
    name = quoted(column.given)
    value = read_text(name, column.type) if column.is_text else sql.col(name)
    match type_ := _type(column):
        case types.BinaryType():
            return sql.regexp_replace(sql.base64(value), r"\s", "")
        case types.TimestampNTZType():
            return _timestamp_text(value)
        case types.TimestampType():
            # Local time in UTC, whatever the zone of the session.
            seconds = (sql.unix_micros(value).cast("decimal(20, 0)") / 1_000_000).cast("decimal(18, 6)")
            in_utc = sql.expr("TIMESTAMP_NTZ'1970-01-01 00:00:00'") + sql.make_dt_interval(secs=seconds)
            return sql.concat(_timestamp_text(in_utc), sql.lit("Z"))
        case types.DecimalType():
            return _plain_text(value, type_)
    return value.cast("string")


def _plain_text(value: Column, type_: types.DecimalType) -> Column:
    """Write a decimal with all its digits.

    Spark writes values below a millionth with an exponent unless ANSI is set.
    """
    size = sql.abs(value)
    is_small = size < sql.lit(_SMALLEST_PLAIN).cast("decimal(7, 6)")
    fraction = sql.when(is_small, size).cast(types.DecimalType(min(type_.scale + 1, _DIGITS_MAX), type_.scale))
    digits = sql.substring((fraction + 1).cast("string"), 2, _DIGITS_MAX + 1)
    small = sql.concat(sql.when(value < 0, sql.lit("-0")).otherwise(sql.lit("0")), digits)
    return sql.when(is_small, small).otherwise(value.cast("string"))


def _timestamp_text(value: Column) -> Column:
    """Write a time without a zone. Spark drops trailing zeros after the second, as live changes do."""
    return sql.translate(value.cast("string"), " ", "T")


def _json_text(column: FittedColumn) -> Column:
    """Write a value as JSON: numbers and booleans as they are, everything else as text."""
    text = _text(column)
    type_ = _type(column)
    if isinstance(type_, _BARE_IN_JSON) and not isinstance(type_, types.DecimalType):
        return text
    # to_json takes no plain text, so a list is unwrapped. Its escapes are Jackson's, as in Debezium.
    listed = sql.to_json(sql.array(text))
    return sql.when(text.isNotNull(), listed.substr(sql.lit(2), sql.length(listed) - 2))
