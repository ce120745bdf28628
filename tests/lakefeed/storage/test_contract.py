"""The contract of every object store, run against each that can be started here."""

from __future__ import annotations

import asyncio
import os

import pyarrow as pa
import pytest

from lakefeed.contract.errors import FileMissing, StorageError
from lakefeed.settings import MIB
from lakefeed.storage.store import open_store

BIG = os.urandom(11 * MIB)  # three parts of 5 MiB


@pytest.mark.parametrize("data", [b"", b"small", BIG], ids=["empty", "small", "in parts"])
async def test_written_object_is_read_back(store, place, data):
    await store.write(f"{place.root}/a/x.bin", data)
    assert await store.read(f"{place.root}/a/x.bin") == data


@pytest.mark.parametrize("name", ["plain.parquet", "day=2026-11-15/x", "b=c%3Ad/x y", "ä€/+&=@,;'()!~"])
async def test_names_are_not_decoded(store, place, name):
    await store.write(f"{place.root}/t/{name}", b"abc")
    assert place.names() == [f"t/{name}"]
    assert await store.read(f"{place.root}/t/{name}") == b"abc"


async def test_arrow_buffers_are_written_as_they_are(store, place):
    await store.write(f"{place.root}/x", pa.py_buffer(b"abc"))
    assert await store.read(f"{place.root}/x") == b"abc"


async def test_a_missing_object_is_an_error_of_its_own_that_names_it(store, place):
    with pytest.raises(FileMissing, match="nowhere") as caught:
        await store.read(f"{place.root}/nowhere")
    assert "\n" not in str(caught.value)


async def test_a_read_is_bounded_by_max_bytes(store, place):
    await store.write(f"{place.root}/x", b"12345")
    assert await store.read(f"{place.root}/x", max_bytes=5) == b"12345"
    with pytest.raises(StorageError, match="is larger than 4 bytes") as caught:
        await store.read(f"{place.root}/x", max_bytes=4)
    assert not isinstance(caught.value, FileMissing)


async def test_exists_is_true_for_objects_only(store, place):
    await store.write(f"{place.root}/d/x", b"")
    assert await store.exists(f"{place.root}/d/x")
    assert not await store.exists(f"{place.root}/d")
    assert not await store.exists(f"{place.root}/d/y")


async def test_names_of_a_directory_are_those_of_its_objects_and_of_no_others(store, place):
    for name in ("d/x", "d/b=c%3Ad y", "d/e/x", "de", "x"):
        await store.write(f"{place.root}/{name}", b"")
    for directory in ("d", "d/"):
        assert sorted(await store.list_names(f"{place.root}/{directory}")) == ["b=c%3Ad y", "x"]
    assert await store.list_names(f"{place.root}/nowhere") == []


async def test_an_object_below_a_new_directory_can_be_written(store, place):
    await store.make_directory(f"{place.root}/d/e")
    await store.write(f"{place.root}/d/e/x", b"abc")
    assert place.names() == ["d/e/x"]


async def test_a_blocking_write_is_offered_where_writes_need_a_thread(store, place):
    write = store.blocking_write(f"{place.root}/d/x", b"abc")
    assert (write is None) == ("://" in place.root and not place.root.startswith("file:"))
    if write is not None:
        await asyncio.to_thread(write)
        assert await store.read(f"{place.root}/d/x") == b"abc"


async def test_delete_removes_an_object_and_accepts_a_missing_one(store, place):
    await store.write(f"{place.root}/x", b"abc")
    await store.delete(f"{place.root}/x")
    await store.delete(f"{place.root}/x")
    assert place.names() == []
    with pytest.raises(FileMissing):
        await store.read(f"{place.root}/x")


async def test_a_location_of_another_store_is_refused(store):
    for use in (store.read, store.exists, store.delete, store.list_names, lambda location: store.write(location, b"")):
        with pytest.raises(StorageError, match="location=hdfs://b/k"):
            await use("hdfs://b/k")


async def test_many_objects_at_once_do_not_mix(store, place):
    await asyncio.gather(*(store.write(f"{place.root}/d/{n}", str(n).encode()) for n in range(50)))
    assert await asyncio.gather(*(store.read(f"{place.root}/d/{n}") for n in range(50))) == [
        str(n).encode() for n in range(50)
    ]
    assert len(place.names()) == 50


async def test_a_cancelled_write_leaves_the_object_whole_or_absent(place):
    async with open_store(place.config) as store:
        for steps in range(0, 40, 5):
            write = asyncio.create_task(store.write(f"{place.root}/{steps}", BIG))
            for _ in range(steps):
                await asyncio.sleep(0.001)
            write.cancel()
            await asyncio.gather(write, return_exceptions=True)
    # The store is closed: a local write that had begun has been finished in its thread.
    async with open_store(place.config) as store:
        for name in place.names():
            assert await store.read(f"{place.root}/{name}") == BIG
