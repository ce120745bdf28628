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
the input does not tell. Where a mirror would go by row ids, key_checks.py refuses such a key.
"""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import Column, types
from pyspark.sql import functions as sql

from pipeline.backfill.fitting import FittedColumn
from pipeline.backfill.texts import read_text
from pipeline.backfill.type_fits import type_text
from pipeline.mirrors.sql_text import quoted

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
