"""Bodies of HTTP ingest: of every size and coding, whole, cut off, slow and never-ending."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import zlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from lakefeed.ingest.config import IngestConfig
from lakefeed.settings import MIB
from tests.ingest.debezium.envelopes import streamed
from tests.ingest.http_ingest import NDJSON, insert, serving_routes
from tests.ingest.raw_http import post_head, raw_connection, send_raw
from tests.ingest.running_intake import until

SMALL = IngestConfig(frame_max_bytes=4_000, event_max_bytes=1_000)


async def chunks(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


@pytest.mark.parametrize("chunked", [False, True])
async def test_body_above_the_limit_is_a_413_that_names_it(tmp_path, chunked):
    async with serving_routes(tmp_path, config=SMALL) as client:
        body = json.dumps({"sourceDoId": "shop", "events": [insert(1)], "padding": "x" * 8_000}).encode()
        sent: Any = chunks(body[:3_000], body[3_000:6_000], body[6_000:]) if chunked else body
        status, document = await client.post("/cdc", sent)
        assert (status, document["reason"]) == (413, "payload_too_large")
        assert "4000 bytes" in document["error"]
        assert (await client.batch(1)).status == 200


# -- compressed


def batch_body(*sequences: int) -> bytes:
    return json.dumps({"sourceDoId": "shop", "events": [insert(sequence) for sequence in sequences]}).encode()


ROWS = b"".join(b'{"id": %d, "name": "name %d"}\n' % (number, number) for number in range(1_000))
PACK = {"gzip": gzip.compress, "deflate": zlib.compress, "identity": bytes}


@pytest.mark.parametrize("coding", PACK)
async def test_compressed_batch_rows_and_events_are_taken(tmp_path, coding):
    pack, coded = PACK[coding], {"Content-Encoding": coding}
    async with serving_routes(tmp_path) as client:
        assert (await client.post("/cdc", pack(batch_body(1)), headers=coded)).status == 200
        rows = await client.post("/cdc", pack(ROWS), headers=NDJSON | coded, params={"source": "rows", "table": "t"})
        assert (rows.status, rows.document["eventsAccepted"]) == (200, 1_000)
        event = json.dumps(streamed(90, 100, 1)).encode()
        taken = await client.post("/cdc/debezium", pack(event), headers=coded, params={"source": "dbz"})
        assert (taken.status, taken.document["eventsAccepted"]) == (200, 1)


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
@pytest.mark.parametrize("missing", [1, 8, 500])
async def test_compressed_body_that_was_cut_off_is_a_400_and_nothing_of_it_is_taken(tmp_path, coding, missing):
    body = PACK[coding](ROWS)[:-missing]
    async with serving_routes(tmp_path) as client:
        for path, kind in (("/cdc", NDJSON), ("/cdc", {}), ("/cdc/debezium", {})):
            headers = {"Content-Encoding": coding, **kind}
            answer = await client.post(path, body, headers=headers, params={"source": "shop", "table": "t"})
            assert (answer.status, answer.document["reason"]) == (400, "invalid_format")
            assert answer.document["error"] == f"body: was cut off before the end of the compressed data: {coding}"
        assert client.running.frames() == []
        assert client.gate.budget.used_bytes == 0


@pytest.mark.parametrize("path", ["/cdc", "/cdc/debezium"])
@pytest.mark.parametrize("coding", ["gzip", "deflate"])
async def test_body_that_unpacks_to_more_than_the_limit_is_a_413(tmp_path, path, coding):
    async with serving_routes(tmp_path) as client:
        bomb = PACK[coding](bytes(10 * MIB))
        headers = {"Content-Encoding": coding, "Connection": "close"}
        status, document = await client.post(path, bomb, headers=headers, params={"source": "shop"})
        assert (status, document["reason"]) == (413, "payload_too_large")
        assert client.gate.budget.used_bytes == 0
        assert (await client.batch(1)).status == 200


@pytest.mark.parametrize("path", ["/cdc", "/cdc/debezium"])
@pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "gzip, gzip"])
async def test_body_that_is_not_what_its_coding_says_is_a_400(tmp_path, path, coding):
    async with serving_routes(tmp_path) as client:
        answer = await client.post(
            path, b"\xffnot compressed", headers={"Content-Encoding": coding}, params={"source": "shop"}
        )
        assert (answer.status, answer.document["reason"]) == (400, "invalid_format")
        assert answer.document["error"].startswith(("body: ", "Content-Encoding: "))
        assert (await client.batch(1)).status == 200


# -- broken, slow, unfinished


async def test_broken_chunks_are_a_400(tmp_path):
    async with serving_routes(tmp_path) as client:
        request = b"POST /cdc?source=shop HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{}\r\nzz\r\n"
        ((status, _),) = await send_raw(client.url, request)
        assert status == 400
        assert (await client.batch(1)).status == 200


@pytest.mark.parametrize("path", ["/cdc?source=shop", "/cdc/debezium?source=shop"])
@pytest.mark.parametrize("sent", [0, 10, 200_000], ids=["nothing", "little", "more than the allowance"])
async def test_body_that_does_not_end_is_a_408_after_its_time_and_nothing_of_it_is_taken(tmp_path, path, sent):
    async with (
        serving_routes(tmp_path, config=IngestConfig(message_timeout_s=0.3)) as client,
        raw_connection(client.url) as raw,
    ):
        await raw.send(post_head(path, Content_Length=300_000) + b" " * sent)
        status, _, document = await raw.answer()
        assert (status, document["reason"], document["shouldRetry"]) == (408, "timeout", True)
        assert client.running.frames() == []
        assert (client.gate.budget.used_bytes, client.gate.slots.used) == (0, 0)
        assert await raw.closed() == b""


@pytest.mark.parametrize("path", ["/cdc?source=shop&table=t", "/cdc/debezium?source=shop"])
@pytest.mark.parametrize("sent", [10, 200_000], ids=["little", "more than the allowance"])
async def test_client_that_goes_in_the_middle_of_its_body_leaves_nothing_behind(tmp_path, path, sent, caplog):
    rows = b'{"id": 1}\n' * 30_000
    async with serving_routes(tmp_path) as client:
        async with raw_connection(client.url) as raw:
            head = post_head(path, Content_Length=len(rows), Content_Type="application/x-ndjson")
            await raw.send(head + rows[:sent])
            await until(lambda: client.gate.slots.used == 1)
        await until(lambda: client.gate.slots.used == 0)
        assert client.gate.budget.used_bytes == 0
        assert client.running.frames() == []
        assert (await client.batch(1)).status == 200
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []


async def test_client_that_does_not_read_its_answers_is_cut_off_and_holds_nothing(tmp_path):
    config = IngestConfig(reply_timeout_s=0.3)
    body = b"no JSON"
    requests = (post_head("/cdc?source=shop", Content_Length=len(body)) + body) * 100
    async with (
        serving_routes(tmp_path, config=config, send_buffer_bytes=4_096) as client,
        raw_connection(client.url, buffer_bytes=4_096) as raw,
    ):
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(20):
                while not client.metric("lakefeed_ingest_http_unread_responses_total"):
                    await raw.send(requests)
        await until(lambda: client.metric("lakefeed_ingest_http_unread_responses_total") == 1)
        assert (client.gate.budget.used_bytes, client.gate.slots.used) == (0, 0)
        assert (await client.batch(1)).status == 200
