"""One row against its table's columns, value by value: what fits is kept, what does not is left over. Owns that split.

A row is parsed exactly: numbers that Python would change stay text. Then each value is offered to its column:

    kept    an image that decode.decode_lifted takes without loss
    left    everything else, as it was, for `_cdc_rescued`

`_cdc_rescued` is a JSON object shaped like the row. Where a column is null and the object has its name, the value is
there whole; where a struct is not null, the object has only those fields of it that did not fit. A list with one
misfit is left over whole. Under the name "" is what the row is instead of an object, or fields that no name can hold:

    {"age": "unknown"}                      column age is null
    {"address": {"zip": ["x"]}}             column address is a struct whose other fields are in place
    {"": [1, 2]}                            the row is a list
    {"": {"a": 1, "a": 2}}                  the row names a field twice: kept as it was received, and no column has it
    {"": {"_cdc_base64": "eyJhIjr/fQ=="}}   the row is not UTF-8
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any, NamedTuple, TypeAlias

import msgspec

from writer.rows import exact_numbers as numbers
from writer.rows.change_columns import text_of
from writer.rows.column_notes import former_names, is_json
from writer.rows.groups import Image
from writer.rows.map_keys import key_reader
from writer.rows.parse_types import KEY, VALUE
from writer.rows.text_values import fits_text, is_text_type
from writer.types import Field, ListType, MapType, StructType, Type

# The result of a value that fits: nothing is left of it.
NOTHING: Any = object()
# The result of parsing a row that cannot be parsed exactly.
UNREADABLE: Any = object()

# The name under which `_cdc_rescued` holds what is not a field of the row.
WHOLE_ROW = ""

# kept, left
Split: TypeAlias = tuple[Any, Any]
Keeper: TypeAlias = Callable[[Any], Split]

# Shorter integers cannot leave 64 bits.
_INT64_SAFE_CHARS = 18

_EMPTY_ROW = b"{}"

to_json = msgspec.json.Encoder().encode


class KeptRow(NamedTuple):
    """A row after the split: what its columns keep, as members and as an image, and the text for `_cdc_rescued`."""

    members: dict[str, Any]
    image: bytes
    rescued: str | None


def parse_row(image: Image) -> Any:
    """Parse a row, UNREADABLE where that is not possible exactly.

    Integers that 64 bits may not hold, and numbers with a point, an exponent or a sign that would get lost, are
    `msgspec.Raw`: Python has no type that keeps them as they are written.
    """
    try:
        return _decode(bytes(image).decode())
    except (ValueError, RecursionError):
        return UNREADABLE


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("a key is written twice")
    return members


def _integer(text: str) -> int | msgspec.Raw:
    return int(text) if len(text) <= _INT64_SAFE_CHARS and text != "-0" else msgspec.Raw(text)


_decode = json.JSONDecoder(object_pairs_hook=_unique, parse_int=_integer, parse_float=msgspec.Raw).decode


def keep_row(keep: Keeper, image: Image, row: Any) -> KeptRow:
    """Split a parsed row; one that cannot be split is rescued as it was received."""
    if row is not UNREADABLE:
        try:
            kept, left = keep(row)
            return KeptRow(kept, to_json(kept), None if left is NOTHING else to_json(left).decode())
        except (RecursionError, UnicodeEncodeError):
            # It was just shallow enough to be parsed, or it has half a surrogate pair.
            pass
    return KeptRow({}, _EMPTY_ROW, f'{{"{WHOLE_ROW}":{text_of(image)}}}')


def number_text(value: int | msgspec.Raw) -> str:
    """Give a parsed number as JSON writes it."""
    return str(value) if isinstance(value, int) else bytes(value).decode()


def is_number(value: Any) -> bool:
    """Tell whether a parsed value is a number."""
    return isinstance(value, int | msgspec.Raw) and not isinstance(value, bool)


def row_keeper(fields: Sequence[Field]) -> Keeper:
    """Build what splits a whole row between a table's own columns and `_cdc_rescued`."""
    keep_fields = _struct_keeper(fields)

    def keep(row: Any) -> Split:
        if not isinstance(row, dict):
            return {}, {WHOLE_ROW: row}
        kept, left = keep_fields(row)
        if left is not NOTHING and WHOLE_ROW in left:
            left[WHOLE_ROW] = {WHOLE_ROW: left[WHOLE_ROW]}
        return kept, left

    return keep


def _keeper(type_: Type, doc: str | None) -> Keeper:
    if is_json(doc):
        return lambda value: (to_json(value).decode(), NOTHING)
    match type_:
        case StructType(fields):
            return _struct_keeper(fields)
        case ListType(_, element, _):
            return _list_keeper(_keeper(element, None))
        case MapType(_, key, _, value, _):
            assert isinstance(key, str), "only primitive types are keys"
            return _map_keeper(key, _keeper(value, None))
        case str():
            return _primitive_keeper(type_)


def _leave(value: Any) -> Split:
    return None, value


def _struct_keeper(fields: Sequence[Field]) -> Keeper:
    current = {field.name: (field.name, _own_class(field), _keeper(field.type, field.doc)) for field in fields}
    former = {name: current[field.name] for field in fields for name in former_names(field)}
    keepers = former | current

    def keep(members: Any) -> Split:
        if not isinstance(members, dict):
            return None, members
        kept, left = {}, {}
        for given, value in members.items():
            name, own_class, keeper = keepers.get(given) or (given, None, _leave)
            if name != given and name in members:
                keeper, own_class = _leave, None  # under the former name there is something else beside
            if type(value) is own_class:
                kept[name] = value
            elif value is not None:
                kept_value, left_value = keeper(value)
                if kept_value is not None:
                    kept[name] = kept_value
                if left_value is not NOTHING:
                    left[given] = left_value
        return kept, left or NOTHING

    return keep


# Most values are of the class that their column's values always have, and need no closer look.
_OWN_CLASSES: Mapping[str, type] = {"boolean": bool, "long": int, "string": str}


def _own_class(field: Field) -> type | None:
    return _OWN_CLASSES.get(field.type) if isinstance(field.type, str) and not is_json(field.doc) else None


def _list_keeper(keep_element: Keeper) -> Keeper:
    def keep(elements: Any) -> Split:
        if not isinstance(elements, list):
            return None, elements
        kept = []
        for element in elements:
            kept_element, left = (None, NOTHING) if element is None else keep_element(element)
            if left is not NOTHING:
                return None, elements
            kept.append(kept_element)
        return kept, NOTHING

    return keep


def _map_keeper(key_type: str, keep_value: Keeper) -> Keeper:
    read_keys, keep_values = key_reader(key_type), _list_keeper(keep_value)

    def keep(members: Any) -> Split:
        if not isinstance(members, dict):
            return None, members
        keys = read_keys(list(members))
        values, left = keep_values(list(members.values()))
        if keys is None or left is not NOTHING:
            return None, members
        return [{KEY: key, VALUE: value} for key, value in zip(keys, values, strict=True)], NOTHING

    return keep


def _primitive_keeper(type_: str) -> Keeper:
    convert = _converter(type_)

    def keep(value: Any) -> Split:
        kept = convert(value)
        return (None, value) if kept is None else (kept, NOTHING)

    return keep


def _converter(type_: str) -> Callable[[Any], Any]:
    """Give what turns a parsed value into one that the strict decoder takes, or into None for a misfit."""
    if parts := numbers.decimal_parts(type_):
        return lambda value: _as_decimal(value, *parts)
    if is_text_type(type_):
        return lambda value: value if isinstance(value, str) and fits_text(value, type_) else None
    match type_:
        case "boolean":
            return lambda value: value if isinstance(value, bool) else None
        case "string":
            return lambda value: value if isinstance(value, str) else None
        case "int":
            return lambda value: as_integer(value, numbers.INT32_MIN, numbers.INT32_MAX)
        case "long":
            return lambda value: as_integer(value, numbers.INT64_MIN, numbers.INT64_MAX)
        case "float":
            return lambda value: as_double(value, single=True)
        case "double":
            return lambda value: as_double(value, single=False)
    return lambda _: None


def plain_number(value: Any) -> str | None:
    """Give a number as JSON writes it, also where it came as `__bigint__:123`; None for anything else."""
    if isinstance(value, str):
        return numbers.bigint_of(value)
    return number_text(value) if is_number(value) else None


def as_integer(value: Any, lowest: int, highest: int) -> int | None:
    """Give a parsed value as an integer within bounds, None if it is not one. 1.0 and 1e3 are integers."""
    if type(value) is int:
        return value if lowest <= value <= highest else None
    text = plain_number(value)
    exact = None if text is None else numbers.decimal_of(text)
    integer = None if exact is None else numbers.integer_of(exact)
    return integer if integer is not None and lowest <= integer <= highest else None


def as_double(value: Any, *, single: bool) -> msgspec.Raw | None:
    """Give a parsed number as it was written if a double (or a float) holds it, else None."""
    text = plain_number(value)
    if text is None or not numbers.double_holds(text) or (single and not numbers.float_holds(float(text))):
        return None
    return msgspec.Raw(text)


def exact_decimal(value: Any) -> Decimal | None:
    """Give a parsed number, or text that writes one, as a decimal."""
    text = plain_number(value)
    if text is None and isinstance(value, str):
        text = value
    return None if text is None else numbers.decimal_of(text)


def _as_decimal(value: Any, precision: int, scale: int) -> str | None:
    exact = exact_decimal(value)
    needed = None if exact is None else numbers.decimal_precision(exact, scale)
    return None if exact is None or needed is None or needed > precision else numbers.decimal_text(exact)
