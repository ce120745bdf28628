"""The benchmark measures what it says: whole, unique changes of the promised size, numbered without a hole."""

from __future__ import annotations

import orjson
import pyarrow as pa
import pytest

from tests.bench.workload import ENCODINGS, Stream, build_frames


def _stream(**overrides) -> Stream:
    values = {"first_sequence": 0, "first_number": 0, "changes": 2_500, "frame_changes": 1_000, "seed": 1}
    return Stream(source="bench-0", table="bench_0", **(values | overrides))


def test_frames_hold_all_sequences_of_the_stream_in_order():
    frames = list(build_frames(_stream(first_sequence=500, first_number=7)))
    batches = [orjson.loads(frame) for _, frame in frames]
    assert [count for count, _ in frames] == [1_000, 1_000, 500]
    assert [batch["sequenceNumber"] for batch in batches] == [7, 8, 9]
    assert [event["sequence"] for batch in batches for event in batch["events"]] == list(range(500, 3_000))


def test_rows_are_unique_and_changes_are_about_six_hundred_bytes():
    frames = [frame for _, frame in build_frames(_stream())]
    events = [event for frame in frames for event in orjson.loads(frame)["events"]]
    assert len({(event.get("after") or event["before"])["address"] for event in events}) == 2_500
    assert 540 <= sum(map(len, frames)) / 2_500 <= 650


@pytest.mark.parametrize("encoding", ENCODINGS[1:])
def test_arrow_frames_hold_the_rows_of_the_json_frames(encoding):
    events = [event for _, frame in build_frames(_stream()) for event in orjson.loads(frame)["events"]]
    rows = [event.get("after") or event["before"] for event in events]
    frames = [frame for _, frame in build_frames(_stream(encoding=encoding))]
    table = pa.concat_tables([pa.ipc.open_stream(frame).read_all() for frame in frames])
    assert table["_cdc_sequence"].to_pylist() == list(range(2_500))
    assert table["address"].to_pylist() == [row["address"] for row in rows]
    assert [str(balance) for balance in table["balance"].to_pylist()] == [row["balance"] for row in rows]
    assert table["profile"].to_pylist() == [row["profile"] for row in rows]


def test_streams_of_one_seed_are_the_same_bytes():
    assert list(build_frames(_stream())) == list(build_frames(_stream()))
