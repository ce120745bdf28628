"""Arrow columns against their table's, at any depth: what fits is kept, what does not is left over. Owns that split.

The counterpart of misfits.py for rows that are columns already, with the same outcome: a struct keeps the fields that
fit, a list or map with one misfit is left over whole. Values that fit are never looked at one by one; most columns
have the very layout of the table's and are only given its field ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from lakefeed.iceberg.arrow import to_arrow_schema, to_arrow_type
from lakefeed.iceberg.types import Field, ListType, MapType, Schema, StructType, Type, decimal_parts
from lakefeed.writer.rows.comments import ELEMENT, VALUE, Path, former_names, is_json, name_in
from lakefeed.writer.rows.declaration import declare_fields
from lakefeed.writer.rows.evolution import Room, StructWatch, still_required, type_has_required
from lakefeed.writer.rows.groups import ArrowGroup, arrow_change_columns
from lakefeed.writer.rows.json_exact import NOTHING, WHOLE_ROW, Fitted, row_keeper, to_json, with_own
from lakefeed.writer.rows.json_strict import NO_VACANCIES, Vacancies, own_fields
from lakefeed.writer.rows.values import Misfit, is_text_type, read_texts
from lakefeed.writer.wire.arrow_frame import CHANGE_COLUMNS
from lakefeed.writer.wire.arrow_types import (
    UUID_VALUES,
    declared_fields,
    in_common_years,
    is_bytes,
    json_values,
    moment_texts,
)

# --- writer.arrow.casts -----------------------------------------------------------------------------------------------
#
# Arrow values cast to the type of their column, exactly: each keeps its value, or is a misfit. Primitive types only.
#
# Owns which casts are made at once, for a whole array. Where such a cast does not exist or refuses some value, each
# value is offered in its JSON form (arrow_json.py) to the rules that rows in JSON go by (json_exact.py).


_INT64_DIGITS = pa.decimal128(19, 0)
_UINT64_DIGITS = pa.decimal128(20, 0)

Mask: TypeAlias = npt.NDArray[np.bool_]


class Cast(NamedTuple):
    """Values in their column's type, null where one did not fit; `misfits` marks those, None if there are none."""

    kept: pa.Array
    misfits: Mask | None


def cast_exactly(values: pa.Array, type_: str, doc: str | None = None) -> Cast:
    """Cast values of any plain primitive type of Arrow's to an Iceberg type."""
    if pt.is_null(values.type):
        return Cast(pa.nulls(len(values), to_arrow_type(type_)), None)
    if not is_json(doc):
        try:
            if (cast := _cast_all(values, type_)) is not None:
                return Cast(cast, None)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, Misfit):
            pass  # some value has no exact place: look at each
    return _cast_each(values, type_, doc)


def _cast_all(values: pa.Array, type_: str) -> pa.Array | None:
    """Cast all values at once, None where Arrow has no exact cast.

    Raises: ArrowInvalid, ArrowNotImplementedError or Misfit where some value does not fit.
    """
    source, target = values.type, to_arrow_type(type_)
    if source == UUID_VALUES:
        return values.cast(target) if type_ == "uuid" else None
    if pt.is_temporal(source):
        return _cast_moments(values, target)
    if pt.is_string(source):
        return read_texts(values, type_) if is_text_type(type_) else values if pt.is_string(target) else None
    if is_bytes(source):
        return values.cast(target) if is_bytes(target) else None
    if decimal_parts(type_):
        return _cast_to_decimal(values, target)
    if pt.is_boolean(source) or pt.is_boolean(target):
        return values if source == target else None
    if pt.is_decimal(source):
        return values.cast(target) if pt.is_integer(target) else None
    # Of numbers Arrow refuses what would lose digits, except from doubles to floats.
    is_number = pt.is_integer(target) or (pt.is_floating(target) and not (pt.is_float64(source) and type_ == "float"))
    return values.cast(target) if is_number else None


def _cast_moments(values: pa.Array, target: pa.DataType) -> pa.Array | None:
    source = values.type
    if not np.all(in_common_years(values)):
        return None
    if pt.is_string(target):
        return moment_texts(values)
    if pt.is_timestamp(source) and pt.is_timestamp(target):
        return values.cast(target) if (source.tz is None) == (target.tz is None) else None
    is_same_kind = (pt.is_date(source) and pt.is_date(target)) or (pt.is_time(source) and pt.is_time(target))
    return values.cast(target) if is_same_kind else None


def _cast_to_decimal(values: pa.Array, target: pa.DataType) -> pa.Array | None:
    if pt.is_integer(values.type):
        # Arrow asks for room for any integer of the type, so each is given it before the digits are counted.
        return values.cast(_UINT64_DIGITS if pt.is_uint64(values.type) else _INT64_DIGITS).cast(target)
    return values.cast(target) if pt.is_decimal(values.type) else None


def _cast_each(values: pa.Array, type_: str, doc: str | None) -> Cast:
    forms = json_values(values)
    if is_json(doc):
        texts = [None if form is None else to_json(form).decode() for form in forms]
        return Cast(pa.array(texts, pa.string()), None)
    keep = row_keeper((Field(0, "value", type_),))
    kept = [None if form is None else keep({"value": form})[0].get("value") for form in forms]
    present = np.array([form is not None for form in forms], bool)
    misfits = present & np.array([value is None for value in kept], bool)
    return Cast(_array_of(kept, type_), misfits if misfits.any() else None)


def _array_of(kept: list[Any], type_: str) -> pa.Array:
    """Build a column of what json_exact.py keeps: numbers of unsure size as text, texts as they were."""
    if is_text_type(type_):
        return read_texts(pa.array(kept, pa.string()), type_)
    if decimal_parts(type_):
        return pa.array([None if text is None else Decimal(text) for text in kept], to_arrow_type(type_))
    if type_ in ("float", "double"):
        doubles = pa.array([None if number is None else float(bytes(number)) for number in kept], pa.float64())
        return doubles.cast(to_arrow_type(type_), safe=False)
    return pa.array(kept, to_arrow_type(type_))


def as_mask(values: pa.Array) -> Mask:
    """Turn an Arrow array of booleans without nulls into a mask."""
    mask: Mask = values.to_numpy(zero_copy_only=False)
    return mask


def null_mask(values: pa.Array) -> pa.Array | None:
    """Mark the nulls of an array for those who build another one like it, None where there are none."""
    return pc.is_null(values) if values.null_count else None


# --- writer.arrow.split -----------------------------------------------------------------------------------------------


Rows: TypeAlias = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Left:
    """What did not fit: values whole, or of structs only the members that are named."""

    misfits: Mask
    values: pa.Array | None
    members: Mapping[str, Left]

    def render(self, rows: Rows) -> list[Any]:
        """Give what is left in these rows as JSON values, NOTHING where all fitted."""
        left = self.misfits[rows]
        if self.values is not None:
            forms = iter(json_values(self.values.take(pa.array(rows[left]))))
            return [next(forms) if is_left else NOTHING for is_left in left]
        columns = {name: member.render(rows) for name, member in self.members.items()}
        return [_members_of(columns, row) if is_left else NOTHING for row, is_left in enumerate(left)]


def _members_of(columns: Mapping[str, list[Any]], row: int) -> dict[str, Any]:
    return {name: values[row] for name, values in columns.items() if values[row] is not NOTHING}


Split: TypeAlias = tuple[pa.Array, Left | None]


def split_fields(
    names: Sequence[str], arrays: Sequence[pa.Array], fields: Sequence[Field], rows: int
) -> tuple[list[pa.Array], Left | None]:
    """Split named arrays between fields, in the fields' order; fields that nobody brings are null."""
    brought = dict(zip(names, arrays, strict=True))
    kept: list[pa.Array] = []
    members: dict[str, Left] = {}
    for field in fields:
        name = name_in(field, brought)
        if name is None:
            kept.append(pa.nulls(rows, to_arrow_type(field.type)))
            continue
        column, left = _split(brought.pop(name), field.type, field.doc)
        kept.append(column)
        if left is not None:
            members[name] = left
    for name, values in brought.items():
        if (left := _leave_all(values)) is not None:
            members[name] = left
    if not members:
        return kept, None
    misfits = np.logical_or.reduce([each.misfits for each in members.values()])
    return kept, Left(misfits, None, members)


def _leave_all(values: pa.Array) -> Left | None:
    return _leave(values, as_mask(values.is_valid()))


def _leave(values: pa.Array, misfits: Mask | None) -> Left | None:
    return Left(misfits, values, {}) if misfits is not None and misfits.any() else None


def _split(values: pa.Array, type_: Type, doc: str | None) -> Split:
    target = to_arrow_type(type_)
    # What Arrow calls not nullable may not even be null below a null struct, so such columns are built anew.
    if not is_json(doc) and _is_laid_out_alike(values.type, target) and not type_has_required(type_):
        return values.view(target), None
    if not pt.is_nested(values.type) and isinstance(type_, str):
        kept, misfits = cast_exactly(values, type_, doc)
        return kept, _leave(values, misfits)
    if values.offset and pt.is_nested(values.type):
        # Building on parts of a slice is not possible; joining copies the slice into an array of its own.
        values = pa.concat_arrays([values, values.slice(0, 0)])
    if is_json(doc):
        return cast_exactly(values, "string", doc).kept, None
    match type_:
        case StructType() if pt.is_struct(values.type):
            return _split_struct(values, type_)
        case ListType() if pt.is_list(values.type):
            return _split_list(values, type_)
        case MapType() if pt.is_map(values.type):
            return _split_map(values, type_)
    return pa.nulls(len(values), target), _leave_all(values)


def _is_laid_out_alike(source: pa.DataType, target: pa.DataType) -> bool:
    """Tell whether values are the column's as they are, whatever they are. Of times the years have to be looked at."""
    if pt.is_struct(source) and pt.is_struct(target):
        return len(source) == len(target) and all(
            mine.name == other.name and _is_laid_out_alike(mine.type, other.type)
            for mine, other in zip(source, target, strict=True)
        )
    if pt.is_list(source) and pt.is_list(target):
        return _is_laid_out_alike(source.value_type, target.value_type)
    if pt.is_map(source) and pt.is_map(target):
        same_keys = _is_laid_out_alike(source.key_type, target.key_type)
        return same_keys and _is_laid_out_alike(source.item_type, target.item_type)
    return bool(source == target) and not pt.is_temporal(source)


def _split_struct(values: pa.StructArray, type_: StructType) -> Split:
    names = [field.name for field in values.type]
    # Flattened children are null where the struct is, so that nothing below a null is taken for a value.
    kept, left = split_fields(names, values.flatten(), type_.fields, len(values))
    fields = list(to_arrow_type(type_))
    if not fields:
        return pa.nulls(len(values), to_arrow_type(type_)), left
    return pa.StructArray.from_arrays(kept, fields=fields, mask=null_mask(values)), left


def _split_list(values: pa.Array, type_: ListType) -> Split:
    elements, left = _split(values.values, type_.element, None)
    misfits = _lists_with(left, values)
    kept = pa.ListArray.from_arrays(
        values.offsets, elements, type=to_arrow_type(type_), mask=_nulls_and(values, misfits)
    )
    return kept, _leave(values, misfits)


def _split_map(values: pa.MapArray, type_: MapType) -> Split:
    keys, left_keys = _split(values.keys, type_.key, None)
    items, left_items = _split(values.items, type_.value, None)
    misfits = _either(_lists_with(left_keys, values), _lists_with(left_items, values))
    if misfits is not None:
        # A map cannot be built around keys that did not fit, so the others are split again without it.
        others, _ = _split_map(values.filter(pa.array(~misfits)), type_)
        places = pa.array(np.cumsum(~misfits) - 1, mask=misfits)
        return others.take(places), _leave(values, misfits)
    return pa.MapArray.from_arrays(values.offsets, keys, items, type=to_arrow_type(type_), mask=null_mask(values)), None


def _either(some: Mask | None, others: Mask | None) -> Mask | None:
    if some is None or others is None:
        return others if some is None else some
    return some | others


def _lists_with(left: Left | None, lists: pa.Array) -> Mask | None:
    """Mark the lists that have an element that did not fit."""
    if left is None:
        return None
    before = np.r_[0, np.cumsum(left.misfits)]
    offsets = lists.offsets.to_numpy()
    misfits: Mask = (before[offsets[1:]] > before[offsets[:-1]]) & as_mask(lists.is_valid())
    return misfits


def _nulls_and(values: pa.Array, misfits: Mask | None) -> pa.Array | None:
    if misfits is None:
        return null_mask(values)
    return pa.array(misfits | ~as_mask(values.is_valid()))


# --- writer.arrow.relaxation ------------------------------------------------------------------------------------------
#
# Required fields that the columns of a frame leave empty become optional. Owns finding them, at any depth.
#
# The counterpart of rows/relaxation.py for rows that are columns already.


def relax_columns(fields: Sequence[Field], columns: Sequence[Sequence[pa.Array]], room: Room) -> tuple[Field, ...]:
    """Make those fields optional, at any depth, that have a null in their arrays."""
    return tuple(_relax_field(each, arrays, room, (each.name,)) for each, arrays in zip(fields, columns, strict=True))


def _relax_field(each: Field, arrays: Sequence[pa.Array], room: Room, path: Path) -> Field:
    required = _still_required(arrays, room, path, required=each.required)
    type_ = each.type if is_json(each.doc) else _relax_type(each.type, arrays, room, path)
    return each if (required, type_) == (each.required, each.type) else replace(each, required=required, type=type_)


def _relax_type(type_: Type, arrays: Sequence[pa.Array], room: Room, path: Path) -> Type:
    if not type_has_required(type_):
        return type_
    match type_:
        case StructType(fields):
            # Below a null struct nothing is missing.
            children = [array.filter(array.is_valid()).flatten() for array in arrays]
            columns = [[each[index] for each in children] for index in range(len(fields))]
            relaxed = (
                _relax_field(each, column, room, (*path, each.name))
                for each, column in zip(fields, columns, strict=True)
            )
            return StructType(tuple(relaxed))
        case ListType(element=element, element_required=required):
            below = (*path, ELEMENT)
            elements = [array.flatten() for array in arrays]
            required = _still_required(elements, room, below, required=required)
            return replace(type_, element=_relax_type(element, elements, room, below), element_required=required)
        case MapType(value=value, value_required=required):
            # What is left of a filtered column is no slice, so its items are those of its maps.
            below = (*path, VALUE)
            items = [array.filter(array.is_valid()).items for array in arrays]
            required = _still_required(items, room, below, required=required)
            return replace(type_, value=_relax_type(value, items, room, below), value_required=required)
        case str():
            return type_


def _still_required(arrays: Sequence[pa.Array], room: Room, path: Path, *, required: bool) -> bool:
    has_nulls = any(array.null_count for array in arrays)
    return still_required(room, path, required=required, has_nulls=has_nulls)


# --- writer.arrow.rows ------------------------------------------------------------------------------------------------
#
# Rows that came as Arrow columns, in their table's columns. Owns the order of the steps; each has its own module.
#
#     columns --declare--> wider columns --split--> kept, left --widen for what is left--> --relax--> rows,
# `_cdc_rescued`
#
# There is one path for all groups, because values that fit are never looked at. A group that asks for no change of the
# columns is decoded by many threads at once; one that does waits for its table's turn (runs.py).


# Rows are copied out of their frames where those hold more than this many times the rows' own size.
HELD_MAX_RATIO = 2


def fit_arrow_group(
    group: ArrowGroup,
    columns: StructType,
    *,
    next_field_id: int,
    vacant: Vacancies = NO_VACANCIES,
    nanoseconds: bool = False,
) -> Fitted:
    """Put any group into its table's columns, which may evolve; each value is in its column or in `_cdc_rescued`.

    `nanoseconds` tells that the table's format has types for them.
    """
    brought = [field for field in group.rows.schema if field.name not in CHANGE_COLUMNS]
    room = Room(columns, next_field_id)
    own = declare_fields(own_fields(columns), declared_fields(brought, nanoseconds=nanoseconds), room)
    parts = _split_rows(group, own)
    if any(part.left is not None for part in parts):
        wider = _widen_for_left(own, parts, room)
        if wider != own:
            own, parts = wider, _split_rows(group, wider)
    relaxed = relax_columns(own, [[part.kept[index] for part in parts] for index in range(len(own))], room)
    if relaxed != own:
        own, parts = relaxed, _split_rows(group, relaxed)
    evolved = with_own(columns, own)
    table = _assemble(group, evolved, own=own, parts=parts)
    return Fitted(evolved, room.last_field_id, table, tuple(room.changes), vacant)


@dataclass(frozen=True, slots=True)
class _Part:
    """The rows of one batch: what their columns keep, and what is left over."""

    rows: int
    kept: list[pa.Array]
    left: Left | None

    def render_left(self) -> list[dict[str, object]]:
        return [] if self.left is None else self.left.render(np.flatnonzero(self.left.misfits))


def _split_rows(group: ArrowGroup, own: Sequence[Field]) -> list[_Part]:
    """Split the rows batch by batch, so that columns stay in their frames' bytes."""
    brought = [name for name in group.rows.column_names if name not in CHANGE_COLUMNS]
    return [
        _Part(batch.num_rows, *split_fields(brought, [batch.column(name) for name in brought], own, batch.num_rows))
        for batch in group.rows.to_batches()
    ]


def _widen_for_left(own: Sequence[Field], parts: Sequence[_Part], room: Room) -> tuple[Field, ...]:
    """Let known columns grow for single values that did not fit, by the rules that rows in JSON go by."""
    known = {name for field in own for name in (field.name, *former_names(field))}
    watch = StructWatch(StructType(tuple(own)))
    for part in parts:
        for row in part.render_left():
            watch.add({name: value for name, value in row.items() if name in known})
    return watch.evolved(room, ()).fields


def _assemble(group: ArrowGroup, columns: StructType, *, own: Sequence[Field], parts: Sequence[_Part]) -> pa.Table:
    schema = to_arrow_schema(Schema(0, columns))
    every = dict(arrow_change_columns(group, schema, rescued=_rescued(parts)))
    for index, field in enumerate(own):
        target = schema.field(field.name).type
        every[field.name] = pa.chunked_array([part.kept[index] for part in parts], type=target)
    table = pa.table([every[name] for name in schema.names], schema=schema)
    if table.nbytes * HELD_MAX_RATIO < group.held_bytes:
        return table.take(pa.array(np.arange(table.num_rows)))
    return table


def _rescued(parts: Sequence[_Part]) -> pa.Array | None:
    if all(part.left is None for part in parts):
        return None
    return pa.array([text for part in parts for text in _rescued_texts(part)], pa.string())


def _rescued_texts(part: _Part) -> list[str | None]:
    texts: list[str | None] = [None] * part.rows
    if part.left is not None:
        for row, members in zip(np.flatnonzero(part.left.misfits), part.render_left(), strict=True):
            texts[row] = _rescued_text(members)
    return texts


def _rescued_text(members: dict[str, object]) -> str:
    if WHOLE_ROW in members:
        members = members | {WHOLE_ROW: {WHOLE_ROW: members[WHOLE_ROW]}}
    return to_json(members).decode()
