"""Text as values of a column's type, in Spark, and which text is none. Owns the forms; docs/schemas.md has them.

Spark's casts cut `1.5` down to 1, round decimals and take `2026` for a date. Nothing is rounded, cut off or guessed
here: text that is not exactly a value of the type gives null, and the caller keeps the text.
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


def can_be_text(type_: types.DataType) -> bool:
    """Tell whether values of a type can be read from text."""
    others = (types.BooleanType, types.FloatType, types.DoubleType, types.DecimalType, types.BinaryType)
    return isinstance(type_, (*_CASTS, *others))


def read_text(column: str, type_: types.DataType) -> Column:
    """Read a text column, whose name is quoted, as values of a type; null is what is none.

    Text in a column of text is a uuid: to Spark, these are no type of their own.
    """
    text = sql.expr(column)
    match type_:
        case types.StringType():
            return sql.when(_is(text, _UUID), sql.lower(text))
        case types.BooleanType():
            return sql.when(_is(text, "(?i)true|t"), True).when(_is(text, "(?i)false|f"), False)
        case types.FloatType() | types.DoubleType():
            return _real(column, type_)
        case types.DecimalType():
            return sql.when(_is(text, _decimal(type_)), _cast(column, type_))
        case types.BinaryType():
            data = sql.unbase64(text)
            again = sql.regexp_replace(sql.base64(data), r"\s", "")
            return sql.when(_is(text, "[A-Za-z0-9+/]*={0,2}") & (again == text), data)
    return sql.when(_is(text, _CASTS[type(type_)]), _cast(column, type_))


def _is(text: Column, pattern: str) -> Column:
    return text.rlike(f"^(?:{pattern})$") & ~text.endswith("\n")


def _cast(column: str, type_: types.DataType) -> Column:
    return sql.expr(f"try_cast({column} AS {type_.simpleString()})")


def _real(column: str, type_: types.DataType) -> Column:
    """Read a number; one that is too large for the type is none, and so is text such as `1d` that Java takes."""
    text, number = sql.expr(column), _cast(column, type_)
    is_finite = ~sql.isnan(number) & (sql.abs(number) < sql.lit(float("inf")))
    found = sql.when(_is(text, _REAL) & is_finite, number)
    for name, value in _NOT_FINITE.items():
        found = found.when(sql.lower(text) == name, sql.lit(value).cast(type_))
    return found


def _decimal(type_: types.DecimalType) -> str:
    whole, fraction = type_.precision - type_.scale, type_.scale
    return rf"[+-]?0*\d{{0,{whole}}}(\.\d{{0,{fraction}}}0*)?"
