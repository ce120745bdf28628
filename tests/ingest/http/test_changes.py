"""/cdc: batches and rows, of many clients and of odd ones, are in the log once."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from lakefeed.contract.changes import Position, SourceId
from lakefeed.settings import MIB
from lakefeed.writer.config import LogConfig
from tests.fakes import HeldFilesystem
from tests.ingest.http_ingest import Answer, insert, serving_routes
from tests.ingest.offers import offer_of
from tests.ingest.raw_http import send_raw
from tests.ingest.running_intake import until

SHOP = SourceId("shop")
ROOMY_LOG = LogConfig(segment_max_bytes=MIB, max_bytes=64 * MIB)


# -- batches


async def test_batch_is_durable_when_it_is_answered(tmp_path):
    async with serving_routes(tmp_path) as client:
        status, document = await client.batch(1, 2, 3)
        assert status == 200
        assert document == {
            "success": True,
            "eventsReceived": 3,
            "eventsAccepted": 3,
            "isDuplicate": False,
            "lastDurableSequence": 3,
        }
        assert client.sequences() == [1, 2, 3]
        assert client.running.intake.durable_position(SHOP) == Position(0, 3)


@pytest.mark.parametrize(
    "body",
    [
        {"type": "cdc_batch", "sourceDoId": "shop", "events": [insert(1)]},
        {"sourceDoId": "shop", "events": [insert(1)]},
        {"events": [insert(1)], "sourceDoId": "shop", "padding": "x" * 300, "type": "cdc_batch"},
    ],
    ids=["type first", "no type", "type last"],
)
async def test_type_may_stand_anywhere_or_be_left_out(tmp_path, body):
    async with serving_routes(tmp_path) as client:
        assert (await client.post("/cdc", body)).status == 200
        assert client.sequences() == [1]


@pytest.mark.parametrize(
    ("params", "headers", "own"),
    [({"source": "shop"}, {}, ""), ({}, {"X-Client-ID": "shop"}, ""), ({"source": "b"}, {"X-Client-ID": "c"}, "shop")],
    ids=["query", "header", "the batch's own comes first"],
)
async def test_source_is_named_by_batch_query_or_header(tmp_path, params, headers, own):
    async with serving_routes(tmp_path) as client:
        body = {"sourceDoId": own, "events": [insert(1)]}
        assert (await client.post("/cdc", body, params=params, headers=headers)).status == 200
        assert client.running.intake.sources() == {"shop": Position(0, 1)}


async def test_batch_that_comes_again_is_taken_once(tmp_path):
    async with serving_routes(tmp_path) as client:
        await client.batch(1, 2)
        status, document = await client.batch(1, 2)
        assert (status, document["eventsAccepted"], document["isDuplicate"]) == (200, 0, True)
        assert document["lastDurableSequence"] == 2
        assert client.sequences() == [1, 2]


async def test_of_a_batch_that_overlaps_the_new_changes_are_taken(tmp_path):
    async with serving_routes(tmp_path) as client:
        await client.batch(1, 2, 3)
        status, document = await client.batch(2, 3, 4, 5)
        assert (status, document["eventsReceived"], document["eventsAccepted"]) == (200, 4, 2)
        assert not document["isDuplicate"]
        assert client.sequences() == [1, 2, 3, 4, 5]


async def test_source_that_starts_over_says_so_with_a_higher_epoch(tmp_path):
    async with serving_routes(tmp_path) as client:
        batch = {"sourceDoId": "shop", "events": [insert(1)]}
        assert (await client.post("/cdc", batch)).status == 200
        assert (await client.post("/cdc", batch, params={"epoch": 2})).document["eventsAccepted"] == 1
        status, document = await client.post("/cdc", batch, params={"epoch": 1})
        assert (status, document["reason"]) == (409, "invalid_sequence")
        assert "epoch=1 known=2" in document["error"]
        assert client.running.intake.durable_position(SHOP) == Position(2, 1)


async def test_empty_batch_is_taken_and_leaves_nothing(tmp_path):
    async with serving_routes(tmp_path) as client:
        for answer in (await client.batch(), await client.rows()):
            assert (answer.status, answer.document["eventsReceived"], answer.document["eventsAccepted"]) == (200, 0, 0)
        assert client.running.frames() == []


# -- rows


async def test_rows_are_inserts_numbered_on_from_what_is_durable(tmp_path):
    async with serving_routes(tmp_path) as client:
        await client.batch(41)
        status, document = await client.rows({"id": 1}, {"id": 2})
        assert (status, document["eventsAccepted"], document["lastDurableSequence"]) == (200, 2, 43)
        await client.rows({"id": 3})
        assert client.sequences() == [41, 42, 43, 44]
        assert client.accepted_rows()[1:] == [{"id": 1}, {"id": 2}, {"id": 3}]
        assert {(event.operation, event.table) for event in client.events()} == {("INSERT", "users")}


async def test_rows_of_a_new_source_are_numbered_above_what_another_node_can_have_given_them(tmp_path):
    async with serving_routes(tmp_path / "one") as one, serving_routes(tmp_path / "two") as two:
        await one.rows(*[{"id": number} for number in range(1_000)])
        await two.rows({"id": 1})
        assert min(two.sequences()) > max(one.sequences())


async def test_rows_go_on_in_the_epoch_of_their_source(tmp_path):
    async with serving_routes(tmp_path) as client:
        await client.post("/cdc", {"sourceDoId": "shop", "events": [insert(7)]}, params={"epoch": 3})
        assert (await client.rows({"id": 1})).status == 200
        assert client.running.intake.durable_position(SHOP) == Position(3, 8)


async def test_rows_with_a_sequence_are_taken_once(tmp_path):
    async with serving_routes(tmp_path) as client:
        assert (await client.rows({"id": 1}, {"id": 2}, sequence=10)).document["eventsAccepted"] == 2
        assert (await client.rows({"id": 1}, {"id": 2}, sequence=10)).document["isDuplicate"]
        assert (await client.rows({"id": 2}, {"id": 3}, sequence=11)).document["eventsAccepted"] == 1
        assert client.sequences() == [10, 11, 12]


@pytest.mark.parametrize(
    ("row", "key", "row_id"),
    [
        ({"id": 7}, None, "7"),
        ({"id": "sieben \U0001f426"}, None, "sieben \U0001f426"),
        ({"id": 2**70}, None, str(2**70)),
        ({"id": 1.5}, None, "1.5"),
        ({"id": None}, None, ""),
        ({"name": "no id"}, None, ""),
        ({"id": {"a": 1}}, None, '{"a": 1}'),
        ({"id": 1, "näme": "n"}, "näme", "n"),
    ],
)
async def test_row_id_is_the_key_columns_text(tmp_path, row, key, row_id):
    async with serving_routes(tmp_path) as client:
        params = {} if key is None else {"key": key}
        assert (await client.rows(row, **params)).status == 200
        assert [event.row_id for event in client.events()] == [row_id]
        assert client.accepted_rows() == [row]


async def test_blank_lines_and_carriage_returns_are_no_rows(tmp_path):
    async with serving_routes(tmp_path) as client:
        body = b'\r\n{"id":1}\r\n\n  \n{"id":2}'
        params = {"source": "shop", "table": "users"}
        headers = {"Content-Type": "application/x-ndjson; charset=utf-8"}
        assert (await client.post("/cdc", body, headers=headers, params=params)).document["eventsAccepted"] == 2


async def test_rows_without_numbers_from_many_clients_at_once_are_all_taken(tmp_path):
    async with serving_routes(tmp_path) as client:
        answers = await asyncio.gather(*[client.rows({"id": number}, {"id": -number}) for number in range(1, 41)])
        assert [(answer.status, answer.document["eventsAccepted"]) for answer in answers] == [(200, 2)] * 40
        assert sorted(row["id"] for row in client.accepted_rows()) == sorted([*range(1, 41), *range(-40, 0)])


async def test_rows_without_numbers_are_taken_although_another_client_takes_their_numbers(tmp_path):
    files = HeldFilesystem()
    async with serving_routes(tmp_path, files=files) as client:
        await client.batch(1)
        files.open_gate.clear()
        begun = files.begun
        (overtaking,) = await client.running.offer(offer_of(2, 3))  # durable before the rows, but after their numbering
        await until(lambda: files.begun > begun)
        rows = asyncio.create_task(client.rows({"id": "a"}, {"id": "b"}, {"id": "c"}))
        await until(lambda: bool(client.running.intake._queue))
        files.open_gate.set()
        await overtaking
        assert (await rows).document["eventsAccepted"] == 3
        taken = [row["id"] for row in client.accepted_rows()]
        assert sorted(map(str, taken)) == ["1", "2", "3", "a", "b", "c"]


# -- many clients, odd clients


async def test_many_clients_at_once_each_get_their_own_answer(tmp_path):
    async with serving_routes(tmp_path, log_config=ROOMY_LOG) as client:

        async def send(source: str) -> list[Answer]:
            return [await client.batch(first, first + 1, source=source) for first in range(1, 21, 2)]

        answers = await asyncio.gather(*[send(f"source-{number}") for number in range(50)])
        for own in answers:
            assert [answer.document["lastDurableSequence"] for answer in own] == list(range(2, 21, 2))
        assert client.metric("lakefeed_ingest_durable_changes_total") == 1_000
        assert set(client.running.intake.sources().values()) == {Position(0, 20)}


@pytest.mark.parametrize("path", ["/cdc?source=shop", "/cdc/debezium?source=shop"])
async def test_offer_to_speak_http_2_is_ignored_on_every_request_of_a_connection(tmp_path, path):
    events = {"/cdc?source=shop": lambda n: {"events": [insert(n)]}, "/cdc/debezium?source=shop": _debezium_insert}
    requests = []
    for number in (1, 2, 3):
        body = json.dumps(events[path](number)).encode()
        requests.append(
            f"POST {path} HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\nContent-Length: {len(body)}\r\n"
            "Host: 127.0.0.1\r\nHTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\r\nUpgrade: h2c\r\n"
            "User-Agent: Java-http-client/21.0.9\r\ncontent-type: application/json\r\n\r\n".encode()
            + body
        )
    async with serving_routes(tmp_path) as client:
        answers = await send_raw(client.url, *requests)
        assert [(status, document["eventsAccepted"]) for status, document in answers] == [(200, 1)] * 3
        assert [row["id"] for row in client.accepted_rows()] == [1, 2, 3]


def _debezium_insert(number: int) -> dict[str, Any]:
    return {"op": "c", "after": {"id": number}, "source": {"schema": "public", "table": "t"}}


@pytest.mark.parametrize("path", ["/cdc", "/cdc/debezium"])
async def test_other_methods_are_a_405(tmp_path, path):
    async with serving_routes(tmp_path) as client, client._client.get(client.url + path) as response:
        assert response.status == 405
