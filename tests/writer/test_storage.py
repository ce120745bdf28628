from __future__ import annotations

import asyncio
import os
import shutil
import socket
from pathlib import Path

import pyarrow as pa
import pytest

from writer.config import MIB, StorageConfig
from writer.errors import StorageError
from writer.storage import LocalStore, local_path, open_store
from writer.storage_s3 import S3Store, _Body

BIG = os.urandom(11 * MIB)  # three parts of 5 MiB


def s3_config(server, bucket, **settings):
    return StorageConfig(
        warehouse=f"s3://{bucket}/w",
        s3_endpoint=server.endpoint,
        s3_path_style=True,
        s3_access_key_id=server.access_key_id,
        s3_secret_access_key=server.secret_access_key,
        s3_part_bytes=5 * MIB,
        **settings,
    )


@pytest.fixture(params=["local", "s3"])
async def store_and_root(request, tmp_path):
    """A store of each kind, and a root to write under."""
    if request.param == "local":
        async with open_store(StorageConfig(warehouse=str(tmp_path))) as store:
            assert isinstance(store, LocalStore)
            yield store, f"file://{tmp_path}"
    else:
        server = request.getfixturevalue("s3_server")
        bucket = server.create_bucket()
        async with open_store(s3_config(server, bucket)) as store:
            assert isinstance(store, S3Store)
            yield store, f"s3://{bucket}"


@pytest.mark.parametrize("data", [b"", b"small", BIG], ids=["empty", "small", "in parts"])
async def test_what_was_written_is_read_back(store_and_root, data):
    store, root = store_and_root
    await store.write(f"{root}/a/b=c%3Ad/x.bin", data)
    assert await store.read(f"{root}/a/b=c%3Ad/x.bin") == data


async def test_arrow_buffers_are_written_as_they_are(store_and_root):
    store, root = store_and_root
    await store.write(f"{root}/x", pa.py_buffer(b"abc"))
    assert await store.read(f"{root}/x") == b"abc"


async def test_a_missing_object_is_an_error_that_names_it(store_and_root):
    store, root = store_and_root
    with pytest.raises(StorageError, match="nowhere"):
        await store.read(f"{root}/nowhere")


async def test_delete_removes_an_object_and_takes_an_absent_one(store_and_root):
    store, root = store_and_root
    await store.write(f"{root}/x", b"abc")
    await store.delete(f"{root}/x")
    await store.delete(f"{root}/x")
    with pytest.raises(StorageError):
        await store.read(f"{root}/x")


async def test_a_location_of_another_store_is_refused(store_and_root):
    store, _ = store_and_root
    with pytest.raises(StorageError, match="location=gs://b/k"):
        await store.write("gs://b/k", b"")


async def test_an_existing_file_is_not_overwritten(tmp_path):
    async with open_store(StorageConfig(warehouse=str(tmp_path))) as store:
        await store.write(f"file://{tmp_path}/x", b"first")
        with pytest.raises(StorageError, match="exists already"):
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


async def test_a_directory_that_was_deleted_is_made_again(tmp_path):
    async with open_store(StorageConfig(warehouse=str(tmp_path))) as store:
        await store.write(f"file://{tmp_path}/d/e/1", b"x")
        shutil.rmtree(tmp_path / "d")
        with pytest.raises(StorageError):
            await store.write(f"file://{tmp_path}/d/e/2", b"x")
        await store.write(f"file://{tmp_path}/d/e/3", b"x")
    assert [path.name for path in (tmp_path / "d" / "e").iterdir()] == ["3"]


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


async def test_an_upload_in_parts_that_fails_leaves_no_parts(s3_server, monkeypatch):
    bucket = s3_server.create_bucket()
    async with open_store(s3_config(s3_server, bucket)) as store:
        upload_part = store._client.upload_part

        async def fail_the_second(**request):
            if request["PartNumber"] == 2:
                request["ChecksumCRC32"] = "AAAAAA=="
            return await upload_part(**request)

        monkeypatch.setattr(store._client, "upload_part", fail_the_second)
        with pytest.raises(StorageError, match=f"location=s3://{bucket}/x"):
            await store.write(f"s3://{bucket}/x", BIG)
    client = s3_server.client()
    assert "Uploads" not in client.list_multipart_uploads(Bucket=bucket)
    assert "Contents" not in client.list_objects_v2(Bucket=bucket)
    client.close()


async def test_a_wrong_checksum_is_refused_by_the_store(s3_server, monkeypatch):
    bucket = s3_server.create_bucket()
    monkeypatch.setattr("writer.storage_s3._build_body", lambda view: _Body(bytes(view), "AAAAAA=="))
    async with open_store(s3_config(s3_server, bucket)) as store:
        with pytest.raises(StorageError, match="BadDigest"):
            await store.write(f"s3://{bucket}/x", b"abc")


async def test_wrong_keys_are_a_storage_error(s3_server):
    bucket = s3_server.create_bucket()
    config = StorageConfig(
        warehouse=f"s3://{bucket}",
        s3_endpoint=s3_server.endpoint,
        s3_path_style=True,
        s3_access_key_id="nobody",
        s3_secret_access_key="nothing",
    )
    async with open_store(config) as store:
        with pytest.raises(StorageError, match="cannot write object"):
            await store.write(f"s3://{bucket}/x", b"abc")


async def test_a_store_that_never_answers_is_a_storage_error():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        config = StorageConfig(
            warehouse="s3://b",
            s3_endpoint=f"http://127.0.0.1:{silent.getsockname()[1]}",
            s3_path_style=True,
            s3_access_key_id="k",
            s3_secret_access_key="s",
            request_timeout_s=0.2,
        )
        async with open_store(config) as store:
            with pytest.raises(StorageError, match="cannot read object"):
                await store.read("s3://b/x")
