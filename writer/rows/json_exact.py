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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import msgspec
import pyarrow as pa

from lakefeed.contract import changes as names
from lakefeed.contract.changes import FIELDS_MAX
from lakefeed.iceberg.types import Field, ListType, MapType, StructType, Type, decimal_parts
from lakefeed.writer.rows import values as numbers
from lakefeed.writer.rows.comments import KEY, VALUE, former_names, is_json
from lakefeed.writer.rows.declaration import declare_fields, rename_fields, without_nanoseconds
from lakefeed.writer.rows.evolution import Room, StructWatch, relax_fields
from lakefeed.writer.rows.groups import ChangeGroup, Image, text_of
from lakefeed.writer.rows.json_strict import NO_VACANCIES, Vacancies, decode_group, decode_lifted, own_fields
from lakefeed.writer.rows.merge import conform
from lakefeed.writer.rows.values import (
    Misfit,
    as_double,
    as_integer,
    exact_decimal,
    fits_text,
    is_text_type,
    key_reader,
)

# --- writer.rows.misfits ----------------------------------------------------------------------------------------------


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
    if parts := decimal_parts(type_):
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


def _as_decimal(value: Any, precision: int, scale: int) -> str | None:
    exact = exact_decimal(value)
    needed = None if exact is None else numbers.decimal_precision(exact, scale)
    return None if exact is None or needed is None or needed > precision else numbers.decimal_text(exact)


# --- writer.schema ----------------------------------------------------------------------------------------------------
#
# The columns of a change table, and the exact way into them for rows that the strict decoder refuses.
#
# Owns the `_cdc_` columns' types and the slow path: see every value, let the columns evolve, rescue what still does not
# fit. Inference, evolution and rescue have their own modules; this one puts them in order. Afterwards the strict
# decoder
# takes rows of the same shape, so the next group is fast again.


# Rows that the strict decoder is offered again together. Where misfits are rare, only their neighbours are slow too.
FIT_CHUNK_ROWS = 500
# Paths that may come and are null. Beyond it rows that have others take the slow path, which needs no memory of them.
VACANCIES_MAX = FIELDS_MAX


def initial_columns(*, keep_before: bool) -> StructType:
    """Give the columns of a table before any row has come: Lakefeed's own."""
    left_out = {names.BEFORE} if not keep_before else set()
    wanted = [name for name in names.ALL if name not in left_out]
    element_id = len(wanted) + 1
    types: dict[str, Type] = {
        names.SEQUENCE: "long",
        names.TIMESTAMP: "timestamptz",
        names.INGESTED_AT: "timestamptz",
        names.UNCHANGED: ListType(element_id, "string"),
        names.EPOCH: "long",
    }
    optional = (names.BEFORE, names.UNCHANGED, names.METADATA, names.RESCUED, names.EPOCH)
    return StructType(
        tuple(
            Field(field_id, name, types.get(name, "string"), required=name not in optional)
            for field_id, name in enumerate(wanted, start=1)
        )
    )


@dataclass(frozen=True, slots=True)
class Evolved:
    """A table's columns after a declaration. `changes` names what is new, `refusals` what is not followed."""

    columns: StructType
    last_field_id: int
    changes: tuple[str, ...] = ()
    refusals: tuple[str, ...] = ()


def declare_columns(columns: StructType, declared: StructType, *, last_field_id: int, nanoseconds: bool) -> Evolved:
    """Give a table's columns with what is declared beyond them; `nanoseconds` tells whether its format has them."""
    fields = declared.fields if nanoseconds else without_nanoseconds(declared.fields)
    renaming = Room(columns, last_field_id + 1)
    renamed = rename_fields(own_fields(columns), fields, renaming)
    room = Room(with_own(columns, renamed), last_field_id + 1)
    own = declare_fields(renamed, fields, room)
    changes, refusals = (*renaming.changes, *room.changes), (*renaming.refusals, *room.refusals)
    return Evolved(with_own(columns, own), room.last_field_id, changes, refusals)


@dataclass(frozen=True, slots=True)
class Fitted:
    """A group in its table's columns, which may have evolved for it.

    `added` names what is new, `refused` what was declared with it and is not followed; both for the log.
    """

    columns: StructType
    last_field_id: int
    table: pa.Table
    added: tuple[str, ...]
    vacant: Vacancies
    refused: tuple[str, ...] = ()


def fit_group(
    group: ChangeGroup, columns: StructType, *, next_field_id: int, vacant: Vacancies = NO_VACANCIES
) -> Fitted:
    """Decode any group, whatever its rows hold; each value is in its column or in `_cdc_rescued`."""
    # 1. What the strict decoder takes need not be looked at: it asks for no change of the columns.
    parts = list(_offer_again(group, columns, vacant))
    slow = [_Slow(part) for part in parts if isinstance(part, ChangeGroup)]
    # 2. See every value of the others, and let the columns evolve.
    watch, room = StructWatch(StructType(own_fields(columns))), Room(columns, next_field_id)
    for part in slow:
        part.show(watch)
    own = watch.evolved(room, ()).fields
    # 3. Keep what fits now. Where that leaves required columns empty, they become optional.
    for part in slow:
        part.keep(own)
    own = tuple(relax_fields(own, [row.members for part in slow for row in part.kept], room))
    evolved = with_own(columns, own)
    # 4. Decode all parts under the same columns, in their order.
    decoded = iter([part.decode(evolved) for part in slow])
    tables = [next(decoded) if isinstance(part, ChangeGroup) else conform(part, evolved) for part in parts]
    known = sorted(vacant.union(watch.vacancies(())))[:VACANCIES_MAX]
    return Fitted(evolved, room.last_field_id, pa.concat_tables(tables), tuple(room.changes), frozenset(known))


def _offer_again(group: ChangeGroup, columns: StructType, vacant: Vacancies) -> Iterator[pa.Table | ChangeGroup]:
    """Cut a group into chunks and decode those that the strict decoder takes."""
    for start in range(0, max(len(group), 1), FIT_CHUNK_ROWS):
        chunk = group.between(start, min(start + FIT_CHUNK_ROWS, len(group)))
        try:
            yield decode_group(chunk, columns, vacant)
        except Misfit:
            yield chunk


def with_own(columns: StructType, own: Sequence[Field]) -> StructType:
    """Put evolved columns in the place of the old ones, and new ones at the end."""
    by_id = {field.id: field for field in own}
    kept = [by_id.pop(field.id, field) for field in columns.fields]
    return StructType((*kept, *by_id.values()))


class _Slow:
    """A chunk on its way through the slow path."""

    def __init__(self, group: ChangeGroup) -> None:
        self._group = group
        self._parsed = [parse_row(image) for image in group.images]
        self.kept: list[KeptRow] = []

    def show(self, watch: StructWatch) -> None:
        for row in self._parsed:
            watch.add(row)

    def keep(self, own: Sequence[Field]) -> None:
        keep = row_keeper(own)
        self.kept = [keep_row(keep, image, row) for image, row in zip(self._group.images, self._parsed, strict=True)]

    def decode(self, columns: StructType) -> pa.Table:
        images, rescued = [row.image for row in self.kept], [row.rescued for row in self.kept]
        return decode_lifted(self._group, columns, images=images, rescued=rescued)
