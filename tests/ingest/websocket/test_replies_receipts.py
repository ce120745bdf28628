"""Receipts: what is committed is told, once, with the snapshots that hold it, and never before."""

from __future__ import annotations

import aiohttp
import pytest

from lakefeed.contract.changes import Position
from lakefeed.ingest.service import serving
from lakefeed.ingest.websocket.replies import WAITING_MAX_BATCHES, Receipts
from tests.ingest.conftest import small_config
from tests.ingest.limited_service import wait_for_status
from tests.ingest.ws_client import connected


def at(sequence: int) -> Position:
    return Position(0, sequence)


def due(receipts: Receipts, committed: Position | None) -> int | None:
    batch = receipts.take_due(committed)
    return batch.number if batch is not None else None


def test_highest_batch_that_is_wholly_committed_is_due():
    receipts = Receipts()
    for number, last in ((7, 10), (8, 20), (9, 30)):
        receipts.expect(number, at(last))
    assert due(receipts, None) is None
    assert due(receipts, at(9)) is None
    assert due(receipts, at(29)) == 8
    assert due(receipts, at(29)) is None
    assert due(receipts, at(30)) == 9


def test_batch_that_was_sent_again_does_not_hide_those_behind_it():
    receipts = Receipts()
    for number, last in ((4, 10), (5, 20), (4, 10)):
        receipts.expect(number, at(last))
    assert due(receipts, at(20)) == 5
    assert due(receipts, at(20)) is None


def test_no_receipt_covers_a_lower_batch_that_was_resent_and_is_not_committed():
    receipts = Receipts()
    for number, sequence in ((2, 2), (4, 5), (3, 6), (5, 7)):
        receipts.expect(number, Position(0, sequence))
    assert due(receipts, Position(0, 5)) == 2
    assert due(receipts, Position(0, 6)) == 4
    assert due(receipts, Position(0, 7)) == 5


def test_waiting_batches_are_bounded_and_the_newest_still_gets_its_receipt():
    receipts = Receipts()
    for number in range(WAITING_MAX_BATCHES + 100):
        receipts.expect(number, at(number))
    assert len(receipts._waiting) == WAITING_MAX_BATCHES
    assert due(receipts, at(10)) == 10
    assert due(receipts, at(WAITING_MAX_BATCHES + 98)) == WAITING_MAX_BATCHES - 2, "the newest one stands for the rest"
    assert due(receipts, at(WAITING_MAX_BATCHES + 100)) == WAITING_MAX_BATCHES + 99


async def test_receipt_names_the_snapshot_of_each_table(service):
    async with connected(service.ws_url) as client:
        await client.batch(1, 2, sequenceNumber=5)
        await client.batch(3, table="orders", sequenceNumber=6)
        assert client.receipts == [], "nothing is committed yet"
        flushed = await client.request("flush_request")
        receipt = await client.receive_receipt(6)
    snapshots = {name: table["snapshotId"] for name, table in flushed["result"]["tables"].items()}
    assert receipt["tables"] == snapshots
    assert (receipt["type"], receipt["status"], receipt["lastCommittedSequence"]) == ("ack", "persisted", 3)


async def test_receipts_cover_only_the_connections_own_batches(service):
    async with connected(service.ws_url, "one") as one, connected(service.ws_url, "two") as two:
        await one.batch(1, sequenceNumber=1)
        await two.batch(1, sequenceNumber=100)
        await one.request("flush_request")
        assert (await one.receive_receipt(1))["sequenceNumber"] == 1
        assert (await two.receive_receipt(100))["sequenceNumber"] == 100


async def test_client_that_never_connects_gets_no_receipts(service):
    async with connected(service.ws_url, None) as client:
        await client.batch(1, sourceDoId="quick")
        await client.request("flush_request")
        await client.request("heartbeat")
        assert client.receipts == []


async def test_level_committed_answers_with_the_receipt_alone(tmp_path):
    config = small_config(tmp_path, flush_max_age_s=0.05)
    async with serving(config) as addresses, connected(addresses.ws_url, None) as client:
        await client.request("connect", sourceDoId="shop", ackLevel="committed")
        await client.send_batch(1, 2, sequenceNumber=1)
        await client.send_batch(3, sequenceNumber=2)
        assert (await client.receive_receipt(2))["lastCommittedSequence"] == 3
        assert (await client.request("heartbeat"))["type"] == "pong", "no other ack stood in between"
        await client.send_batch(1, 2, sequenceNumber=3)
        assert (await client.receive_receipt(3))["sequenceNumber"] == 3, "a duplicate is told as committed too"


async def test_level_committed_answers_with_the_correlation_of_the_batch(service):
    async with connected(service.ws_url, None) as client:
        await client.request("connect", sourceDoId="shop", ackLevel="committed")
        for number in (1, 2):
            await client.send_batch(number, sequenceNumber=number, correlationId=f"c-{number}")
        await client.request("flush_request")
        assert (await client.receive_receipt(2))["correlationId"] == "c-2"


async def test_batch_resent_after_its_commit_gets_its_receipt_at_once(service):
    async with connected(service.ws_url) as client:
        await client.batch(1, 2, sequenceNumber=1)
        await client.request("flush_request")
    async with connected(service.ws_url) as client:
        assert (await client.batch(1, 2, sequenceNumber=7))["status"] == "duplicate"
        assert (await client.receive_receipt(7))["lastCommittedSequence"] == 2


@pytest.mark.parametrize("level", ["durable", "committed"])
async def test_client_that_hears_its_acks_only_after_the_commit_still_gets_every_receipt(service, level, stuck_socket):
    async with connected(service.ws_url, None) as client:
        await client.request("connect", sourceDoId="shop", ackLevel=level)
        stuck_socket.clear()
        await client.send("heartbeat")
        await client.send_batch(1, sequenceNumber=0)
        await client.send_batch(2, sequenceNumber=1)
        await wait_for_status(service, lambda status: status["log"]["durableEnd"] == 2)
        async with aiohttp.ClientSession(service.http_url) as http, http.post("/flush") as flushed:
            assert flushed.status == 200
        await wait_for_status(service, lambda status: status["lastFlushTime"] is not None)
        stuck_socket.set()
        for _ in range(3 if level == "durable" else 1):
            await client.receive()
        assert (await client.receive_receipt(1))["lastCommittedSequence"] == 2


async def test_refusals_are_sent_at_every_ack_level(service):
    async with connected(service.ws_url, None) as client:
        await client.request("connect", sourceDoId="shop", ackLevel="committed")
        nack = await client.request("cdc_batch", events=[{"sequence": -1}])
        assert nack["reason"] == "invalid_format"


DEBEZIUM_INSERT = {
    "op": "c",
    "after": {"id": 1, "name": "Ada"},
    "source": {"connector": "postgresql", "db": "d", "schema": "public", "table": "people", "lsn": 5, "txId": 1,
               "sequence": '["4","5"]', "ts_ms": 1_763_251_200_000},
    "ts_ms": 1_763_251_200_000,
}  # fmt: skip


async def test_debezium_events_resent_after_their_commit_get_their_receipt_at_once(service):
    async with connected(service.ws_url, None) as client:
        await client.request("connect", sourceDoId="pg", ackLevel="committed")
        await client.send("debezium_batch", sequenceNumber=1, events=[DEBEZIUM_INSERT])
        await client.request("flush_request")
        await client.receive_receipt(1)
        await client.send("debezium_batch", sequenceNumber=2, events=[DEBEZIUM_INSERT], correlationId="again")
        assert (await client.receive_receipt(2))["correlationId"] == "again"


async def test_debezium_events_over_the_websocket_get_ack_and_receipt(service):
    event = DEBEZIUM_INSERT
    async with connected(service.ws_url, "pg") as client:
        ack = await client.request("debezium_batch", sequenceNumber=1, events=[event], correlationId="c")
        assert (ack["status"], ack["correlationId"], ack["details"]["eventsProcessed"]) == ("ok", "c", 1)
        again = await client.request("debezium_batch", sequenceNumber=2, events=[event])
        assert again["status"] == "duplicate"
        flushed = await client.request("flush_request")
        assert flushed["result"]["tables"]["public.people"]["rows"] == 1
        assert (await client.receive_receipt(1))["status"] == "persisted"
        nack = await client.request("debezium_batch", sequenceNumber=3, events=[{"op": "c"}])
        assert (nack["type"], nack["reason"], nack["sequenceNumber"]) == ("nack", "invalid_format", 3)
