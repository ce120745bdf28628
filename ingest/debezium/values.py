"""Rows and values of Debezium events: logical types, TOAST placeholders, row ids and Connect schemas.

Values with a Kafka Connect schema become JSON that loses nothing:

    Decimal, VariableScaleDecimal   "12.50"                    base64 of two's complement, with its scale
    Date, Time, Timestamp, ...      "2026-11-16T05:28:00.123"  days, or ticks of the type's precision
    IsoDate, IsoTime, IsoTimestamp  the same                   without the Z, which means no zone
    ZonedTimestamp, ZonedTime       unchanged
    Bits                            "000100"                   padded to the declared length (bit varying: the maximum)
    float, double                   unchanged                  "NaN" and "Infinity" are irregular
    array, map, struct              their parts, each by its own type
    anything else                   unchanged

A value that does not fit its own schema is kept unchanged and is irregular: one odd value must not stop a source.

Days and ticks count from 1970-01-01 in the proleptic Gregorian calendar, as in PostgreSQL and Java:

    years 1 to 9999                2026-11-16, 05:28:00.123, 2026-11-16T05:28:00.123456    regular
    other years of PostgreSQL      -0043-03-15 (44 BC), +12026-01-01                       irregular
    overflowed infinities          infinity, -infinity                                     irregular
    any other number               its digits                                              irregular

PostgreSQL's infinite dates and timestamps arrive as overflowed numbers. Those below were observed; PostgreSQL cannot
hold any of them as a moment, so no real value is mistaken for one.

A row that needs none of these steps keeps its bytes:

    1. columns that cannot be trusted are dropped (before-images only, see events.TableKeys)
    2. columns with the placeholder of an unchanged TOAST value are dropped and named in `unchanged`
    3. values are converted by the schema that came with the row, if any

The placeholder takes the shape of its column: text and json hold it unchanged, bytea its base64, text[] a list of it,
integer and float arrays its character codes, hstore maps an entry of it. A real value that equals the placeholder
cannot be distinguished from it.

Every event of a table repeats its schema, which is ten times the size of the row, so each schema is parsed once.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import date
from decimal import Decimal
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeAlias

import msgspec

from lakefeed.ingest.debezium.events import NO_IMAGE, NULL, DebeziumMalformed

MILLIS = 1_000
MICROS = 1_000_000
NANOS = 1_000_000_000

_DAY_S = 86_400
_EPOCH_ORDINAL = date(1970, 1, 1).toordinal()
_CYCLE_YEARS = 400
_CYCLE_DAYS = 146_097

_REGULAR_YEAR_MIN = 1
_REGULAR_YEAR_MAX = 9999
# 4713 BC is PostgreSQL's first year; microseconds in 64 bits end early in the year after the last one here.
_YEAR_MIN = -4712
_YEAR_MAX = 294_246

# Streamed dates wrap at 32 bits, those of a snapshot are the timestamp's infinity in days, cut to 32 bits.
_INFINITE_DAYS = {-2_147_472_692: "infinity", -622_191_234: "infinity", -2_147_472_691: "-infinity"}
_INFINITE_MILLIS = {9_223_372_036_825_200: "infinity", -9_223_372_036_832_400: "-infinity"}
# The same as Debezium writes them in its text modes.
_INFINITE_TEXTS = {
    "-5877611-06-21": "infinity",
    "+292278994-08-16": "infinity",
    "-5877611-06-22": "-infinity",
    "+294247-01-10T04:00:25.2": "infinity",
    "-290308-12-21T19:59:27.6": "-infinity",
}

# PostgreSQL's longest numeric has 147455 digits, which is less than this.
DECIMAL_MAX_BYTES = 64 * 1024
DECIMAL_MAX_SCALE = 16_383
# PostgreSQL's longest bit string is 83886080 bits, too long for one character each.
BITS_MAX_LENGTH = 64 * 1024
# Zeros are free for a sender: written out, a value has at most this many characters, or this many per one received.
WRITTEN_MAX_CHARS = 256
GROWTH_MAX = 8
# A placeholder is a setting, so a service has few of them.
PLACEHOLDERS_MAX = 16
# White space and decimals that a sender may put between character codes.
_CODE_MAX_BYTES = 8
# Tables, times their versions, that are remembered; larger schemas than this are read anew, so memory stays bounded.
SCHEMAS_MAX = 512
SCHEMA_MAX_BYTES = 64 * 1024

_INTEGER = re.compile(rb"-?[0-9]{1,19}")
_TEXT_START = b'"'
_LIST_START = b"["

_DATE = re.compile(r"\d{4}-\d\d-\d\d")
_TIME = re.compile(r"\d\d:\d\d:\d\d(\.\d+)?")
_TIMESTAMP = re.compile(rf"{_DATE.pattern}T{_TIME.pattern}")
_ZONED = re.compile(rf"{_TIMESTAMP.pattern}(Z|[+-]\d\d:\d\d)")
_WRAPPING = {"schema", "payload"}

_encode = msgspec.json.Encoder().encode
_decode_text = msgspec.json.Decoder(str).decode
_decode_list = msgspec.json.Decoder(list[msgspec.Raw]).decode
_decode_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_any = msgspec.json.Decoder().decode


class Converted(NamedTuple):
    """A value as JSON. A regular one is exactly what its type promises."""

    json: bytes
    regular: bool


Converter: TypeAlias = Callable[[bytes], Converted]


def _text(text: str, *, regular: bool) -> Converted:
    return Converted(_encode(text), regular)


# -- dates and times


def _read_date(days: int) -> Converted:
    if days in _INFINITE_DAYS:
        return _text(_INFINITE_DAYS[days], regular=False)
    day = _day_of(days)
    return _text(str(days), regular=False) if day is None else _text(day.text, regular=day.regular)


def _read_timestamp(ticks: int, per_second: int) -> Converted:
    """Read a timestamp without zone."""
    millis = ticks * MILLIS // per_second
    if millis in _INFINITE_MILLIS and ticks * MILLIS == millis * per_second:
        return _text(_INFINITE_MILLIS[millis], regular=False)
    days, rest = divmod(ticks, _DAY_S * per_second)
    day = _day_of(days)
    if day is None:
        return _text(str(ticks), regular=False)
    return _text(f"{day.text}T{_clock_text(rest, per_second)}", regular=day.regular)


def _read_time_of_day(ticks: int, per_second: int) -> Converted:
    """Read a time of day. Others, such as 24:00:00 or MySQL's -01:00:00, are irregular."""
    sign = "-" if ticks < 0 else ""
    return _text(sign + _clock_text(abs(ticks), per_second), regular=0 <= ticks < _DAY_S * per_second)


class _Day(NamedTuple):
    text: str
    regular: bool


def _day_of(days: int) -> _Day | None:
    cycle, rest = divmod(days + _EPOCH_ORDINAL - 1, _CYCLE_DAYS)
    day = date.fromordinal(rest + 1)
    year = day.year + cycle * _CYCLE_YEARS
    if not _YEAR_MIN <= year <= _YEAR_MAX:
        return None
    sign = "-" if year < 0 else "+" if year > _REGULAR_YEAR_MAX else ""
    regular = _REGULAR_YEAR_MIN <= year <= _REGULAR_YEAR_MAX
    return _Day(f"{sign}{abs(year):04}-{day.month:02}-{day.day:02}", regular)


def _clock_text(ticks: int, per_second: int) -> str:
    seconds, fraction = divmod(ticks, per_second)
    minutes, second = divmod(seconds, 60)
    hour, minute = divmod(minutes, 60)
    digits = f"{fraction + per_second}"[1:].rstrip("0")
    return f"{hour:02}:{minute:02}:{second:02}{'.' if digits else ''}{digits}"


# -- values by their schema


class TypeSchema(msgspec.Struct):
    """The schema of a value, as Kafka Connect writes it beside the payload."""

    type: str = ""
    name: str | None = None
    field: str | None = None
    parameters: dict[str, str] | None = None
    fields: list[TypeSchema] | None = None
    items: TypeSchema | None = None
    values: TypeSchema | None = None


class _VariableScaleDecimal(msgspec.Struct):
    scale: int
    value: str


_decode_variable_scale = msgspec.json.Decoder(_VariableScaleDecimal).decode


def converter_of(schema: TypeSchema) -> Converter | None:
    """Return the converter for values of a schema; None if they stay unchanged."""
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
            converters = converters_of(schema.fields)
            return _lenient(partial(_read_struct, converters=converters)) if converters else None
    return None


def converters_of(fields: list[TypeSchema] | None) -> dict[str, Converter]:
    """Return the converters for the fields of a struct, without those that stay unchanged."""
    chosen = {each.field: converter_of(each) for each in fields or () if each.field is not None}
    return {name: converter for name, converter in chosen.items() if converter is not None}


def read_fields(columns: dict[str, msgspec.Raw], converters: dict[str, Converter]) -> list[str]:
    """Convert fields of the mapping itself; return the names of irregular ones."""
    irregular = []
    for name, converter in converters.items():
        value = columns.get(name)
        if value is None or value == NULL:
            continue
        converted = converter(bytes(value))
        columns[name] = msgspec.Raw(converted.json)
        if not converted.regular:
            irregular.append(name)
    return irregular


def _lenient(read: Converter) -> Converter:
    def read_or_keep(value: bytes) -> Converted:
        try:
            return read(value)
        except (ValueError, msgspec.MsgspecError):
            return Converted(value, regular=False)

    return read_or_keep


def _parameter(schema: TypeSchema, name: str) -> int | None:
    text = (schema.parameters or {}).get(name, "")
    return int(text) if re.fullmatch(r"-?[0-9]{1,6}", text) else None


def _read_number(value: bytes, read: Callable[[int], Converted]) -> Converted:
    if _INTEGER.fullmatch(value) is None:
        raise ValueError("not a whole number")
    return read(int(value))


def _read_local(value: bytes, pattern: re.Pattern[str]) -> Converted:
    """Read a text in ISO mode, which appends a Z to values without zone."""
    local = _decode_text(value).removesuffix("Z")
    if local in _INFINITE_TEXTS:
        return _text(_INFINITE_TEXTS[local], regular=False)
    return _text(local, regular=pattern.fullmatch(local) is not None)


def _read_zoned(value: bytes) -> Converted:
    return Converted(value, regular=_ZONED.fullmatch(_decode_text(value)) is not None)


def _read_float(value: bytes) -> Converted:
    return Converted(value, regular=not value.startswith(_TEXT_START))


def _read_decimal(value: bytes, scale: int | None) -> Converted:
    return _text(_plain(_decode_text(value), scale), regular=True)


def _read_variable_scale(value: bytes) -> Converted:
    decimal = _decode_variable_scale(value)
    return _text(_plain(decimal.value, decimal.scale), regular=True)


def _plain(text: str, scale: int | None) -> str:
    """Return a decimal with all its digits and no exponent."""
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


def _read_bits(value: bytes, length: int | None) -> Converted:
    text = _decode_text(value)
    bits = int.from_bytes(base64.b64decode(text, validate=True), "little")
    if length is None or not bits.bit_length() <= length <= BITS_MAX_LENGTH:
        raise ValueError("not a bit string of this length")
    _check_growth(length, text)
    return _text(f"{bits:0{length}b}", regular=True)


def _check_growth(chars: int, value: str | bytes) -> None:
    if chars > max(WRITTEN_MAX_CHARS, GROWTH_MAX * len(value)):
        raise ValueError("too long once it is written out")


def _of_parts(part: TypeSchema | None, read: Callable[[bytes, Converter], Converted]) -> Converter | None:
    converter = converter_of(part) if part is not None else None
    return None if converter is None else _lenient(lambda value: read(value, converter))


def _read_list(value: bytes, converter: Converter) -> Converted:
    converted = _read_parts(_decode_list(value), value, converter)
    return Converted(b"[" + b",".join(each.json for each in converted) + b"]", all(each.regular for each in converted))


def _read_map(value: bytes, converter: Converter) -> Converted:
    if value.startswith(_LIST_START):
        return Converted(value, regular=True)  # pairs: the keys are no text
    entries = _decode_object(value)
    converted = _read_parts(entries.values(), value, converter)
    json = _encode({name: msgspec.Raw(each.json) for name, each in zip(entries, converted, strict=True)})
    return Converted(json, all(each.regular for each in converted))


def _read_parts(parts: Iterable[msgspec.Raw], whole: bytes, converter: Converter) -> list[Converted]:
    converted, chars = [], 0
    for part in parts:
        converted.append(Converted(b"null", regular=True) if part == NULL else converter(bytes(part)))
        chars += len(converted[-1].json)
        _check_growth(chars, whole)
    return converted


def _read_struct(value: bytes, converters: dict[str, Converter]) -> Converted:
    fields = _decode_object(value)
    irregular = read_fields(fields, converters)
    return Converted(_encode(fields), not irregular)


def _of_ticks(read: Callable[[int, int], Converted], per_second: int) -> Converter:
    return partial(_read_number, read=lambda ticks: read(ticks, per_second))


_BY_NAME: dict[str, Converter] = {
    "io.debezium.data.VariableScaleDecimal": _read_variable_scale,
    "io.debezium.time.Date": partial(_read_number, read=_read_date),
    "io.debezium.time.Time": _of_ticks(_read_time_of_day, MILLIS),
    "io.debezium.time.MicroTime": _of_ticks(_read_time_of_day, MICROS),
    "io.debezium.time.NanoTime": _of_ticks(_read_time_of_day, NANOS),
    "io.debezium.time.Timestamp": _of_ticks(_read_timestamp, MILLIS),
    "io.debezium.time.MicroTimestamp": _of_ticks(_read_timestamp, MICROS),
    "io.debezium.time.NanoTimestamp": _of_ticks(_read_timestamp, NANOS),
    "org.apache.kafka.connect.data.Date": partial(_read_number, read=_read_date),
    "org.apache.kafka.connect.data.Time": _of_ticks(_read_time_of_day, MILLIS),
    "org.apache.kafka.connect.data.Timestamp": _of_ticks(_read_timestamp, MILLIS),
    "io.debezium.time.IsoDate": partial(_read_local, pattern=_DATE),
    "io.debezium.time.IsoTime": partial(_read_local, pattern=_TIME),
    "io.debezium.time.IsoTimestamp": partial(_read_local, pattern=_TIMESTAMP),
    "io.debezium.time.ZonedTimestamp": _read_zoned,
}


# -- rows


@dataclass(frozen=True, slots=True)
class Image:
    """A row as it may be stored. `columns` are its values one by one, for keys."""

    json: msgspec.Raw
    columns: dict[str, msgspec.Raw]
    unchanged: tuple[str, ...]
    irregular: tuple[str, ...]


NONE = Image(NO_IMAGE, {}, (), ())


def read_image(
    row: msgspec.Raw,
    *,
    path: str,
    unavailable_value: str,
    converters: dict[str, Converter],
    trusted: Collection[str] | None = None,
) -> Image:
    """Read a row; `trusted` limits it to those columns.

    Raises: DebeziumMalformed.
    """
    if row in (NO_IMAGE, NULL):
        return NONE
    columns = decode_object(row, path)
    sent = len(columns)
    if trusted is not None:
        columns = {name: value for name, value in columns.items() if name in trusted}
    placeholder = placeholder_of(unavailable_value)
    unchanged = []
    if placeholder.may_be_in(row):
        unchanged = [name for name, value in columns.items() if placeholder.is_value(value)]
        columns = {name: value for name, value in columns.items() if name not in unchanged}
    irregular = read_fields(columns, converters)
    as_sent = len(columns) == sent and not converters
    json = row if as_sent else msgspec.Raw(_encode(columns))
    return Image(json, columns, tuple(unchanged), tuple(irregular))


def decode_object(json: bytes | msgspec.Raw, path: str) -> dict[str, msgspec.Raw]:
    """Decode one level of a JSON object.

    Raises: DebeziumMalformed.
    """
    try:
        return _decode_object(json)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise DebeziumMalformed(path, "expected an object") from None


class Placeholder:
    """What stands for a value that the source did not send, in all its shapes."""

    def __init__(self, text: str) -> None:
        utf8 = text.encode()
        in_base64 = base64.b64encode(utf8).decode()
        codes = [rf"{code}(?:\.0+)?" for code in utf8]
        # Text that JSON can write in several ways is looked for value by value.
        self._is_plain = text.isascii() and text.isprintable() and not {*text} & {*'"\\/'}
        self._texts = (utf8, in_base64.encode())
        self._codes = re.compile(r"\s*,\s*".join(codes).encode())
        self._shapes: tuple[Any, ...] = (text, in_base64, [text], [in_base64], list(utf8), {text: text})
        self._max_bytes = max(len(utf8) * _CODE_MAX_BYTES, 4 * len(in_base64)) + _CODE_MAX_BYTES

    def may_be_in(self, row: msgspec.Raw | bytes) -> bool:
        """Return, fast, whether a row can hold the placeholder at all."""
        json = bytes(row)
        return not self._is_plain or any(text in json for text in self._texts) or self._codes.search(json) is not None

    def is_value(self, value: msgspec.Raw | bytes) -> bool:
        """Return whether a value is the placeholder."""
        if len(value) > self._max_bytes:
            return False
        try:
            return _decode_any(value) in self._shapes
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return False


placeholder_of = lru_cache(maxsize=PLACEHOLDERS_MAX)(Placeholder)


def row_id_of(columns: dict[str, msgspec.Raw], keys: Sequence[str]) -> str:
    """Return the id of a row: the text of one key column, or several as a JSON list; empty if any is missing."""
    values = [columns.get(name, NULL) for name in keys]
    if not values or NULL in values:
        return ""
    if len(values) > 1:
        return _encode(values).decode()
    text = bytes(values[0]).decode()
    return _decode_text(text) if text.startswith('"') else text


# -- schemas


@dataclass(frozen=True, slots=True)
class ValueSchema:
    """How the fields of a value are read, and, for those that are rows themselves, their columns."""

    converters: dict[str, Converter] = field(default_factory=dict)
    rows: dict[str, dict[str, Converter]] = field(default_factory=dict)

    def row(self, name: str) -> dict[str, Converter]:
        """Return the converters for the columns of a field."""
        return self.rows.get(name, {})


NO_SCHEMA = ValueSchema()


def split_schema(json: bytes | msgspec.Raw, path: str) -> tuple[msgspec.Raw, ValueSchema]:
    """Return a value and its schema; a value without a schema is unchanged.

    Raises: DebeziumMalformed.
    """
    value = msgspec.Raw(bytes(json).strip())
    if not bytes(value).startswith(b"{"):
        return value, NO_SCHEMA
    fields = decode_object(json, path)
    if fields.keys() != _WRAPPING:
        return value, NO_SCHEMA
    if fields["schema"] == NULL:
        return fields["payload"], NO_SCHEMA
    schema = bytes(fields["schema"])
    try:
        parse = _cached_schema if len(schema) <= SCHEMA_MAX_BYTES else _parse_schema
        return fields["payload"], parse(schema)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise DebeziumMalformed(f"{path}.schema", "expected a schema of Kafka Connect") from None


_decode_schema = msgspec.json.Decoder(TypeSchema).decode


def _parse_schema(schema: bytes) -> ValueSchema:
    fields = _decode_schema(schema).fields or []
    rows = {each.field: converters_of(each.fields) for each in fields if each.field is not None and each.fields}
    return ValueSchema(converters_of(fields), rows)


_cached_schema = lru_cache(maxsize=SCHEMAS_MAX)(_parse_schema)
