"""Load responses: encoded once, compressed on request, cached within a limit, with a config per request."""

from __future__ import annotations

import asyncio
import gzip
import zlib
from collections.abc import Callable

import orjson
import pytest

from lakefeed.catalog.metadata.document import encode_document
from lakefeed.catalog.names import Pointer
from lakefeed.catalog.service.load_responses import (
    ALL,
    GZIP_MIN_BYTES,
    REFS,
    LoadResponses,
    ResponseKey,
    StoredMetadata,
    encode_load,
    load_etag,
)
from lakefeed.contract.errors import StorageError
from tests.catalog.conftest import Client, Server
from tests.catalog.documents import append, create_body, new_table
from tests.catalog.routes.test_http import Connect

TABLE = "namespaces/db/tables/t"
CONFIG = b'{"a":"b"}'


def stored(location: str, **more: object) -> StoredMetadata:
    document = new_table() | more
    return StoredMetadata(Pointer(location), encode_document(document))


class Loads:
    """Counts how often metadata is asked for."""

    def __init__(self, version: StoredMetadata) -> None:
        self.version = version
        self.count = 0

    async def load(self) -> StoredMetadata:
        self.count += 1
        return self.version


async def test_response_is_encoded_once_per_form():
    responses, loads = LoadResponses(max_bytes=10**6), Loads(stored("one", padding="x" * GZIP_MIN_BYTES))
    for _ in range(3):
        plain = await responses.find_or_encode(ResponseKey(Pointer("one"), ALL, gzip=False), loads.load)
        packed = await responses.find_or_encode(ResponseKey(Pointer("one"), ALL, gzip=True), loads.load)
    assert loads.count == 2
    assert (plain.is_gzip, packed.is_gzip) == (False, True)
    assert gzip.decompress(packed.body(CONFIG)) == plain.body(CONFIG)
    assert orjson.loads(plain.body(CONFIG)) == {
        "metadata-location": "one",
        "metadata": loads.version.document,
        "config": {"a": "b"},
    }


@pytest.mark.parametrize("compress", [False, True])
def test_config_differs_per_request_while_the_encoded_metadata_is_reused(compress: bool):
    encoded = encode_load(stored("one", padding="x" * GZIP_MIN_BYTES), compress=compress)
    configs = [b"{}", CONFIG, orjson.dumps({"token": "x" * 200_000}), None]
    for config in configs:
        body = encoded.body(config)
        assert body.startswith(encoded.data)
        document = orjson.loads(gzip.decompress(body) if compress else body)
        assert document.get("config") == (None if config is None else orjson.loads(config))
        assert document["metadata"]["padding"] == "x" * GZIP_MIN_BYTES


def test_gzipped_response_is_one_member_that_ends_with_the_body():
    body = encode_load(stored("one", padding="x" * GZIP_MIN_BYTES), compress=True).body(CONFIG)
    decompressor = zlib.decompressobj(zlib.MAX_WBITS | 16)
    assert orjson.loads(decompressor.decompress(body))["config"] == {"a": "b"}
    assert (decompressor.eof, decompressor.unused_data) == (True, b"")


async def test_least_recently_used_responses_are_evicted_at_the_limit():
    first, second = Loads(stored("one")), Loads(stored("two"))
    responses = LoadResponses(max_bytes=len(encode_load(first.version).data))
    for _ in range(2):
        await responses.find_or_encode(ResponseKey(Pointer("one"), ALL, gzip=False), first.load)
    await responses.find_or_encode(ResponseKey(Pointer("two"), ALL, gzip=False), second.load)
    await responses.find_or_encode(ResponseKey(Pointer("one"), ALL, gzip=False), first.load)
    assert (first.count, second.count) == (2, 1)


async def test_response_larger_than_the_limit_evicts_no_other():
    small, large = Loads(stored("one")), Loads(stored("two", padding="x" * 10_000))
    responses = LoadResponses(max_bytes=5_000)
    for loads in (small, large, large, small):
        await responses.find_or_encode(ResponseKey(loads.version.pointer, ALL, gzip=False), loads.load)
    assert (small.count, large.count) == (1, 2)


async def test_concurrent_requests_for_a_response_that_is_not_cached_share_one_encoding():
    loads = Loads(stored("one", padding="x" * GZIP_MIN_BYTES))
    responses, key = LoadResponses(max_bytes=10**6), ResponseKey(Pointer("one"), ALL, gzip=True)
    found = await asyncio.gather(*(responses.find_or_encode(key, loads.load) for _ in range(20)))
    assert (loads.count, len(set(found))) == (1, 1)


async def test_concurrent_requests_for_one_response_all_get_the_error_of_the_one_attempt():
    attempts: list[int] = []
    gate = asyncio.Event()

    async def fail() -> StoredMetadata:
        attempts.append(1)
        await gate.wait()
        raise StorageError("storage does not answer")

    responses, key = LoadResponses(max_bytes=10**6), ResponseKey(Pointer("one"), ALL, gzip=False)
    waiting = [asyncio.create_task(responses.find_or_encode(key, fail)) for _ in range(20)]
    await asyncio.sleep(0)
    gate.set()
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [StorageError] * 20
    assert len(attempts) == 1


def test_etags_differ_by_version_snapshots_and_config():
    one = Pointer("one")
    tags = [
        load_etag(one, ALL, b"{}"),
        load_etag(Pointer("two"), ALL, b"{}"),
        load_etag(Pointer("one", digest="other content"), ALL, b"{}"),
        load_etag(one, REFS, b"{}"),
        load_etag(one, ALL, CONFIG),
    ]
    assert len(set(tags)) == len(tags)


@pytest.mark.parametrize("cache_bytes", [0, 10**6])
@pytest.mark.parametrize("shown", [ALL, REFS])
def test_gzipped_and_plain_loads_are_equal_before_and_after_a_commit(
    start_server: Callable[..., Server], connect: Connect, cache_bytes: int, shown: str
):
    client: Client = connect(start_server(response_cache_bytes=cache_bytes))
    client.post("namespaces", {"namespace": ["db"]})
    client.post("namespaces/db/tables", create_body(properties={"padding": "x" * GZIP_MIN_BYTES}))
    seen = []
    for number in (1, 2):
        update = {"requirements": [], "updates": append(number, number)}
        assert client.post(TABLE, update)[0] == 200
        plain = client.send("GET", TABLE, params={"snapshots": shown}, headers={"Accept-Encoding": "identity"})
        packed = client.send("GET", TABLE, params={"snapshots": shown}, headers={"Accept-Encoding": "gzip"})
        assert "Content-Encoding" not in plain.headers
        assert packed.headers["Content-Encoding"] == "gzip"
        assert packed.json() == plain.json()
        assert packed.headers["ETag"] == plain.headers["ETag"]
        tag = {"If-None-Match": plain.headers["ETag"]}
        assert client.send("GET", TABLE, params={"snapshots": shown}, headers=tag).status_code == 304
        seen.append(plain.json()["metadata"]["current-snapshot-id"])
    assert seen == [1, 2]


@pytest.mark.parametrize("accepted", ["gzip;q=0", "identity, gzip; q=0.0", "gzipped", ""])
def test_client_that_does_not_take_gzip_gets_none(client: Client, accepted: str):
    client.post("namespaces", {"namespace": ["db"]})
    client.post("namespaces/db/tables", create_body(properties={"padding": "x" * GZIP_MIN_BYTES}))
    answer = client.send("GET", TABLE, headers={"Accept-Encoding": accepted})
    assert "Content-Encoding" not in answer.headers
