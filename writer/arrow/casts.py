"""Arrow values cast to the type of their column, exactly: each keeps its value, or is a misfit. Primitive types only.

Owns which casts are made at once, for a whole array. Where such a cast does not exist or refuses some value, each
value is offered in its JSON form (arrow_json.py) to the rules that rows in JSON go by (misfits.py).
"""

from __future__ import annotations

from decimal import Decimal
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from writer.arrow.json import in_common_years, json_values, moment_texts
from writer.arrow.types import UUID_VALUES, is_bytes
from writer.rows.column_notes import is_json
from writer.rows.exact_numbers import decimal_parts
from writer.rows.misfits import row_keeper, to_json
from writer.rows.text_values import Misfit, is_text_type, read_texts
from writer.types import Field, to_arrow_type

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
    """Build a column of what misfits.py keeps: numbers of unsure size as text, texts as they were."""
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
