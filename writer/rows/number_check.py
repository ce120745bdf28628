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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from writer.rows.exact_numbers import double_holds

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
