"""The column `_cdc_partition`, filled from each event as DoLake chose its buffers. Owns the rule and its values.

With route = "dolake" the first of these that a change has is its value; a change that has none has null:

    1. metadata.partition             its text; a number or other JSON as it is written
    2. the row's column partition_key its text
    3. the row's column created_at    dt=YYYY-MM-DD, in UTC: of a date or time, of text that begins with a date, or of a
                                      whole number of milliseconds since 1970

Columns are looked at as a whole: JSON is parsed once per different text, and never for a table without the column.
"""

from __future__ import annotations

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from writer import columns as names
from writer.iceberg.terms import Transform
from writer.iceberg.transforms import apply_transform

KEY_COLUMN = "partition_key"
TIME_COLUMN = "created_at"

_DATE = r"^(?P<date>\d{4}-\d{2}-\d{2})(?:$|[T ])"
_DAY_PREFIX = "dt="
_MS_PER_DAY = 86_400_000
# Days that have four digits of year: 0001-01-01 to 9999-12-31.
_FIRST_DAY = -719_162
_LAST_DAY = 2_932_896


class _Routed(msgspec.Struct):
    """What of an event's metadata is looked at."""

    partition: msgspec.Raw = msgspec.Raw(b"null")


_ROUTED = msgspec.json.Decoder(_Routed)
_DAY = Transform("day")


def fill_route(table: pa.Table) -> pa.Table:
    """Fill `_cdc_partition` where the table has it."""
    position = table.schema.get_field_index(names.PARTITION)
    if position < 0:
        return table
    found = (_from_metadata(table), _from_key(table), _from_time(table))
    values = pc.coalesce(*(pa.nulls(table.num_rows, pa.string()) if each is None else each for each in found))
    return table.set_column(position, table.schema.field(position), values)


def _column(table: pa.Table, name: str) -> pa.Array | None:
    return table.column(name).combine_chunks() if name in table.column_names else None


def _from_metadata(table: pa.Table) -> pa.Array | None:
    column = _column(table, names.METADATA)
    if column is None or column.null_count == len(column):
        return None
    encoded = column.dictionary_encode()
    texts = pa.array([_routed_text(text) for text in encoded.dictionary.to_pylist()], pa.string())
    return texts.take(encoded.indices)


def _routed_text(metadata: str) -> str | None:
    try:
        value = bytes(_ROUTED.decode(metadata).partition)
        return msgspec.json.decode(value, type=str) if value.startswith(b'"') else _plain_text(value)
    except msgspec.MsgspecError:  # metadata is an object by the protocol; what is not, routes nothing
        return None


def _plain_text(value: bytes) -> str | None:
    return None if value == b"null" else value.decode()


def _from_key(table: pa.Table) -> pa.Array | None:
    column = _column(table, KEY_COLUMN)
    if column is None or pt.is_nested(column.type) or pt.is_fixed_size_binary(column.type) or pt.is_binary(column.type):
        return None
    return column.cast(pa.string())


def _from_time(table: pa.Table) -> pa.Array | None:
    column = _column(table, TIME_COLUMN)
    dates = None if column is None else _dates(column)
    return None if dates is None else pc.binary_join_element_wise(_DAY_PREFIX, dates, "")


def _dates(values: pa.Array) -> pa.Array | None:
    """Give dates as text, null where there is none."""
    if pt.is_string(values.type):
        return pc.struct_field(pc.extract_regex(values, _DATE), "date")
    days = _days(values)
    if days is None:
        return None
    is_known = pc.and_(pc.greater_equal(days, _FIRST_DAY), pc.less_equal(days, _LAST_DAY))
    known = pc.if_else(is_known, days, pa.scalar(None, pa.int64()))
    return known.cast(pa.int32()).cast(pa.date32()).cast(pa.string())


def _days(values: pa.Array) -> pa.Array | None:
    """Give days since 1970, of columns that hold times."""
    if pt.is_integer(values.type):
        # Days of four-digit years are exact as doubles, and what is beyond is left out.
        milliseconds = values.cast(pa.float64(), safe=False)
        return pc.floor(pc.divide(milliseconds, float(_MS_PER_DAY))).cast(pa.int64())
    if pt.is_timestamp(values.type):
        return apply_transform(_DAY, "timestamp_ns" if values.type.unit == "ns" else "timestamp", values)
    return apply_transform(_DAY, "date", values) if pt.is_date32(values.type) else None
