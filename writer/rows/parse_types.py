"""What pyarrow.json is told to parse for a column, and how that becomes the column. Owns both directions.

The *parse type* of most columns is their own. The others:

    date, time, timestamp, uuid, binary ...  string; text_values.py reads it
    float                                    float64; narrowed where nothing is lost
    decimal(p, s)                            decimal256(p, s): pyarrow.json scales the digits that it read without
                                             looking whether the result overflows; here it cannot
    JSON text, map                           null, so that any value is refused; string and list<struct<key, value>>
                                             for *lifted* images, which misfits.py has rewritten
    vacant (see Vacancies)                   null; has no column

Nothing is required while parsing, because pyarrow.json would refuse a null struct for its required fields; refining
checks that.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from writer.rows.column_notes import is_json
from writer.rows.exact_numbers import decimal_parts, floats_hold
from writer.rows.text_values import Misfit, is_text_type, read_texts
from writer.types import Field, ListType, MapType, StructType, Type, to_arrow_type

# Paths of fields that rows name but that have only been null so far, so that nobody knows their type: no column holds
# them, and the strict decoder has to be told that they may come. The step into a list's elements is "element".
Path: TypeAlias = tuple[str, ...]
Vacancies: TypeAlias = frozenset[Path]
NO_VACANCIES: Vacancies = frozenset()
ELEMENT = "element"
# The steps into a map's entries.
KEY = "key"
VALUE = "value"


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
