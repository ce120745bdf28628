"""Two versions of a table's columns made one: the table's own, and those the writer evolved meanwhile.

The table's version wins wherever both know a column, its field ids always, except that what holds more stays: the
wider of two types, and optional. Rows may be buffered that need it. A column that only one of them has renamed gets
its new name. Columns that only the writer knows are added behind with fresh ids, and optional: the table may have files
without them. So a table that the catalog numbered anew at creation, or that Spark has altered while rows were buffered,
goes on with every column of both.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import pyarrow as pa
import pyarrow.types as pt

from lakefeed.contract.changes import fold
from lakefeed.iceberg.arrow import to_arrow_schema, to_arrow_type
from lakefeed.iceberg.types import Field, ListType, MapType, Schema, StructType, Type, written_fields
from lakefeed.writer.rows.comments import as_key, former_names, is_json, is_key, name_in, with_former_names

# --- writer.merge -----------------------------------------------------------------------------------------------------


_PROMOTIONS = {("int", "long"), ("float", "double")}
_DECIMAL = re.compile(r"decimal\((\d+),\s*(\d+)\)")


@dataclass(frozen=True, slots=True)
class Merged:
    """The columns of both, and the highest field id in use."""

    columns: StructType
    last_field_id: int


def merge_columns(table: StructType, own: StructType, *, last_field_id: int) -> Merged:
    """Add to the table's columns those that only the writer's version has, by name, also by a former one."""
    ids = _Ids(last_field_id)
    columns = _merge_structs(table, own, ids)
    return Merged(columns, ids.last)


class _Ids:
    """Hands out field ids that the table has never used."""

    def __init__(self, last: int) -> None:
        self.last = last

    def next(self) -> int:
        self.last += 1
        return self.last


def _merge_structs(table: StructType, own: StructType, ids: _Ids) -> StructType:
    pairs = _pair_fields(table, own)
    paired = {own_field.name for own_field in pairs.values()}
    kept = tuple(_merge_field(field, pairs.get(field.name), ids) for field in table.fields)
    # Engines take names for the same that differ by case only: what rows have for such a one is rescued.
    taken = {fold(name) for field in kept for name in (field.name, *former_names(field))}
    unknown = (field for field in own.fields if field.name not in paired and fold(field.name) not in taken)
    added = tuple(_renumber_field(replace(field, required=False), ids) for field in unknown)
    return StructType(kept + added)


def _pair_fields(table: StructType, own: StructType) -> dict[str, Field]:
    """Find for the table's fields, by name, the writer's that is the same one: of the same name, or renamed by one."""
    pairs = {field.name: same for field in table.fields if (same := own.field(field.name)) is not None}
    left = {field.name: field for field in own.fields if field.name not in pairs}
    for field in table.fields:
        renamed = None if field.name in pairs else _renamed(field, left)
        if renamed is not None:
            pairs[field.name] = left.pop(renamed)
    return pairs


def _renamed(table: Field, own: Mapping[str, Field]) -> str | None:
    """Find the writer's field that the table has renamed, or that has renamed the table's."""
    return name_in(table, own) or next((name for name, each in own.items() if table.name in former_names(each)), None)


def _merge_field(table: Field, own: Field | None, ids: _Ids) -> Field:
    if own is None:
        return table
    merged = replace(table, type=_merge_types(table.type, own.type, ids), required=table.required and own.required)
    if is_key(own) and not is_key(merged):
        merged = as_key(merged)
    if own.name == table.name or own.name in former_names(table):
        return merged
    return with_former_names(replace(merged, name=own.name), (table.name, *former_names(own)))


def _merge_types(table: Type, own: Type, ids: _Ids) -> Type:
    if isinstance(table, StructType) and isinstance(own, StructType):
        return _merge_structs(table, own, ids)
    if isinstance(table, ListType) and isinstance(own, ListType):
        required = table.element_required and own.element_required
        return replace(table, element=_merge_types(table.element, own.element, ids), element_required=required)
    if isinstance(table, MapType) and isinstance(own, MapType):
        required = table.value_required and own.value_required
        return replace(table, value=_merge_types(table.value, own.value, ids), value_required=required)
    if isinstance(table, str) and isinstance(own, str) and _is_promotion(table, own):
        return own
    return table


def _is_promotion(table: str, own: str) -> bool:
    """Tell whether Iceberg lets a column of the table's type become the writer's, which is a wider one."""
    if (table, own) in _PROMOTIONS:
        return True
    from_, to = _DECIMAL.fullmatch(table), _DECIMAL.fullmatch(own)
    return from_ is not None and to is not None and int(from_[1]) < int(to[1]) and from_[2] == to[2]


def reads_otherwise(before: Type, after: Type) -> bool:
    """Tell whether rows in Arrow that were decoded for some columns mean others in columns that look the same there.

    Text is not JSON text, nor the other way round, and 16 bytes may be a UUID or not. All else Arrow's types tell.
    """
    match before, after:
        case StructType(), StructType():
            names = {field.name: field for field in before.fields}
            pairs = ((names.get(name_in(field, names) or ""), field) for field in after.fields)
            return any(
                is_json(old.doc) != is_json(new.doc) or reads_otherwise(old.type, new.type)
                for old, new in pairs
                if old is not None
            )
        case ListType(), ListType():
            return reads_otherwise(before.element, after.element)
        case MapType(), MapType():
            return reads_otherwise(before.key, after.key) or reads_otherwise(before.value, after.value)
        case str(), str():
            return {before, after} == {"uuid", "fixed[16]"}
    return False


def shows_all(table: StructType, written: StructType) -> bool:
    """Tell whether a table shows all values of files that were written for other columns, where rows meant them to be.

    It finds them by ids; whoever gives a column another name, and no note of the old one, means another.
    """
    fields = {field.id: field for field in table.fields}
    missing = fields.keys() - {field.id for field in written.fields}
    return not any(fields[field_id].required for field_id in missing) and all(
        (shown := fields.get(field.id)) is not None
        and name_in(shown, (field.name,)) is not None
        and is_json(shown.doc) == is_json(field.doc)
        and shown.required <= field.required
        and _shows(shown.type, field.type)
        for field in written.fields
    )


def _shows(table: Type, written: Type) -> bool:
    match table, written:
        case StructType(), StructType():
            return shows_all(table, written)
        case ListType(), ListType():
            as_fields = [Field(each.element_id, "", each.element, each.element_required) for each in (table, written)]
        case MapType(), MapType():
            as_fields = [Field(each.value_id, "", each.value, each.value_required) for each in (table, written)]
        case str(), str():
            return _spelled(table) == _spelled(written) or _is_promotion(written, table)
        case _:
            return False
    return shows_all(StructType((as_fields[0],)), StructType((as_fields[1],)))


def _spelled(type_: str) -> str:
    """Spell a type as others may: decimals with a space or without."""
    return type_.replace(" ", "")


def _renumber_field(field: Field, ids: _Ids) -> Field:
    return replace(field, id=ids.next(), type=_renumber_type(field.type, ids))


def _renumber_type(type_: Type, ids: _Ids) -> Type:
    match type_:
        case StructType(fields):
            return StructType(tuple(_renumber_field(field, ids) for field in fields))
        case ListType(_, element, required):
            return ListType(ids.next(), _renumber_type(element, ids), required)
        case MapType(_, key, _, value, required):
            return MapType(ids.next(), _renumber_type(key, ids), ids.next(), _renumber_type(value, ids), required)
    return type_


def without_fields(columns: StructType, ids: Container[int]) -> StructType:
    """Leave out fields by their ids, at any depth."""
    return StructType(
        tuple(replace(field, type=_without(field.type, ids)) for field in columns.fields if field.id not in ids)
    )


def _without(type_: Type, ids: Container[int]) -> Type:
    match type_:
        case StructType():
            return without_fields(type_, ids)
        case ListType(element=element):
            return replace(type_, element=_without(element, ids))
        case MapType(value=value):
            return replace(type_, value=_without(value, ids))
    return type_


def lost_ids(before: StructType, after: StructType) -> frozenset[int]:
    """Name the fields that a table had, and has no more or under a name only that was never theirs."""
    left = dict(_fields(after))
    return frozenset(
        field_id
        for field_id, field in _fields(before)
        if field_id not in left or name_in(left[field_id], (field.name,)) is None
    )


def _fields(type_: Type) -> Iterator[tuple[int, Field]]:
    match type_:
        case StructType(fields):
            for field in fields:
                yield field.id, field
                yield from _fields(field.type)
        case ListType(element=element):
            yield from _fields(element)
        case MapType(value=value):
            yield from _fields(value)


def required_ids(columns: StructType) -> Iterator[int]:
    """Walk over the ids of fields that are never null, nor anything above them."""
    for field in columns.fields:
        if field.required:
            yield field.id
            if isinstance(field.type, StructType):
                yield from required_ids(field.type)


def field_ids(type_: Type) -> Iterator[int]:
    """Walk over all field ids in a type."""
    match type_:
        case StructType(fields):
            for field in fields:
                yield field.id
                yield from field_ids(field.type)
        case ListType(element_id, element, _):
            yield element_id
            yield from field_ids(element)
        case MapType(key_id, key, value_id, value, _):
            yield from (key_id, value_id)
            yield from field_ids(key)
            yield from field_ids(value)


# --- writer.rows.conform ----------------------------------------------------------------------------------------------
#
# Rows decoded under an older version of a schema, brought to a newer one, so that one file can hold both.
#
# Owns which differences are bridged without looking at what was sent: new names, new fields, and Iceberg's promotions.
#
#     int -> long, float -> double, decimal(p, s) -> decimal(p', s)      each value stays what it is
#     any other type                                                     only where there are no values
#
# Of any other type the rows have to be decoded again: a number of milliseconds is no timestamp to Arrow's casts, nor is
# base64 bytes to them. The same goes for a column that the newer version has no more (somebody dropped it).


_CONFORM_PROMOTIONS = {(pa.int32(), pa.int64()), (pa.float32(), pa.float64())}


def conform(table: pa.Table, columns: StructType) -> pa.Table:
    """Give the same rows under columns that evolved from the table's: new names, wider types, nulls for new fields.

    Raises:
        pa.ArrowInvalid: the columns have no place for some value, as far as can be told here.
    """
    schema = to_arrow_schema(Schema(0, columns))
    if table.schema.equals(schema, check_metadata=True):
        return table
    given, fields = set(table.column_names), written_fields(columns)
    taken = [name_in(field, given) for field in fields]
    _check_empty(table.column(name) for name in given.difference(taken))
    arrays = [
        _conform_column(table.column(name), field.type)
        if name is not None
        else pa.nulls(table.num_rows, to_arrow_type(field.type))
        for field, name in zip(fields, taken, strict=True)
    ]
    return pa.table(arrays, schema=schema)


def _check_empty(left_out: Iterable[pa.Array | pa.ChunkedArray]) -> None:
    if any(values.null_count < len(values) for values in left_out):
        raise pa.ArrowInvalid("values have no column any more")


def _conform_column(column: pa.ChunkedArray, type_: Type) -> pa.ChunkedArray:
    target = to_arrow_type(type_)
    if column.type == target:
        return column
    return pa.chunked_array([_conform(chunk, type_) for chunk in column.chunks], type=target)


def _conform(array: pa.Array, type_: Type) -> pa.Array:
    target = to_arrow_type(type_)
    if array.type == target:
        return array
    if array.null_count == len(array):
        return pa.nulls(len(array), target)
    if array.offset:
        # Building on parts of a slice is not possible; joining copies the slice into an array of its own.
        array = pa.concat_arrays([array, array.slice(0, 0)])
    match type_:
        case StructType() if pt.is_struct(array.type):
            return _conform_struct(array, type_)
        case ListType(element=element) if pt.is_list(array.type):
            values = _conform(array.values, element)
            return pa.ListArray.from_arrays(array.offsets, values, type=target, mask=array.is_null())
        case MapType(key=key, value=value) if pt.is_map(array.type):
            keys, items = _conform(array.keys, key), _conform(array.items, value)
            return pa.MapArray.from_arrays(array.offsets, keys, items, type=target, mask=array.is_null())
        case str() if _conform_is_promotion(array.type, target):
            return array.cast(target)
    raise pa.ArrowInvalid("values have a column of another type now")


def _conform_struct(array: pa.StructArray, type_: StructType) -> pa.StructArray:
    given = {field.name for field in array.type}
    taken = [name_in(field, given) for field in type_.fields]
    _check_empty(array.field(name) for name in given.difference(taken))
    children = [
        pa.nulls(len(array), to_arrow_type(field.type)) if name is None else _conform(array.field(name), field.type)
        for field, name in zip(type_.fields, taken, strict=True)
    ]
    fields = list(to_arrow_type(type_).fields)
    return pa.StructArray.from_arrays(children, fields=fields, mask=array.is_null())


def _conform_is_promotion(given: pa.DataType, target: pa.DataType) -> bool:
    """Tell whether Iceberg lets a column of the one type become the other."""
    if pt.is_decimal(given) and pt.is_decimal(target):
        return bool(given.scale == target.scale and given.precision <= target.precision)
    return (given, target) in _CONFORM_PROMOTIONS
