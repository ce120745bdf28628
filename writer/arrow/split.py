"""Arrow columns against their table's, at any depth: what fits is kept, what does not is left over. Owns that split.

The counterpart of misfits.py for rows that are columns already, with the same outcome: a struct keeps the fields that
fit, a list or map with one misfit is left over whole. Values that fit are never looked at one by one; most columns
have the very layout of the table's and are only given its field ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as pt

from writer.arrow.casts import Mask, as_mask, cast_exactly, null_mask
from writer.arrow.json import json_values
from writer.rows.column_notes import is_json, name_in
from writer.rows.misfits import NOTHING
from writer.rows.relaxation import type_has_required
from writer.types import Field, ListType, MapType, StructType, Type, to_arrow_type

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
