import json
import sys
import threading

import msgspec
import pytest

from lakefeed.contract.changes import INT64_MAX, TIMESTAMP_MAX_MS
from lakefeed.writer.wire.json_batch import BatchHead, BatchMalformed, decode_batch, decode_deeper


def body(**event) -> bytes:
    fields = {"sequence": 1, "operation": "INSERT", "table": "users"} | event
    return json.dumps({"events": [fields]}).encode()


def with_row(row: bytes) -> bytes:
    return b'{"events":[{"sequence":1,"operation":"INSERT","table":"users","after":' + row + b"}]}"


def test_quick_start_batch_needs_nothing_but_its_events():
    batch = decode_batch(body(after={"id": 1}))
    assert msgspec.json.decode(body(after={"id": 1}), type=BatchHead).sequence_number is None
    assert (batch.events[0].row_id, batch.events[0].timestamp, bytes(batch.events[0].before)) == ("", None, b"")


def test_full_batch_is_read_by_its_names_on_the_wire():
    text = (
        b'{"type":"cdc_batch","timestamp":5,"correlationId":"c","sourceDoId":"do","sourceShardName":"s",'
        b'"sequenceNumber":7,"firstEventSequence":1,"lastEventSequence":1,"sizeBytes":9,"isRetry":true,"retryCount":2,'
        b'"future":[1],"events":[{"sequence":1,"timestamp":6,"operation":"DELETE","table":"t","rowId":"r",'
        b'"before":{"a":1},"unchanged":["b"],"metadata":{"partition":"p"}}]}'
    )
    event = decode_batch(text).events[0]
    head = msgspec.json.decode(text, type=BatchHead)
    assert (head.source_do_id, head.sequence_number, head.is_retry, head.retry_count) == ("do", 7, True, 2)
    assert (head.events[0].row_id, head.events[0].unchanged) == ("r", ["b"])
    assert (event.row_id, event.unchanged, bytes(event.before), bytes(event.after)) == ("r", ["b"], b'{"a":1}', b"")


@pytest.mark.parametrize(
    ("event", "field"),
    [
        ({"sequence": -1}, "sequence"),
        ({"sequence": INT64_MAX + 1}, "sequence"),
        ({"sequence": 1.5}, "sequence"),
        ({"timestamp": TIMESTAMP_MAX_MS + 1}, "timestamp"),
        ({"operation": "UPSERT"}, "operation"),
        ({"table": ""}, "table"),
        ({"rowId": 5}, "rowId"),
        ({"unchanged": [5]}, "unchanged"),
    ],
)
def test_bad_field_is_named_with_its_rule(event, field):
    with pytest.raises(BatchMalformed, match=rf"events\[0\]\.{field}"):
        decode_batch(body(**event))


@pytest.mark.parametrize(
    "row",
    [b"{", b'{"a":NaN}', b'{"a":Infinity}', b'{"a":01}', b'{"a":1,}', b'{"a":"\n"}', b'{"a":"\\ud800\\u0041"}', b"tru"],
)
def test_rows_are_checked_to_their_last_token(row):
    with pytest.raises(BatchMalformed):
        decode_batch(with_row(row))


@pytest.mark.parametrize("row", [b'{"a":"\xff"}', b'{"a":1,"a":2}', b'{"a":1e999}', b'{"\xff":1}'])
def test_rows_are_admitted_without_a_look_at_utf8_duplicate_keys_and_ranges(row):
    assert bytes(decode_batch(with_row(row)).events[0].after) == row


def test_text_outside_rows_must_be_utf8():
    with pytest.raises(BatchMalformed):
        decode_batch(b'{"events":[{"sequence":1,"operation":"INSERT","table":"\xff"}]}')


def test_nesting_without_end_is_refused_and_not_a_crash():
    with pytest.raises(BatchMalformed, match="nested too deeply"):
        decode_batch(with_row(b"[" * 1_000_000))


def test_what_admission_takes_the_writer_can_decode_from_a_deeper_stack():
    deepest = _deepest(lambda body: decode_deeper(decode_batch, body))
    refused = []

    def decode_from(frames: int) -> None:
        if frames:
            decode_from(frames - 1)
        else:
            try:
                decode_batch(_nested(deepest))
            except BatchMalformed as error:
                refused.append(error)

    thread = threading.Thread(target=decode_from, args=(50,))
    thread.start()
    thread.join()
    assert not refused


def _deepest(decode) -> int:
    low, high = 1, 2 * sys.getrecursionlimit() + 20_000
    while low < high:
        middle = (low + high + 1) // 2
        try:
            decode(_nested(middle))
            low = middle
        except BatchMalformed:
            high = middle - 1
    return low


def _nested(depth: int) -> bytes:
    return with_row(b"[" * depth + b"]" * depth)
