"""The messages of the wire protocol: every field, what is refused and in which words. Sessions: test_session.py."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lakefeed.ingest.errors import ProtocolError
from lakefeed.ingest.protocol.messages import (
    CORRELATION_ID_MAX_CHARS,
    Ack,
    Connect,
    Disconnect,
    FlushRequest,
    Heartbeat,
    Nack,
    decode_message,
    encode_message,
)
from lakefeed.writer.wire.json_batch import BatchHead, decode_batch
from tests.ingest.wire_messages import batch, event, frame, refusal

MESSAGES = "connect, cdc_batch, debezium_batch, heartbeat, flush_request, disconnect"
OPERATIONS = "INSERT, UPDATE, DELETE, READ, TRUNCATE, MESSAGE"


# -- messages and their fields


def test_connect_carries_every_field_of_the_protocol():
    message = decode_message(
        frame(
            "connect",
            timestamp=1763251200000,
            correlationId="c-1",
            sourceDoId="shop",
            sourceShardName="eu-1",
            lastAckSequence=41,
            protocolVersion=1,
            epoch=3,
            capabilities={
                "binaryProtocol": True,
                "compression": False,
                "batching": True,
                "maxBatchSize": 1000,
                "maxMessageSize": 4194304,
            },
        )
    )
    assert message == Connect(
        source_do_id="shop",
        timestamp=1763251200000,
        source_shard_name="eu-1",
        last_ack_sequence=41,
        protocol_version=1,
        epoch=3,
        capabilities={
            "binaryProtocol": True,
            "compression": False,
            "batching": True,
            "maxBatchSize": 1000,
            "maxMessageSize": 4194304,
        },
        correlation_id="c-1",
    )


def test_connect_needs_only_its_source():
    assert decode_message(frame("connect", sourceDoId="shop")) == Connect(source_do_id="shop")


def test_batch_carries_every_field_of_the_protocol():
    message = decode_message(
        batch(
            7,
            8,
            timestamp=1763251200000,
            correlationId="c-2",
            sourceShardName="eu-1",
            sequenceNumber=4,
            firstEventSequence=7,
            lastEventSequence=8,
            sizeBytes=512,
            isRetry=True,
            retryCount=2,
        )
    )
    assert isinstance(message, BatchHead)
    assert (message.source_do_id, message.source_shard_name, message.sequence_number) == ("shop", "eu-1", 4)
    assert (message.first_event_sequence, message.last_event_sequence) == (7, 8)
    assert (message.timestamp, message.correlation_id, message.size_bytes) == (1763251200000, "c-2", 512)
    assert (message.is_retry, message.retry_count) == (True, 2)


def test_event_carries_every_field_and_leaves_rows_undecoded():
    message = decode_message(
        frame(
            "cdc_batch",
            events=[
                event(
                    9,
                    operation="UPDATE",
                    timestamp=1763251200000,
                    rowId="9",
                    before={"id": 9, "name": "Ada"},
                    after={"id": 9, "name": "Grace"},
                    unchanged=["photo"],
                    metadata={"partition": "p"},
                )
            ],
        )
    )
    assert isinstance(message, BatchHead)
    (only,) = message.events
    assert (only.sequence, only.operation, only.table, only.row_id) == (9, "UPDATE", "users", "9")
    assert (only.timestamp, only.unchanged) == (1763251200000, ["photo"])


@pytest.mark.parametrize("operation", ["INSERT", "UPDATE", "DELETE"])
def test_each_operation_is_taken(operation):
    message = decode_message(frame("cdc_batch", events=[event(operation=operation)]))
    assert isinstance(message, BatchHead)
    assert message.events[0].operation == operation


def test_heartbeat_carries_every_field_and_needs_none():
    assert decode_message(frame("heartbeat")) == Heartbeat()
    assert decode_message(
        frame("heartbeat", timestamp=5, sourceDoId="shop", lastAckSequence=4, pendingEvents=3, correlationId="c")
    ) == Heartbeat(timestamp=5, source_do_id="shop", last_ack_sequence=4, pending_events=3, correlation_id="c")


@pytest.mark.parametrize("reason", ["manual", "shutdown", "buffer_full", "time_threshold"])
def test_flush_request_takes_each_reason_of_the_protocol(reason):
    message = decode_message(frame("flush_request", timestamp=5, sourceDoId="shop", reason=reason, correlationId="c"))
    assert message == FlushRequest(timestamp=5, source_do_id="shop", reason=reason, correlation_id="c")


def test_flush_request_needs_no_field():
    assert decode_message(frame("flush_request")) == FlushRequest()


def test_disconnect_carries_every_field_and_needs_none():
    assert decode_message(frame("disconnect")) == Disconnect()
    assert decode_message(
        frame("disconnect", timestamp=5, sourceDoId="shop", reason="bye", correlationId="c")
    ) == Disconnect(timestamp=5, source_do_id="shop", reason="bye", correlation_id="c")


def test_unknown_fields_are_ignored():
    message = decode_message(frame("heartbeat", timestamp=5, novelty={"deep": [1]}))
    assert message == Heartbeat(timestamp=5)


def test_answers_use_the_protocols_names_and_leave_out_what_is_not_known():
    ack = json.loads(encode_message(Ack(timestamp=1, sequence_number=2, status="ok")))
    assert ack == {"type": "ack", "timestamp": 1, "sequenceNumber": 2, "status": "ok"}
    nack = json.loads(
        encode_message(Nack(1, 2, "buffer_full", "log has used up its budget", should_retry=True, retry_delay_ms=1000))
    )
    assert nack == {
        "type": "nack",
        "timestamp": 1,
        "sequenceNumber": 2,
        "reason": "buffer_full",
        "errorMessage": "log has used up its budget",
        "shouldRetry": True,
        "retryDelayMs": 1000,
    }


def test_rows_keep_integers_of_any_size():
    body = b'{"type":"cdc_batch","events":[{"sequence":1,"operation":"INSERT","table":"t","after":{"n":%d}}]}' % 10**40
    assert isinstance(decode_message(body), BatchHead)
    assert bytes(decode_batch(body).events[0].after) == b'{"n":%d}' % 10**40


# -- what is refused, and in which words


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"operation": "UPSERT"}, f"events[1].operation: expected one of {OPERATIONS}, got str"),
        ({"operation": None}, f"events[1].operation: expected one of {OPERATIONS}, got null"),
        ({"operation": 5}, f"events[1].operation: expected one of {OPERATIONS}, got int"),
        ({"operation": "insert"}, f"events[1].operation: expected one of {OPERATIONS}, got str"),
        ({"sequence": "two"}, "events[1].sequence: expected int, got str"),
        ({"sequence": -1}, "events[1].sequence: expected int >= 0"),
        ({"sequence": 2.5}, "events[1].sequence: expected int, got float"),
        ({"sequence": 2**63}, "events[1].sequence: expected int <= 9223372036854775807"),
        ({"sequence": 10**30}, "events[1].sequence: expected int <= 9223372036854775807"),
        ({"table": ""}, "events[1].table: expected str of length >= 1"),
        ({"table": 5}, "events[1].table: expected str, got int"),
        ({"timestamp": "now"}, "events[1].timestamp: expected int | null, got str"),
        ({"timestamp": 10**16}, "events[1].timestamp: expected int <= 253402300799999"),
        ({"rowId": 9}, "events[1].rowId: expected str, got int"),
        ({"unchanged": "photo"}, "events[1].unchanged: expected array | null, got str"),
        ({"unchanged": [1]}, "events[1].unchanged[0]: expected str, got int"),
    ],
)
def test_wrong_field_of_an_event_is_named_with_its_rule(fields, words):
    error = refusal(frame("cdc_batch", events=[event(1), event(2) | fields]))
    assert str(error) == words
    assert error.reason == "invalid_format"


@pytest.mark.parametrize("name", ["sequence", "operation", "table"])
def test_missing_field_of_an_event_is_named_with_its_event(name):
    incomplete = {key: value for key, value in event(2).items() if key != name}
    error = refusal(frame("cdc_batch", events=[event(1), incomplete]))
    assert str(error) == f"events[1]: object missing required field {name}"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (frame("cdc_batch"), "object missing required field events"),
        (frame("cdc_batch", events={}), "events: expected array, got object"),
        (frame("cdc_batch", events=[5]), "events[0]: expected object, got int"),
        (frame("cdc_batch", events=[], sequenceNumber="5"), "sequenceNumber: expected int | null, got str"),
        (frame("cdc_batch", events=[], sequenceNumber=-5), "sequenceNumber: expected int >= 0"),
        (frame("cdc_batch", events=[], firstEventSequence=1.5), "firstEventSequence: expected int | null, got float"),
        (frame("cdc_batch", events=[], lastEventSequence=[]), "lastEventSequence: expected int | null, got array"),
        (frame("cdc_batch", events=[], sourceDoId=5), "sourceDoId: expected str, got int"),
        (frame("cdc_batch", events=[], isRetry="yes"), "isRetry: expected bool, got str"),
        (frame("cdc_batch", events=[], correlationId=5), "correlationId: expected str | null, got int"),
        (frame("connect"), "object missing required field sourceDoId"),
        (frame("connect", sourceDoId=""), "sourceDoId: expected str of length >= 1"),
        (frame("connect", sourceDoId=None), "sourceDoId: expected str, got null"),
        (frame("connect", sourceDoId="s", epoch=-1), "epoch: expected int >= 0"),
        (frame("connect", sourceDoId="s", protocolVersion="1"), "protocolVersion: expected int, got str"),
        (frame("connect", sourceDoId="s", capabilities=[]), "capabilities: expected object, got array"),
        (frame("heartbeat", timestamp="now"), "timestamp: expected int, got str"),
        (
            frame("flush_request", reason="secret"),
            "reason: expected one of manual, shutdown, buffer_full, time_threshold, got str",
        ),
        (frame("connect", sourceDoId="s", ackLevel="seen"), "ackLevel: expected one of durable, committed, got str"),
        (frame("connect", sourceDoId="s", ackLevel=5), "ackLevel: expected one of durable, committed, got int"),
        (frame("disconnect", reason=5), "reason: expected str | null, got int"),
        (frame("subscribe"), f"type: expected one of {MESSAGES}, got str"),
        (b'{"type":5}', f"type: expected one of {MESSAGES}"),
        (b"{}", "object missing required field type"),
        (b"[]", "expected object, got array"),
        (b'"connect"', "expected object, got str"),
        (b"null", "expected object, got null"),
    ],
)
def test_wrong_message_is_answered_with_field_and_rule(body, words):
    error = refusal(body)
    assert str(error) == words
    assert error.reason == "invalid_format"


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b'{"type":"heartbeat"} x', b"not json", b'{"type":"heartbeat","timestamp":NaN}', b"\xff\xfe"],
)
def test_broken_json_is_said_to_be_so(body):
    assert str(refusal(body)).startswith("not valid JSON: ")


@pytest.mark.parametrize("value", [b"NaN", b"Infinity", b"-Infinity"])
def test_numbers_that_json_does_not_have_are_refused_in_rows_too(value):
    body = b'{"type":"cdc_batch","events":[{"sequence":1,"operation":"INSERT","table":"t","after":{"n":%s}}]}' % value
    assert str(refusal(body)).startswith("not valid JSON: ")


def test_names_that_are_not_utf8_are_refused():
    body = b'{"type":"cdc_batch","events":[{"sequence":1,"operation":"INSERT","table":"t\xff"}]}'
    assert str(refusal(body)).startswith("not valid JSON: ")


def test_nesting_without_end_is_refused():
    deep = b"[" * 100_000 + b"]" * 100_000
    body = b'{"type":"cdc_batch","events":[{"sequence":1,"operation":"INSERT","table":"t","after":%s}]}' % deep
    assert str(refusal(body)) == "a value is nested too deeply"


@pytest.mark.parametrize(
    "value", ["topsecret", "topsecret - at `$.topsecret`", "it's 'topsecret'", "'topsecret", "topsecret'\n"]
)
@pytest.mark.parametrize("kind", ["type", "operation", "reason"])
def test_refusals_never_repeat_a_value(kind, value):
    body = {
        "type": frame(value),
        "operation": frame("cdc_batch", events=[event(operation=value)]),
        "reason": frame("flush_request", reason=value),
    }[kind]
    words = str(refusal(body))
    assert "topsecret" not in words
    assert "expected one of" in words


def test_refusal_of_a_malformed_batch_still_carries_its_number_and_correlation():
    error = refusal(frame("cdc_batch", sequenceNumber=17, correlationId="c-17", events=[event(operation="UPSERT")]))
    assert (error.sequence_number, error.correlation_id) == (17, "c-17")


def test_refusal_of_a_batch_whose_number_is_the_fault_carries_none():
    error = refusal(frame("cdc_batch", sequenceNumber="17", correlationId=5, events=[]))
    assert (error.sequence_number, error.correlation_id) == (None, None)


def test_correlation_id_is_bounded_because_answers_repeat_it():
    longest = "c" * CORRELATION_ID_MAX_CHARS
    assert decode_message(frame("heartbeat", correlationId=longest)) == Heartbeat(correlation_id=longest)
    error = refusal(frame("heartbeat", correlationId=longest + "c"))
    assert str(error) == f"correlationId: expected at most {CORRELATION_ID_MAX_CHARS} characters"
    assert error.correlation_id is None


SEEDS = [
    frame(
        "cdc_batch",
        sequenceNumber=1,
        events=[
            event(1, before={"a": [1.5, None, True, {"b": "\u00fc\n"}]}, metadata={"x": "y"}, unchanged=["p"]),
            event(2, after={"n": -1e10, "s": "\ud83d\ude00"}, rowId="9"),
        ],
    ),
]
BYTES = st.sampled_from([bytes([each]) for each in b'{}[]",:\\u0d8eE+-.tfnNI \x00\x1f\x7f\xc3\xff'])
MUTATIONS = st.lists(st.tuples(st.integers(0, 600), st.integers(0, 2), BYTES), min_size=1, max_size=4)


@settings(max_examples=1_500, deadline=None)
@given(seed=st.sampled_from(SEEDS), mutations=MUTATIONS)
def test_whatever_is_admitted_the_writer_can_decode(seed, mutations):
    body = seed
    for place, removed, added in mutations:
        at = place % (len(body) + 1)
        body = body[:at] + added + body[at + removed :]
    try:
        message = decode_message(body)
    except ProtocolError:
        return
    if isinstance(message, BatchHead):
        assert [each.sequence for each in decode_batch(body).events] == [each.sequence for each in message.events]


@pytest.mark.parametrize("depth", [500, 700, 800, 850, 900, 950, 1_000])
def test_whatever_nesting_is_admitted_the_writer_can_decode(depth):
    deep = b"[" * depth + b"]" * depth
    body = b'{"type":"cdc_batch","events":[{"sequence":1,"operation":"INSERT","table":"t","after":%s}]}' % deep
    try:
        decode_message(body)
    except ProtocolError:
        return
    assert bytes(decode_batch(body).events[0].after) == deep


def test_refusal_of_a_batch_that_is_nested_too_deeply_still_carries_its_number():
    deep = json.loads("[" * 880 + "]" * 880)
    error = refusal(frame("cdc_batch", sequenceNumber=17, events=[event(after=deep)]))
    assert (str(error), error.sequence_number) == ("a value is nested too deeply", 17)
