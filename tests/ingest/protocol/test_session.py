"""One connection's side of the conversation: which batches it may send when, and for which source it speaks."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lakefeed.contract.changes import SourceId
from lakefeed.ingest.errors import ProtocolError
from lakefeed.ingest.protocol.batch import NAME_MAX_CHARS
from lakefeed.ingest.protocol.messages import Connect, decode_message
from lakefeed.ingest.protocol.session import SOURCE_ID_MAX_CHARS, Session, State
from lakefeed.writer.wal.payload import Encoding
from lakefeed.writer.wire.json_batch import BatchHead
from tests.ingest.wire_messages import batch, event, frame

EVENT_MAX_BYTES = 1024 * 1024


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


def test_batches_behind_a_refused_one_are_refused_until_it_came():
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


def test_batch_without_a_source_is_refused_and_binds_nothing():
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
