"""The control plane's listener: bodies of routes that know nothing of codings arrive unpacked, or not at all."""

from __future__ import annotations

import gzip
import zlib

import aiohttp
import pytest
from aiohttp import web

from lakefeed.ingest.config import IngestConfig
from lakefeed.settings import MIB
from tests.ingest.http_ingest import serving_http

BODY = b'{"id": 1}' * 50_000


async def echo(request: web.Request) -> web.Response:
    """A route like any other of the control plane: reads what comes."""
    body = bytearray()
    try:
        async for chunk in request.content.iter_any():
            body += chunk
    except web.RequestPayloadError as error:
        return web.Response(status=400, text=str(error))
    return web.Response(body=bytes(body))


async def post(body: bytes, **headers: str) -> tuple[int, bytes]:
    app = web.Application()
    app.router.add_post("/v1/echo", echo)
    async with serving_http(app, IngestConfig()) as url, aiohttp.ClientSession() as client:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        async with client.post(f"{url}/v1/echo", data=body, headers=named) as answer:
            return answer.status, await answer.read()


async def test_body_that_is_not_compressed_arrives_as_it_is():
    assert await post(BODY) == (200, BODY)


@pytest.mark.parametrize(("coding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
async def test_compressed_body_of_any_other_route_arrives_unpacked(coding, pack):
    assert await post(pack(BODY), Content_Encoding=coding) == (200, BODY)


async def test_body_that_was_cut_off_is_an_error_where_the_route_reads_it():
    status, text = await post(gzip.compress(BODY)[:-8], Content_Encoding="gzip")
    assert (status, text) == (400, b"body: was cut off before the end of the compressed data: gzip")


async def test_unknown_content_encoding_is_an_error_where_the_route_reads_it():
    status, text = await post(b"?", Content_Encoding="br")
    assert (status, text) == (400, b"Content-Encoding: expected gzip, deflate or identity")


async def test_body_that_unpacks_to_more_than_the_limit_is_a_413():
    assert (await post(gzip.compress(bytes(2 * MIB)), Content_Encoding="gzip"))[0] == 413
