"""Values of every type, with those at the ends of each, and conversions to PyIceberg's own."""

from __future__ import annotations

import datetime as dt
import math
import random
import struct
from decimal import Context, Decimal
from typing import Any
from uuid import UUID

import pyarrow as pa
from pydantic import TypeAdapter
from pyiceberg.types import IcebergType

from lakefeed.iceberg.arrow import to_arrow_type
from lakefeed.iceberg.types import decimal_parts
from tests.seeds import choose_count, choose_seed

EXACT = Context(prec=60)
SAMPLES = choose_count("PYICEBERG_SAMPLES", 60)
INT, LONG = (-(2**31), 2**31 - 1), (-(2**63), 2**63 - 1)
# What Python's datetime holds: years 1 to 9999.
DAYS = (-719_162, 2_932_896)
MICROS = (-62_135_596_800_000_000, 253_402_300_799_999_999)

RANDOM = random.Random(choose_seed("PYICEBERG_SEED", 7))


def whole_numbers(lowest: int, highest: int) -> list[int]:
    edges = [lowest, lowest + 1, highest - 1, highest, 0, 1, -1, 9, 10, -10, -11, 86_399, -86_400, -86_401, 1000, -1001]
    small = [RANDOM.randint(max(lowest, -(10**6)), min(highest, 10**6)) for _ in range(SAMPLES // 2)]
    large = [RANDOM.randint(lowest, highest) for _ in range(SAMPLES // 2)]
    return [value for value in edges + small + large if lowest <= value <= highest]


def decimals(precision: int) -> list[int]:
    at_byte_lengths = (127, 128, -128, -129, 255, 256, -32768, -32769)
    return [*whole_numbers(-(10**precision) + 1, 10**precision - 1), *at_byte_lengths]


def texts(alphabet: str = "abé漢🐋\x00", longest: int = 24) -> list[str]:
    return ["", "iceberg"] + ["".join(RANDOM.choices(alphabet, k=RANDOM.randint(0, longest))) for _ in range(SAMPLES)]


def byte_strings(*, size: int | None = None) -> list[bytes]:
    return [RANDOM.randbytes(RANDOM.randint(0, 24) if size is None else size) for _ in range(SAMPLES)]


# By type: decimals as unscaled integers, dates and times as the stored integers.
VALUES: dict[str, list[Any]] = {
    "boolean": [True, False],
    "int": whole_numbers(*INT),
    "long": whole_numbers(*LONG),
    "float": [
        *(0.0, -0.0, 1.5, math.inf, -math.inf),
        *(struct.unpack("<f", struct.pack("<f", RANDOM.uniform(-1e30, 1e30)))[0] for _ in range(SAMPLES)),
    ],
    "double": [0.0, -0.0, math.inf, 1e308, *(RANDOM.uniform(-1e300, 1e300) for _ in range(SAMPLES))],
    "date": whole_numbers(*DAYS),
    "time": whole_numbers(0, 86_399_999_999),
    "timestamp": whole_numbers(*MICROS),
    "timestamptz": whole_numbers(*MICROS),
    "timestamp_ns": whole_numbers(*LONG),
    "timestamptz_ns": whole_numbers(*LONG),
    "string": texts(),
    "uuid": byte_strings(size=16),
    "binary": byte_strings(),
    "fixed[5]": byte_strings(size=5),
    "decimal(9,2)": decimals(9),
    "decimal(18,0)": decimals(18),
    "decimal(38,10)": decimals(38),
}


def peer_type(type_: str) -> Any:
    return TypeAdapter(IcebergType).validate_python(type_)


def to_peer(type_: str, value: Any) -> Any:
    """Return a value as PyIceberg takes it."""
    if value is None:
        return None
    if decimal := decimal_parts(type_):
        return Decimal(value).scaleb(-decimal[1], EXACT)
    return UUID(bytes=value) if type_ == "uuid" else value


def from_peer(type_: str, value: Any) -> Any:
    """Return one of PyIceberg's values as ours."""
    if isinstance(value, Decimal):
        decimal = decimal_parts(type_)
        assert decimal is not None
        return int(value.scaleb(decimal[1], EXACT))
    match value:
        case UUID():
            return value.bytes
        case dt.datetime():
            return (value.replace(tzinfo=None) - dt.datetime(1970, 1, 1)) // dt.timedelta(microseconds=1)
        case dt.date():
            return value.toordinal() - dt.date(1970, 1, 1).toordinal()
        case dt.time():
            return ((value.hour * 60 + value.minute) * 60 + value.second) * 1_000_000 + value.microsecond
    return value


def to_arrow_array(type_: str, values: list[Any]) -> pa.Array:
    arrow = to_arrow_type(type_)
    if pa.types.is_temporal(arrow):
        return pa.array(values, pa.int32() if type_ == "date" else pa.int64()).cast(arrow)
    if decimal_parts(type_):
        return pa.array([to_peer(type_, value) for value in values], arrow)
    return pa.array(values, arrow)
