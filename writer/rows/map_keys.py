"""Keys of maps, which JSON can only write as text. Owns how they are read.

    string                    as they are
    int, long                 digits: "42"
    decimal(p, s)             a number in digits: "19.90"
    date, time, uuid ...      as text_values.py reads values of that type

A map whose keys cannot all be read so, or of whose keys two are the same value written in two ways, is a misfit.
Numbers of floating point, booleans and nested values are no keys here: nobody could look them up by their text.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeAlias

import pyarrow as pa

from writer.rows import exact_numbers as numbers
from writer.rows.text_values import Misfit, is_text_type, read_texts

# From an object's names to keys as the strict decoder takes them, None where they do not all fit.
KeyReader: TypeAlias = Callable[[list[str]], list[Any] | None]

_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,18}")
_BOUNDS = {"int": (numbers.INT32_MIN, numbers.INT32_MAX), "long": (numbers.INT64_MIN, numbers.INT64_MAX)}


def can_be_key(type_: str) -> bool:
    """Tell whether a JSON object's names can be read as values of a type."""
    return type_ == "string" or type_ in _BOUNDS or is_text_type(type_) or numbers.decimal_parts(type_) is not None


def key_reader(type_: str) -> KeyReader:
    """Give what reads an object's names as keys of a type."""
    if type_ == "string":
        return lambda names: names
    if bounds := _BOUNDS.get(type_):
        return lambda names: _read_integers(names, *bounds)
    if parts := numbers.decimal_parts(type_):
        return lambda names: _read_decimals(names, *parts)
    if is_text_type(type_):
        return lambda names: _read_texts(names, type_)
    return lambda names: None if names else []


def _read_integers(names: list[str], lowest: int, highest: int) -> list[int] | None:
    if not all(map(_INTEGER.fullmatch, names)):
        return None
    keys = [int(name) for name in names]
    return keys if all(lowest <= key <= highest for key in keys) else None


def _read_decimals(names: list[str], precision: int, scale: int) -> list[str] | None:
    exact = [numbers.decimal_of(name) for name in names]
    keys = []
    for each in exact:
        needed = None if each is None else numbers.decimal_precision(each, scale)
        if each is None or needed is None or needed > precision:
            return None
        keys.append(numbers.decimal_text(each))
    return keys if len(set(keys)) == len(keys) else None


def _read_texts(names: list[str], type_: str) -> list[str] | None:
    try:
        values = read_texts(pa.array(names, pa.string()), type_)
    except Misfit:
        return None
    return names if len(values.unique()) == len(names) else None
