"""A second look at numbers that were parsed into doubles: did their text have more digits than a double holds?

Owns finding them fast. pyarrow.json rounds without a word, and after it the text is gone, so the JSON lines are scanned
for numbers that could have been rounded (a few per cent of the decoding time), and only rows with such a number
are read again, by msgspec, which skips all but their doubles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec
import numpy as np
import pyarrow as pa

from writer.exact_numbers import double_holds

# Every decimal of up to fifteen significant digits survives a double, unless it is near the smallest ones.
SAFE_DIGITS = 15

_SCAN_BLOCK_BYTES = 128 * 1024  # a block and its masks stay in the processor's cache

_Collect: TypeAlias = Callable[[Any, list[msgspec.Raw]], None]


@dataclass(frozen=True, slots=True)
class DoubleCheck:
    """Checks the doubles of one parse type."""

    decode: Callable[[msgspec.Raw | bytes], Any]
    collect: _Collect

    def all_held(self, lines: bytes, images: Sequence[msgspec.Raw | bytes]) -> bool:
        """Tell whether doubles hold all their numbers in `images`, which `lines` joins with one byte between them."""
        tokens: list[msgspec.Raw] = []
        for row in _suspicious_rows(lines, images):
            self.collect(self.decode(images[row]), tokens)
        return all(_is_safe(token) or double_holds(token.decode()) for token in map(bytes, tokens))


def double_check_of(type_: pa.DataType) -> DoubleCheck | None:
    """Build the check for a parse type, None if it has no doubles."""
    reader = _reader_of(type_)
    return None if reader is None else DoubleCheck(msgspec.json.Decoder(reader[0]).decode, reader[1])


def _is_safe(token: bytes) -> bool:
    return len(token) <= SAFE_DIGITS and b"e" not in token and b"E" not in token


def _suspicious_rows(lines: bytes, images: Sequence[msgspec.Raw | bytes]) -> list[int]:
    offsets = list(suspicious_offsets(lines))
    if not offsets:
        return []
    row_ends = np.cumsum(np.fromiter(map(len, images), np.int64, len(images)) + 1)
    rows: list[int] = np.unique(np.searchsorted(row_ends, np.concatenate(offsets), side="right")).tolist()
    return rows


def suspicious_offsets(text: bytes) -> Iterator[np.ndarray[Any, np.dtype[np.intp]]]:
    """Find where JSON text may have a number that a double cannot hold, in blocks of ascending byte offsets.

    Those are runs of sixteen digits (a point among them counts) and exponents below -99. There are false alarms, in
    strings and in integers; a number that is not found is safe.
    """
    run = SAFE_DIGITS + 1
    everything = np.frombuffer(text, np.uint8)
    for start in range(0, len(everything), _SCAN_BLOCK_BYTES):
        # Blocks overlap, so that a run across their border is found.
        first = max(start - run + 1, 0)
        block = everything[first : start + _SCAN_BLOCK_BYTES]
        digits = (block - np.uint8(ord("."))) <= ord("9") - ord(".")
        runs = digits[:-1] & digits[1:]
        for width in (2, 4, 8):
            runs = runs[:-width] & runs[width:]
        exponents = (block[:-3] == ord("-")) & digits[1:-2] & digits[2:-1] & digits[3:]
        if runs.any():
            yield np.flatnonzero(runs) + first
        if exponents.any():
            found = np.flatnonzero(exponents) + first
            yield found[(everything[found - 1] | 0x20) == ord("e")]


def _reader_of(type_: pa.DataType) -> tuple[Any, _Collect] | None:
    """Build a msgspec type that skips all but the doubles of a parse type, and what collects their text from it."""
    if pa.types.is_float64(type_):
        return msgspec.Raw, lambda token, tokens: tokens.append(token)
    if pa.types.is_list(type_):
        return _list_reader(type_.value_type)
    if pa.types.is_struct(type_):
        return _struct_reader(type_)
    return None


def _list_reader(element_type: pa.DataType) -> tuple[Any, _Collect] | None:
    reader = _reader_of(element_type)
    if reader is None:
        return None
    element, collect_element = reader

    def collect(elements: list[Any] | None, tokens: list[msgspec.Raw]) -> None:
        for each in elements or ():
            collect_element(each, tokens)

    return list[element] | None, collect  # type: ignore[valid-type]


def _struct_reader(type_: pa.StructType) -> tuple[Any, _Collect] | None:
    found = [(field.name, reader) for field in type_.fields if (reader := _reader_of(field.type)) is not None]
    if not found:
        return None
    # A field's name need not be a name in Python, so the fields are numbered and renamed.
    attributes = [f"field_{index}" for index in range(len(found))]
    struct = msgspec.defstruct(
        "Doubles",
        [(attribute, *_with_default(reader[0])) for attribute, (_, reader) in zip(attributes, found, strict=True)],
        rename=dict(zip(attributes, (name for name, _ in found), strict=True)),
        gc=False,
    )
    collectors = [(attribute, reader[1]) for attribute, (_, reader) in zip(attributes, found, strict=True)]

    def collect(value: Any, tokens: list[msgspec.Raw]) -> None:
        if value is not None:
            for attribute, collect_field in collectors:
                collect_field(getattr(value, attribute), tokens)

    return struct | None, collect


def _with_default(type_: Any) -> tuple[Any, Any]:
    return (type_, msgspec.Raw()) if type_ is msgspec.Raw else (type_, None)
