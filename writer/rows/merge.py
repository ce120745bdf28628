"""Schema merge: two versions of a table's columns made one, and rows of an older version brought to a newer one.

The catalog's version wins wherever both have a column, and its field ids always. What holds more stays: the wider of
two types, and optional, because rows that need it may be buffered. A column that only one version renamed gets its new
name. Columns that only the writer has are added at the end with new ids, and optional, because the table may have files
without them. So a table that the catalog renumbered at creation, or that Spark altered while rows were buffered, keeps
every column of both versions.

Rows that were decoded for an older version are brought to a newer one without decoding them again, if that is exact:

    new names, new fields, int -> long, float -> double, decimal(p, s) -> decimal(p', s)     each value stays the same
    any other type, or no column any more                                                    only if all values are null

Otherwise the rows must be decoded again: to an Arrow cast a number of milliseconds is no timestamp, and base64 is not
bytes.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

import pyarrow as pa
import pyarrow.types as pt

from lakefeed.contract.changes import fold
from lakefeed.iceberg.arrow import to_arrow_schema, to_arrow_type
from lakefeed.iceberg.types import (
    PRIMITIVES,
    Field,
    ListType,
    MapType,
    Schema,
    StructType,
    Type,
    children,
    decimal_parts,
    map_type,
    promotes,
    walk,
    written_fields,
)
from lakefeed.writer.rows.comments import as_key, former_names, is_json, is_key, name_in, with_former_names
from lakefeed.writer.rows.evolution import FieldIds

_Column: TypeAlias = pa.Array | pa.ChunkedArray


def merge_columns(table: StructType, own: StructType, ids: FieldIds) -> StructType:
    """Add to the table's columns those that only the writer's version has, by name or by a former name."""
    pairs = _pair_fields(table, own)
    paired = {own_field.name for own_field in pairs.values()}
    kept = tuple(_merge_field(field, pairs.get(field.name), ids) for field in table.fields)
    # To engines, names that differ by case only are the same: the rows' values for such a column are rescued.
    taken = {fold(name) for field in kept for name in (field.name, *former_names(field))}
    unknown = (field for field in own.fields if field.name not in paired and fold(field.name) not in taken)
    return StructType((*kept, *(ids.number(replace(field, required=False)) for field in unknown)))


def _pair_fields(table: StructType, own: StructType) -> dict[str, Field]:
    """Map the names of the table's fields to the writer's: same name, or one of the two renamed it."""
    pairs = {field.name: same for field in table.fields if (same := own.field(field.name)) is not None}
    left = {field.name: field for field in own.fields if field.name not in pairs}
    for field in table.fields:
        if field.name not in pairs:
            later = (name for name, each in left.items() if field.name in former_names(each))
            if (name := name_in(field, left) or next(later, None)) is not None:
                pairs[field.name] = left.pop(name)
    return pairs


def _merge_field(table: Field, own: Field | None, ids: FieldIds) -> Field:
    if own is None:
        return table
    merged = replace(table, type=_merge_types(table.type, own.type, ids), required=table.required and own.required)
    if is_key(own) and not is_key(merged):
        merged = as_key(merged)
    if own.name == table.name or own.name in former_names(table):
        return merged
    return with_former_names(replace(merged, name=own.name), (table.name, *former_names(own)))


def _merge_types(table: Type, own: Type, ids: FieldIds) -> Type:
    match table, own:
        case StructType(), StructType():
            return merge_columns(table, own, ids)
        case ListType(), ListType():
            required = table.element_required and own.element_required
            return replace(table, element=_merge_types(table.element, own.element, ids), element_required=required)
        case MapType(), MapType():
            required = table.value_required and own.value_required
            return replace(table, value=_merge_types(table.value, own.value, ids), value_required=required)
        case str(), str() if promotes(table, own):
            return own
    return table


def has_other_meaning(before: Type, after: Type) -> bool:
    """Return whether rows decoded for some columns mean something else in columns of the same Arrow types.

    Text is not JSON text, and 16 bytes may be a UUID or not. Arrow's types show every other difference.
    """
    match before, after:
        case (StructType(), StructType()) | (ListType(), ListType()) | (MapType(), MapType()):
            old_fields = {field.name: field for field in children(before)}
            pairs = ((old_fields.get(name_in(field, old_fields) or ""), field) for field in children(after))
            return any(
                is_json(old.doc) != is_json(new.doc) or has_other_meaning(old.type, new.type)
                for old, new in pairs
                if old is not None
            )
        case str(), str():
            return {before, after} == {"uuid", "fixed[16]"}
    return False


def contains_all_written(table: Type, written: Type) -> bool:
    """Return whether a table shows all values of files written for other columns, where their rows meant them.

    Fields are matched by id. A name that is neither the field's own nor a former one means another field.
    """
    match table, written:
        case (StructType(), StructType()) | (ListType(), ListType()) | (MapType(), MapType()):
            fields = {field.id: field for field in children(table)}
            missing = fields.keys() - {field.id for field in children(written)}
            return not any(fields[field_id].required for field_id in missing) and all(
                (shown := fields.get(field.id)) is not None
                and name_in(shown, (field.name,)) is not None
                and is_json(shown.doc) == is_json(field.doc)
                and shown.required <= field.required
                and contains_all_written(shown.type, field.type)
                for field in children(written)
            )
        case str(), str():
            # Other writers spell decimals without a space.
            same = table == written or (decimal_parts(table) or table) == (decimal_parts(written) or written)
            return same or promotes(written, table)
    return False


def without_fields(columns: StructType, ids: Container[int]) -> StructType:
    """Return columns without some fields, at any depth."""
    kept = (field for field in columns.fields if field.id not in ids)
    return StructType(tuple(replace(field, type=_without(field.type, ids)) for field in kept))


def _without(type_: Type, ids: Container[int]) -> Type:
    if isinstance(type_, StructType):
        return without_fields(type_, ids)
    return map_type(type_, lambda child: replace(child, type=_without(child.type, ids)))


def dropped_ids(before: StructType, after: StructType) -> frozenset[int]:
    """Return the fields of a table that are gone, or that have only a name which was never theirs."""
    left = {field.id: field for field in _named_fields(after)}
    return frozenset(
        field.id
        for field in _named_fields(before)
        if field.id not in left or name_in(left[field.id], (field.name,)) is None
    )


def _named_fields(columns: StructType) -> Iterator[Field]:
    """Yield the fields of structs at any depth, without elements, keys and values."""
    return (path[-1] for path in walk(columns) if len(path) == 1 or isinstance(path[-2].type, StructType))


def required_ids(columns: StructType) -> Iterator[int]:
    """Yield the ids of fields that are never null, nor is anything above them."""
    for field in columns.fields:
        if field.required:
            yield field.id
            if isinstance(field.type, StructType):
                yield from required_ids(field.type)


def field_ids(type_: Type) -> Iterator[int]:
    """Yield all field ids in a type."""
    return (path[-1].id for path in walk(type_))


def conform(table: pa.Table, columns: StructType) -> pa.Table:
    """Return the same rows under columns that evolved from the table's: new names, wider types, nulls for new fields.

    Raises: pa.ArrowInvalid if some value does not fit the columns without decoding it again.
    """
    schema = to_arrow_schema(Schema(0, columns))
    if table.schema.equals(schema, check_metadata=True):
        return table
    given = dict(zip(table.column_names, table.columns, strict=True))
    return pa.table(_conform_fields(given, written_fields(columns), table.num_rows), schema=schema)


def _conform_fields(given: Mapping[str, _Column], fields: Sequence[Field], rows: int) -> list[_Column]:
    used = [name_in(field, given) for field in fields]
    if any(given[name].null_count < rows for name in given.keys() - set(used)):
        raise pa.ArrowInvalid("values have no column any more")
    return [
        pa.nulls(rows, to_arrow_type(field.type)) if name is None else _conform(given[name], field.type)
        for field, name in zip(fields, used, strict=True)
    ]


def _conform(array: _Column, type_: Type) -> _Column:
    target = to_arrow_type(type_)
    if array.type == target:
        return array
    if array.null_count == len(array):
        return pa.nulls(len(array), target)
    if isinstance(array, pa.ChunkedArray):
        return pa.chunked_array([_conform(chunk, type_) for chunk in array.chunks], type=target)
    if array.offset:
        # Arrow cannot build on parts of a slice. Joining copies the slice into an array of its own.
        array = pa.concat_arrays([array, array.slice(0, 0)])
    match type_:
        case StructType(fields) if pt.is_struct(array.type):
            given = {field.name: array.field(field.name) for field in array.type}
            parts = _conform_fields(given, fields, len(array))
            return pa.StructArray.from_arrays(parts, fields=list(target), mask=array.is_null())
        case ListType(element=element) if pt.is_list(array.type):
            values = _conform(array.values, element)
            return pa.ListArray.from_arrays(array.offsets, values, type=target, mask=array.is_null())
        case MapType(key=key, value=value) if pt.is_map(array.type):
            keys, items = _conform(array.keys, key), _conform(array.items, value)
            return pa.MapArray.from_arrays(array.offsets, keys, items, type=target, mask=array.is_null())
        case str() if promotes(_name_of(array.type), type_):
            return array.cast(target)
    raise pa.ArrowInvalid("values have a column of another type now")


_NAMES = {to_arrow_type(name): name for name in PRIMITIVES}


def _name_of(type_: pa.DataType) -> str:
    """Return Iceberg's name of an Arrow type, an empty one if it does not matter for promotions."""
    return f"decimal({type_.precision}, {type_.scale})" if pt.is_decimal(type_) else _NAMES.get(type_, "")
