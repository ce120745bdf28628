"""JSON rows to Arrow columns, strictly: all rows of a group exactly, or a `Misfit`. Never row by row.

    images --join--> JSON lines --pyarrow.json--> parsed columns --refine--> the table's own columns

This is the fast path. It refuses rather than lose or change anything: fields that the table has no column for, values
of another type, numbers that a double would round, times without their zone, text that is not UTF-8, a key that is
written twice, nulls in required columns. What it refuses goes to json_exact.py, which looks at each value.

pyarrow.json parses most columns as their own type. The others:

    date, time, timestamp, uuid, binary ...  string; values.py reads it
    float                                    float64; narrowed if nothing is lost
    decimal(p, s)                            decimal256(p, s): pyarrow.json scales the digits that it read without
                                             checking for overflow; here it cannot overflow
    JSON text, map                           null, so that any value is refused; string and list<struct<key, value>>
                                             for images that json_exact.py has rewritten
    unknown fields that are always null      null; they have no column. Which fields these are is inferred from the
                                             group's first rows, and only if parsing without them failed

Nothing is required while parsing, because pyarrow.json would refuse a null struct for its required fields; refining
checks it.

pyarrow.json changes some numbers silently. Their text is checked before or after it:

    doubles    Digits beyond what a double holds are rounded, and tiny numbers become 0. The JSON lines are scanned for
               long numbers. Those that a double writes back digit by digit are exact; only rows with another one are
               read again. Numbers too large for a double become infinite, which refining sees.
    decimals   A number with an exponent may become 0, wrap around, or (1e-10000000) crash the process. All decimals are
               read before parsing, and only plain ones of a bounded length pass.

pyarrow.json releases the interpreter's lock, so several groups decode at once; groups of 4 to 8 MB are best.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from lakefeed.iceberg.arrow import to_arrow_type
from lakefeed.iceberg.types import Field, ListType, MapType, StructType, Type, decimal_parts
from lakefeed.writer.rows.comments import ELEMENT, KEY, VALUE, is_json
from lakefeed.writer.rows.values import Image, Misfit, double_holds, floats_hold, is_text_type, read_texts

# Measured best from 128 KiB to 512 KiB; larger blocks leave the processor's cache.
PARSE_BLOCK_BYTES = 256 * 1024

# Versions of tables' columns whose parse plan is cached. One plan takes a few kilobytes per hundred columns.
PLANS_MAX = 1024

# Every decimal of up to fifteen significant digits survives a double, unless it is near the smallest ones.
SAFE_DIGITS = 15

# Below this a double holds every integer.
EXACT_INTEGERS_BELOW = float(2**53)

# Rows from which null fields are inferred. pyarrow.json takes time proportional to rows times names here, so a whole
# group whose names are data (20,000 rows of 12 bytes with a name each) would take 24 s; a sample takes 40 ms at most.
SAMPLE_MAX_ROWS = 100
SAMPLE_MAX_BYTES = 64 * 1024

_SCAN_BLOCK_BYTES = 128 * 1024  # a block and its masks stay in the processor's cache

# A decimal column has at most 38 digits. The parse type has 76, so that any number that passes fits in it.
_PLAIN_DECIMAL = re.compile(rb'(?:"?[+-]?[0-9]{1,38}(?:\.[0-9]{1,38})?"?|null)?')

_BEFORE_A_NUMBER = np.frombuffer(b":,[ \t\r\n", np.uint8)

# A big integer that JavaScript sent as text, as a value (not as a key, not inside another string).
_BIGINT_MARK = b'"__bigint__:'
_BIGINT_VALUE = re.compile(rb'(?<=[:,\[\s])"__bigint__:(-?(?:0|[1-9][0-9]*))"(?=\s*[,}\]])')

_Bytes: TypeAlias = npt.NDArray[np.uint8]
_Offsets: TypeAlias = npt.NDArray[np.intp]

# Reads the texts of certain numbers out of rows.
_NumberReader: TypeAlias = Callable[[Sequence[Image]], list[msgspec.Raw]]


def decode_rows(
    images: Sequence[Image], fields: tuple[Field, ...], *, rewritten: bool = False, check_required: bool = True
) -> list[pa.ChunkedArray]:
    """Decode rows into columns, in the order of `fields`. `rewritten` images come from json_exact.py.

    Raises: Misfit unless every value of every row has its exact place.
    """
    plan = _plan(fields, rewritten)
    if not images:
        return [pa.chunked_array([], to_arrow_type(field.type)) for field in fields]
    lines = b"\n".join(images)
    try:
        parsed = _parse(lines, images, plan)
    except Misfit:
        if rewritten or _BIGINT_MARK not in lines:
            raise
        images = [_BIGINT_VALUE.sub(rb"\1", bytes(image)) for image in images]
        parsed = _parse(b"\n".join(images), images, plan)
    return [_refine_column(parsed.column(field.name), field, check_required) for field in fields]


@dataclass(frozen=True, slots=True)
class ParsePlan:
    """How rows are parsed for one version of a table's columns, and how their numbers are checked."""

    schema: pa.Schema
    doubles: _NumberReader | None
    decimals: _NumberReader | None

    @classmethod
    def of(cls, type_: pa.StructType) -> ParsePlan:
        """Return the plan for a parse type."""
        doubles, decimals = (_number_reader(type_, is_one) for is_one in (pa.types.is_float64, pa.types.is_decimal))
        return cls(pa.schema(type_.fields), doubles, decimals)

    def decimals_are_safe(self, images: Sequence[Image]) -> bool:
        """Return whether all decimals can be parsed. Call this before parsing."""
        if self.decimals is None:
            return True
        try:
            tokens = self.decimals(images)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            # A row or a struct is something else.
            return False
        return all(map(_PLAIN_DECIMAL.fullmatch, tokens))

    def doubles_are_exact(self, lines: bytes, images: Sequence[Image], parsed: pa.Table) -> bool:
        """Return whether doubles hold all their numbers. `lines` joins `images` with one byte; `parsed` is of them."""
        if self.doubles is None:
            return True
        has_large = any(_has_large(chunk) for column in parsed.columns for chunk in column.chunks)
        offsets = _suspicious_offsets(lines, integers=has_large)
        if not len(offsets):
            return True
        row_ends = np.cumsum(np.fromiter(map(len, images), np.int64, len(images)) + 1)
        rows: list[int] = np.unique(np.searchsorted(row_ends, offsets, side="right")).tolist()
        tokens = map(bytes, self.doubles([images[row] for row in rows]))
        return all(
            (len(token) <= SAFE_DIGITS and b"e" not in token.lower()) or double_holds(token.decode())
            for token in tokens
        )


@lru_cache(maxsize=PLANS_MAX)
def _plan(fields: tuple[Field, ...], rewritten: bool) -> ParsePlan:
    return ParsePlan.of(_parse_type(StructType(fields), rewritten=rewritten))


def _parse_type(type_: Type, *, rewritten: bool, doc: str | None = None) -> pa.DataType:
    if is_json(doc):
        return pa.string() if rewritten else pa.null()
    match type_:
        case StructType(fields):
            types = [_parse_type(field.type, rewritten=rewritten, doc=field.doc) for field in fields]
            return pa.struct([pa.field(field.name, each) for field, each in zip(fields, types, strict=True)])
        case ListType(_, element, _):
            return pa.list_(pa.field(ELEMENT, _parse_type(element, rewritten=rewritten)))
        case MapType(_, key, _, value, _) if rewritten:
            entry = [(part, _parse_type(each, rewritten=True)) for part, each in ((KEY, key), (VALUE, value))]
            return pa.list_(pa.field(ELEMENT, pa.struct(entry)))
        case MapType():
            return pa.null()
        case str():
            return _parse_primitive(type_)


def _parse_primitive(type_: str) -> pa.DataType:
    if parts := decimal_parts(type_):
        return pa.decimal256(*parts)
    if type_ == "float":
        return pa.float64()
    return pa.string() if is_text_type(type_) else to_arrow_type(type_)


def _parse(lines: bytes, images: Sequence[Image], plan: ParsePlan) -> pa.Table:
    if not plan.decimals_are_safe(images):
        raise Misfit("a decimal is not written plainly")
    # A row may span two blocks but not three.
    block_bytes = max(PARSE_BLOCK_BYTES, max(map(len, images)) + 1)
    try:
        try:
            parsed = _read_json(lines, plan.schema, block_bytes)
        except pa.ArrowInvalid:
            parsed = _read_json(lines, _with_null_fields(images, plan.schema, block_bytes), block_bytes)
        # pyarrow.json takes any bytes for text.
        parsed.validate(full=True)
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise Misfit(f"rows do not fit their table: {error}") from error
    if parsed.num_rows != len(images):
        raise Misfit(f"rows were not read one for one: expected={len(images)} read={parsed.num_rows}")
    if not plan.doubles_are_exact(lines, images, parsed):
        raise Misfit("a number has more digits than a double holds")
    return parsed


def _read_json(lines: bytes, schema: pa.Schema, block_bytes: int, *, unexpected: str = "error") -> pa.Table:
    read = pj.ReadOptions(use_threads=False, block_size=block_bytes)
    parse = pj.ParseOptions(explicit_schema=schema, unexpected_field_behavior=unexpected)
    return pj.read_json(pa.BufferReader(lines), read, parse)


def _with_null_fields(images: Sequence[Image], schema: pa.Schema, block_bytes: int) -> pa.Schema:
    """Return the parse schema with the unknown fields of the first rows, at any depth, if all of them are null.

    Raises: Misfit if an unknown field has a value, or if there is no such field; ArrowException, UnicodeDecodeError.
    """
    rows, size_bytes = 1, len(images[0])
    while rows < min(len(images), SAMPLE_MAX_ROWS) and size_bytes + len(images[rows]) <= SAMPLE_MAX_BYTES:
        size_bytes += len(images[rows])
        rows += 1
    sample = _read_json(b"\n".join(images[:rows]), schema, block_bytes, unexpected="infer").schema
    if sample.equals(schema) or not _has_only_null_fields_beyond(pa.struct(list(sample)), pa.struct(list(schema))):
        raise Misfit("rows have a field that is no column of their table")
    return sample


def _has_only_null_fields_beyond(found: pa.DataType, known: pa.DataType) -> bool:
    if pa.types.is_struct(found) and pa.types.is_struct(known):
        types = {field.name: field.type for field in known}
        return all(
            _has_only_null_fields_beyond(field.type, types[field.name])
            if field.name in types
            else pa.types.is_null(field.type)
            for field in found
        )
    if pa.types.is_list(found) and pa.types.is_list(known):
        return _has_only_null_fields_beyond(found.value_type, known.value_type)
    return bool(found == known)


def _refine_column(parsed: pa.ChunkedArray, field: Field, check_required: bool) -> pa.ChunkedArray:
    """Turn a parsed column into the table's own.

    Raises: Misfit.
    """
    if check_required and field.required and parsed.null_count:
        raise Misfit(f"a required column has nulls: column={field.name}")
    target = to_arrow_type(field.type)
    if _is_final(field.type) and parsed.type == target:
        return parsed
    return pa.chunked_array([_refine(chunk, field.type, check_required) for chunk in parsed.chunks], type=target)


def _is_final(type_: Type) -> bool:
    """Return whether parsing already makes the column's own values, with nothing left to check."""
    match type_:
        case StructType(fields):
            return all(_is_final(field.type) and not field.required for field in fields)
        case ListType(_, element, required):
            return _is_final(element) and not required
        case MapType():
            return False
        case str():
            return type_ != "double" and bool(_parse_primitive(type_) == to_arrow_type(type_))


def _refine(parsed: pa.Array, type_: Type, check_required: bool) -> pa.Array:
    """Turn parsed values into values of a type.

    Raises: Misfit.
    """
    target = to_arrow_type(type_)
    if pa.types.is_null(parsed.type):
        return pa.nulls(len(parsed), target)
    match type_:
        case StructType(fields):
            children = [_refine(parsed.field(field.name), field.type, check_required) for field in fields]
            for field, child in zip(fields, children, strict=True):
                # Below a null struct nothing is missing.
                if check_required and field.required and pc.any(pc.and_(child.is_null(), parsed.is_valid())).as_py():
                    raise Misfit(f"a required field has nulls: field={field.name}")
            return pa.StructArray.from_arrays(children, fields=list(target.fields), mask=parsed.is_null())
        case ListType(_, element, required):
            elements = _refine(parsed.values, element, check_required)
            if check_required and required and elements.null_count:
                raise Misfit("a list of required elements has nulls")
            return pa.ListArray.from_arrays(parsed.offsets, elements, type=target, mask=parsed.is_null())
        case MapType(_, key, _, value, required):
            keys = _refine(parsed.values.field(KEY), key, check_required)
            values = _refine(parsed.values.field(VALUE), value, check_required)
            if check_required and required and values.null_count:
                raise Misfit("a map of required values has nulls")
            return pa.MapArray.from_arrays(parsed.offsets, keys, values, type=target, mask=parsed.is_null())
        case str():
            return _refine_primitive(parsed, type_)


def _refine_primitive(parsed: pa.Array, type_: str) -> pa.Array:
    if is_text_type(type_):
        return read_texts(parsed, type_)
    # JSON has no infinity: such a number was too large.
    if type_ == "double" and not pc.all(pc.is_finite(parsed), min_count=0).as_py():
        raise Misfit("a number is larger than a double holds")
    if type_ == "float" and not floats_hold(parsed):
        raise Misfit("a number has more digits than a float holds")
    return parsed.cast(to_arrow_type(type_), safe=type_ != "float")


def _has_large(values: pa.Array) -> bool:
    """Return whether an integer may have lost digits on its way into a double."""
    type_ = values.type
    if pa.types.is_float64(type_):
        return bool(pc.any(pc.greater_equal(pc.abs(values), EXACT_INTEGERS_BELOW)).as_py())
    if pa.types.is_struct(type_):
        return any(map(_has_large, values.flatten()))
    return pa.types.is_list(type_) and _has_large(values.flatten())


def _suspicious_offsets(text: bytes, *, integers: bool) -> _Offsets:
    """Return where JSON lines may have a number that a double would change; integers count only if asked.

    There are false alarms, in strings and in columns that are not doubles. A number that is not found is safe, unless
    it is too large for a double.
    """
    everything = np.frombuffer(text, np.uint8)
    found = [_scan(everything, start) for start in range(0, len(everything), _SCAN_BLOCK_BYTES)]
    windows = np.concatenate([long for long, _ in found])
    tiny = np.concatenate([exponents for _, exponents in found])
    return np.concatenate([tiny, _changed_numbers(everything, windows, integers=integers)]) if len(windows) else tiny


def _scan(everything: _Bytes, start: int) -> tuple[_Offsets, _Offsets]:
    """Return, for one block, all windows of sixteen digits (a point counts as one), and all exponents below -99."""
    # Blocks overlap, so that a window across their border is found, once.
    first = max(start - SAFE_DIGITS, 0)
    block = everything[first : start + _SCAN_BLOCK_BYTES]
    digits = (block - np.uint8(ord("."))) <= ord("9") - ord(".")
    windows = digits[:-1] & digits[1:]
    for width in (2, 4, 8):
        windows = windows[:-width] & windows[width:]
    # There are few minus signs, and fewer after an e: only there check what follows.
    minuses = np.flatnonzero(block[:-3] == ord("-"))
    minuses = minuses[(block[minuses - 1] | 0x20) == ord("e")]
    exponents = minuses[digits[minuses + 1] & digits[minuses + 2] & digits[minuses + 3]]
    return np.flatnonzero(windows) + first, exponents + first


def _changed_numbers(everything: _Bytes, windows: _Offsets, *, integers: bool) -> _Offsets:
    """Return, of the runs of digits that windows cover, those that are numbers which a double does not write back."""
    borders = np.flatnonzero(np.diff(windows) > 1)
    starts = windows[np.r_[0, borders + 1]]
    ends = windows[np.r_[borders, -1]] + SAFE_DIGITS + 1
    # A number follows a colon, a comma, a bracket or white space, maybe with its sign. All else is inside a string.
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
    """Return for each run of digits whether a double writes it back; what is no number counts as held."""
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


def _number_reader(type_: pa.DataType, is_wanted: Callable[[pa.DataType], bool]) -> _NumberReader | None:
    """Return what reads the wanted numbers of a parse type, None if it has none."""
    numbers = _numbers_type(type_, is_wanted)
    if numbers is None:
        return None
    decode = msgspec.json.Decoder(numbers).decode

    def read(images: Sequence[Image]) -> list[msgspec.Raw]:
        tokens: list[msgspec.Raw] = []
        for image in images:
            _collect(decode(image), tokens)
        return tokens

    return read


def _numbers_type(type_: pa.DataType, is_wanted: Callable[[pa.DataType], bool]) -> Any:
    """Return a type for msgspec that skips all but the wanted numbers, None if there are none."""
    if is_wanted(type_):
        return msgspec.Raw
    if pa.types.is_list(type_):
        element = _numbers_type(type_.value_type, is_wanted)
        return None if element is None else list[element] | None  # type: ignore[valid-type]
    if not pa.types.is_struct(type_):
        return None
    found = {each.name: numbers for each in type_ if (numbers := _numbers_type(each.type, is_wanted)) is not None}
    if not found:
        return None
    # A field's name need not be a name in Python, so the fields are numbered and renamed.
    fields = [
        (f"field_{index}", numbers, msgspec.Raw() if numbers is msgspec.Raw else None)
        for index, numbers in enumerate(found.values())
    ]
    rename = {f"field_{index}": name for index, name in enumerate(found)}
    return msgspec.defstruct("Numbers", fields, rename=rename, gc=False) | None


def _collect(value: Any, tokens: list[msgspec.Raw]) -> None:
    if isinstance(value, msgspec.Raw):
        tokens.append(value)
    elif value is not None:
        for each in value if isinstance(value, list) else msgspec.structs.astuple(value):
            _collect(each, tokens)
