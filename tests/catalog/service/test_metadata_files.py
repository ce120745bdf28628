"""Metadata files on a local disk and on S3, their locations and their cache."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import os
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest

from lakefeed.catalog.app import build_catalog
from lakefeed.catalog.config import CatalogConfig, Warehouse
from lakefeed.catalog.errors import BadRequest, FileChanged
from lakefeed.catalog.metadata.document import parse_document
from lakefeed.catalog.names import Pointer
from lakefeed.catalog.service.metadata_files import MetadataFiles, unpack
from lakefeed.contract.errors import FileMissing, LocationForbidden, LocationInvalid, StorageError
from lakefeed.locations import Confinement, Location, parse_location
from tests.catalog.conftest import Client, Server
from tests.catalog.documents import create_body, new_table
from tests.catalog.local_files import LocalFiles
from tests.catalog.test_clients import ROWS, SCHEMA
from tests.clients import open_pyiceberg
from tests.gcs_server import GcsServer
from tests.s3_server import S3Server


@pytest.mark.parametrize("location", ["file:/a/b", "file:///a/b", "file://localhost/a/b", "/a/b", "file:///a//b/"])
def test_spellings_of_a_local_location_are_equal(location: str):
    assert parse_location(location).path == "/a/b"


@pytest.mark.parametrize(
    "location", ["", "a/b", "http://x/y", "file://host/a", "s3://", "file:///a/../b", "/a/./b", "/a\0"]
)
def test_ambiguous_location_is_rejected(location: str):
    with pytest.raises(LocationInvalid):
        parse_location(location)


@pytest.mark.parametrize(
    ("location", "scheme", "container"),
    [
        ("s3n://b/k", "s3", "b"),
        ("gs://b/k", "gs", "b"),
        ("abfs://c@a.dfs.core.windows.net/k", "abfss", "c@a.dfs.core.windows.net"),
    ],
)
def test_object_stores_are_told_apart_by_scheme_and_container(location: str, scheme: str, container: str):
    assert parse_location(location) == Location(scheme, container, "/k")


def test_confinement_goes_by_directories_not_by_letters():
    rule = Confinement("s3://bucket/lake", allow_any=False)
    rule.check("s3a://bucket/lake/db/t")
    for outside in ("s3://bucket/lake2/t", "s3://bucket/lake", "s3://other/lake/t"):
        with pytest.raises(LocationForbidden):
            rule.check(outside)
    with pytest.raises(LocationInvalid):
        Confinement("s3://bucket/lake", allow_any=True).check("file:///x")


async def test_local_write_makes_its_directory_and_leaves_nothing_beside_the_file(tmp_path: Path):
    files = LocalFiles()
    location = f"file://{tmp_path}/new/metadata/00000-a.metadata.json"
    await files.write(location, b"{}")
    assert await files.read(location, max_bytes=10) == b"{}"
    assert os.listdir(tmp_path / "new/metadata") == ["00000-a.metadata.json"]  # noqa: PTH208 - in a coroutine
    with pytest.raises(StorageError):
        await files.read(location, max_bytes=1)
    await files.delete(location)
    await files.delete(location)
    with pytest.raises(FileMissing):
        await files.read(location, max_bytes=10)
    await files.close()


@pytest.fixture
def taken(tmp_path: Path) -> Path:
    """A directory where a file is going to be written."""
    (tmp_path / "taken" / "inside").mkdir(parents=True)
    return tmp_path / "taken"


async def test_failed_local_write_leaves_no_file(taken: Path, tmp_path: Path):
    files = LocalFiles()
    with pytest.raises(StorageError):
        await files.write(f"file://{taken}", b"{}")
    assert os.listdir(tmp_path) == ["taken"]  # noqa: PTH208 - in a coroutine
    await files.close()


async def test_cache_keeps_the_recently_used_within_its_limit(tmp_path: Path):
    files = LocalFiles()
    document = new_table()
    size = len(orjson.dumps(document))
    metadata = MetadataFiles(files, parse=parse_document, max_bytes=10 * size, cache_bytes=5 * size * 2)
    locations = [f"file://{tmp_path}/{number}.metadata.json" for number in range(3)]
    first, second = [await metadata.write(location, document) for location in locations[:2]]
    assert await metadata.load(first.pointer) is first
    await metadata.write(locations[2], document)
    assert await metadata.load(first.pointer) is first
    assert await metadata.load(second.pointer) is not second
    metadata.forget(second.pointer)
    await files.close()


async def test_document_larger_than_the_whole_cache_is_still_served(tmp_path: Path):
    files = LocalFiles()
    metadata = MetadataFiles(files, parse=parse_document, max_bytes=10**6, cache_bytes=0)
    location = f"file://{tmp_path}/0.metadata.json"
    written = await metadata.write(location, new_table())
    assert (await metadata.load(written.pointer)).document == new_table()
    await files.close()


async def test_document_larger_than_the_cache_evicts_no_other(tmp_path: Path):
    files = LocalFiles()
    metadata = MetadataFiles(files, parse=parse_document, max_bytes=10**6, cache_bytes=30_000)
    small, large = (f"file://{tmp_path}/{number}.metadata.json" for number in range(2))
    first = await metadata.write(small, new_table())
    await metadata.write(large, new_table(properties={"padding": "x" * 10_000}))
    assert await metadata.load(first.pointer) is first
    await files.close()


async def test_concurrent_loads_of_one_document_share_one_read(tmp_path: Path):
    files, reads = LocalFiles(), []

    def parse(raw: bytes) -> dict:
        reads.append(raw)
        return parse_document(raw)

    location = f"file://{tmp_path}/0.metadata.json"
    (tmp_path / "0.metadata.json").write_bytes(orjson.dumps(new_table()))
    metadata = MetadataFiles(files, parse=parse, max_bytes=10**6, cache_bytes=10**6)
    loaded = await asyncio.gather(*(metadata.load(Pointer(location)) for _ in range(20)))
    assert len(reads) == 1
    assert all(each is loaded[0] for each in loaded)
    await files.close()


class HungFiles(LocalFiles):
    """The local disk, whose reads wait for the test and then fail on request."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.reads = 0
        self.fails = False

    async def read(self, location: str, *, max_bytes: int) -> bytes:
        self.reads += 1
        await self.gate.wait()
        if self.fails:
            raise StorageError("storage does not answer")
        return await super().read(location, max_bytes=max_bytes)


async def test_concurrent_loads_of_one_document_all_get_the_error_of_the_one_attempt(tmp_path: Path):
    files = HungFiles()
    files.fails = True
    metadata = MetadataFiles(files, parse=parse_document, max_bytes=10**6, cache_bytes=10**6)
    pointer = Pointer(f"file://{tmp_path}/0.metadata.json")
    waiting = [asyncio.create_task(metadata.load(pointer)) for _ in range(20)]
    await asyncio.sleep(0)
    files.gate.set()
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [StorageError] * 20
    assert files.reads == 1
    await files.close()


async def test_document_is_read_anew_for_another_content_of_its_file(tmp_path: Path):
    files, place = LocalFiles(), tmp_path / "v1.metadata.json"
    location = f"file://{place}"
    metadata = MetadataFiles(files, parse=parse_document, max_bytes=10**6, cache_bytes=10**6)
    pointers = []
    for owner in ("first", "second", "first"):
        place.write_bytes(orjson.dumps(new_table(properties={"owner": owner})))
        other_process = MetadataFiles(files, parse=parse_document, max_bytes=10**6, cache_bytes=10**6)
        pointers.append((await other_process.load_for_register(location)).pointer)
        assert (await metadata.load(pointers[-1])).document["properties"]["owner"] == owner
    assert pointers[0] == pointers[2] != pointers[1]
    await files.close()


async def test_other_content_than_was_registered_is_refused_by_its_name(tmp_path: Path):
    files, place = LocalFiles(), tmp_path / "v1.metadata.json"
    location = f"file://{place}"
    place.write_bytes(orjson.dumps(new_table(properties={"owner": "first"})))
    registering, other_process = (
        MetadataFiles(files, parse=parse_document, max_bytes=10**6, cache_bytes=10**6) for _ in range(2)
    )
    registered = await registering.load_for_register(location)
    place.write_bytes(orjson.dumps(new_table(properties={"owner": "second"})))
    with pytest.raises(FileChanged, match=r"register it again.*v1\.metadata\.json"):
        await other_process.load(registered.pointer)
    assert await registering.load(registered.pointer) is registered
    unchecked = await other_process.load(Pointer(location))
    assert unchecked.document["properties"]["owner"] == "second"
    again = await other_process.load_for_register(location)
    assert (await other_process.load(again.pointer)).document["properties"]["owner"] == "second"
    await files.close()


async def test_two_pointers_at_one_file_do_not_evict_each_other(tmp_path: Path):
    """Two names of one table: the second was registered with the file that the catalog wrote."""
    files = LocalFiles()
    metadata = MetadataFiles(files, parse=parse_document, max_bytes=10**6, cache_bytes=10**6)
    location = f"file://{tmp_path}/0.metadata.json"
    written = await metadata.write(location, new_table())
    registered = await metadata.load_for_register(location)
    assert await metadata.load(written.pointer) is written
    assert await metadata.load(registered.pointer) is registered
    metadata.forget(written.pointer)
    assert await metadata.load(written.pointer) is not written
    assert await metadata.load(registered.pointer) is registered
    await files.close()


def test_gzip_bomb_is_cut_off_at_the_limit():
    location = "file:///x/00000-a.gz.metadata.json"
    packed = gzip.compress(b" " * 1_000_000)
    with pytest.raises(StorageError):
        unpack(location, packed, 1000)
    with pytest.raises(BadRequest):
        unpack(location, b"not gzip", 1000)
    assert len(unpack(location, packed, 1_000_000)) == 1_000_000


@pytest.mark.integration
def test_tables_live_on_s3(s3_server: S3Server, tmp_path: Path, start_server: Callable[..., Server]):
    bucket = s3_server.create_bucket()
    warehouse = Warehouse(s3_server.storage(f"s3://{bucket}/lake"))
    config = CatalogConfig(verify_metadata_file=True, metadata_cache_bytes=0)
    server = start_server(build_catalog(config, warehouse, tmp_path / "s3.db"))
    with contextlib.closing(open_pyiceberg(server.url, s3=s3_server.settings)) as catalog:
        catalog.create_namespace("db")
        table = catalog.create_table("db.t", SCHEMA)
        table.append(ROWS)
        with table.transaction() as transaction:
            limits = {"write.metadata.previous-versions-max": "1", "write.metadata.delete-after-commit.enabled": "true"}
            transaction.set_properties(limits)
        assert catalog.load_table("db.t").scan().to_arrow()["id"].to_pylist() == [1, 2, 3]
        assert table.metadata_location.startswith(f"s3://{bucket}/lake/db/t-")
    with contextlib.closing(s3_server.client()) as s3:
        keys = [item["Key"] for item in s3.list_objects_v2(Bucket=bucket)["Contents"]]
    versions = sorted(key.rsplit("/", 1)[1][:5] for key in keys if key.endswith(".metadata.json"))
    assert versions == ["00001", "00002"]


@pytest.mark.integration
def test_metadata_files_live_on_google_cloud_storage(
    gcs_server: GcsServer, tmp_path: Path, start_server: Callable[..., Server], connect: Callable[[Server], Client]
):
    bucket = gcs_server.create_bucket()
    config = CatalogConfig(verify_metadata_file=True, metadata_cache_bytes=0)
    warehouse = Warehouse(gcs_server.storage(f"gs://{bucket}/lake"))
    client = connect(start_server(build_catalog(config, warehouse, tmp_path / "gcs.db")))
    client.post("namespaces", {"namespace": ["db"]})
    status, created = client.post("namespaces/db/tables", create_body("t"))
    assert (status, created["config"]) == (200, {"gcs.service.host": gcs_server.endpoint})
    owner = {"action": "set-properties", "updates": {"owner": "me"}}
    assert client.post("namespaces/db/tables/t", {"requirements": [], "updates": [owner]})[0] == 200
    loaded = client.get("namespaces/db/tables/t")[1]
    assert loaded["metadata"]["properties"]["owner"] == "me"
    locations = (created["metadata-location"], loaded["metadata-location"])
    assert sorted(f"gs://{bucket}/{name}" for name in gcs_server.names(bucket)) == sorted(locations)
    outside = {**create_body("u"), "location": "gs://other-bucket/u"}
    assert client.post("namespaces/db/tables", outside)[0] == 403
    assert client.delete("namespaces/db/tables/t?purgeRequested=true")[0] == 204
    assert gcs_server.names(bucket) == []
