"""A look at the text of numbers that pyarrow.json would change without a word. Owns finding them fast.

- Doubles: digits beyond what a double holds are rounded, and tiny numbers become 0. The JSON lines are scanned for
  long numbers; those that a double writes back digit by digit (as programs write their doubles) are held. Only rows
  with another one are read again. Numbers too large for a double become infinite, which parse_types.py sees afterwards.
- Decimals: a number with an exponent may become 0, wrap around, or (1e-10000000) crash the process. So all decimals
  are read before pyarrow.json sees them, and only plain ones of a bounded length are let through.

Rows are read here by msgspec, which skips everything but the numbers in question.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from lakefeed.contract import changes as names
from lakefeed.iceberg.arrow import to_arrow_schema, to_arrow_type
from lakefeed.iceberg.types import Field, ListType, MapType, Schema, StructType, Type, decimal_parts, written_fields
from lakefeed.writer.rows.comments import ELEMENT, KEY, VALUE, Path, is_json
from lakefeed.writer.rows.groups import ChangeGroup, Image, change_columns
from lakefeed.writer.rows.values import Misfit, double_holds, floats_hold, is_text_type, read_texts

# --- writer.rows.parse_types ------------------------------------------------------------------------------------------
#
# What pyarrow.json is told to parse for a column, and how that becomes the column. Owns both directions.
#
# The *parse type* of most columns is their own. The others:
#
#     date, time, timestamp, uuid, binary ...  string; values.py reads it
#     float                                    float64; narrowed where nothing is lost
#     decimal(p, s)                            decimal256(p, s): pyarrow.json scales the digits that it read without
#                                              looking whether the result overflows; here it cannot
#     JSON text, map                           null, so that any value is refused; string and list<struct<key, value>>
#                                              for *lifted* images, which json_exact.py has rewritten
#     vacant (see Vacancies)                   null; has no column
#
# Nothing is required while parsing, because pyarrow.json would refuse a null struct for its required fields; refining
# checks that.


Vacancies: TypeAlias = frozenset[Path]
NO_VACANCIES: Vacancies = frozenset()


def parse_struct(fields: Iterable[Field], vacant: Vacancies, *, lifted: bool) -> pa.StructType:
    """Give the parse type of fields, followed by what may come beside them."""
    parsed = [_parse_field(field, _below(vacant, field.name), lifted=lifted) for field in fields]
    known = {field.name for field in parsed}
    unknown = sorted({path[0] for path in vacant if len(path) == 1} - known)
    return pa.struct([*parsed, *(pa.field(name, pa.null()) for name in unknown)])


def _below(vacant: Vacancies, name: str) -> Vacancies:
    return frozenset(path[1:] for path in vacant if len(path) > 1 and path[0] == name)


def _parse_field(field: Field, vacant: Vacancies, *, lifted: bool) -> pa.Field:
    if is_json(field.doc):
        return pa.field(field.name, pa.string() if lifted else pa.null())
    return pa.field(field.name, _parse_type(field.type, vacant, lifted=lifted))


def _parse_type(type_: Type, vacant: Vacancies, *, lifted: bool) -> pa.DataType:
    match type_:
        case StructType(fields):
            return parse_struct(fields, vacant, lifted=lifted)
        case ListType(_, element, _):
            return pa.list_(pa.field(ELEMENT, _parse_type(element, _below(vacant, ELEMENT), lifted=lifted)))
        case MapType(_, key, _, value, _):
            if not lifted:
                return pa.null()
            parts = {KEY: key, VALUE: value}
            entry = [(part, _parse_type(each, NO_VACANCIES, lifted=True)) for part, each in parts.items()]
            return pa.list_(pa.field(ELEMENT, pa.struct(entry)))
        case str():
            return _parse_primitive(type_)


def _parse_primitive(type_: str) -> pa.DataType:
    if parts := decimal_parts(type_):
        return pa.decimal256(*parts)
    if type_ == "float":
        return pa.float64()
    return pa.string() if is_text_type(type_) else to_arrow_type(type_)


def refine_column(parsed: pa.ChunkedArray, field: Field) -> pa.ChunkedArray:
    """Turn a parsed column into the table's own.

    Raises: Misfit.
    """
    if field.required and parsed.null_count:
        raise Misfit(f"a required column has nulls: column={field.name}")
    target = to_arrow_type(field.type)
    if _is_final(field.type) and parsed.type == target:
        return parsed
    return pa.chunked_array([refine(chunk, field.type) for chunk in parsed.chunks], type=target)


def _is_final(type_: Type) -> bool:
    """Tell whether parsing already makes the column's own values, with nothing left to check."""
    match type_:
        case StructType(fields):
            return all(_is_final(field.type) and not field.required for field in fields)
        case ListType(_, element, required):
            return _is_final(element) and not required
        case MapType():
            return False
        case str():
            return type_ != "double" and bool(_parse_primitive(type_) == to_arrow_type(type_))


def refine(parsed: pa.Array, type_: Type) -> pa.Array:
    """Turn parsed values into values of a type.

    Raises: Misfit.
    """
    if pa.types.is_null(parsed.type):
        return pa.nulls(len(parsed), to_arrow_type(type_))
    match type_:
        case StructType():
            return _refine_struct(parsed, type_)
        case ListType():
            return _refine_list(parsed, type_)
        case MapType():
            return _refine_map(parsed, type_)
        case "double":
            return _refine_double(parsed)
        case "float":
            return _refine_float(parsed)
        case str():
            return read_texts(parsed, type_) if is_text_type(type_) else parsed.cast(to_arrow_type(type_))


def _refine_struct(parsed: pa.StructArray, type_: StructType) -> pa.StructArray:
    children = [refine(parsed.field(field.name), field.type) for field in type_.fields]
    for field, child in zip(type_.fields, children, strict=True):
        if field.required and pc.any(pc.and_(child.is_null(), parsed.is_valid()), min_count=0).as_py():
            raise Misfit(f"a required field has nulls: field={field.name}")
    fields = list(to_arrow_type(type_).fields)
    return pa.StructArray.from_arrays(children, fields=fields, mask=parsed.is_null())


def _refine_list(parsed: pa.ListArray, type_: ListType) -> pa.ListArray:
    elements = refine(parsed.values, type_.element)
    if type_.element_required and elements.null_count:
        raise Misfit("a list of required elements has nulls")
    return pa.ListArray.from_arrays(parsed.offsets, elements, type=to_arrow_type(type_), mask=parsed.is_null())


def _refine_map(parsed: pa.ListArray, type_: MapType) -> pa.MapArray:
    entries = parsed.values
    keys, values = refine(entries.field(KEY), type_.key), refine(entries.field(VALUE), type_.value)
    if type_.value_required and values.null_count:
        raise Misfit("a map of required values has nulls")
    return pa.MapArray.from_arrays(parsed.offsets, keys, values, type=to_arrow_type(type_), mask=parsed.is_null())


def _refine_double(doubles: pa.Array) -> pa.Array:
    # JSON has no infinity: such a number was too large.
    if not pc.all(pc.is_finite(doubles), min_count=0).as_py():
        raise Misfit("a number is larger than a double holds")
    return doubles


def _refine_float(doubles: pa.Array) -> pa.Array:
    if not floats_hold(doubles):
        raise Misfit("a number has more digits than a float holds")
    return doubles.cast(pa.float32(), safe=False)


# --- writer.rows.number_check -----------------------------------------------------------------------------------------


# Every decimal of up to fifteen significant digits survives a double, unless it is near the smallest ones.
SAFE_DIGITS = 15

# Below this a double holds every integer.
EXACT_INTEGERS_BELOW = float(2**53)

_SCAN_BLOCK_BYTES = 128 * 1024  # a block and its masks stay in the processor's cache

_Image: TypeAlias = msgspec.Raw | bytes
_IsWanted: TypeAlias = Callable[[pa.DataType], bool]
_Collect: TypeAlias = Callable[[Any, list[msgspec.Raw]], None]
_Bytes: TypeAlias = npt.NDArray[np.uint8]
_Offsets: TypeAlias = npt.NDArray[np.intp]

_BEFORE_A_NUMBER = np.frombuffer(b":,[ \t\r\n", np.uint8)


# A decimal column has at most 38 digits. What is parsed has 76, so that any number that is let through fits in there.
_PLAIN_DECIMAL = re.compile(rb'(?:"?[+-]?[0-9]{1,38}(?:\.[0-9]{1,38})?"?|null)?')


@dataclass(frozen=True, slots=True)
class NumberCheck:
    """Checks the numbers of one parse type."""

    doubles: _Reader | None
    decimals: _Reader | None

    def decimals_are_safe(self, images: Sequence[_Image]) -> bool:
        """Tell whether all decimals can be parsed. Ask before parsing."""
        if self.decimals is None:
            return True
        try:
            tokens = self.decimals.read(images)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            # A row or a struct is something else.
            return False
        return all(map(_PLAIN_DECIMAL.fullmatch, tokens))

    def doubles_are_exact(self, lines: bytes, images: Sequence[_Image], parsed: pa.Table) -> bool:
        """Tell whether doubles hold all their numbers. `lines` joins `images` with one byte; they became `parsed`."""
        if self.doubles is None:
            return True
        offsets = suspicious_offsets(lines, integers=_has_large_doubles(parsed))
        tokens = self.doubles.read([images[row] for row in _rows_at(offsets, images)])
        return all(_is_safe(token) or double_holds(token.decode()) for token in map(bytes, tokens))


def number_check_of(type_: pa.DataType) -> NumberCheck:
    """Build the check for a parse type."""
    return NumberCheck(_reader_of(type_, pa.types.is_float64), _reader_of(type_, pa.types.is_decimal))


def _is_safe(token: bytes) -> bool:
    return len(token) <= SAFE_DIGITS and b"e" not in token and b"E" not in token


def _rows_at(offsets: _Offsets, images: Sequence[_Image]) -> list[int]:
    if not len(offsets):
        return []
    row_ends = np.cumsum(np.fromiter(map(len, images), np.int64, len(images)) + 1)
    rows: list[int] = np.unique(np.searchsorted(row_ends, offsets, side="right")).tolist()
    return rows


def _has_large_doubles(parsed: pa.Table) -> bool:
    """Tell whether an integer may have lost digits on its way into a double column."""
    return any(_has_large(chunk) for column in parsed.columns for chunk in column.chunks)


def _has_large(values: pa.Array) -> bool:
    type_ = values.type
    if pa.types.is_float64(type_):
        return bool(pc.any(pc.greater_equal(pc.abs(values), EXACT_INTEGERS_BELOW)).as_py())
    if pa.types.is_struct(type_):
        return any(map(_has_large, values.flatten()))
    return pa.types.is_list(type_) and _has_large(values.flatten())


def suspicious_offsets(text: bytes, *, integers: bool) -> _Offsets:
    """Find where JSON lines may have a number that a double would change; of integers only if asked.

    There are false alarms, in strings and in columns that are not doubles. A number that is not found is safe, unless
    it is too large for a double.
    """
    everything = np.frombuffer(text, np.uint8)
    found = [_scan(everything, start) for start in range(0, len(everything), _SCAN_BLOCK_BYTES)]
    windows = np.concatenate([long for long, _ in found])
    tiny = np.concatenate([exponents for _, exponents in found])
    return np.concatenate([tiny, _changed_numbers(everything, windows, integers=integers)]) if len(windows) else tiny


def _scan(everything: _Bytes, start: int) -> tuple[_Offsets, _Offsets]:
    """Find in one block all windows of sixteen digits (a point counts as one), and all exponents below -99."""
    # Blocks overlap, so that a window across their border is found, once.
    first = max(start - SAFE_DIGITS, 0)
    block = everything[first : start + _SCAN_BLOCK_BYTES]
    digits = (block - np.uint8(ord("."))) <= ord("9") - ord(".")
    windows = digits[:-1] & digits[1:]
    for width in (2, 4, 8):
        windows = windows[:-width] & windows[width:]
    # There are few minus signs, and fewer behind an e: only those are worth a look at what follows.
    minuses = np.flatnonzero(block[:-3] == ord("-"))
    minuses = minuses[(block[minuses - 1] | 0x20) == ord("e")]
    exponents = minuses[digits[minuses + 1] & digits[minuses + 2] & digits[minuses + 3]]
    return np.flatnonzero(windows) + first, exponents + first


def _changed_numbers(everything: _Bytes, windows: _Offsets, *, integers: bool) -> _Offsets:
    """Of the runs of digits that windows cover, keep those that are numbers which a double does not write back."""
    borders = np.flatnonzero(np.diff(windows) > 1)
    starts = windows[np.r_[0, borders + 1]]
    ends = windows[np.r_[borders, -1]] + SAFE_DIGITS + 1
    # A number stands behind a colon, a comma, a bracket or white space, perhaps with its sign. All else is in a string.
    before = np.where(everything[starts - 1] == ord("-"), everything[starts - 2], everything[starts - 1])
    is_number = np.isin(before, _BEFORE_A_NUMBER)
    starts, ends = starts[is_number], ends[is_number]
    has_exponent = (everything[np.minimum(ends, len(everything) - 1)] | 0x20) == ord("e")
    changed: _Offsets = starts[has_exponent | ~_are_held(_gather(everything, starts, ends), integers=integers)]
    return changed


def _gather(everything: _Bytes, starts: _Offsets, ends: _Offsets) -> pa.Array:
    """Copy pieces of text into one Arrow column."""
    lengths = ends - starts
    offsets = np.r_[0, np.cumsum(lengths)]
    places = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths)
    buffers = [None, pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(everything[places])]
    return pa.Array.from_buffers(pa.string(), len(starts), buffers)


def _are_held(tokens: pa.Array, *, integers: bool) -> npt.NDArray[np.bool_]:
    """Tell for each run of digits whether a double writes it back; what is no number is held by all means."""
    is_fraction = pc.equal(pc.count_substring(tokens, "."), 1)  # a point at an end is no number, but a double reads it
    fractions = pc.if_else(is_fraction, tokens, "0.5")
    written = fractions.cast(pa.float64()).cast(pa.string())
    held = np.asarray(pc.equal(fractions, written)).copy()
    if integers:
        held &= np.asarray(pc.match_substring(tokens, "."))
    # Arrow writes large and tiny ones in another form than most; those few are compared by value.
    for index in np.flatnonzero(~held):
        held[index] = double_holds(tokens[int(index)].as_py())
    return held


class _Reader:
    """Reads the text of certain numbers out of rows."""

    def __init__(self, type_: Any, collect: _Collect) -> None:
        self._decode = msgspec.json.Decoder(type_).decode
        self._collect = collect

    def read(self, images: Sequence[_Image]) -> list[msgspec.Raw]:
        tokens: list[msgspec.Raw] = []
        for image in images:
            self._collect(self._decode(image), tokens)
        return tokens


def _reader_of(type_: pa.DataType, is_wanted: _IsWanted) -> _Reader | None:
    parts = _reader_parts(type_, is_wanted)
    return None if parts is None else _Reader(*parts)


def _reader_parts(type_: pa.DataType, is_wanted: _IsWanted) -> tuple[Any, _Collect] | None:
    """Build a msgspec type that skips all but the wanted numbers of a type, and what collects their text from it."""
    if is_wanted(type_):
        return msgspec.Raw, lambda token, tokens: tokens.append(token)
    if pa.types.is_list(type_):
        return _list_parts(type_.value_type, is_wanted)
    if pa.types.is_struct(type_):
        return _struct_parts(type_, is_wanted)
    return None


def _list_parts(element_type: pa.DataType, is_wanted: _IsWanted) -> tuple[Any, _Collect] | None:
    parts = _reader_parts(element_type, is_wanted)
    if parts is None:
        return None
    element, collect_element = parts

    def collect(elements: list[Any] | None, tokens: list[msgspec.Raw]) -> None:
        for each in elements or ():
            collect_element(each, tokens)

    return list[element] | None, collect  # type: ignore[valid-type]


def _struct_parts(type_: pa.StructType, is_wanted: _IsWanted) -> tuple[Any, _Collect] | None:
    found = [(each.name, parts) for each in type_.fields if (parts := _reader_parts(each.type, is_wanted)) is not None]
    if not found:
        return None
    # A field's name need not be a name in Python, so the fields are numbered and renamed.
    attributes = [f"field_{index}" for index in range(len(found))]
    struct = msgspec.defstruct(
        "Numbers",
        [(attribute, *_with_default(parts[0])) for attribute, (_, parts) in zip(attributes, found, strict=True)],
        rename=dict(zip(attributes, (name for name, _ in found), strict=True)),
        gc=False,
    )
    collectors = [(attribute, parts[1]) for attribute, (_, parts) in zip(attributes, found, strict=True)]

    def collect(value: Any, tokens: list[msgspec.Raw]) -> None:
        if value is not None:
            for attribute, collect_field in collectors:
                collect_field(getattr(value, attribute), tokens)

    return struct | None, collect


def _with_default(type_: Any) -> tuple[Any, Any]:
    return (type_, msgspec.Raw()) if type_ is msgspec.Raw else (type_, None)


# --- writer.decode ----------------------------------------------------------------------------------------------------
#
# Rows of a group to Arrow columns, strictly: all of the group's rows exactly, or a refusal. Never row by row.
#
# Owns the fast path. What it refuses goes through schema.fit_group, which sees each value. It refuses, rather than lose
# or change anything: fields that the table has no column for, values of another type, numbers that a double would
# round,
# times without their zone, text that is not UTF-8, a key written twice, nulls in required columns.
#
#     images --join--> JSON lines --pyarrow.json--> parsed columns --refine--> the table's columns, beside the _cdc_
# ones
#
# pyarrow.json releases the interpreter's lock, so that several groups decode at once; groups of 4 to 8 MB are best.


# Measured best from 128 KiB to 512 KiB; larger blocks leave the processor's cache.
PARSE_BLOCK_BYTES = 256 * 1024

# Versions of tables' schemas whose parse plan is kept. One plan is a few kilobytes per hundred columns.
PLANS_MAX = 1024

# A big integer that JavaScript had to send as text, where a value stands (not a key, not inside another string).
_BIGINT_MARK = b'"__bigint__:'
_BIGINT_VALUE = re.compile(rb'(?<=[:,\[\s])"__bigint__:(-?(?:0|[1-9][0-9]*))"(?=\s*[,}\]])')


def decode_group(group: ChangeGroup, columns: StructType, vacant: Vacancies = NO_VACANCIES) -> pa.Table:
    """Decode a group into its table's columns.

    Raises: Misfit unless every value of every row has its exact place.
    """
    plan = _plan(columns, vacant, lifted=False)
    if not group.images:
        return plan.schema.empty_table()
    lines = b"\n".join(group.images)
    try:
        own = _decode_lines(lines, group.images, plan)
    except Misfit:
        if _BIGINT_MARK not in lines:
            raise
        images = [_BIGINT_VALUE.sub(rb"\1", bytes(image)) for image in group.images]
        own = _decode_lines(b"\n".join(images), images, plan)
    return _assemble(group, plan, own=own, rescued=None)


def decode_lifted(
    group: ChangeGroup, columns: StructType, *, images: Sequence[Image], rescued: Sequence[str | None]
) -> pa.Table:
    """Decode images that json_exact.py has rewritten to fit, with what it could not make fit beside them.

    Raises: Misfit.
    """
    plan = _plan(columns, NO_VACANCIES, lifted=True)
    return _assemble(group, plan, own=_decode_lines(b"\n".join(images), images, plan), rescued=rescued)


def own_fields(columns: StructType) -> tuple[Field, ...]:
    """Give the columns that the rows themselves bring, and that can be written."""
    return tuple(field for field in written_fields(columns) if not field.name.startswith(names.RESERVED_PREFIX))


@dataclass(frozen=True, slots=True)
class _Plan:
    """What one version of a table's schema needs for decoding."""

    schema: pa.Schema
    own: tuple[Field, ...]
    parse: pj.ParseOptions
    numbers: NumberCheck


@lru_cache(maxsize=PLANS_MAX)
def _plan(columns: StructType, vacant: Vacancies, *, lifted: bool) -> _Plan:
    own = own_fields(columns)
    parse_type = parse_struct(own, vacant, lifted=lifted)
    options = pj.ParseOptions(explicit_schema=pa.schema(parse_type.fields), unexpected_field_behavior="error")
    return _Plan(to_arrow_schema(Schema(0, columns)), own, options, number_check_of(parse_type))


def _decode_lines(lines: bytes, images: Sequence[Image], plan: _Plan) -> dict[str, pa.ChunkedArray]:
    if not plan.numbers.decimals_are_safe(images):
        raise Misfit("a decimal is not written plainly")
    # A row may span two blocks but not three.
    block_bytes = max(PARSE_BLOCK_BYTES, max(map(len, images)) + 1)
    try:
        parsed = pj.read_json(
            pa.BufferReader(lines), pj.ReadOptions(use_threads=False, block_size=block_bytes), plan.parse
        )
        # pyarrow.json takes any bytes for text.
        parsed.validate(full=True)
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise Misfit(f"rows do not fit their table: {error}") from error
    if parsed.num_rows != len(images):
        raise Misfit(f"rows were not read one for one: expected={len(images)} read={parsed.num_rows}")
    if not plan.numbers.doubles_are_exact(lines, images, parsed):
        raise Misfit("a number has more digits than a double holds")
    return {field.name: refine_column(parsed.column(field.name), field) for field in plan.own}


def _assemble(
    group: ChangeGroup, plan: _Plan, *, own: dict[str, pa.ChunkedArray], rescued: Sequence[str | None] | None
) -> pa.Table:
    every = own | change_columns(group, plan.schema, rescued=rescued)
    return pa.table([every[name] for name in plan.schema.names], schema=plan.schema)
