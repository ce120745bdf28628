"""Local files: durability, exclusive creation and errors."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from pathlib import Path

import pytest

from lakefeed.contract.errors import StorageError
from lakefeed.storage.config import StorageConfig
from lakefeed.storage.local import local_path
from lakefeed.storage.store import open_store


async def test_an_existing_file_is_not_overwritten(tmp_path):
    async with open_store(StorageConfig(warehouse=str(tmp_path))) as store:
        await store.write(f"file://{tmp_path}/x", b"first")
        with pytest.raises(StorageError, match="cannot write file: File exists"):
            await store.write(f"file://{tmp_path}/x", b"second")
        assert await store.read(f"file://{tmp_path}/x") == b"first"


async def test_a_failed_write_leaves_no_file_behind(tmp_path):
    async with open_store(StorageConfig(warehouse=str(tmp_path))) as store:
        with pytest.raises(TypeError):
            await store.write(f"file://{tmp_path}/x", "text is not bytes")
    assert list(tmp_path.iterdir()) == []


async def test_a_disk_that_refuses_is_a_storage_error(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    async with open_store(StorageConfig(warehouse=str(tmp_path))) as store:
        with pytest.raises(StorageError, match=r"cannot write file: Not a directory: path=.*/file/x"):
            await store.write(f"file://{tmp_path}/file/x", b"")


async def test_file_and_every_new_name_on_its_way_are_synced_before_the_write_returns(tmp_path, monkeypatch):
    synced = []
    fsync = os.fsync

    def note(descriptor: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    async with open_store(StorageConfig(warehouse=str(tmp_path))) as store:
        await store.write(f"file://{tmp_path}/d/e/x", b"abc")
    *directories, file, last = synced
    assert directories == [str(tmp_path), str(tmp_path / "d")]
    assert file == str(tmp_path / "d/e/x")
    assert last == str(tmp_path / "d/e")


async def test_a_sync_that_fails_is_an_error_and_leaves_no_file(tmp_path, monkeypatch):
    def fail(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    async with open_store(StorageConfig(warehouse=str(tmp_path))) as store:
        monkeypatch.setattr(os, "fsync", fail)
        with pytest.raises(StorageError, match="cannot write file: Input/output error"):
            await store.write(f"file://{tmp_path}/x", b"abc")
    assert list(tmp_path.iterdir()) == []


async def test_a_deleted_directory_is_created_again(tmp_path):
    async with open_store(StorageConfig(warehouse=str(tmp_path))) as store:
        await store.write(f"file://{tmp_path}/d/e/1", b"x")
        shutil.rmtree(tmp_path / "d")
        await store.write(f"file://{tmp_path}/d/e/2", b"x")
    assert [path.name for path in (tmp_path / "d" / "e").iterdir()] == ["2"]


async def test_parallel_writes_into_a_new_directory_do_not_collide(tmp_path):
    async with open_store(StorageConfig(warehouse=str(tmp_path))) as store:
        await asyncio.gather(*(store.write(f"file://{tmp_path}/d/e/{i}", b"x") for i in range(20)))
    assert len(list((tmp_path / "d" / "e").iterdir())) == 20


@pytest.mark.parametrize("location", ["file:///a/b c%20d", "file:/a/b c%20d", "/a/b c%20d"])
def test_all_forms_of_a_local_location_are_one_path(location):
    assert local_path(location) == Path("/a/b c%20d")


@pytest.mark.parametrize("location", ["s3://b/k", "file://host/x"])
def test_a_location_elsewhere_is_not_local(location):
    with pytest.raises(StorageError, match="not a local location"):
        local_path(location)
