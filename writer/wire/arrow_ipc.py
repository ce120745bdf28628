"""Arrow IPC framing: bounds the memory that a stream may claim, before Arrow reads it.

    stream:   message*  [end]
    message:  0xFFFFFFFF | length: i32 | metadata: flatbuffer bytes[length] | body: bytes[bodyLength in the metadata]
    end:      0xFFFFFFFF | 0: i32
    order:    schema, then dictionary and record batches

Arrow checks what it reads, but not how much memory it needs for it: a few bytes can claim terabytes of decompressed
data, a column of a trillion nulls, or one long text a million times. So the metadata is read here first, with every
access checked, and a stream that claims more than its limit is refused before anything is allocated.
Formats: arrow/format/Message.fbs and Schema.fbs, metadata version 5 (and 4, which is laid out alike).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from lakefeed.contract.changes import FIELDS_MAX, NESTING_MAX_DEPTH
from lakefeed.writer.wire.json_batch import BatchMalformed

CONTINUATION = b"\xff\xff\xff\xff"

# Each batch costs time beside its rows. Clients with more batches join them, or send more frames.
BATCHES_MAX = 256

Numbers: TypeAlias = npt.NDArray[np.int64]

_PREFIX = struct.Struct("<4si")
_U8, _I16, _U16, _I32, _U32, _I64 = map(struct.Struct, ("<B", "<h", "<H", "<i", "<I", "<q"))
_SCHEMA, _DICTIONARY_BATCH, _RECORD_BATCH = 1, 2, 3
_TIMESTAMP_TYPE = 10
_NOT_COMPRESSED = -1


@dataclass(frozen=True, slots=True)
class BatchContents:
    """A dictionary or record batch: the slots of each of its fields, and the decompressed size of its buffers."""

    is_dictionary: bool
    slots: Numbers
    buffer_bytes: int


def scan_stream(stream: bytes, *, inflated_max_bytes: int) -> list[BatchContents]:
    """Return what a stream's messages hold, without decompressing or copying anything.

    Raises: BatchMalformed for a stream that is not well formed or claims more than its limit.
    """
    try:
        return list(_scan(memoryview(stream), inflated_max_bytes))
    except (struct.error, IndexError) as error:
        raise BatchMalformed("not a valid Arrow stream: it points outside of itself") from error


def check_expanded(expanded_bytes: int, max_bytes: int) -> None:
    """Raise BatchMalformed if a stream expands to more than its limit."""
    if expanded_bytes > max_bytes:
        raise BatchMalformed(f"expected at most {max_bytes} bytes once expanded; send fewer rows in one frame")


def _scan(stream: memoryview, inflated_max_bytes: int) -> Iterator[BatchContents]:
    inflated_bytes = 0
    for number, (kind, header, body) in enumerate(_messages(stream)):
        if number > BATCHES_MAX:
            raise BatchMalformed(f"expected at most {BATCHES_MAX} batches in one Arrow stream")
        if (number == 0) != (kind == _SCHEMA):
            raise BatchMalformed("not a valid Arrow stream: expected one schema, and that first")
        if kind == _SCHEMA:
            _check_schema(header)
            continue
        contents = _contents_of(kind, header, body)
        inflated_bytes += contents.buffer_bytes
        check_expanded(inflated_bytes, inflated_max_bytes)
        yield contents


def _messages(stream: memoryview) -> Iterator[tuple[int, _Table, memoryview]]:
    """Yield the kind, header and body of each message."""
    position = 0
    while position < len(stream):
        mark, length = _PREFIX.unpack_from(stream, position)
        if mark != CONTINUATION or length < 0:
            raise BatchMalformed("not a valid Arrow stream: expected a message")
        position += _PREFIX.size
        if length == 0:
            break
        metadata = _part(stream, position, length)
        table = _Table(metadata, _U32.unpack_from(metadata, 0)[0])
        body_length = table.number(_I64, 3)
        _Tally(text_bytes=length).take_key_values(table, 4)
        position += length
        header = table.table(2)
        if header is None:
            raise BatchMalformed("not a valid Arrow stream: a message is empty")
        yield table.number(_U8, 1), header, _part(stream, position, body_length)
        position += body_length
    if position != len(stream):
        raise BatchMalformed("not a valid Arrow stream: bytes follow its end")


def _part(stream: memoryview, start: int, length: int) -> memoryview:
    if not 0 <= length <= len(stream) - start:
        raise BatchMalformed("not a valid Arrow stream: a message is cut off")
    return stream[start : start + length]


def _contents_of(kind: int, header: _Table, body: memoryview) -> BatchContents:
    batch: _Table | None = header
    if kind == _DICTIONARY_BATCH:
        batch = header.table(1)
    elif kind != _RECORD_BATCH:
        raise BatchMalformed("not a valid Arrow stream: expected only dictionary and record batches after the schema")
    if batch is None:
        raise BatchMalformed("not a valid Arrow stream: a dictionary is missing")
    nodes, buffers = batch.pairs(1), batch.pairs(2)
    offsets, lengths = buffers[:, 0], buffers[:, 1]
    size = len(body)
    if np.any(nodes < 0) or np.any(buffers < 0) or np.any(lengths > size) or np.any(offsets > size - lengths):
        raise BatchMalformed("not a valid Arrow stream: a buffer lies outside of its message")
    sizes = lengths if batch.table(3) is None else _inflated(body, offsets, lengths)
    # No numpy type holds the sum of what a stream may claim.
    return BatchContents(kind == _DICTIONARY_BATCH, nodes[:, 0], sum(sizes.tolist()))


def _inflated(body: memoryview, offsets: Numbers, lengths: Numbers) -> Numbers:
    """Return the decompressed sizes of buffers: each begins with its size, or with -1 if it is not compressed."""
    filled = lengths > 0
    if np.any(lengths[filled] < _I64.size):
        raise BatchMalformed("not a valid Arrow stream: a compressed buffer is too short")
    places = offsets[filled][:, None] + np.arange(_I64.size)
    sizes = np.frombuffer(body, np.uint8)[places].view("<i8").reshape(-1)
    if np.any(sizes < _NOT_COMPRESSED):
        raise BatchMalformed("not a valid Arrow stream: a compressed buffer has no size")
    return np.where(sizes == _NOT_COMPRESSED, lengths[filled] - _I64.size, sizes)


def _check_schema(schema: _Table) -> None:
    """Bound fields and text: parts of a flatbuffer may be referenced many times, and Arrow copies them each time."""
    if schema.number(_I16, 0) != 0:
        raise BatchMalformed("expected an Arrow stream of little-endian numbers")
    tally = _Tally(text_bytes=len(schema.data))
    tally.take_key_values(schema, 2)
    tally.take_fields(schema, 1, depth=1)


@dataclass(slots=True)
class _Tally:
    """What a schema may still use. The text of a schema without repeated references fits in its own bytes."""

    text_bytes: int
    fields: int = FIELDS_MAX

    def take_fields(self, parent: _Table, slot: int, *, depth: int) -> None:
        children = parent.tables(slot, at_most=self.fields)
        self.fields -= len(children)
        if self.fields < 0:
            raise BatchMalformed(f"expected at most {FIELDS_MAX} fields in one Arrow stream")
        if children and depth > NESTING_MAX_DEPTH:
            raise BatchMalformed(f"expected columns to be nested at most {NESTING_MAX_DEPTH} deep")
        for field in children:
            self.take_name(field, 0)
            if field.number(_U8, 2) == _TIMESTAMP_TYPE and (timestamp := field.table(3)) is not None:
                self.take_name(timestamp, 1)
            self.take_key_values(field, 6)
            self.take_fields(field, 5, depth=depth + 1)

    def take_key_values(self, parent: _Table, slot: int) -> None:
        for pair in parent.tables(slot, at_most=self.text_bytes):
            self.take_text(pair, 0)
            self.take_text(pair, 1)

    def take_name(self, parent: _Table, slot: int) -> None:
        """Take the name of a field or of a time zone, which must be UTF-8."""
        try:
            self.take_text(parent, slot).decode()
        except UnicodeDecodeError as error:
            raise BatchMalformed("expected names of columns and time zones in UTF-8") from error

    def take_text(self, parent: _Table, slot: int) -> bytes:
        text = parent.text(slot)
        # Empty texts count as well, so that their number is bounded.
        self.text_bytes -= len(text) + 1
        if self.text_bytes < 0:
            raise BatchMalformed("not a valid Arrow stream: its schema uses one text many times")
        return text


class _Table:
    """A table in a flatbuffer: `number` and the others return the member in a slot. All access is checked.

    An absent member has its default: 0, None, or an empty vector.
    """

    __slots__ = ("_members", "data", "position")

    def __init__(self, data: memoryview, position: int) -> None:
        (distance,) = _I32.unpack_from(data, position)
        vtable = position - distance
        if vtable < 0:  # a negative index would count from the end
            raise IndexError
        (size,) = _U16.unpack_from(data, vtable)
        self.data = data
        self.position = position
        self._members: tuple[int, ...] = struct.unpack_from(f"<{size // 2}H", data, vtable)[2:]

    def _member(self, slot: int) -> int:
        """Return the position of a member, 0 if it is absent."""
        offset = self._members[slot] if slot < len(self._members) else 0
        return self.position + offset if offset else 0

    def _target(self, slot: int) -> int:
        """Return the position that a member refers to, 0 if it is absent."""
        position = self._member(slot)
        return position + _U32.unpack_from(self.data, position)[0] if position else 0

    def number(self, layout: struct.Struct, slot: int) -> int:
        position = self._member(slot)
        return int(layout.unpack_from(self.data, position)[0]) if position else 0

    def table(self, slot: int) -> _Table | None:
        position = self._target(slot)
        return _Table(self.data, position) if position else None

    def text(self, slot: int) -> bytes:
        position = self._target(slot)
        if not position:
            return b""
        start = position + _U32.size
        return bytes(self.data[start : start + _U32.unpack_from(self.data, position)[0]])

    def tables(self, slot: int, *, at_most: int) -> list[_Table]:
        """Return a vector of tables, at most one more than `at_most`: then there are too many."""
        vector = self._target(slot)
        if not vector:
            return []
        count = min(_U32.unpack_from(self.data, vector)[0], at_most + 1)
        places = range(vector + 4, vector + 4 * count + 4, 4)
        return [_Table(self.data, place + _U32.unpack_from(self.data, place)[0]) for place in places]

    def pairs(self, slot: int) -> Numbers:
        """Return a vector of structs of two 64-bit integers."""
        vector = self._target(slot)
        if not vector:
            return np.empty((0, 2), np.int64)
        count = _U32.unpack_from(self.data, vector)[0]
        if count * 16 > len(self.data) - vector - 4:
            raise IndexError
        return np.frombuffer(self.data, "<i8", 2 * count, vector + 4).reshape(-1, 2)
