"""/cdc: what is answered 2xx is in the log once; what breaks a rule is told which; a full log makes clients wait."""

from __future__ import annotations

import asyncio
import errno
import gzip
import json
import zlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from ingest import http_ingest
from ingest.config import IngestConfig
from tests.fakes import FaultyFilesystem
from tests.ingest.offered import offer_of
from tests.ingest.posting import NDJSON, Answer, insert, posting
from tests.ingest.test_intake import LARGE, HeldFilesystem, fill, turns, until
from writer.changes import Position, SourceId
from writer.config import MIB, LogConfig

SHOP = SourceId("shop")
SMALL = IngestConfig(frame_max_bytes=4_000, event_max_bytes=1_000)
ROOMY_LOG = LogConfig(segment_max_bytes=MIB, max_bytes=64 * MIB)


async def chunks(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


async def talk_raw(url: str, *requests: bytes) -> list[tuple[int, dict[str, Any]]]:
    """Send requests as they are over one connection, each after the answer to the one before."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        heard = []
        async with asyncio.timeout(20):
            for request in requests:
                writer.write(request)
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = int(head.lower().split("content-length:")[1].split()[0])
                body = await reader.readexactly(length)
                heard.append((int(head.split()[1]), json.loads(body) if body.startswith(b"{") else {}))
        return heard
    finally:
        writer.close()
        await writer.wait_closed()


# -- batches


async def test_batch_is_durable_when_it_is_answered(tmp_path):
    async with posting(tmp_path) as client:
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
        assert client.at_work.intake.durable_position(SHOP) == Position(0, 3)


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
    async with posting(tmp_path) as client:
        assert (await client.post("/cdc", body)).status == 200
        assert client.sequences() == [1]


@pytest.mark.parametrize(
    ("params", "headers", "own"),
    [({"source": "shop"}, {}, ""), ({}, {"X-Client-ID": "shop"}, ""), ({"source": "b"}, {"X-Client-ID": "c"}, "shop")],
    ids=["query", "header", "the batch's own comes first"],
)
async def test_source_is_named_by_batch_query_or_header(tmp_path, params, headers, own):
    async with posting(tmp_path) as client:
        body = {"sourceDoId": own, "events": [insert(1)]}
        assert (await client.post("/cdc", body, params=params, headers=headers)).status == 200
        assert client.at_work.intake.sources() == {"shop": Position(0, 1)}


async def test_batch_that_comes_again_is_taken_once(tmp_path):
    async with posting(tmp_path) as client:
        await client.batch(1, 2)
        status, document = await client.batch(1, 2)
        assert (status, document["eventsAccepted"], document["isDuplicate"]) == (200, 0, True)
        assert document["lastDurableSequence"] == 2
        assert client.sequences() == [1, 2]


async def test_of_a_batch_that_overlaps_the_new_changes_are_taken(tmp_path):
    async with posting(tmp_path) as client:
        await client.batch(1, 2, 3)
        status, document = await client.batch(2, 3, 4, 5)
        assert (status, document["eventsReceived"], document["eventsAccepted"]) == (200, 4, 2)
        assert not document["isDuplicate"]
        assert client.sequences() == [1, 2, 3, 4, 5]


async def test_source_that_starts_over_says_so_with_a_higher_epoch(tmp_path):
    async with posting(tmp_path) as client:
        batch = {"sourceDoId": "shop", "events": [insert(1)]}
        assert (await client.post("/cdc", batch)).status == 200
        assert (await client.post("/cdc", batch, params={"epoch": 2})).document["eventsAccepted"] == 1
        status, document = await client.post("/cdc", batch, params={"epoch": 1})
        assert (status, document["reason"]) == (409, "invalid_sequence")
        assert "epoch=1 known=2" in document["error"]
        assert client.at_work.intake.durable_position(SHOP) == Position(2, 1)


async def test_empty_batch_is_taken_and_leaves_nothing(tmp_path):
    async with posting(tmp_path) as client:
        for answer in (await client.batch(), await client.rows()):
            assert (answer.status, answer.document["eventsReceived"], answer.document["eventsAccepted"]) == (200, 0, 0)
        assert client.at_work.frames() == []


# -- rows


async def test_rows_are_inserts_numbered_on_from_what_is_durable(tmp_path):
    async with posting(tmp_path) as client:
        await client.batch(41)
        status, document = await client.rows({"id": 1}, {"id": 2})
        assert (status, document["eventsAccepted"], document["lastDurableSequence"]) == (200, 2, 43)
        await client.rows({"id": 3})
        assert client.sequences() == [41, 42, 43, 44]
        assert client.rows_taken()[1:] == [{"id": 1}, {"id": 2}, {"id": 3}]
        assert {(event.operation, event.table) for event in client.events()} == {("INSERT", "users")}


async def test_rows_of_a_new_source_are_numbered_above_what_another_node_can_have_given_them(tmp_path):
    async with posting(tmp_path / "one") as one, posting(tmp_path / "two") as two:
        await one.rows(*[{"id": number} for number in range(1_000)])
        await two.rows({"id": 1})
        assert min(two.sequences()) > max(one.sequences())


async def test_rows_go_on_in_the_epoch_of_their_source(tmp_path):
    async with posting(tmp_path) as client:
        await client.post("/cdc", {"sourceDoId": "shop", "events": [insert(7)]}, params={"epoch": 3})
        assert (await client.rows({"id": 1})).status == 200
        assert client.at_work.intake.durable_position(SHOP) == Position(3, 8)


async def test_rows_with_a_sequence_are_taken_once(tmp_path):
    async with posting(tmp_path) as client:
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
    async with posting(tmp_path) as client:
        params = {} if key is None else {"key": key}
        assert (await client.rows(row, **params)).status == 200
        assert [event.row_id for event in client.events()] == [row_id]
        assert client.rows_taken() == [row]


async def test_blank_lines_and_carriage_returns_are_no_rows(tmp_path):
    async with posting(tmp_path) as client:
        body = b'\r\n{"id":1}\r\n\n  \n{"id":2}'
        params = {"source": "shop", "table": "users"}
        headers = {"Content-Type": "application/x-ndjson; charset=utf-8"}
        assert (await client.post("/cdc", body, headers=headers, params=params)).document["eventsAccepted"] == 2


async def test_rows_without_numbers_from_many_clients_at_once_are_all_taken(tmp_path):
    async with posting(tmp_path) as client:
        answers = await asyncio.gather(*[client.rows({"id": number}, {"id": -number}) for number in range(1, 41)])
        assert [(answer.status, answer.document["eventsAccepted"]) for answer in answers] == [(200, 2)] * 40
        assert sorted(row["id"] for row in client.rows_taken()) == sorted([*range(1, 41), *range(-40, 0)])


async def test_rows_without_numbers_are_taken_although_another_client_takes_their_numbers(tmp_path):
    files = HeldFilesystem()
    async with posting(tmp_path, files=files) as client:
        await client.batch(1)
        files.open_gate.clear()
        begun = files.begun
        (overtaking,) = await client.at_work.offer(offer_of(2, 3))  # durable before the rows, but after their numbering
        await until(lambda: files.begun > begun)
        rows = asyncio.create_task(client.rows({"id": "a"}, {"id": "b"}, {"id": "c"}))
        await until(lambda: bool(client.at_work.intake._waiting))
        files.open_gate.set()
        await overtaking
        assert (await rows).document["eventsAccepted"] == 3
        taken = [row["id"] for row in client.rows_taken()]
        assert sorted(map(str, taken)) == ["1", "2", "3", "a", "b", "c"]


# -- bad input


BAD_BATCHES = [
    (b"", "not valid JSON"),
    (b"{", "not valid JSON"),
    (b"[]", "expected object"),
    (b"\xff", "not valid JSON"),
    (b"{}", "missing required field events"),
    (b'{"type":"connect","sourceDoId":"shop"}', "type: expected cdc_batch"),
    (b'{"events":5}', "events: expected array"),
    (b'{"events":[5]}', "events[0]: expected object"),
    (b'{"events":[{"operation":"INSERT","table":"t"}]}', "events[0]: object missing required field sequence"),
    (b'{"events":[{"sequence":-1,"operation":"INSERT","table":"t"}]}', "events[0].sequence: expected int >= 0"),
    (b'{"events":[{"sequence":1,"operation":"UPSERT","table":"t"}]}', "events[0].operation: expected one of INSERT"),
    (b'{"events":[{"sequence":1,"operation":"INSERT","table":""}]}', "events[0].table: expected str"),
    (b'{"events":[{"sequence":1,"operation":"INSERT","table":"a/b"}]}', "events[0].table: expected a name"),
    (
        b'{"events":[{"sequence":2,"operation":"INSERT","table":"t"},{"sequence":2,"operation":"INSERT","table":"t"}]}',
        "events[1].sequence: expected more than that of the event before",
    ),
    (b'{"events":[{"sequence":1,"operation":"INSERT","table":"t","after":' + b"[" * 5_000, "nested too deeply"),
]


@pytest.mark.parametrize(("body", "error"), BAD_BATCHES, ids=[error for _, error in BAD_BATCHES])
async def test_bad_batch_is_a_400_that_names_field_and_rule(tmp_path, body, error):
    async with posting(tmp_path) as client:
        status, document = await client.post("/cdc", body, params={"source": "shop"})
        assert (status, document["success"], document["reason"]) == (400, False, "invalid_format")
        assert error in document["error"]
        assert client.metric("ingest_nacks_total", reason="invalid_format") == 1
        assert client.at_work.frames() == []
        assert (await client.batch(1)).status == 200


BAD_ROWS = [
    (b"5", {}, "line 1: expected a JSON object"),
    (b'{"id":1}\n\n{"id":', {}, "line 3: expected a JSON object"),
    (b'{"id":1}\n{"id":"\xff"}', {}, "line 2: expected UTF-8"),
    (b'{"id":1}\n{"deep":' + b"[" * 5_000 + b"]" * 5_000 + b"}", {}, "nested too deeply"),
    (b'{"id":' + b"[" * 5_000 + b"]" * 5_000 + b"}", {}, "nested too deeply"),
    (b'{"id":"\\ud800"}', {}, "line 1: expected a JSON object"),
    (b'{"id":1}', {"table": ""}, "table: expected"),
    (b'{"id":1}', {"table": "a//b"}, "table: expected a name"),
    (b'{"id":1}', {"source": ""}, "source: expected"),
    (b'{"id":1}', {"source": "a\x01b"}, "source: expected"),
    (b'{"id":1}', {"source": "s" * 256}, "source: expected"),
    (b'{"id":1}', {"sequence": "x"}, "sequence: expected a whole number"),
    (b'{"id":1}', {"sequence": "-1"}, "sequence: expected a whole number"),
    (b'{"id":1}', {"sequence": "9" * 5_000}, "sequence: expected a whole number"),
    (b'{"id":1}\n{"id":2}', {"sequence": str(2**63 - 1)}, "sequence: expected a whole number"),
    (b'{"id":1}', {"sequence": "٣²"}, "sequence: expected a whole number"),
    (b'{"id":1}', {"epoch": "1.5"}, "epoch: expected a whole number"),
    (b'{"id":1}', {"epoch": str(2**63)}, "epoch: expected a whole number"),
    (b'{"id":1}', {"epoch": "9" * 5_000}, "epoch: expected a whole number"),
]


@pytest.mark.parametrize(
    ("body", "params", "error"), BAD_ROWS, ids=[f"{n} {e}" for n, (_, _, e) in enumerate(BAD_ROWS)]
)
async def test_bad_rows_are_a_400_that_names_line_or_parameter_and_rule(tmp_path, body, params, error):
    async with posting(tmp_path) as client:
        known = {"source": "shop", "table": "users"}
        status, document = await client.post("/cdc", body, headers=NDJSON, params={**known, **params})
        assert (status, document["reason"]) == (400, "invalid_format")
        assert error in document["error"]
        assert client.at_work.frames() == []
        assert (await client.rows({"id": 1})).status == 200


@pytest.mark.parametrize("epoch", [str(2**63), "9" * 30, "-1", "x"])
async def test_epoch_that_is_none_is_refused_before_it_reaches_the_log(tmp_path, epoch):
    async with posting(tmp_path) as client:
        body = {"sourceDoId": "shop", "events": [insert(1)]}
        status, document = await client.post("/cdc", body, params={"epoch": epoch})
        assert (status, document["error"][:6]) == (400, "epoch:")
        assert (await client.batch(1)).status == 200


async def test_batch_without_a_source_is_told_where_to_name_it(tmp_path):
    async with posting(tmp_path) as client:
        for body in ({"events": [insert(1)]}, {"events": []}):
            status, document = await client.post("/cdc", body)
            assert (status, document["reason"]) == (400, "invalid_format")
            assert document["error"].startswith("sourceDoId: expected")
            assert "source" in document["error"].removeprefix("sourceDoId")


async def test_bytes_that_are_no_text_in_the_client_header_are_refused(tmp_path):
    body = json.dumps({"events": [insert(1)]}).encode()
    async with posting(tmp_path) as client:
        for kind in (b"application/json", b"application/x-ndjson"):
            request = (
                b"POST /cdc?table=users HTTP/1.1\r\nHost: h\r\nX-Client-ID: sh\xffop\r\nContent-Type: "
                + kind
                + b"\r\nContent-Length: %d\r\n\r\n" % len(body)
                + body
            )
            ((status, document),) = await talk_raw(client.url, request)
            assert (status, document["reason"]) == (400, "invalid_format")


@pytest.mark.parametrize("chunked", [False, True])
async def test_body_above_the_limit_is_a_413_that_names_it(tmp_path, chunked):
    async with posting(tmp_path, config=SMALL) as client:
        body = json.dumps({"sourceDoId": "shop", "events": [insert(1)], "padding": "x" * 8_000}).encode()
        sent: Any = chunks(body[:3_000], body[3_000:6_000], body[6_000:]) if chunked else body
        status, document = await client.post("/cdc", sent)
        assert (status, document["reason"]) == (413, "payload_too_large")
        assert "4000 bytes" in document["error"]
        assert (await client.batch(1)).status == 200


@pytest.mark.parametrize("kind", ["batch", "rows"])
async def test_event_above_the_limit_is_a_413(tmp_path, kind):
    async with posting(tmp_path, config=SMALL) as client:
        if kind == "batch":
            events = [insert(1), insert(2, after={"name": "x" * 1_500})]
            answer = await client.post("/cdc", {"sourceDoId": "shop", "events": events})
        else:
            answer = await client.rows({"id": 1}, {"name": "x" * 1_500})
        assert (answer.status, answer.document["reason"]) == (413, "event_too_large")
        assert {"batch": "events[1]", "rows": "line 2"}[kind] in answer.document["error"]
        assert client.at_work.frames() == []


async def test_batch_that_no_segment_could_hold_is_a_413(tmp_path):
    async with posting(tmp_path) as client:
        assert client.at_work.log.group_max_bytes < MIB
        events = [insert(number, after={"name": "x" * LARGE}) for number in range(1, 6)]
        status, document = await client.post("/cdc", {"sourceDoId": "shop", "events": events})
        assert (status, document["reason"], document["shouldRetry"]) == (413, "payload_too_large", False)


@pytest.mark.parametrize("path", ["/cdc", "/cdc/debezium"])
@pytest.mark.parametrize(
    ("body", "coding"),
    [
        (b"no gzip at all", "gzip"),
        (gzip.compress(b"x" * 80 * MIB), "gzip"),
        (zlib.compress(b"x" * 80 * MIB), "deflate"),
    ],
    ids=["not compressed", "gzip bomb", "deflate bomb"],
)
async def test_body_that_does_not_decompress_or_grows_too_large_is_refused(tmp_path, path, body, coding):
    async with posting(tmp_path) as client:
        status, document = await client.post(
            path, body, headers={"Content-Encoding": coding, "Connection": "close"}, params={"source": "shop"}
        )
        assert status in (400, 413)
        assert document["success"] is False
        assert (await client.batch(1)).status == 200


async def test_compressed_batch_is_taken(tmp_path):
    async with posting(tmp_path) as client:
        body = gzip.compress(json.dumps({"sourceDoId": "shop", "events": [insert(1)]}).encode())
        assert (await client.post("/cdc", body, headers={"Content-Encoding": "gzip"})).status == 200


async def test_broken_chunks_are_a_400(tmp_path):
    async with posting(tmp_path) as client:
        request = b"POST /cdc?source=shop HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{}\r\nzz\r\n"
        ((status, _),) = await talk_raw(client.url, request)
        assert status == 400
        assert (await client.batch(1)).status == 200


# -- durable, and not before


async def test_answer_comes_after_the_sync_and_never_before(tmp_path):
    files = HeldFilesystem()
    async with posting(tmp_path, files=files) as client:
        await client.batch(1)
        files.open_gate.clear()
        begun = files.begun
        answer = asyncio.create_task(client.batch(2))
        await until(lambda: files.begun > begun)
        await turns()
        assert not answer.done()
        files.open_gate.set()
        assert (await answer).status == 200


async def test_client_that_hangs_up_harms_nobody_and_may_send_again(tmp_path):
    files = HeldFilesystem()
    async with posting(tmp_path, files=files) as client:
        await client.batch(1)
        files.open_gate.clear()
        begun = files.begun
        gone = asyncio.create_task(client.batch(2, 3))
        await until(lambda: files.begun > begun)
        gone.cancel()
        await turns()
        again = asyncio.create_task(client.batch(2, 3))
        files.open_gate.set()
        assert (await again).document["lastDurableSequence"] == 3
        assert client.sequences() == [1, 2, 3]


async def test_full_log_makes_the_answer_late_and_it_is_a_200_once_there_is_room(tmp_path):
    async with posting(tmp_path) as client:
        await fill(client.at_work)
        batch = asyncio.create_task(client.batch(1, 2, padding="x" * LARGE))
        rows = asyncio.create_task(client.rows({"id": 1, "name": "x" * LARGE}, source="rows"))
        await until(lambda: client.at_work.intake._dedup._gaps.keys() >= {"shop", "rows"})
        assert not batch.done()
        assert not rows.done()
        await client.at_work.log.trim(client.at_work.log.durable_end)
        accepted = [answer.document.get("eventsAccepted", answer) for answer in (await batch, await rows)]
        assert accepted == [2, 1]
        assert client.metric("ingest_received_changes_total") == 3


async def test_log_that_stays_full_is_a_503_that_says_to_try_again(tmp_path, monkeypatch):
    monkeypatch.setattr(http_ingest, "FULL_WAIT_S", 0.0)
    async with posting(tmp_path) as client:
        await fill(client.at_work)
        status, document = await client.batch(1, padding="x" * LARGE)
        assert (status, document["reason"], document["shouldRetry"]) == (503, "buffer_full", True)
        await client.at_work.log.trim(client.at_work.log.durable_end)
        assert (await client.batch(1, padding="x" * LARGE)).status == 200


async def test_batch_whose_client_is_gone_is_not_tried_again(tmp_path):
    async with posting(tmp_path) as client:
        await fill(client.at_work)
        gone = asyncio.create_task(client.batch(1, padding="x" * LARGE))
        await until(lambda: "shop" in client.at_work.intake._dedup._gaps)
        gone.cancel()
        await turns()
        await client.at_work.log.trim(client.at_work.log.durable_end)
        await asyncio.sleep(2 * http_ingest.FULL_PAUSE_S)  # as long as a try would have taken
        assert client.sequences() == []
        assert (await client.batch(1)).status == 200


async def test_broken_log_is_a_503(tmp_path):
    files = FaultyFilesystem()
    async with posting(tmp_path, files=files) as client:
        await client.batch(1)
        files.fail("sync", errno.EIO)
        status, document = await client.batch(2)
        assert (status, document["reason"], document["shouldRetry"]) == (503, "internal_error", True)


async def test_batch_behind_one_that_was_refused_is_a_409_until_that_returns(tmp_path, monkeypatch):
    monkeypatch.setattr(http_ingest, "FULL_WAIT_S", 0.0)
    async with posting(tmp_path) as client:
        await fill(client.at_work)
        assert (await client.batch(1, padding="x" * LARGE)).status == 503
        status, document = await client.batch(2)
        assert (status, document["reason"], document["shouldRetry"]) == (409, "invalid_sequence", True)
        await client.at_work.log.trim(client.at_work.log.durable_end)
        assert [(await client.batch(number)).status for number in (1, 2)] == [200, 200]


# -- many clients, odd clients


async def test_many_clients_at_once_each_get_their_own_answer(tmp_path):
    async with posting(tmp_path, log_config=ROOMY_LOG) as client:

        async def send(source: str) -> list[Answer]:
            return [await client.batch(first, first + 1, source=source) for first in range(1, 21, 2)]

        answers = await asyncio.gather(*[send(f"source-{number}") for number in range(50)])
        for own in answers:
            assert [answer.document["lastDurableSequence"] for answer in own] == list(range(2, 21, 2))
        assert client.metric("ingest_durable_changes_total") == 1_000
        assert set(client.at_work.intake.sources().values()) == {Position(0, 20)}


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
    async with posting(tmp_path) as client:
        answers = await talk_raw(client.url, *requests)
        assert [(status, document["eventsAccepted"]) for status, document in answers] == [(200, 1)] * 3
        assert [row["id"] for row in client.rows_taken()] == [1, 2, 3]


def _debezium_insert(number: int) -> dict[str, Any]:
    return {"op": "c", "after": {"id": number}, "source": {"schema": "public", "table": "t"}}


@pytest.mark.parametrize("path", ["/cdc", "/cdc/debezium"])
async def test_other_methods_are_a_405(tmp_path, path):
    async with posting(tmp_path) as client, client._client.get(client.url + path) as response:
        assert response.status == 405
