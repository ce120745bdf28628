"""Finished answers of loads: the same bytes for everyone, packed for who asks, and never more than the limit."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Callable

import orjson
import pytest

from lakefeed.catalog.metadata.document import serialise
from lakefeed.catalog.names import Pointer
from lakefeed.catalog.service.metadata_cache import ALL, GZIP_MIN_BYTES, REFS, Key, LoadAnswers, StoredMetadata
from lakefeed.contract.errors import StorageError
from tests.catalog.conftest import Client, Server
from tests.catalog.documents import append, create_body, new_table
from tests.catalog.routes.test_http import Connect

TABLE = "namespaces/db/tables/t"


def stored(location: str, **more: object) -> StoredMetadata:
    document = new_table() | more
    return StoredMetadata(Pointer(location), serialise(document))


class Loads:
    """Counts how often metadata is asked for."""

    def __init__(self, version: StoredMetadata) -> None:
        self.version = version
        self.count = 0

    async def load(self) -> StoredMetadata:
        self.count += 1
        return self.version


async def test_answer_is_built_once_per_form():
    answers, loads = LoadAnswers({"a": "b"}, max_bytes=10**6), Loads(stored("one", padding="x" * GZIP_MIN_BYTES))
    for _ in range(3):
        plain = await answers.find_or_build(Key(Pointer("one"), ALL, packed=False), loads.load)
        packed = await answers.find_or_build(Key(Pointer("one"), ALL, packed=True), loads.load)
    assert loads.count == 2
    assert gzip.decompress(packed) == plain
    assert orjson.loads(plain) == {
        "metadata-location": "one",
        "metadata": loads.version.document,
        "config": {"a": "b"},
    }


async def test_least_recently_used_answers_leave_at_the_limit():
    first, second = Loads(stored("one")), Loads(stored("two"))
    room = len(LoadAnswers({}, max_bytes=0).build(first.version))
    answers = LoadAnswers({}, max_bytes=room)
    for _ in range(2):
        await answers.find_or_build(Key(Pointer("one"), ALL, packed=False), first.load)
    await answers.find_or_build(Key(Pointer("two"), ALL, packed=False), second.load)
    await answers.find_or_build(Key(Pointer("one"), ALL, packed=False), first.load)
    assert (first.count, second.count) == (2, 1)


async def test_answer_larger_than_the_limit_drives_no_other_one_out():
    small, large = Loads(stored("one")), Loads(stored("two", padding="x" * 10_000))
    answers = LoadAnswers({}, max_bytes=5_000)
    for loads in (small, large, large, small):
        await answers.find_or_build(Key(loads.version.pointer, ALL, packed=False), loads.load)
    assert (small.count, large.count) == (1, 2)


async def test_those_who_ask_at_once_for_what_is_not_kept_wait_for_one_to_build_it():
    loads = Loads(stored("one", padding="x" * GZIP_MIN_BYTES))
    answers, key = LoadAnswers({}, max_bytes=10**6), Key(Pointer("one"), ALL, packed=True)
    found = await asyncio.gather(*(answers.find_or_build(key, loads.load) for _ in range(20)))
    assert (loads.count, len(set(found))) == (1, 1)


async def test_those_who_wait_for_one_answer_all_get_the_error_of_the_one_try():
    tries: list[int] = []
    gate = asyncio.Event()

    async def fail() -> StoredMetadata:
        tries.append(1)
        await gate.wait()
        raise StorageError("storage does not answer")

    answers = LoadAnswers({}, max_bytes=10**6)
    waiting = [
        asyncio.create_task(answers.find_or_build(Key(Pointer("one"), ALL, packed=False), fail)) for _ in range(20)
    ]
    await asyncio.sleep(0)
    gate.set()
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [StorageError] * 20
    assert len(tries) == 1


def test_tags_differ_by_version_history_and_client_configuration():
    answers, others = LoadAnswers({}, max_bytes=0), LoadAnswers({"a": "b"}, max_bytes=0)
    one = Pointer("one")
    tags = [
        answers.etag(one, ALL),
        answers.etag(Pointer("two"), ALL),
        answers.etag(Pointer("one", digest="other content"), ALL),
        answers.etag(one, REFS),
        others.etag(one, ALL),
    ]
    assert len(set(tags)) == len(tags)


@pytest.mark.parametrize("cache_bytes", [0, 10**6])
@pytest.mark.parametrize("shown", [ALL, REFS])
def test_packed_and_plain_loads_say_the_same_before_and_after_a_commit(
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
