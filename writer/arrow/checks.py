"""What the columns of an Arrow frame must be. Owns the rules; the frame's definition is arrow_frames.py's."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from writer import columns as names
from writer.arrow.json import in_common_years
from writer.arrow.types import find_unsupported, is_list, is_text
from writer.changes import Operation
from writer.envelope import TIMESTAMP_MAX_MS, TIMESTAMP_MIN_MS, BatchMalformed
from writer.rows.field_names import NAME_MAX_CHARS

# What a change is beside its row. Other columns that start like these are not Lakefeed's to take from a client.
CHANGE_COLUMNS = frozenset(
    (names.SEQUENCE, names.TIMESTAMP, names.OPERATION, names.ROW_ID, names.BEFORE, names.UNCHANGED, names.METADATA)
)

_NS_PER_US = 1000
_OPERATIONS = pa.array([operation.value for operation in Operation])


def check_schema(schema: pa.Schema) -> None:
    """Check names and types.

    Raises: BatchMalformed.
    """
    _check_names(schema, "")
    own = [field for field in schema if field.name not in CHANGE_COLUMNS]
    for path, rule in find_unsupported(own):
        raise BatchMalformed(f"{path}: {rule}")
    for field in schema:
        _check_change_type(field.name, field.type)
    if names.SEQUENCE not in schema.names:
        raise BatchMalformed(f"{names.SEQUENCE}: expected as a column of type int64")


def _check_names(fields: Iterable[pa.Field], parent: str) -> None:
    seen = set()
    for field in fields:
        if len(field.name) > NAME_MAX_CHARS:
            raise BatchMalformed(f"{parent}: expected names of at most {NAME_MAX_CHARS} characters")
        if field.name in seen:
            raise BatchMalformed(f"{parent}{field.name}: expected each name once")
        seen.add(field.name)
        _check_names_below(field.type, parent + field.name)


def _check_names_below(type_: pa.DataType, path: str) -> None:
    if pt.is_struct(type_):
        _check_names(type_, f"{path}.")
    elif pt.is_map(type_):
        _check_names_below(type_.item_type, f"{path}.value")
    elif is_list(type_):
        _check_names_below(type_.value_type, f"{path}.element")


def _check_change_type(name: str, type_: pa.DataType) -> None:
    match name:
        case names.SEQUENCE:
            fits, expected = pt.is_int64(type_), "int64"
        case names.TIMESTAMP:
            fits, expected = pt.is_timestamp(type_) or pt.is_int64(type_) or pt.is_null(type_), "a timestamp, or int64"
        case names.OPERATION:
            fits, expected = _is_text(type_), "text"
        case names.ROW_ID | names.BEFORE | names.METADATA:
            fits, expected = _is_text(type_) or pt.is_null(type_), "text"
        case names.UNCHANGED:
            fits, expected = pt.is_null(type_) or (is_list(type_) and is_text(type_.value_type)), "a list of text"
        case _:
            return
    if not fits:
        raise BatchMalformed(f"{name}: expected {expected}, got {type_}")


def _is_text(type_: pa.DataType) -> bool:
    return is_text(type_.value_type if pt.is_dictionary(type_) else type_)


def check_changes(batch: pa.RecordBatch) -> None:
    """Check the values of a batch's change columns; that sequences rise is a matter of the whole frame.

    Raises: BatchMalformed.
    """
    if batch.column(names.SEQUENCE).null_count:
        raise BatchMalformed(f"{names.SEQUENCE}: expected no nulls")
    if names.OPERATION in batch.schema.names and not _are_operations(batch.column(names.OPERATION)):
        raise BatchMalformed(f"{names.OPERATION}: expected one of {', '.join(_OPERATIONS.to_pylist())}")
    if names.TIMESTAMP in batch.schema.names:
        _check_timestamps(batch.column(names.TIMESTAMP))


def _are_operations(given: pa.Array) -> bool:
    if pt.is_dictionary(given.type) and not given.null_count and _are_operations(given.dictionary):
        return True
    return bool(pc.all(pc.is_in(given.cast(pa.string()), _OPERATIONS), min_count=0).as_py())


def _check_timestamps(given: pa.Array) -> None:
    if pt.is_null(given.type):
        return
    if pt.is_timestamp(given.type) and given.type.unit == "ns":
        numbers = given.view(pa.int64()).fill_null(0).to_numpy()
        if np.any(numbers % _NS_PER_US):
            raise BatchMalformed(f"{names.TIMESTAMP}: expected whole microseconds")
    as_moments = given if pt.is_timestamp(given.type) else given.view(pa.timestamp("ms"))
    if not np.all(in_common_years(as_moments)):
        raise BatchMalformed(
            f"{names.TIMESTAMP}: expected years 1 to 9999, in ms from {TIMESTAMP_MIN_MS} to {TIMESTAMP_MAX_MS}"
        )
