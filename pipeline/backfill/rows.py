"""Row ids of what was read: the key as Debezium's events, with their schemas, and `lakefeed push` write it. Owns forms.

    type                                 one column                   in a list of several
    byte, short, int, long               7                            7
    boolean                              true                         true
    string                               itself                       "itself"
    uuid                                 in lower case                "in lower case"
    decimal(p, s)                        12.50, s digits              "12.50"
    date                                 2026-11-16                   "2026-11-16"
    timestamp                            2026-11-16T05:28:00.12       "2026-11-16T05:28:00.12"
    binary                               AP+A, base64                 "AP+A"

What the input has is written, not what the table makes of it: a source's `decimal(9, 2)` has two digits behind the
point, whatever the table holds. Other types have ids too, each value its own, but the source writes them in a form that
the input does not tell. Where a mirror would go by row ids, target.py refuses such a key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pyspark.sql import Column, DataFrame, types
from pyspark.sql import functions as sql

from lakefeed.contract import changes as cdc
from lakefeed.contract.changes import Operation, Position
from lakefeed.pipeline.backfill.types import FittedColumn, read_text, type_text
from lakefeed.pipeline.spark.tables import quoted
from lakefeed.settings import SettingsError

# --- pipeline.backfill.row_ids ----------------------------------------------------------------------------------------


# What Spark makes of a database's numbers that have no digits declared: 38, of which some are behind the point.
_UNDECLARED_DIGITS = 38

_DIGITS_MAX = 38
_SMALLEST_PLAIN = "0.000001"

_BARE_IN_JSON = (types.IntegralType, types.BooleanType, types.FractionalType)


def row_id(key: Sequence[FittedColumn]) -> Column:
    """Name a row by its key; null if a part of the key is."""
    if len(key) == 1:
        return _text(key[0])
    # Without a separator of its own: that one leaves out nulls, this is null if any part is.
    parts = [part for column in key for part in (sql.lit(","), _json_text(column))]
    return sql.concat(sql.lit("["), *parts[1:], sql.lit("]"))


def form_problem(column: FittedColumn) -> str | None:
    """Tell why a key's live form cannot be known from the input; None if it is."""
    type_ = _type(column)
    match type_:
        case types.FloatType() | types.DoubleType():
            return "floating point numbers can be written in several ways"
        case types.TimestampType():
            return "it has as many digits behind the second as the source's column, which is not known"
        case types.DecimalType() if type_.scale and (column.is_text or type_.precision == _UNDECLARED_DIGITS):
            return "it has as many digits behind the point as the source's column, which is not known"
    return None


def shown(column: FittedColumn) -> str:
    """Show a column of a key with its type, for people."""
    return f"{column.given} {type_text(_type(column))}"


def _type(column: FittedColumn) -> types.DataType:
    return column.type if column.is_text else column.given_type


def _text(column: FittedColumn) -> Column:
    name = quoted(column.given)
    value = read_text(name, column.type) if column.is_text else sql.col(name)
    match type_ := _type(column):
        case types.BinaryType():
            return sql.regexp_replace(sql.base64(value), r"\s", "")
        case types.TimestampNTZType():
            return _moment_text(value)
        case types.TimestampType():
            return sql.concat(_moment_text(_in_utc(value)), sql.lit("Z"))
        case types.DecimalType():
            return _plain_text(value, type_)
    return value.cast("string")


def _plain_text(value: Column, type_: types.DecimalType) -> Column:
    """Write a decimal with all its digits: below a millionth, Spark writes it with an exponent unless ANSI is set."""
    size = sql.abs(value)
    is_small = size < sql.lit(_SMALLEST_PLAIN).cast("decimal(7, 6)")
    fraction = sql.when(is_small, size).cast(types.DecimalType(min(type_.scale + 1, _DIGITS_MAX), type_.scale))
    digits = sql.substring((fraction + 1).cast("string"), 2, _DIGITS_MAX + 1)
    small = sql.concat(sql.when(value < 0, sql.lit("-0")).otherwise(sql.lit("0")), digits)
    return sql.when(is_small, small).otherwise(value.cast("string"))


def _moment_text(value: Column) -> Column:
    """Write a time without a zone: Spark takes off the zeros behind the second, as is done for live changes."""
    return sql.translate(value.cast("string"), " ", "T")


def _in_utc(value: Column) -> Column:
    """Give a moment's time in UTC, whatever the zone of the session."""
    seconds = (sql.unix_micros(value).cast("decimal(20, 0)") / 1_000_000).cast("decimal(18, 6)")
    return sql.expr("TIMESTAMP_NTZ'1970-01-01 00:00:00'") + sql.make_dt_interval(secs=seconds)


def _json_text(column: FittedColumn) -> Column:
    """Write a value as JSON: numbers and truth values as they are, all else as text."""
    text = _text(column)
    type_ = _type(column)
    if isinstance(type_, _BARE_IN_JSON) and not isinstance(type_, types.DecimalType):
        return text
    # Spark writes lists only. Escapes are Jackson's, which Debezium has too.
    listed = sql.to_json(sql.array(text))
    return sql.when(text.isNotNull(), listed.substr(sql.lit(2), sql.length(listed) - 2))


# --- pipeline.backfill.reads ------------------------------------------------------------------------------------------
#
# Rows of an input as the changes of a table: READ, all at one position. Owns what the `_cdc_` columns hold.
#
# Columns that the input lacks are named as unchanged, so that mirrors keep what they have there. Row ids: row_ids.py.


_NESTED = (types.StructType, types.ArrayType, types.MapType)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How rows are read: from which source, by which key, as of which position, and when."""

    source: str
    key: Sequence[str]
    position: Position
    at_us: int


def as_changes(
    rows: DataFrame, columns: Sequence[FittedColumn], table: types.StructType, reading: Reading
) -> DataFrame:
    """Give rows of an input as rows of a table, with all columns that it has."""
    values = {column.name: _value(column) for column in columns}
    own = _own_columns(columns, table, reading)
    made = [
        (own[field.name] if field.name in own else values.get(field.name, sql.lit(None)))
        .cast(field.dataType)
        .alias(field.name)
        for field in table.fields
    ]
    return rows.select(*made)


def _own_columns(columns: Sequence[FittedColumn], table: types.StructType, reading: Reading) -> dict[str, Column]:
    moment = sql.timestamp_micros(sql.lit(reading.at_us).cast("long"))
    given = {column.name for column in columns}
    lacking = [name for name in table.names if name not in given and not name.startswith(cdc.RESERVED_PREFIX)]
    return {
        cdc.SEQUENCE: sql.lit(reading.position.sequence),
        cdc.TIMESTAMP: moment,
        cdc.OPERATION: sql.lit(Operation.READ.value),
        cdc.ROW_ID: row_id(key_columns(columns, reading.key)),
        cdc.SOURCE: sql.lit(reading.source),
        cdc.INGESTED_AT: moment,
        cdc.UNCHANGED: sql.array(*map(sql.lit, lacking)) if lacking else sql.lit(None),
        cdc.RESCUED: _rescued(columns),
        cdc.EPOCH: sql.lit(reading.position.epoch or None),
    }


def _value(column: FittedColumn) -> Column:
    if not column.is_text:
        value = sql.col(quoted(column.given))
        return value if column.convert is None else column.convert(value)
    return read_text(quoted(column.given), column.type)


def _rescued(columns: Sequence[FittedColumn]) -> Column:
    """Keep the text of values that are none of their column's type, as JSON."""
    texts = [column for column in columns if column.is_text]
    if not texts:
        return sql.lit(None)
    kept = [sql.when(_value(column).isNull(), sql.col(quoted(column.given))).alias(column.name) for column in texts]
    return sql.nullif(sql.to_json(sql.struct(*kept)), sql.lit("{}"))


def key_columns(columns: Sequence[FittedColumn], key: Sequence[str]) -> list[FittedColumn]:
    """Find the columns of the input that name a row.

    Raises: SettingsError.
    """
    by_name = {name.lower(): column for column in columns for name in (column.given, column.name)}
    missing = [name for name in key if name.lower() not in by_name]
    if missing:
        have = ", ".join(column.given for column in columns)
        raise SettingsError(f"the input has no such column: key={','.join(missing)} columns={have}")
    found = [by_name[name.lower()] for name in key]
    if nested := [column.given for column in found if isinstance(column.type, _NESTED)]:
        raise SettingsError(f"a key is made of single values: key={','.join(nested)}")
    return found
