"""Streams that ask for more memory than they may are refused before Arrow reads them."""

from __future__ import annotations

import gc
import io
import struct

import pyarrow as pa
import pytest

from lakefeed.writer.wire.arrow_ipc import BATCHES_MAX, CONTINUATION, scan_stream
from lakefeed.writer.wire.json_batch import BatchMalformed
from tests.writer.wire.arrow_batches import changes, stream_of

MIB = 1024 * 1024


def refusal(stream: bytes, inflated_max_bytes: int = 4 * MIB) -> str:
    gc.collect()  # what earlier tests left may be released at any time, so allocations can only be bounded
    allocated = pa.total_allocated_bytes()
    with pytest.raises(BatchMalformed) as caught:
        scan_stream(stream, inflated_max_bytes=inflated_max_bytes)
    assert pa.total_allocated_bytes() <= allocated, "nothing was inflated"
    return str(caught.value)


@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
def test_contents_are_measured_without_reading_them(compression):
    rows = changes({"t": ["x" * 100] * 1000, "d": pa.array(["a", "b"] * 500).dictionary_encode()})
    dictionary, batch = scan_stream(stream_of(rows, compression=compression), inflated_max_bytes=MIB)
    assert (dictionary.is_dictionary, dictionary.slots.tolist()) == (True, [2])
    assert (batch.is_dictionary, batch.slots.tolist()) == (False, [1000, 1000, 1000])
    assert 8_000 + 104_000 + 4_000 <= batch.buffer_bytes <= 120_000


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_a_stream_that_inflates_beyond_the_limit_is_refused_unread(compression):
    stream = stream_of(changes({"t": ["x" * 1_000_000] * 50}), compression=compression)
    assert len(stream) < MIB
    assert refusal(stream) == f"expected at most {4 * MIB} bytes once expanded; send fewer rows in one frame"
    assert scan_stream(stream, inflated_max_bytes=64 * MIB)


def test_a_claim_of_terabytes_is_refused_unread():
    stream = stream_of(changes({"t": ["x" * 1_000]}), compression="zstd")
    at = stream.rindex(struct.pack("<q", 1_000))
    assert "once expanded" in refusal(stream[:at] + struct.pack("<q", 2**50) + stream[at + 8 :])


def test_buffers_that_share_their_bytes_count_each():
    stream = stream_of(changes({f"c{n}": pa.array(range(1000), pa.int64()) for n in range(3)}))
    body_bytes = 4 * 8_000
    assert scan_stream(stream, inflated_max_bytes=MIB)[0].buffer_bytes == body_bytes
    for number in range(1, 4):
        at = stream.rindex(struct.pack("<qq", 8_000 * number, 8_000))
        stream = stream[:at] + struct.pack("<qq", 0, body_bytes) + stream[at + 16 :]
    assert scan_stream(stream, inflated_max_bytes=MIB)[0].buffer_bytes == 8_000 + 3 * body_bytes


@pytest.mark.parametrize(("offset", "length"), [(2**40, 8), (-8, 8), (0, 2**62), (0, -1), (2**63 - 1, 2**63 - 1)])
def test_buffers_outside_of_their_message_are_refused(offset, length):
    stream = stream_of(changes(rows=1000))
    at = stream.index(struct.pack("<qq", 0, 8_000))
    changed = stream[:at] + struct.pack("<qq", offset, length) + stream[at + 16 :]
    assert refusal(changed) == "not a valid Arrow stream: a buffer lies outside of its message"


def test_slots_below_zero_are_refused():
    stream = stream_of(changes(rows=999))
    at = stream.index(struct.pack("<qq", 999, 0))
    assert "outside of its message" in refusal(stream[:at] + struct.pack("<qq", -1, 0) + stream[at + 16 :])


def test_text_that_a_schema_uses_many_times_is_refused():
    stream = bytearray(_stream_with_metadata({f"key {n:04}": f"value {n:04}" for n in range(500)}))
    # All pairs become the one with the long value, so that Arrow would copy it hundreds of times.
    long = bytearray(_stream_with_metadata({"long": "x" * 50_000} | {f"k{n}": "" for n in range(500)}))
    assert scan_stream(bytes(stream), inflated_max_bytes=MIB) is not None
    pairs = _pairs_of(long)
    target = next(place + _u32(long, place) for place in pairs if _value_length(long, place) == 50_000)
    for place in pairs:
        struct.pack_into("<I", long, place, target - place)
    assert refusal(bytes(long)) == "not a valid Arrow stream: its schema uses one text many times"


@pytest.mark.parametrize(("good", "bad"), [(b"the_name", b"the_\xffame"), (b"Europe/Paris", b"Europe/P\xffris")])
def test_names_of_columns_and_time_zones_are_text(good, bad):
    stream = stream_of(changes({"the_name": pa.array([1], pa.timestamp("s", "Europe/Paris"))}))
    assert stream.count(good) == 1
    assert refusal(stream.replace(good, bad)) == "expected names of columns and time zones in UTF-8"


def _stream_with_metadata(metadata: dict[str, str]) -> bytes:
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, pa.schema([("c", pa.int8())], metadata=metadata)):
        pass
    return sink.getvalue()


def _u32(data: bytearray, place: int) -> int:
    return struct.unpack_from("<I", data, place)[0]


def _member(data: bytearray, table: int, slot: int) -> int:
    vtable = table - struct.unpack_from("<i", data, table)[0]
    return table + struct.unpack_from("<H", data, vtable + 4 + 2 * slot)[0]


def _pairs_of(stream: bytearray) -> range:
    """Find where the schema's metadata refers to its pairs: message -> header -> custom_metadata."""
    message = 8 + _u32(stream, 8)
    header = _member(stream, message, 2)
    schema = header + _u32(stream, header)
    member = _member(stream, schema, 2)
    vector = member + _u32(stream, member)
    return range(vector + 4, vector + 4 + 4 * _u32(stream, vector), 4)


def _value_length(stream: bytearray, place: int) -> int:
    value = _member(stream, place + _u32(stream, place), 1)
    return _u32(stream, value + _u32(stream, value))


# -- framing


def test_streams_end_with_or_without_a_mark():
    stream = stream_of(changes(rows=3))
    end = CONTINUATION + bytes(4)
    assert stream.endswith(end)
    for ending in (stream, stream.removesuffix(end)):
        assert [batch.slots.tolist() for batch in scan_stream(ending, inflated_max_bytes=MIB)] == [[3]]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda stream: stream + b"x", "bytes follow its end"),
        (lambda stream: stream[:-9], "a message is cut off"),
        (lambda stream: stream[:4], "points outside of itself"),
        (lambda stream: CONTINUATION + struct.pack("<i", -5) + stream[8:], "expected a message"),
        (lambda stream: CONTINUATION + struct.pack("<i", 2**30) + stream[8:], "a message is cut off"),
        (lambda stream: stream[:-8] + stream, "expected one schema, and that first"),
        (lambda stream: stream[:8] + b"\xff" * 8 + stream[16:], "points outside of itself"),
    ],
)
def test_broken_framing_is_refused(damage, message):
    assert message in refusal(damage(stream_of(changes(rows=3))))


def test_very_many_batches_are_refused():
    rows = changes(rows=BATCHES_MAX + 1)
    assert scan_stream(stream_of(rows, batch_rows=2), inflated_max_bytes=MIB)
    assert refusal(stream_of(rows, batch_rows=1)) == f"expected at most {BATCHES_MAX} batches in one Arrow stream"
