"""/cdc: what breaks a rule is told which one, and nothing of it is taken."""

from __future__ import annotations

import json

import pytest

from lakefeed.ingest.config import IngestConfig
from lakefeed.settings import MIB
from tests.ingest.http_ingest import NDJSON, insert, serving_routes
from tests.ingest.raw_http import send_raw
from tests.ingest.running_intake import LARGE

SMALL = IngestConfig(frame_max_bytes=4_000, event_max_bytes=1_000)


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
    async with serving_routes(tmp_path) as client:
        status, document = await client.post("/cdc", body, params={"source": "shop"})
        assert (status, document["success"], document["reason"]) == (400, False, "invalid_format")
        assert error in document["error"]
        assert client.metric("lakefeed_ingest_nacks_total", reason="invalid_format") == 1
        assert client.running.frames() == []
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
    async with serving_routes(tmp_path) as client:
        known = {"source": "shop", "table": "users"}
        status, document = await client.post("/cdc", body, headers=NDJSON, params={**known, **params})
        assert (status, document["reason"]) == (400, "invalid_format")
        assert error in document["error"]
        assert client.running.frames() == []
        assert (await client.rows({"id": 1})).status == 200


@pytest.mark.parametrize("epoch", [str(2**63), "9" * 30, "-1", "x"])
async def test_epoch_that_is_none_is_refused_before_it_reaches_the_log(tmp_path, epoch):
    async with serving_routes(tmp_path) as client:
        body = {"sourceDoId": "shop", "events": [insert(1)]}
        status, document = await client.post("/cdc", body, params={"epoch": epoch})
        assert (status, document["error"][:6]) == (400, "epoch:")
        assert (await client.batch(1)).status == 200


async def test_batch_without_a_source_is_told_where_to_name_it(tmp_path):
    async with serving_routes(tmp_path) as client:
        for body in ({"events": [insert(1)]}, {"events": []}):
            status, document = await client.post("/cdc", body)
            assert (status, document["reason"]) == (400, "invalid_format")
            assert document["error"].startswith("sourceDoId: expected")
            assert "source" in document["error"].removeprefix("sourceDoId")


async def test_bytes_that_are_no_text_in_the_client_header_are_refused(tmp_path):
    body = json.dumps({"events": [insert(1)]}).encode()
    async with serving_routes(tmp_path) as client:
        for kind in (b"application/json", b"application/x-ndjson"):
            request = (
                b"POST /cdc?table=users HTTP/1.1\r\nHost: h\r\nX-Client-ID: sh\xffop\r\nContent-Type: "
                + kind
                + b"\r\nContent-Length: %d\r\n\r\n" % len(body)
                + body
            )
            ((status, document),) = await send_raw(client.url, request)
            assert (status, document["reason"]) == (400, "invalid_format")


@pytest.mark.parametrize("kind", ["batch", "rows"])
async def test_event_above_the_limit_is_a_413(tmp_path, kind):
    async with serving_routes(tmp_path, config=SMALL) as client:
        if kind == "batch":
            events = [insert(1), insert(2, after={"name": "x" * 1_500})]
            answer = await client.post("/cdc", {"sourceDoId": "shop", "events": events})
        else:
            answer = await client.rows({"id": 1}, {"name": "x" * 1_500})
        assert (answer.status, answer.document["reason"]) == (413, "event_too_large")
        assert {"batch": "events[1]", "rows": "line 2"}[kind] in answer.document["error"]
        assert client.running.frames() == []


async def test_batch_that_no_segment_could_hold_is_a_413(tmp_path):
    async with serving_routes(tmp_path) as client:
        assert client.running.log.group_max_bytes < MIB
        events = [insert(number, after={"name": "x" * LARGE}) for number in range(1, 6)]
        status, document = await client.post("/cdc", {"sourceDoId": "shop", "events": events})
        assert (status, document["reason"], document["shouldRetry"]) == (413, "payload_too_large", False)
