"""The hash of a row as Spark computes it, from built-in functions alone. Owns the expression.

The definition is docs/verification.md's, and writer/verification/row_hash.py has it for Arrow: both give the same
number for the same row. `x64` is Spark's `xxhash64` on longs, text and bytes. Fields are those of the table's Iceberg
schema as its JSON has them, because the hash goes by field ids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any

from pyspark.sql import Column
from pyspark.sql import functions as sql

# Longer values are hashed in parts.
PART_BYTES = 256
# Decimals of so many digits are hashed as one long.
LONG_DIGITS = 18
# Iceberg keeps the ids above for columns that tables do not list, such as row ids in files.
LAST_FIELD_ID = 2_147_483_446

# What adds itself, as a long or as it is.
_AS_LONG = frozenset(("boolean", "int", "long"))
_MOMENTS = frozenset(("timestamp", "timestamptz"))
_BYTES = frozenset(("string", "binary"))


class TypeUnknown(ValueError):
    """A column has a type that Spark has none for: its rows cannot be hashed here."""


def row_hash(fields: Sequence[Mapping[str, Any]]) -> Column:
    """Hash a row of the table whose columns these are.

    Raises: TypeUnknown.
    """
    return sql.xxhash64(_joined(fields, lambda name: sql.col(f"`{name.replace('`', '``')}`")))


def _joined(fields: Sequence[Mapping[str, Any]], value_of: Callable[[str], Column]) -> Column:
    """Put together what several fields add to their row."""
    joined = _long(0)
    for field in fields:
        if field["id"] <= LAST_FIELD_ID:
            joined = joined.bitwiseXOR(_added(field["id"], field["type"], value_of(field["name"])))
    return joined


def _added(field_id: int, type_: Any, value: Column) -> Column:
    """Say what a field adds to its row; nulls add nothing."""
    return sql.when(value.isNull(), _long(0)).otherwise(_added_by_value(_long(field_id), type_, value))


def _added_by_value(f: Column, type_: Any, value: Column) -> Column:
    if isinstance(type_, Mapping):
        return _added_by_parts(f, type_, value)
    kind = str(type_)
    if kind in _AS_LONG:
        return sql.xxhash64(f, value.cast("long"))
    if kind in ("float", "double"):
        return sql.xxhash64(f, value.cast("double"))
    if kind in _MOMENTS:
        return sql.xxhash64(f, value)
    if kind == "date":
        return sql.xxhash64(f, sql.unix_date(value).cast("long"))
    if kind.startswith("decimal"):
        return _added_by_decimal(f, kind, value)
    if kind == "uuid":
        return sql.xxhash64(f, _whole_words(sql.unhex(sql.regexp_replace(value, "-", ""))))
    if kind in _BYTES or kind.startswith("fixed"):
        return _added_by_bytes(f, value)
    raise TypeUnknown(f"no hash in Spark for a column of this type: type={kind}")


def _added_by_bytes(f: Column, value: Column) -> Column:
    """Hash text or bytes, long ones in parts. The parts cost more, so that only long values take that way."""
    data = value.cast("binary")
    size = sql.octet_length(data)
    last = sql.floor((size - 1) / PART_BYTES).cast("int")
    parts = sql.transform(
        sql.sequence(sql.lit(0), sql.greatest(last, sql.lit(0))),
        lambda i: sql.xxhash64(f, i.cast("long"), _whole_words(data.substr(i * PART_BYTES + 1, sql.lit(PART_BYTES)))),
    )
    return sql.when(size <= PART_BYTES, sql.xxhash64(f, _whole_words(data))).otherwise(_xor_of(parts, _long(0)))


def _whole_words(data: Column) -> Column:
    """Make bytes up to words of eight: in front, how many the first one has, and zeros."""
    leads = sql.array(*(sql.lit(bytes([odd]) + bytes(7 - odd)) for odd in range(8)))
    return sql.concat(sql.element_at(leads, sql.octet_length(data) % 8 + 1), data)


def _added_by_decimal(f: Column, kind: str, value: Column) -> Column:
    """Hash a decimal. Of a type of up to 18 digits Spark takes the unscaled value as a long, of others its bytes."""
    precision, scale = (int(part) for part in kind.rstrip(")").partition("(")[2].split(","))
    as_long = sql.xxhash64(f, value.cast(f"decimal({LONG_DIGITS}, {min(scale, LONG_DIGITS)})"))
    as_bytes = sql.xxhash64(f, value.cast(f"decimal(38, {scale})"))
    if precision <= LONG_DIGITS:
        return as_long
    if scale > LONG_DIGITS:
        return as_bytes
    return sql.when(sql.abs(value) < sql.lit(Decimal(10 ** (LONG_DIGITS - scale))), as_long).otherwise(as_bytes)


def _added_by_parts(f: Column, type_: Mapping[str, Any], value: Column) -> Column:
    match type_:
        case {"type": "struct", "fields": fields}:
            return sql.xxhash64(f, _long(1)).bitwiseXOR(_joined(fields, value.getField))
        case {"type": "list", "element-id": element_id, "element": element}:
            added = sql.transform(
                value, lambda each, i: sql.xxhash64(_added(element_id, element, each), i.cast("long"))
            )
        case {"type": "map", "key-id": key_id, "key": key, "value-id": value_id, "value": item}:
            added = sql.transform(
                sql.map_entries(value),
                lambda entry: sql.xxhash64(
                    _added(key_id, key, entry["key"]).bitwiseXOR(_added(value_id, item, entry["value"]))
                ),
            )
        case _:
            raise TypeUnknown(f"no hash in Spark for a column of this type: type={type_.get('type')}")
    return _xor_of(added, sql.xxhash64(f, sql.size(value).cast("long")))


def _xor_of(parts: Column, first: Column) -> Column:
    return sql.aggregate(parts, first, lambda left, right: left.bitwiseXOR(right))


def _long(number: int) -> Column:
    return sql.lit(number).cast("long")
