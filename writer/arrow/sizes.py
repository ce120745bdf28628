"""How large Arrow columns are once every value stands for itself. Owns the measure; limits are the caller's.

A dictionary or a view may name one long text a million times over. So sizes are taken row by row, as arrays of numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from writer.arrow.types import is_list, is_text

Numbers: TypeAlias = npt.NDArray[np.int64]


def slot_costs(fields: Iterable[pa.Field]) -> Numbers:
    """Give for each field, in the order of a batch's nodes, what one value costs beside itself: its name and a byte."""
    return np.fromiter((cost for field in fields for cost in _costs(field)), np.int64)


def _costs(field: pa.Field) -> Iterator[int]:
    yield len(field.name.encode()) + 1
    yield from _costs_below(field.type)


def _costs_below(type_: pa.DataType) -> Iterator[int]:
    if isinstance(type_, pa.BaseExtensionType):
        yield from _costs_below(type_.storage_type)
    elif pt.is_struct(type_):
        for field in type_:
            yield from _costs(field)
    elif is_list(type_):
        yield 1
        yield from _costs_below(type_.value_type)
    elif pt.is_map(type_):
        yield from (1, len("key"), *_costs_below(type_.key_type))
        yield from (len("value"), *_costs_below(type_.item_type))


def expands(type_: pa.DataType) -> bool:
    """Tell whether values of a type can be larger than the buffers that hold them."""
    if isinstance(type_, pa.BaseExtensionType):
        return expands(type_.storage_type)
    if pt.is_map(type_):
        return expands(type_.key_type) or expands(type_.item_type)
    if is_list(type_):
        return expands(type_.value_type)
    if pt.is_struct(type_):
        return any(expands(field.type) for field in type_)
    return bool(pt.is_dictionary(type_) or pt.is_string_view(type_) or pt.is_binary_view(type_))


def row_bytes(values: pa.Array) -> Numbers:
    """Measure each value of a column that no slice was taken of."""
    type_ = values.type
    if isinstance(type_, pa.BaseExtensionType):
        return row_bytes(values.storage)
    if pt.is_dictionary(type_):
        sizes = np.append(row_bytes(values.dictionary), 0)  # the last is that of a null
        indices: Numbers = values.indices.cast(pa.int64()).fill_null(len(values.dictionary)).to_numpy()
        return sizes[indices]
    if pt.is_struct(type_):
        return sum((row_bytes(values.field(index)) for index in range(len(type_))), np.zeros(len(values), np.int64))
    if pt.is_fixed_size_list(type_):
        sums: Numbers = row_bytes(values.values).reshape(len(values), type_.list_size).sum(axis=1)
        return sums
    if is_list(type_):
        return _added_up(row_bytes(values.values), values.offsets)
    if pt.is_map(type_):
        return _added_up(row_bytes(values.keys) + row_bytes(values.items), values.offsets)
    if pt.is_string_view(type_) or pt.is_binary_view(type_):
        return _view_lengths(values)
    if is_text(type_) or pt.is_binary(type_) or pt.is_large_binary(type_):
        lengths: Numbers = pc.binary_length(values).fill_null(0).to_numpy().astype(np.int64)
        return lengths
    return np.full(len(values), 0 if pt.is_null(type_) else -(-type_.bit_width // 8), np.int64)


def _view_lengths(values: pa.Array) -> Numbers:
    """Read the lengths of views, which are the first four of their sixteen bytes; below nulls there may be any."""
    if not len(values):
        return np.empty(0, np.int64)
    views = np.frombuffer(values.buffers()[1], np.int32, 4 * (values.offset + len(values)))
    lengths = views.reshape(-1, 4)[values.offset :, 0].astype(np.int64)
    return np.where(values.is_valid().to_numpy(zero_copy_only=False), lengths, 0)


def _added_up(element_bytes: Numbers, offsets: pa.Array) -> Numbers:
    before: Numbers = np.append(0, np.cumsum(element_bytes))
    places: Numbers = offsets.to_numpy()
    return before[places[1:]] - before[places[:-1]]
