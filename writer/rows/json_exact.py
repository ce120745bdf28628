"""JSON rows to Arrow columns, exactly: each value in its column, or in `_cdc_rescued`. Columns may evolve for it.

This is the slow path, for rows that json_strict.py refuses. A row is parsed so that numbers which Python would change
stay text. Then each value is offered to its column:

    kept    goes into an image that json_strict.py decodes without loss
    left    everything else, as it was, for `_cdc_rescued`

`_cdc_rescued` is a JSON object shaped like the row. If a column is null and the object has its name, the value is there
whole; if a struct is not null, the object has only those fields of it that did not fit. A list with one misfit is left
whole. Under the name "" is what the row is instead of an object, or fields that no name can hold:

    {"age": "unknown"}                      column age is null
    {"address": {"zip": ["x"]}}             column address is a struct whose other fields are in place
    {"": [1, 2]}                            the row is a list
    {"": {"a": 1, "a": 2}}                  the row names a field twice: kept as it was received, in no column
    {"": {"_cdc_base64": "eyJhIjr/fQ=="}}   the row is not UTF-8

Afterwards json_strict.py takes rows of the same shape, so that the next group is fast again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec
import pyarrow as pa

from lakefeed.iceberg.types import Field, ListType, MapType, StructType, Type, decimal_parts, type_name
from lakefeed.writer.rows.comments import KEY, VALUE, former_names, is_json
from lakefeed.writer.rows.evolution import FittedRows, SchemaUpdate, StructObserver, own_fields, relax_fields
from lakefeed.writer.rows.json_strict import decode_rows
from lakefeed.writer.rows.merge import conform
from lakefeed.writer.rows.values import (
    Image,
    Misfit,
    as_double,
    as_integer,
    exact_decimal,
    fit_decimal,
    fits_text,
    is_text_type,
    read_keys,
    text_of,
)

# Rows that are offered to the strict decoder together. If misfits are rare, only their neighbours are slow too.
FIT_CHUNK_ROWS = 500

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


def fit_rows(images: Sequence[Image], update: SchemaUpdate) -> FittedRows:
    """Decode any rows, whatever they hold; the columns of the update may evolve for them."""
    fields = own_fields(update.columns)
    chunks = [images[start : start + FIT_CHUNK_ROWS] for start in range(0, max(len(images), 1), FIT_CHUNK_ROWS)]
    tables: dict[int, pa.Table] = {}
    rescued: list[list[str | None]] = [[None] * len(chunk) for chunk in chunks]
    # 1. Chunks that the strict decoder takes need no look: they ask for no change of the columns. Parse the others.
    slow: dict[int, list[Any]] = {}
    for index, chunk in enumerate(chunks):
        try:
            tables[index] = _decode_chunk(chunk, fields)
        except Misfit:
            slow[index] = [parse_row(image) for image in chunk]
    # 2. See every value of those, and let the columns evolve.
    observer = StructObserver(StructType(fields))
    for rows in slow.values():
        for row in rows:
            observer.add(row)
    evolved = observer.evolved(update, ()).fields
    # 3. Keep what fits now. Required columns that this leaves empty become optional.
    keep = row_keeper(evolved)
    for index, rows in slow.items():
        kept = [_keep_row(keep, image, row) for image, row in zip(chunks[index], rows, strict=True)]
        tables[index] = _decode_chunk([image for image, _ in kept], evolved, rewritten=True, check_required=False)
        rescued[index] = [text for _, text in kept]
    empty = [[piece for index in slow for piece in tables[index].column(at).chunks] for at in range(len(evolved))]
    own = relax_fields(evolved, empty, update)
    update.set_own(own)
    # 4. Bring all chunks to the same columns, in their order.
    table = pa.concat_tables([conform(tables[index], StructType(own)) for index in range(len(chunks))])
    return FittedRows(table.columns, [text for texts in rescued for text in texts] if slow else None)


def _decode_chunk(images: Sequence[Image], fields: tuple[Field, ...], **options: bool) -> pa.Table:
    return pa.table(decode_rows(images, fields, **options), names=[each.name for each in fields])


def parse_row(image: Image) -> Any:
    """Parse a row; return UNREADABLE if that is not possible exactly.

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


def _keep_row(keep: Keeper, image: Image, row: Any) -> tuple[bytes, str | None]:
    """Split a parsed row into an image and the text for `_cdc_rescued`, which is all of a row that cannot be split."""
    if row is not UNREADABLE:
        try:
            kept, left = keep(row)
            return to_json(kept), None if left is NOTHING else to_json(left).decode()
        except (RecursionError, UnicodeEncodeError):
            # It was just shallow enough to be parsed, or it has half a surrogate pair.
            pass
    return _EMPTY_ROW, f'{{"{WHOLE_ROW}":{text_of(image)}}}'


def row_keeper(fields: Sequence[Field]) -> Keeper:
    """Return the function that splits a whole row between a table's own columns and `_cdc_rescued`."""
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
    # Values of the class that their column's values always have need no check: most of them.
    classes = [_OWN_CLASSES.get(type_name(field.type)) if not is_json(field.doc) else None for field in fields]
    current = {
        field.name: (field.name, own_class, _keeper(field.type, field.doc))
        for field, own_class in zip(fields, classes, strict=True)
    }
    former = {name: current[field.name] for field in fields for name in former_names(field)}
    keepers = former | current

    def keep(members: Any) -> Split:
        if not isinstance(members, dict):
            return None, members
        kept, left = {}, {}
        for given, value in members.items():
            name, own_class, keeper = keepers.get(given) or (given, None, _leave)
            if name != given and name in members:
                keeper, own_class = _leave, None  # the row uses both names, so the former one means another field
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


_OWN_CLASSES: Mapping[str, type] = {"boolean": bool, "long": int, "string": str}


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
    keep_values = _list_keeper(keep_value)

    def keep(members: Any) -> Split:
        if not isinstance(members, dict):
            return None, members
        keys = read_keys(list(members), key_type)
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
    """Return the function that turns a parsed value into one that the strict decoder takes, or into None."""
    if parts := decimal_parts(type_):
        return lambda value: fit_decimal(exact_decimal(value), *parts)
    if is_text_type(type_):
        return lambda value: value if isinstance(value, str) and fits_text(value, type_) else None
    match type_:
        case "boolean":
            return lambda value: value if isinstance(value, bool) else None
        case "string":
            return lambda value: value if isinstance(value, str) else None
        case "int" | "long":
            return lambda value: as_integer(value, type_)
        case "float" | "double":
            return lambda value: as_double(value, single=type_ == "float")
    return lambda _: None
