"""The definition of docs/verification.md, value by value in plain Python: slow, and apart from the code it checks."""

from __future__ import annotations

import datetime as dt
import math
import struct
from typing import Any

from lakefeed.iceberg.types import Field, ListType, MapType, StructType, Type

_MASK = 2**64 - 1
_P1, _P2, _P3, _P4, _P5 = (
    11400714785074694791,
    14029467366897019727,
    1609587929392839161,
    9650029242287828579,
    2870177450012600261,
)
_EPOCH = dt.datetime(1970, 1, 1)


def _rotl(x: int, bits: int) -> int:
    return ((x << bits) | (x >> (64 - bits))) & _MASK


def _round(lane: int, word: int) -> int:
    return _rotl((lane + word * _P2) & _MASK, 31) * _P1 & _MASK


def xxh64(data: bytes, seed: int) -> int:
    at = 0
    if len(data) >= 32:
        lanes = [(seed + _P1 + _P2) & _MASK, (seed + _P2) & _MASK, seed, (seed - _P1) & _MASK]
        while at + 32 <= len(data):
            lanes = [_round(lane, w) for lane, w in zip(lanes, struct.unpack_from("<4Q", data, at), strict=True)]
            at += 32
        result = sum(_rotl(lane, bits) for lane, bits in zip(lanes, (1, 7, 12, 18), strict=True)) & _MASK
        for lane in lanes:
            result = ((result ^ _round(0, lane)) * _P1 + _P4) & _MASK
    else:
        result = (seed + _P5) & _MASK
    result = (result + len(data)) & _MASK
    while at + 8 <= len(data):
        result = (_rotl(result ^ _round(0, struct.unpack_from("<Q", data, at)[0]), 27) * _P1 + _P4) & _MASK
        at += 8
    if at + 4 <= len(data):
        result = (_rotl(result ^ (struct.unpack_from("<I", data, at)[0] * _P1 & _MASK), 23) * _P2 + _P3) & _MASK
        at += 4
    for byte in data[at:]:
        result = _rotl(result ^ (byte * _P5 & _MASK), 11) * _P1 & _MASK
    result = (result ^ (result >> 33)) * _P2 & _MASK
    result = (result ^ (result >> 29)) * _P3 & _MASK
    return result ^ (result >> 32)


def x64(*values: int | bytes) -> int:
    result = 42
    for value in values:
        result = xxh64(value if isinstance(value, bytes) else struct.pack("<Q", value & _MASK), result)
    return result


def row_hash(fields: tuple[Field, ...], row: dict[str, Any]) -> int:
    return x64(_joined(fields, row))


def _joined(fields: tuple[Field, ...], row: dict[str, Any]) -> int:
    result = 0
    for field in fields:
        result ^= _added(field.id, field.type, row[field.name])
    return result


def _added(id_: int, type_: Type, value: Any) -> int:
    if value is None:
        return 0
    match type_:
        case StructType(fields):
            return x64(id_, 1) ^ _joined(fields, value)
        case ListType(element_id, element):
            result = x64(id_, len(value))
            for number, each in enumerate(value):
                result ^= x64(_added(element_id, element, each), number)
            return result
        case MapType(key_id, key, value_id, item):
            result = x64(id_, len(value))
            for each, its in value:
                result ^= x64(_added(key_id, key, each) ^ _added(value_id, item, its))
            return result
    plain = _plain(type_, value)
    if isinstance(plain, int) or type_.startswith("decimal"):
        return x64(id_, plain)
    if len(plain) <= 256:
        return x64(id_, made_up(plain))
    result = 0
    for number in range(0, len(plain), 256):
        result ^= x64(id_, number // 256, made_up(plain[number : number + 256]))
    return result


def made_up(text: bytes) -> bytes:
    odd = len(text) % 8
    return bytes([odd]) + bytes(7 - odd) + text


def _plain(type_: str, value: Any) -> int | bytes:
    if type_ in ("float", "double"):
        value = float("nan") if math.isnan(value) else value + 0.0
        return struct.unpack("<q", struct.pack("<d", value))[0]
    if type_.startswith("decimal"):
        sign, digits, _ = value.as_tuple()
        unscaled = (-1) ** sign * int("".join(map(str, digits)))
        if abs(unscaled) < 10**18 and int(type_.rstrip(")").split(",")[1]) <= 18:
            return unscaled
        return unscaled.to_bytes((unscaled if unscaled >= 0 else ~unscaled).bit_length() // 8 + 1, "big", signed=True)
    match value:
        case bool() | int():
            return int(value)
        case str():
            return value.encode()
        case bytes():
            return value
        case dt.datetime():
            return (value.replace(tzinfo=None) - _EPOCH) // dt.timedelta(microseconds=1)
        case dt.date():
            return (value - _EPOCH.date()).days
        case dt.time():
            return ((value.hour * 60 + value.minute) * 60 + value.second) * 1_000_000 + value.microsecond
    return value.bytes  # a UUID
