"""Arrow columns to the table's columns, exactly: what fits is kept, what does not fit goes to `_cdc_rescued`.

    columns --declare--> wider columns --split--> kept, left --widen for what is left--> --relax--> rows, `_cdc_rescued`

The counterpart of json_exact.py for rows that are columns already, with the same outcome: a struct keeps the fields
that fit, a list or map with one misfit is left whole. There is one path for all groups, because values that fit are
never looked at one by one: most columns have the layout of the table's and only get its field ids. Where Arrow has no
exact cast for a whole array, or some value does not survive it, each value is offered in its JSON form (arrow_types.py)
to the rules for JSON rows (json_exact.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from lakefeed.iceberg.arrow import to_arrow_type
from lakefeed.iceberg.types import Field, ListType, MapType, StructType, Type, decimal_parts
from lakefeed.writer.rows.comments import former_names, is_json, name_in
from lakefeed.writer.rows.declaration import declare_fields
from lakefeed.writer.rows.evolution import (
    FittedRows,
    SchemaUpdate,
    StructObserver,
    has_required,
    own_fields,
    relax_fields,
)
from lakefeed.writer.rows.json_exact import NOTHING, WHOLE_ROW, row_keeper, to_json
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

Mask: TypeAlias = npt.NDArray[np.bool_]
Rows: TypeAlias = npt.NDArray[np.intp]


def fit_columns(rows: pa.Table, update: SchemaUpdate, *, nanoseconds: bool = False) -> FittedRows:
    """Bring a frame's rows into their table's columns, which may evolve for them.

    `nanoseconds` is whether the table's format has types for them.
    """
    brought = [field for field in rows.schema if field.name not in CHANGE_COLUMNS]
    own = declare_fields(own_fields(update.columns), declared_fields(brought, nanoseconds=nanoseconds), update)
    parts = _split_rows(rows, own)
    if any(part.left is not None for part in parts):
        wider = _widen_for_left(own, parts, update)
        if wider != own:
            own, parts = wider, _split_rows(rows, wider)
    relaxed = relax_fields(own, [[part.kept[index] for part in parts] for index in range(len(own))], update)
    if relaxed != own:
        own, parts = relaxed, _split_rows(rows, relaxed)
    update.set_own(own)
    arrays = [
        pa.chunked_array([part.kept[index] for part in parts], type=to_arrow_type(field.type))
        for index, field in enumerate(own)
    ]
    has_left = any(part.left is not None for part in parts)
    return FittedRows(arrays, [text for part in parts for text in _rescued_texts(part)] if has_left else None)


@dataclass(frozen=True, slots=True)
class _Part:
    """The rows of one batch: what their columns keep, and what is left over."""

    rows: int
    kept: list[pa.Array]
    left: Left | None

    def render_left(self) -> list[dict[str, object]]:
        return [] if self.left is None else self.left.render(np.flatnonzero(self.left.misfits))


def _split_rows(rows: pa.Table, own: Sequence[Field]) -> list[_Part]:
    """Split the rows batch by batch, so that columns stay in their frames' bytes."""
    brought = [name for name in rows.column_names if name not in CHANGE_COLUMNS]
    return [
        _Part(batch.num_rows, *_split_fields({name: batch.column(name) for name in brought}, own, batch.num_rows))
        for batch in rows.to_batches()
    ]


def _widen_for_left(own: Sequence[Field], parts: Sequence[_Part], update: SchemaUpdate) -> tuple[Field, ...]:
    """Widen known columns for single values that did not fit, by the rules for JSON rows."""
    known = {name for field in own for name in (field.name, *former_names(field))}
    observer = StructObserver(StructType(tuple(own)))
    for part in parts:
        for row in part.render_left():
            observer.add({name: value for name, value in row.items() if name in known})
    return observer.evolved(update, ()).fields


def _rescued_texts(part: _Part) -> list[str | None]:
    texts: list[str | None] = [None] * part.rows
    if part.left is not None:
        for row, members in zip(np.flatnonzero(part.left.misfits), part.render_left(), strict=True):
            if WHOLE_ROW in members:
                members[WHOLE_ROW] = {WHOLE_ROW: members[WHOLE_ROW]}
            texts[row] = to_json(members).decode()
    return texts


@dataclass(frozen=True, slots=True)
class Left:
    """What did not fit: values whole, or of structs only the members that are named."""

    misfits: Mask
    values: pa.Array | None
    members: Mapping[str, Left]

    def render(self, rows: Rows) -> list[Any]:
        """Return what is left of these rows as JSON values, NOTHING for a row that fitted."""
        left = self.misfits[rows]
        if self.values is not None:
            forms = iter(json_values(self.values.take(pa.array(rows[left]))))
            return [next(forms) if is_left else NOTHING for is_left in left]
        columns = {name: member.render(rows) for name, member in self.members.items()}
        return [
            {name: values[row] for name, values in columns.items() if values[row] is not NOTHING}
            if is_left
            else NOTHING
            for row, is_left in enumerate(left)
        ]


Split: TypeAlias = tuple[pa.Array, Left | None]


def _split_fields(
    brought: dict[str, pa.Array], fields: Sequence[Field], rows: int
) -> tuple[list[pa.Array], Left | None]:
    """Split named arrays between fields, in the fields' order; fields without an array are null. Empties `brought`."""
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
    # Arrow does not allow nulls in a non-nullable field even below a null struct, so such columns are rebuilt.
    if not is_json(doc) and _is_laid_out_alike(values.type, target) and not has_required(type_):
        return values.view(target), None
    if not pt.is_nested(values.type) and isinstance(type_, str):
        kept, misfits = cast_exactly(values, type_, doc)
        return kept, _leave(values, misfits)
    if values.offset and pt.is_nested(values.type):
        # Arrow cannot build on parts of a slice. Joining copies the slice into an array of its own.
        values = pa.concat_arrays([values, values.slice(0, 0)])
    if is_json(doc):
        return cast_exactly(values, "string", doc)[0], None
    match type_:
        case StructType() if pt.is_struct(values.type):
            return _split_struct(values, type_)
        case ListType() if pt.is_list(values.type):
            return _split_list(values, type_)
        case MapType() if pt.is_map(values.type):
            return _split_map(values, type_)
    return pa.nulls(len(values), target), _leave_all(values)


def _is_laid_out_alike(source: pa.DataType, target: pa.DataType) -> bool:
    """Return whether values of one type are values of the other as they are. Times are not: their years are checked."""
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
    # Flattened children are null if the struct is, so that nothing below a null counts as a value.
    brought = {field.name: child for field, child in zip(values.type, values.flatten(), strict=True)}
    kept, left = _split_fields(brought, type_.fields, len(values))
    fields = list(to_arrow_type(type_))
    if not fields:
        return pa.nulls(len(values), to_arrow_type(type_)), left
    return pa.StructArray.from_arrays(kept, fields=fields, mask=null_mask(values)), left


def _split_list(values: pa.Array, type_: ListType) -> Split:
    elements, left = _split(values.values, type_.element, None)
    misfits = None if left is None else _lists_with(left, values)
    nulls = null_mask(values) if misfits is None else pa.array(misfits | ~as_mask(values.is_valid()))
    kept = pa.ListArray.from_arrays(values.offsets, elements, type=to_arrow_type(type_), mask=nulls)
    return kept, _leave(values, misfits)


def _split_map(values: pa.MapArray, type_: MapType) -> Split:
    keys, left_keys = _split(values.keys, type_.key, None)
    items, left_items = _split(values.items, type_.value, None)
    if left_keys is not None or left_items is not None:
        misfits = np.zeros(len(values), bool)
        for left in filter(None, (left_keys, left_items)):
            misfits |= _lists_with(left, values)
        # Arrow cannot build a map around keys that did not fit, so split the other maps again without these.
        others, _ = _split_map(values.filter(pa.array(~misfits)), type_)
        places = pa.array(np.cumsum(~misfits) - 1, mask=misfits)
        return others.take(places), _leave(values, misfits)
    return pa.MapArray.from_arrays(values.offsets, keys, items, type=to_arrow_type(type_), mask=null_mask(values)), None


def _lists_with(left: Left, lists: pa.Array) -> Mask:
    """Mark the lists that have an element that did not fit."""
    before = np.r_[0, np.cumsum(left.misfits)]
    offsets = lists.offsets.to_numpy()
    misfits: Mask = (before[offsets[1:]] > before[offsets[:-1]]) & as_mask(lists.is_valid())
    return misfits


_INT64_DIGITS = pa.decimal128(19, 0)
_UINT64_DIGITS = pa.decimal128(20, 0)


def cast_exactly(values: pa.Array, type_: str, doc: str | None = None) -> tuple[pa.Array, Mask | None]:
    """Cast values of any plain primitive Arrow type to an Iceberg type: each keeps its value, or is a misfit.

    Return the values, null where one did not fit, and which did not fit; None if all do.
    """
    if pt.is_null(values.type):
        return pa.nulls(len(values), to_arrow_type(type_)), None
    if not is_json(doc):
        try:
            if (cast := _cast_all(values, type_)) is not None:
                return cast, None
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, Misfit):
            pass  # some value has no exact place: look at each one
    return _cast_each(values, type_, doc)


def _cast_all(values: pa.Array, type_: str) -> pa.Array | None:
    """Cast all values at once; return None if Arrow has no exact cast.

    Raises: ArrowInvalid, ArrowNotImplementedError or Misfit if some value does not fit.
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
    if decimal_parts(type_) and pt.is_integer(source):
        # Arrow demands digits for any integer of the type, so cast to those first and let the second cast count digits.
        return values.cast(_UINT64_DIGITS if pt.is_uint64(source) else _INT64_DIGITS).cast(target)
    if decimal_parts(type_):
        return values.cast(target) if pt.is_decimal(source) else None
    if pt.is_boolean(source) or pt.is_boolean(target):
        return values if source == target else None
    if pt.is_decimal(source):
        return values.cast(target) if pt.is_integer(target) else None
    # Arrow refuses to cast numbers that would lose digits, except from doubles to floats.
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


def _cast_each(values: pa.Array, type_: str, doc: str | None) -> tuple[pa.Array, Mask | None]:
    forms = json_values(values)
    if is_json(doc):
        texts = [None if form is None else to_json(form).decode() for form in forms]
        return pa.array(texts, pa.string()), None
    keep = row_keeper((Field(0, "value", type_),))
    kept = [None if form is None else keep({"value": form})[0].get("value") for form in forms]
    present = np.array([form is not None for form in forms], bool)
    misfits = present & np.array([value is None for value in kept], bool)
    return _array_of(kept, type_), misfits if misfits.any() else None


def _array_of(kept: list[Any], type_: str) -> pa.Array:
    """Build a column of what json_exact.py keeps: numbers as text, texts as they were."""
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
    """Return the nulls of an array as the mask of an array built from its parts, None if there are none."""
    return pc.is_null(values) if values.null_count else None
