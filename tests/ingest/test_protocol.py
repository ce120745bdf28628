"""The wire protocol: every message and field, what is refused and in which words, and what one connection may say."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingest.batch_checks import NAME_MAX_CHARS
from ingest.errors import ProtocolError
from ingest.protocol import (
    CORRELATION_ID_MAX_CHARS,
    SOURCE_ID_MAX_CHARS,
    Ack,
    Connect,
    Disconnect,
    FlushRequest,
    Heartbeat,
    Nack,
    Session,
    State,
    decode_message,
    encode_message,
)
from writer.changes import SourceId
from writer.envelope import BatchHead, decode_batch
from writer.frames import Encoding

EVENT_MAX_BYTES = 1024 * 1024

MESSAGES = "connect, cdc_batch, debezium_batch, heartbeat, flush_request, disconnect"
OPERATIONS = "INSERT, UPDATE, DELETE, READ, TRUNCATE, MESSAGE"


def frame(kind: str, **fields: Any) -> bytes:
    return json.dumps({"type": kind, **fields}).encode()


def event(sequence: int = 1, **fields: Any) -> dict[str, Any]:
    return {"sequence": sequence, "operation": "INSERT", "table": "users", "after": {"id": sequence}, **fields}


def batch(*sequences: int, **fields: Any) -> bytes:
    return frame("cdc_batch", **{"sourceDoId": "shop", "events": [event(each) for each in sequences], **fields})


def refusal(body: bytes) -> ProtocolError:
    with pytest.raises(ProtocolError) as caught:
        decode_message(body)
    return caught.value


def offer(session: Session, body: bytes):
    message = decode_message(body)
    assert isinstance(message, BatchHead)
    return session.on_batch(message, body, received_at_us=5)


def refused(session: Session, body: bytes) -> ProtocolError:
    with pytest.raises(ProtocolError) as caught:
        offer(session, body)
    return caught.value


def new_session(**fields: Any) -> Session:
    return Session(**{"event_max_bytes": EVENT_MAX_BYTES, **fields})


def bound_session(source: str = "shop", **fields: Any) -> Session:
    session = new_session(**fields)
    session.on_connect(Connect(source_do_id=source))
    return session


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


def test_fields_that_nobody_knows_are_ignored():
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
        ({"operation": "UPSERT"}, f"events[1].operation: expected one of {OPERATIONS}"),
        ({"operation": None}, f"events[1].operation: expected one of {OPERATIONS}"),
        ({"operation": "insert"}, f"events[1].operation: expected one of {OPERATIONS}"),
        ({"sequence": "two"}, "events[1].sequence: expected int, got str"),
        ({"sequence": -1}, "events[1].sequence: expected int >= 0"),
        ({"sequence": 2.5}, "events[1].sequence: expected int, got float"),
        ({"sequence": 2**63}, "events[1].sequence: expected int <= 9223372036854775807"),
        ({"sequence": 10**30}, "events[1].sequence: expected int <= 9223372036854775807"),
        ({"table": ""}, "events[1].table: expected str of length >= 1"),
        ({"table": 5}, "events[1].table: expected str, got int"),
        ({"timestamp": "now"}, "events[1].timestamp: expected int, got str"),
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
            "reason: expected one of manual, shutdown, buffer_full, time_threshold",
        ),
        (frame("disconnect", reason=5), "reason: expected str | null, got int"),
        (frame("subscribe"), f"type: expected one of {MESSAGES}"),
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


# -- batches in a session


def test_the_seeds_quick_start_batch_works_with_defaults():
    session = new_session()
    body = json.dumps(
        {
            "type": "cdc_batch",
            "sourceDoId": "do-1",
            "timestamp": 1763251200000,
            "events": [
                {
                    "sequence": 1,
                    "timestamp": 1763251200000,
                    "operation": "INSERT",
                    "table": "users",
                    "rowId": "u1",
                    "after": {"id": "u1"},
                }
            ],
            "sequenceNumber": 1,
        }
    ).encode()
    made = offer(session, body)
    assert made.source == "do-1"
    assert (made.first_sequence, made.last_sequence) == (1, 1)
    assert session.expected_number == 2


def test_batch_without_any_number_gets_the_next_one_of_its_connection():
    session = new_session()
    for expected in (0, 1, 2):
        message = decode_message(batch(expected + 1))
        assert isinstance(message, BatchHead)
        assert session.number_of(message) == expected
        session.on_batch(message, b"{}", received_at_us=0)


def test_offer_holds_the_frame_as_it_was_received():
    body = batch(7, 9, 12)
    made = offer(bound_session(), body)
    assert made.body is body
    assert made.encoding is Encoding.JSON_BATCH
    assert list(made.sequences) == [7, 9, 12]
    assert (made.first_sequence, made.last_sequence, made.received_at_us) == (7, 12, 5)
    assert [made.changes_after(sequence) for sequence in (6, 7, 8, 11, 12)] == [3, 2, 2, 1, 0]


def test_batch_without_events_is_no_offer_but_counts():
    session = bound_session()
    assert offer(session, batch(sequenceNumber=3)) is None
    assert session.expected_number == 4


def test_batch_of_an_epoch_carries_the_epoch_of_connect():
    session = new_session()
    session.on_connect(Connect(source_do_id="shop", epoch=4))
    assert offer(session, batch(1)).epoch == 4


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"firstEventSequence": 6}, "firstEventSequence: expected 7, that of the first event"),
        ({"lastEventSequence": 9}, "lastEventSequence: expected 8, that of the last event"),
    ],
)
def test_first_and_last_sequence_must_match_the_events(fields, words):
    error = refused(bound_session(), batch(7, 8, **fields))
    assert str(error) == words
    assert error.reason == "invalid_format"


@pytest.mark.parametrize("sequences", [(7, 7), (7, 6), (5, 7, 9, 8)])
def test_sequences_must_rise_within_a_batch(sequences):
    error = refused(bound_session(), batch(*sequences))
    last = len(sequences) - 1
    assert str(error) == f"events[{last}].sequence: expected more than that of the event before"


def test_hole_in_the_batch_numbers_is_answered_with_the_number_expected():
    session = bound_session()
    offer(session, batch(1, sequenceNumber=10))
    error = refused(session, batch(3, sequenceNumber=12))
    assert error.reason == "invalid_sequence"
    assert str(error) == "sequenceNumber: a batch is missing: expected=11 received=12"
    assert (error.sequence_number, error.retry) == (12, True)
    assert session.expected_number == 11


def test_connection_may_begin_at_any_batch_number():
    assert offer(bound_session(), batch(1, sequenceNumber=4711)) is not None


def test_earlier_batch_number_may_be_sent_again():
    session = bound_session()
    offer(session, batch(1, sequenceNumber=10))
    offer(session, batch(2, sequenceNumber=11))
    assert offer(session, batch(1, sequenceNumber=10, isRetry=True)) is not None


def test_resending_an_earlier_batch_does_not_ask_for_those_behind_it_again():
    session = bound_session()
    for number in (10, 11, 12):
        offer(session, batch(number, sequenceNumber=number))
    offer(session, batch(10, sequenceNumber=10))
    assert offer(session, batch(13, sequenceNumber=13)) is not None


def test_after_a_refused_batch_those_behind_it_are_told_to_wait():
    session = bound_session()
    for number in (1, 2, 3):
        offer(session, batch(number, sequenceNumber=number))
    session.on_refused(2)
    session.on_refused(3)
    assert "expected=2 received=4" in str(refused(session, batch(4, sequenceNumber=4)))
    for number in (2, 3, 4):
        assert offer(session, batch(number, sequenceNumber=number)) is not None


def test_invalid_batch_must_be_sent_again_before_the_next_even_if_it_was_the_first():
    session = bound_session()
    refused(session, batch(2, 1, sequenceNumber=5))
    assert "expected=5 received=6" in str(refused(session, batch(3, sequenceNumber=6)))
    assert offer(session, batch(1, 2, sequenceNumber=5)) is not None
    assert offer(session, batch(3, sequenceNumber=6)) is not None


def test_malformed_batch_must_be_sent_again_before_the_next_even_if_it_was_the_first():
    session = bound_session()
    session.on_malformed(5)
    assert "expected=5 received=6" in str(refused(session, batch(3, sequenceNumber=6)))


def test_refusal_carries_the_number_of_its_batch():
    assert refused(bound_session(), batch(2, 1, sequenceNumber=9)).sequence_number == 9


@pytest.mark.parametrize("table", ["users", "sales.orders", "a.b.c", "Bestellungen", "größe", "with space", "t" * 255])
def test_table_names_that_a_catalog_can_hold_are_taken(table):
    body = frame("cdc_batch", sourceDoId="shop", events=[event(table=table)])
    assert offer(bound_session(), body) is not None


@pytest.mark.parametrize(
    "table",
    [".", ".users", "users.", "a..b", "a/b", "a\\b", "50%", "what?", "a#b", "a\x00b", "a\nb", "\x7f", "t" * 256],
)
def test_table_names_that_no_catalog_could_hold_are_refused(table):
    body = frame("cdc_batch", sourceDoId="shop", events=[event(1), event(2, table=table)])
    error = refused(bound_session(), body)
    assert str(error).startswith(f"events[1].table: expected a name of at most {NAME_MAX_CHARS} characters")
    assert error.reason == "invalid_format"


@pytest.mark.parametrize("image", ["before", "after", "metadata"])
def test_too_large_an_event_is_refused_by_its_index(image):
    session = bound_session(event_max_bytes=1000)
    body = frame("cdc_batch", sourceDoId="shop", sequenceNumber=3, events=[event(1), event(2) | {image: "x" * 1000}])
    error = refused(session, body)
    assert error.reason == "event_too_large"
    assert str(error).startswith("events[1]: expected at most 1000 bytes, got 10")
    assert error.sequence_number == 3


def test_large_batch_of_small_events_is_taken():
    session = bound_session(event_max_bytes=1000)
    assert offer(session, batch(*range(1, 200))) is not None


# -- binding


def test_connection_is_bound_to_one_source():
    session = bound_session("shop")
    error = refused(session, batch(1, sourceDoId="other"))
    assert str(error) == "sourceDoId: this connection is bound to another source; open one connection per source"
    assert session.source == "shop"


def test_batch_without_a_source_belongs_to_the_source_of_connect():
    assert offer(bound_session("shop"), batch(1, sourceDoId="")).source == "shop"


def test_header_names_the_source_where_no_message_does():
    session = new_session(default_source="from-header")
    assert offer(session, batch(1, sourceDoId="")).source == "from-header"


def test_message_beats_the_header():
    session = new_session(default_source="from-header")
    assert offer(session, batch(1, sourceDoId="from-message")).source == "from-message"


def test_batch_of_nobody_is_refused_and_binds_nothing():
    session = new_session()
    error = refused(session, batch(1, sourceDoId=""))
    assert str(error).startswith("sourceDoId: expected a non-empty string")
    assert (session.source, session.state) == (None, State.OPEN)


def test_refused_batch_binds_nothing():
    session = new_session()
    refused(session, batch(2, 1))
    assert (session.source, session.state) == (None, State.OPEN)


@pytest.mark.parametrize("source", ["caf\udce9", "a\x00b", "a\nb", "\x7f", "s" * (SOURCE_ID_MAX_CHARS + 1)])
def test_source_names_that_could_not_be_stored_are_refused(source):
    for session in (new_session(default_source=source), new_session()):
        message = BatchHead(events=[], source_do_id="" if session.default_source else source)
        with pytest.raises(ProtocolError, match="sourceDoId: expected at most 255 characters, none of them control"):
            session.on_batch(message, b"", received_at_us=0)
        assert session.source is None


def test_longest_source_name_is_taken():
    assert bound_session("ß" * SOURCE_ID_MAX_CHARS).source == "ß" * SOURCE_ID_MAX_CHARS


def test_another_protocol_version_is_refused():
    with pytest.raises(ProtocolError, match="protocolVersion: expected 1"):
        new_session().on_connect(Connect(source_do_id="shop", protocol_version=2))


def test_connecting_again_starts_the_batch_numbers_anew():
    session = bound_session()
    offer(session, batch(1, sequenceNumber=10))
    assert session.on_connect(Connect(source_do_id="shop", epoch=2)) == SourceId("shop")
    assert session.epoch == 2
    assert offer(session, batch(1, sequenceNumber=0)) is not None
    assert offer(session, batch(2, sequenceNumber=1)) is not None


def test_connecting_again_as_another_source_is_refused_and_changes_nothing():
    session = bound_session("shop")
    with pytest.raises(ProtocolError, match="bound to another source"):
        session.on_connect(Connect(source_do_id="other", epoch=9))
    assert (session.source, session.epoch) == ("shop", 0)


def test_ended_session_takes_nothing_more():
    session = bound_session()
    session.end()
    assert str(refused(session, batch(1))) == "the session has ended"
    with pytest.raises(ProtocolError, match="the session has ended"):
        session.on_connect(Connect(source_do_id="shop"))
    assert session.state is State.ENDED
