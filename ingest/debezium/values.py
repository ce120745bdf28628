"""Single values: from Kafka Connect's JSON with its schema to JSON that loses nothing. Owns the logical types.

    Decimal, VariableScaleDecimal   "12.50"                    base64 of two's complement, scale beside it
    Date, Time, Timestamp, ...      "2026-11-16T05:28:00.123"  see times.py; days, or ticks of the type's precision
    IsoDate, IsoTime, IsoTimestamp  the same                   without the Z, which stands for no zone
    ZonedTimestamp, ZonedTime       as they came
    Bits                            "000100"                   padded to the declared length (of bit varying: its most)
    float, double                   as they came               "NaN" and "Infinity" are irregular
    array, map, struct              their parts, each by its own type
    anything else                   as it came

A value that does not fit its own schema is kept as it came and is irregular: one odd value must not stop a source.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterable
from decimal import Decimal
from functools import partial
from typing import NamedTuple, TypeAlias

import msgspec

from ingest.debezium import times
from ingest.debezium.events import NULL
from ingest.debezium.times import MICROS, MILLIS, NANOS, Time

# PostgreSQL's longest numeric has 147455 digits, which is less than this.
DECIMAL_MAX_BYTES = 64 * 1024
DECIMAL_MAX_SCALE = 16_383
# PostgreSQL's longest bit string is 83886080 bits, of which nobody wants a character each.
BITS_MAX_LENGTH = 64 * 1024
# Zeros cost a sender nothing: written out, a value takes this many characters at most, or this many for each that came.
WRITTEN_MAX_CHARS = 256
GROWTH_MAX = 8

_INTEGER = re.compile(rb"-?[0-9]{1,19}")
_TEXT_START = b'"'
_LIST_START = b"["

_DATE = re.compile(r"\d{4}-\d\d-\d\d")
_TIME = re.compile(r"\d\d:\d\d:\d\d(\.\d+)?")
_TIMESTAMP = re.compile(rf"{_DATE.pattern}T{_TIME.pattern}")
_ZONED = re.compile(rf"{_TIMESTAMP.pattern}(Z|[+-]\d\d:\d\d)")

_encode = msgspec.json.Encoder().encode
_decode_text = msgspec.json.Decoder(str).decode
_decode_list = msgspec.json.Decoder(list[msgspec.Raw]).decode
_decode_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class TypeSchema(msgspec.Struct):
    """The schema of a value, as Kafka Connect writes it beside the payload."""

    type: str = ""
    name: str | None = None
    field: str | None = None
    parameters: dict[str, str] | None = None
    fields: list[TypeSchema] | None = None
    items: TypeSchema | None = None
    values: TypeSchema | None = None


class Reading(NamedTuple):
    """A value as JSON. A regular one is exactly what its type promises."""

    json: bytes
    regular: bool


Converter: TypeAlias = Callable[[bytes], Reading]


class _VariableScaleDecimal(msgspec.Struct):
    scale: int
    value: str


_decode_variable_scale = msgspec.json.Decoder(_VariableScaleDecimal).decode


def converter_of(schema: TypeSchema) -> Converter | None:
    """Choose how values of a schema are read; None if they stay as they came."""
    name = schema.name or ""
    if name in _BY_NAME:
        return _lenient(_BY_NAME[name])
    if name == "org.apache.kafka.connect.data.Decimal":
        return _lenient(partial(_read_decimal, scale=_parameter(schema, "scale")))
    if name == "io.debezium.data.Bits":
        return _lenient(partial(_read_bits, length=_parameter(schema, "length")))
    match schema.type:
        case "float" | "double":
            return _read_float
        case "array":
            return _of_parts(schema.items, _read_list)
        case "map":
            return _of_parts(schema.values, _read_map)
        case "struct":
            return _struct_converter(schema)
    return None


def converters_of(fields: list[TypeSchema] | None) -> dict[str, Converter]:
    """Choose how the fields of a struct are read; those that stay as they came are left out."""
    chosen = {each.field: converter_of(each) for each in fields or () if each.field is not None}
    return {name: converter for name, converter in chosen.items() if converter is not None}


def read_fields(columns: dict[str, msgspec.Raw], converters: dict[str, Converter]) -> list[str]:
    """Convert fields in place; gives the names of those that are irregular."""
    irregular = []
    for name, converter in converters.items():
        value = columns.get(name)
        if value is None or value == NULL:
            continue
        reading = converter(bytes(value))
        columns[name] = msgspec.Raw(reading.json)
        if not reading.regular:
            irregular.append(name)
    return irregular


def _lenient(read: Converter) -> Converter:
    def read_or_keep(value: bytes) -> Reading:
        try:
            return read(value)
        except (ValueError, msgspec.MsgspecError):
            return Reading(value, regular=False)

    return read_or_keep


def _parameter(schema: TypeSchema, name: str) -> int | None:
    text = (schema.parameters or {}).get(name, "")
    return int(text) if re.fullmatch(r"-?[0-9]{1,6}", text) else None


def _read_time(value: bytes, write: Callable[[int], Time]) -> Reading:
    if _INTEGER.fullmatch(value) is None:
        raise ValueError("not a whole number")
    return _as_reading(write(int(value)))


def _read_local(value: bytes, pattern: re.Pattern[str]) -> Reading:
    return _as_reading(times.without_zone(_decode_text(value), pattern.fullmatch))


def _as_reading(time: Time) -> Reading:
    return Reading(_encode(time.text), time.regular)


def _read_zoned(value: bytes) -> Reading:
    return Reading(value, regular=_ZONED.fullmatch(_decode_text(value)) is not None)


def _read_float(value: bytes) -> Reading:
    return Reading(value, regular=not value.startswith(_TEXT_START))


def _read_decimal(value: bytes, scale: int | None) -> Reading:
    return Reading(_encode(_plain(_decode_text(value), scale)), regular=True)


def _read_variable_scale(value: bytes) -> Reading:
    decimal = _decode_variable_scale(value)
    return Reading(_encode(_plain(decimal.value, decimal.scale)), regular=True)


def _plain(text: str, scale: int | None) -> str:
    """Write a decimal with all its digits and no exponent."""
    unscaled = base64.b64decode(text, validate=True)
    if not unscaled or len(unscaled) > DECIMAL_MAX_BYTES or scale is None or abs(scale) > DECIMAL_MAX_SCALE:
        raise ValueError("not a decimal")
    _check_growth(abs(scale), text)
    number = int.from_bytes(unscaled, "big", signed=True)
    # str(int) has a limit on digits that PostgreSQL's numeric goes beyond.
    digits = format(Decimal(abs(number)), "f")
    sign = "-" if number < 0 else ""
    if scale <= 0:
        return sign + (digits + "0" * -scale if number else "0")
    digits = digits.rjust(scale + 1, "0")
    return f"{sign}{digits[:-scale]}.{digits[-scale:]}"


def _read_bits(value: bytes, length: int | None) -> Reading:
    text = _decode_text(value)
    bits = int.from_bytes(base64.b64decode(text, validate=True), "little")
    if length is None or not bits.bit_length() <= length <= BITS_MAX_LENGTH:
        raise ValueError("not a bit string of this length")
    _check_growth(length, text)
    return Reading(_encode(f"{bits:0{length}b}"), regular=True)


def _check_growth(chars: int, value: str | bytes) -> None:
    if chars > max(WRITTEN_MAX_CHARS, GROWTH_MAX * len(value)):
        raise ValueError("too long once it is written out")


def _of_parts(part: TypeSchema | None, read: Callable[[bytes, Converter], Reading]) -> Converter | None:
    converter = converter_of(part) if part is not None else None
    return None if converter is None else _lenient(lambda value: read(value, converter))


def _read_list(value: bytes, converter: Converter) -> Reading:
    readings = _read_parts(_decode_list(value), value, converter)
    return Reading(b"[" + b",".join(each.json for each in readings) + b"]", all(each.regular for each in readings))


def _read_map(value: bytes, converter: Converter) -> Reading:
    if value.startswith(_LIST_START):
        return Reading(value, regular=True)  # pairs: the keys are no text
    entries = _decode_object(value)
    readings = _read_parts(entries.values(), value, converter)
    json = _encode({name: msgspec.Raw(each.json) for name, each in zip(entries, readings, strict=True)})
    return Reading(json, all(each.regular for each in readings))


def _read_parts(parts: Iterable[msgspec.Raw], whole: bytes, converter: Converter) -> list[Reading]:
    readings, chars = [], 0
    for part in parts:
        readings.append(_read_part(part, converter))
        chars += len(readings[-1].json)
        _check_growth(chars, whole)
    return readings


def _read_part(part: msgspec.Raw, converter: Converter) -> Reading:
    return Reading(b"null", regular=True) if part == NULL else converter(bytes(part))


def _struct_converter(schema: TypeSchema) -> Converter | None:
    converters = converters_of(schema.fields)
    return _lenient(partial(_read_struct, converters=converters)) if converters else None


def _read_struct(value: bytes, converters: dict[str, Converter]) -> Reading:
    fields = _decode_object(value)
    irregular = read_fields(fields, converters)
    return Reading(_encode(fields), not irregular)


def _of_ticks(write: Callable[[int, int], Time], per_second: int) -> Converter:
    return partial(_read_time, write=lambda ticks: write(ticks, per_second))


_BY_NAME: dict[str, Converter] = {
    "io.debezium.data.VariableScaleDecimal": _read_variable_scale,
    "io.debezium.time.Date": partial(_read_time, write=times.date_of),
    "io.debezium.time.Time": _of_ticks(times.time_of, MILLIS),
    "io.debezium.time.MicroTime": _of_ticks(times.time_of, MICROS),
    "io.debezium.time.NanoTime": _of_ticks(times.time_of, NANOS),
    "io.debezium.time.Timestamp": _of_ticks(times.timestamp_of, MILLIS),
    "io.debezium.time.MicroTimestamp": _of_ticks(times.timestamp_of, MICROS),
    "io.debezium.time.NanoTimestamp": _of_ticks(times.timestamp_of, NANOS),
    "org.apache.kafka.connect.data.Date": partial(_read_time, write=times.date_of),
    "org.apache.kafka.connect.data.Time": _of_ticks(times.time_of, MILLIS),
    "org.apache.kafka.connect.data.Timestamp": _of_ticks(times.timestamp_of, MILLIS),
    "io.debezium.time.IsoDate": partial(_read_local, pattern=_DATE),
    "io.debezium.time.IsoTime": partial(_read_local, pattern=_TIME),
    "io.debezium.time.IsoTimestamp": partial(_read_local, pattern=_TIMESTAMP),
    "io.debezium.time.ZonedTimestamp": _read_zoned,
}
