"""Arrow frame: changes of one table as an Arrow IPC stream, and its checks at admission.

Beside the rows' own columns the stream has these columns:

    _cdc_sequence   int64, not null, rising through all batches            needed
    _cdc_operation  text (or dictionary): INSERT, UPDATE or DELETE         default INSERT
    _cdc_timestamp  timestamp, or int64 in ms; null: time of receipt       default time of receipt
    _cdc_row_id     text (or dictionary)                                   default ""
    _cdc_before     text: the row before the change, as JSON               default null
    _cdc_unchanged  list of text: columns that the source did not send     default null
    _cdc_metadata   text: JSON with other facts about the change           default null

and this metadata in its schema:

    lakefeed.table            the table's name                             needed
    lakefeed.source           as sourceDoId of a JSON batch                default: that of the connection
    lakefeed.sequence-number, lakefeed.first-sequence, lakefeed.last-sequence, lakefeed.previous-sequence,
    lakefeed.correlation-id   as sequenceNumber, firstEventSequence, lastEventSequence, previousSequence and
                              correlationId there

A frame that passes can be written, whatever its values; the writer does not check it again. Its expanded size is that
of the same changes as JSON: the decompressed buffers, and for each value its column's name and one byte. That size is
bounded before anything is decompressed, because in the worst case, when no value fits its column, the frame becomes
that JSON. A dictionary or a view may repeat one long text a million times, so these sizes are computed row by row.
"""

from __future__ import annotations

import array
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Self, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from lakefeed.contract import changes as names
from lakefeed.contract.changes import INT64_MAX, NAME_MAX_CHARS, TIMESTAMP_MAX_MS, TIMESTAMP_MIN_MS, Operation
from lakefeed.writer.wire.arrow_ipc import CONTINUATION, BatchContents, check_expanded, scan_stream
from lakefeed.writer.wire.arrow_types import child_types, find_unsupported, in_common_years, is_list, is_text
from lakefeed.writer.wire.json_batch import BatchMalformed

# The columns of a change beside its row. Clients may not send other columns with this prefix.
CHANGE_COLUMNS = frozenset(
    (names.SEQUENCE, names.TIMESTAMP, names.OPERATION, names.ROW_ID, names.BEFORE, names.UNCHANGED, names.METADATA)
)

_NS_PER_US = 1000
_OPERATIONS = pa.array([operation.value for operation in Operation])

TABLE_KEY = b"lakefeed.table"
SOURCE_KEY = b"lakefeed.source"
NUMBER_KEY = b"lakefeed.sequence-number"
FIRST_KEY = b"lakefeed.first-sequence"
LAST_KEY = b"lakefeed.last-sequence"
PREVIOUS_KEY = b"lakefeed.previous-sequence"
CORRELATION_KEY = b"lakefeed.correlation-id"

# Schemas whose checks are cached; one with a hundred columns takes about ten kilobytes.
SCHEMAS_MAX = 256

_DIGITS = re.compile(r"[0-9]{1,19}")

# What Arrow raises for bytes that are not a stream. Its messages may quote a value, so they are not passed on.
_ARROW_ERRORS = (pa.ArrowException, OSError, UnicodeDecodeError)

# Arrow's own threads would only compete with the decoders.
_READ_OPTIONS = pa.ipc.IpcReadOptions(use_threads=False)

Numbers: TypeAlias = npt.NDArray[np.int64]


class RowTooLarge(BatchMalformed):
    """A single change exceeds the size limit: refuse the frame."""

    def __init__(self, message: str, *, size_bytes: int) -> None:
        super().__init__(message)
        self.size_bytes = size_bytes


@dataclass(frozen=True, slots=True)
class ArrowHead:
    """The frame's metadata, with the names of a JSON batch."""

    table: str
    source_do_id: str
    sequence_number: int | None
    first_event_sequence: int | None
    last_event_sequence: int | None
    previous_sequence: int | None
    correlation_id: str | None


@dataclass(frozen=True, slots=True)
class ArrowBatch:
    """A frame that passed its checks. `expanded_bytes` is its size as JSON would count it."""

    sequences: Sequence[int]
    expanded_bytes: int


def is_arrow_frame(frame: bytes) -> bool:
    """Return whether a frame is an Arrow stream. JSON cannot begin like one."""
    return frame.startswith(CONTINUATION)


def open_stream(body: bytes) -> pa.RecordBatchStreamReader:
    """Open an admitted stream; the caller closes it."""
    return pa.ipc.open_stream(body, options=_READ_OPTIONS)


@lru_cache(maxsize=SCHEMAS_MAX)
def _plan(schema: pa.Schema) -> tuple[Sequence[int], Sequence[str]]:
    """Return what all frames with one schema share: the costs of slots, and the columns whose values expand."""
    check_schema(schema)
    costs = [cost for field in schema for cost in _costs(field)]
    return costs, [field.name for field in schema if expands(field.type)]


@dataclass(frozen=True, slots=True)
class ArrowFrame:
    """A frame during admission: its head is known, the rest is not checked yet."""

    head: ArrowHead
    schema: pa.Schema
    body: bytes
    contents: Sequence[BatchContents]
    max_bytes: int

    @classmethod
    def open(cls, body: bytes, *, expanded_max_bytes: int) -> Self:
        """Read a frame's head, or raise BatchMalformed."""
        contents = scan_stream(body, inflated_max_bytes=expanded_max_bytes)
        try:
            with open_stream(body) as reader:
                schema = reader.schema
                head = _head_of(schema.metadata or {})
        except _ARROW_ERRORS as error:
            raise BatchMalformed("not a valid Arrow stream: its schema cannot be read") from error
        return cls(head, schema, body, contents, expanded_max_bytes)

    def read(self, *, row_max_bytes: int) -> ArrowBatch:
        """Check the whole frame.

        Raises: BatchMalformed or RowTooLarge; the message names the column and the rule.
        """
        try:
            costs, expanding = _plan(self.schema.remove_metadata())
            expanded = self._expanded_bytes(costs)
            with open_stream(self.body) as reader:
                batches = list(reader)
        except _ARROW_ERRORS as error:
            raise BatchMalformed("not a valid Arrow stream: a batch cannot be read") from error
        for batch in batches:
            _check_values(batch)
        for name in expanding:
            expanded += sum(int(row_bytes(batch.column(name)).sum()) for batch in batches)
            check_expanded(expanded, self.max_bytes)
        if expanded > row_max_bytes:  # only then can a single row be too large
            _check_rows(batches, row_max_bytes)
        for batch in batches:
            check_changes(batch)
        return ArrowBatch(_compact(_check_sequences(batches, self.head)), expanded)

    def _expanded_bytes(self, costs: Sequence[int]) -> int:
        total = 0
        for batch in self.contents:
            total += batch.buffer_bytes
            # Slots are as many as the stream claims; numpy would wrap around.
            if batch.is_dictionary or len(batch.slots) != len(costs):
                total += sum(batch.slots.tolist())
            else:
                total += sum(map(operator.mul, batch.slots.tolist(), costs))
        check_expanded(total, self.max_bytes)
        return total


def _head_of(metadata: Mapping[bytes, bytes]) -> ArrowHead:
    table = _text(metadata, TABLE_KEY)
    if not table:
        raise BatchMalformed(f"{TABLE_KEY.decode()}: expected in the schema's metadata")
    return ArrowHead(
        table=table,
        source_do_id=_text(metadata, SOURCE_KEY) or "",
        sequence_number=_number(metadata, NUMBER_KEY),
        first_event_sequence=_number(metadata, FIRST_KEY),
        last_event_sequence=_number(metadata, LAST_KEY),
        previous_sequence=_number(metadata, PREVIOUS_KEY),
        correlation_id=_text(metadata, CORRELATION_KEY),
    )


def _text(metadata: Mapping[bytes, bytes], key: bytes) -> str | None:
    try:
        return metadata[key].decode() if key in metadata else None
    except UnicodeDecodeError as error:
        raise BatchMalformed(f"{key.decode()}: expected text in UTF-8") from error


def _number(metadata: Mapping[bytes, bytes], key: bytes) -> int | None:
    text = _text(metadata, key)
    if text is None:
        return None
    if not _DIGITS.fullmatch(text) or int(text) > INT64_MAX:
        raise BatchMalformed(f"{key.decode()}: expected a whole number from 0 to {INT64_MAX}, in digits")
    return int(text)


def _check_values(batch: pa.RecordBatch) -> None:
    for field, column in zip(batch.schema, batch.columns, strict=True):
        try:
            column.validate(full=True)
        except (pa.ArrowException, UnicodeDecodeError) as error:
            raise BatchMalformed(f"{field.name}: values are not valid {field.type}") from error
        if len(column) != batch.num_rows:
            raise BatchMalformed(f"{field.name}: expected as many values as the batch has rows")


def _check_rows(batches: Sequence[pa.RecordBatch], row_max_bytes: int) -> None:
    for batch in batches:
        sizes = sum(map(row_bytes, batch.columns), np.zeros(batch.num_rows, np.int64))
        if len(sizes) and sizes.max() > row_max_bytes:
            row, size = int(sizes.argmax()), int(sizes.max())
            raise RowTooLarge(
                f"row {row} of a batch: expected at most {row_max_bytes} bytes, got {size}", size_bytes=size
            )


def _check_sequences(batches: Sequence[pa.RecordBatch], head: ArrowHead) -> Numbers:
    parts = [batch.column(names.SEQUENCE).to_numpy() for batch in batches]
    sequences: Numbers = np.concatenate(parts) if parts else np.empty(0, np.int64)
    if not len(sequences):
        return sequences
    if sequences[0] < 0:
        raise BatchMalformed(f"{names.SEQUENCE}: expected whole numbers from 0")
    rises = sequences[1:] > sequences[:-1]
    if not rises.all():
        raise BatchMalformed(f"{names.SEQUENCE}: expected more than in the row before: row={int(rises.argmin()) + 1}")
    ends = ((FIRST_KEY, head.first_event_sequence, 0), (LAST_KEY, head.last_event_sequence, -1))
    for key, claimed, index in ends:
        if claimed not in (None, sequences[index]):
            raise BatchMalformed(f"{key.decode()}: expected {sequences[index]}, as in {names.SEQUENCE}")
    return sequences


def _compact(sequences: Numbers) -> Sequence[int]:
    """Return sequences in few bytes, because they wait with their frame: a range if possible, else eight bytes each."""
    steps = np.diff(sequences)
    if len(steps) and np.all(steps == steps[0]):
        return range(int(sequences[0]), int(sequences[-1]) + 1, int(steps[0]))
    return array.array("q", sequences.tobytes())


def check_schema(schema: pa.Schema) -> None:
    """Raise BatchMalformed unless a frame may have these names and types."""
    _check_names([(field.name, field.type) for field in schema], "")
    for field in schema:
        for path, rule in find_unsupported(field.type, field.name) if field.name not in CHANGE_COLUMNS else ():
            raise BatchMalformed(f"{path}: {rule}")
    for field in schema:
        _check_change_type(field.name, field.type)
    if names.SEQUENCE not in schema.names:
        raise BatchMalformed(f"{names.SEQUENCE}: expected as a column of type int64")


def _check_names(fields: Sequence[tuple[str, pa.DataType]], parent: str) -> None:
    seen = set()
    for name, type_ in fields:
        if len(name) > NAME_MAX_CHARS:
            raise BatchMalformed(f"{parent}: expected names of at most {NAME_MAX_CHARS} characters")
        if name in seen:
            raise BatchMalformed(f"{parent}{name}: expected each name once")
        seen.add(name)
        _check_names(child_types(type_), f"{parent}{name}.")


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
    """Check the values of a batch's change columns, except that sequences rise, which concerns the whole frame.

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


def _costs(field: pa.Field) -> Iterator[int]:
    """Yield, in the order of a batch's nodes, the size of a value's name and one byte."""
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
    """Return whether values of a type can be larger than the buffers that hold them."""
    if isinstance(type_, pa.BaseExtensionType):
        return expands(type_.storage_type)
    if pt.is_dictionary(type_) or pt.is_string_view(type_) or pt.is_binary_view(type_):
        return True
    return any(expands(child) for _, child in child_types(type_))


def row_bytes(values: pa.Array) -> Numbers:
    """Return the size of each value of a column that is not a slice."""
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
        return _sums_by_list(row_bytes(values.values), values.offsets)
    if pt.is_map(type_):
        return _sums_by_list(row_bytes(values.keys) + row_bytes(values.items), values.offsets)
    if pt.is_string_view(type_) or pt.is_binary_view(type_):
        return _view_lengths(values)
    if is_text(type_) or pt.is_binary(type_) or pt.is_large_binary(type_):
        lengths: Numbers = pc.binary_length(values).fill_null(0).to_numpy().astype(np.int64)
        return lengths
    return np.full(len(values), 0 if pt.is_null(type_) else -(-type_.bit_width // 8), np.int64)


def _view_lengths(values: pa.Array) -> Numbers:
    """Return the lengths of views, which are the first four of their sixteen bytes; those of nulls are undefined."""
    if not len(values):
        return np.empty(0, np.int64)
    views = np.frombuffer(values.buffers()[1], np.int32, 4 * (values.offset + len(values)))
    lengths = views.reshape(-1, 4)[values.offset :, 0].astype(np.int64)
    return np.where(values.is_valid().to_numpy(zero_copy_only=False), lengths, 0)


def _sums_by_list(element_bytes: Numbers, offsets: pa.Array) -> Numbers:
    before: Numbers = np.append(0, np.cumsum(element_bytes))
    ends: Numbers = offsets.to_numpy()
    return before[ends[1:]] - before[ends[:-1]]
