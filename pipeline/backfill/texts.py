"""Text as exact values of a column's type, in Spark. docs/schemas.md describes the forms.

Spark's casts cut `1.5` to 1, round decimals and accept `2026` as a date. Here nothing is rounded, cut or guessed: text
that is not exactly a value of the type gives null, and the caller keeps the text.
"""

from __future__ import annotations

from pyspark.sql import Column, types
from pyspark.sql import functions as sql

_INTEGER = r"[+-]?\d+"
_REAL = r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?"
_DATE = r"\d{4}-\d\d-\d\d"
_TIME = r"[T ]\d\d:\d\d(:\d\d(\.\d{1,6})?)?"
_ZONE = r"(Z|[+-]\d\d(:?\d\d)?)"
_UUID = r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"
_NOT_FINITE = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity", "infinity": "Infinity", "-infinity": "-Infinity"}

_CASTS: dict[type[types.DataType], str] = {
    types.ByteType: _INTEGER,
    types.ShortType: _INTEGER,
    types.IntegerType: _INTEGER,
    types.LongType: _INTEGER,
    types.DateType: _DATE,
    types.TimestampType: _DATE + _TIME + _ZONE,
    types.TimestampNTZType: _DATE + _TIME,
}


def is_readable_from_text(type_: types.DataType) -> bool:
    """Return whether values of a type can be read from text."""
    others = (types.BooleanType, types.FloatType, types.DoubleType, types.DecimalType, types.BinaryType)
    return isinstance(type_, (*_CASTS, *others))


def read_text(column: str, type_: types.DataType) -> Column:
    """Read a text column, given by its quoted name, as values of a type; null where the text is not a value.

    A target of type text is a uuid column, which Spark has no type for.
    """
    text = sql.expr(column)
    match type_:
        case types.StringType():
            return sql.when(_matches(text, _UUID), sql.lower(text))
        case types.BooleanType():
            return sql.when(_matches(text, "(?i)true|t"), True).when(_matches(text, "(?i)false|f"), False)
        case types.FloatType() | types.DoubleType():
            return _read_real(column, type_)
        case types.DecimalType():
            return sql.when(_matches(text, _decimal_pattern(type_)), _try_cast(column, type_))
        case types.BinaryType():
            data = sql.unbase64(text)
            again = sql.regexp_replace(sql.base64(data), r"\s", "")
            return sql.when(_matches(text, "[A-Za-z0-9+/]*={0,2}") & (again == text), data)
    return sql.when(_matches(text, _CASTS[type(type_)]), _try_cast(column, type_))


def _matches(text: Column, pattern: str) -> Column:
    return text.rlike(f"^(?:{pattern})$") & ~text.endswith("\n")


def _try_cast(column: str, type_: types.DataType) -> Column:
    return sql.expr(f"try_cast({column} AS {type_.simpleString()})")


def _read_real(column: str, type_: types.DataType) -> Column:
    """Read a number; null if it is too large for the type, or a text such as `1d` that only Java accepts."""
    text, number = sql.expr(column), _try_cast(column, type_)
    is_finite = ~sql.isnan(number) & (sql.abs(number) < sql.lit(float("inf")))
    found = sql.when(_matches(text, _REAL) & is_finite, number)
    for name, value in _NOT_FINITE.items():
        found = found.when(sql.lower(text) == name, sql.lit(value).cast(type_))
    return found


def _decimal_pattern(type_: types.DecimalType) -> str:
    whole, fraction = type_.precision - type_.scale, type_.scale
    return rf"[+-]?0*\d{{0,{whole}}}(\.\d{{0,{fraction}}}0*)?"
