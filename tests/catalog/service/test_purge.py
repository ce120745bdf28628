"""Drop with purge: all files of the table go, and no other file does."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.exceptions import BadRequestError, ValidationError
from pyiceberg.table import Table

from lakefeed.catalog.app import build_app, build_catalog
from lakefeed.catalog.config import CatalogConfig, Warehouse
from lakefeed.catalog.names import owned_directories
from lakefeed.catalog.service import purge
from lakefeed.catalog.store.sqlite import MemoryStore
from lakefeed.contract.errors import StorageError
from lakefeed.locations import Confinement
from tests.catalog.conftest import Client, Server
from tests.catalog.documents import create_body, new_table
from tests.catalog.local_files import LocalFiles
from tests.catalog.routes.test_http import Connect, error_of
from tests.catalog.routes.test_tables_http import TABLE, TABLES, path_of
from tests.catalog.test_clients import ROWS, SCHEMA
from tests.clients import open_duckdb, open_pyiceberg
from tests.s3_server import S3Server


@pytest.fixture
def root(warehouse: Warehouse) -> Path:
    return path_of(warehouse.location)


def files_below(directory: Path) -> set[Path]:
    return {path for path in directory.rglob("*") if path.is_file()}


def make_table(catalog: RestCatalog, name: str = "db.t", **properties: str) -> Table:
    """Make a table with a history: three appends and a rewrite."""
    table = catalog.create_table(name, SCHEMA, properties=properties)
    for _ in range(3):
        table.append(ROWS)
    table.delete("id = 1")
    return table


@pytest.fixture
def db(pyiceberg: RestCatalog) -> RestCatalog:
    pyiceberg.create_namespace("db")
    return pyiceberg


def test_all_files_that_the_table_refers_to_are_deleted_and_nothing_else(
    db: RestCatalog, client: Client, server: Server, root: Path
):
    table = make_table(db)
    with open_duckdb(server.url) as duck:
        duck.execute("DELETE FROM lake.db.t WHERE id = 2")  # writes position deletes
    statistics = path_of(table.location()) / "metadata" / "some.stats"
    statistics.write_bytes(b"puffin")
    snapshot = db.load_table("db.t").current_snapshot().snapshot_id
    facts = {"statistics-path": f"file://{statistics}", "file-size-in-bytes": 6, "file-footer-size-in-bytes": 1}
    for action, more in (
        ("set-statistics", {"blob-metadata": []}),
        ("set-partition-statistics", {}),
    ):
        kind = action.removeprefix("set-")
        update = {"action": action, kind: {"snapshot-id": snapshot, **facts, **more}}
        assert client.post(TABLE, {"requirements": [], "updates": [update]})[0] == 200
    stranger = path_of(table.location()) / "data" / "notes.txt"
    stranger.write_text("mine")
    other = make_table(db, "db.other")
    others = files_below(path_of(other.location()))
    assert len(files_below(path_of(table.location()))) > 20

    db.purge_table("db.t")

    assert not db.table_exists("db.t")
    assert files_below(root) == others | {stranger}
    assert db.load_table("db.other").scan().to_arrow().num_rows == 6


def test_files_from_elsewhere_stay(db: RestCatalog, root: Path):
    foreign = root / "landing" / "rows.parquet"
    foreign.parent.mkdir(parents=True)
    pq.write_table(ROWS, foreign)
    table = db.create_table("db.t", SCHEMA)
    table.add_files([f"file://{foreign}"])
    table.append(ROWS)
    db.purge_table("db.t")
    assert files_below(root) == {foreign}


def test_paths_that_the_table_chose_are_its_own(db: RestCatalog, root: Path):
    paths = {"write.data.path": f"file://{root}/rows/t", "write.metadata.path": f"file://{root}/about/t"}
    make_table(db, "db.t", **paths)
    assert files_below(root / "rows")
    assert files_below(root / "about")
    db.purge_table("db.t")
    assert files_below(root) == set()


def test_owned_directories_are_inside_the_warehouse_whatever_the_table_says():
    document = new_table(location="file:///lake/db/t", properties={"write.data.path": "file:///home/me"})
    places = owned_directories(document, Confinement("file:///lake", allow_any=False))
    own = ["/lake/db/t/data/f", "file:/lake/db/t/metadata/m"]
    foreign = ["/home/me/f", "/lake/db/t2/f", "/lake/db/t", "s3://lake/db/t/f", "gs://x/y", "/lake/db/t/../u/f", ""]
    assert [places.contain(location) for location in own + foreign] == [True] * 2 + [False] * 7


def test_table_that_shares_its_files_is_not_purged_but_can_be_dropped(db: RestCatalog, root: Path):
    make_table(db, "db.t", **{"gc.enabled": "false"})
    before = files_below(root)
    with pytest.raises((BadRequestError, ValidationError), match="GC is disabled"):
        db.purge_table("db.t")
    assert db.table_exists("db.t")
    db.drop_table("db.t")
    assert files_below(root) == before


def test_table_that_shares_its_files_with_another_name_is_not_purged_while_that_exists(db: RestCatalog, root: Path):
    table = make_table(db)
    db.register_table("db.alias", table.metadata_location.replace("file:///", "file:/"))
    db.load_table("db.alias").append(ROWS)  # from here on the two differ, and have most of their files in common
    before = files_below(root)
    with pytest.raises((BadRequestError, ValidationError), match=r"Cannot purge table: .* db\.alias"):
        db.purge_table("db.t")
    assert files_below(root) == before
    db.drop_table("db.t")
    assert db.load_table("db.alias").scan().to_arrow().num_rows == 9
    db.purge_table("db.alias")
    assert not files_below(path_of(table.location()) / "data")


def move_metadata(table: Table, root: Path) -> None:
    """Let the metadata of a table go elsewhere from here on."""
    with table.transaction() as transaction:
        transaction.set_properties({"write.metadata.path": f"file://{root}/moved"})


@pytest.mark.parametrize("moved", ["db.t", "db.alias"])
@pytest.mark.parametrize("purged", ["db.t", "db.alias"])
def test_second_name_whose_metadata_moved_is_found(db: RestCatalog, root: Path, moved: str, purged: str):
    table = make_table(db)
    db.register_table("db.alias", table.metadata_location)
    move_metadata(db.load_table(moved), root)
    before = files_below(root)
    other = ({"db.t", "db.alias"} - {purged}).pop()
    with pytest.raises((BadRequestError, ValidationError), match=rf"Cannot purge table: .* {other}"):
        db.purge_table(purged)
    assert files_below(root) == before
    assert db.load_table(other).scan().to_arrow().num_rows == 6


def test_second_name_whose_metadata_cannot_be_read_is_found(
    db: RestCatalog, start_server: Callable[..., Server], root: Path
):
    table = make_table(db)
    db.register_table("db.alias", table.metadata_location)
    move_metadata(db.load_table("db.alias"), root)
    path_of(db.load_table("db.alias").metadata_location).write_bytes(b"{")
    with contextlib.closing(open_pyiceberg(start_server().url)) as without_cache:
        before = files_below(root)
        with pytest.raises((BadRequestError, ValidationError), match=r"Cannot purge table: .* db\.alias"):
            without_cache.purge_table("db.t")
        assert files_below(root) == before


def test_second_name_whose_uuid_the_database_does_not_know_is_found(db: RestCatalog, root: Path, tmp_path: Path):
    """As after an update from a version that did not keep it."""
    table = make_table(db)
    db.register_table("db.alias", table.metadata_location)
    move_metadata(db.load_table("db.alias"), root)
    with contextlib.closing(sqlite3.connect(tmp_path / "catalog.db")) as database, database:
        assert database.execute("UPDATE entries SET table_uuid = ''").rowcount == 2
    with pytest.raises((BadRequestError, ValidationError), match=r"Cannot purge table: .* db\.alias"):
        db.purge_table("db.t")
    assert db.load_table("db.alias").scan().to_arrow().num_rows == 6


def test_tables_whose_metadata_lies_in_one_directory_are_purged_apart(db: RestCatalog, root: Path):
    together = {"write.metadata.path": f"file://{root}/about/all"}
    first, second = (make_table(db, name, **together) for name in ("db.t", "db.u"))
    db.purge_table("db.t")
    assert not files_below(path_of(first.location()))
    assert db.load_table("db.u").scan().to_arrow().num_rows == second.scan().to_arrow().num_rows


def test_purge_without_metadata_drops_only_the_entry(
    db: RestCatalog, start_server: Callable[..., Server], root: Path, caplog: Any
):
    table = make_table(db)
    path_of(table.metadata_location).unlink()
    before = files_below(root)
    with contextlib.closing(open_pyiceberg(start_server().url)) as without_cache:
        without_cache.purge_table("db.t")
    assert db.list_tables("db") == []
    assert files_below(root) == before
    assert "purge_incomplete" in caplog.text


def test_missing_table_is_not_purged(client: Client):
    client.post("namespaces", {"namespace": ["db"]})
    assert error_of(client.delete(f"{TABLE}?purgeRequested=true"))[1] == "NoSuchTableException"


def test_damaged_manifest_is_reported_and_the_table_can_be_purged_again_after_the_repair(
    db: RestCatalog, root: Path, caplog: Any
):
    table = make_table(db)
    manifest = path_of(table.current_snapshot().manifests(table.io)[0].manifest_path)
    whole = manifest.read_bytes()
    manifest.write_bytes(whole[:100])
    db.purge_table("db.t")
    assert "purge_incomplete" in caplog.text
    left = files_below(root)
    assert {manifest, path_of(table.metadata_location)} <= left
    manifest.write_bytes(whole)
    db.register_table("db.t", table.metadata_location)
    db.purge_table("db.t")
    assert files_below(root) == set()


class SlowFiles(LocalFiles):
    """The local disk, whose deletes wait for the test; counts the waiting ones, and fails on request."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.waiting = 0
        self.most_waiting = 0
        self.failing = ""

    async def open(self) -> None:
        self._loop = asyncio.get_running_loop()

    def let_through(self) -> None:
        self._loop.call_soon_threadsafe(self.gate.set)

    async def delete(self, location: str) -> None:
        self.waiting += 1
        self.most_waiting = max(self.most_waiting, self.waiting)
        try:
            await self.gate.wait()
        finally:
            self.waiting -= 1
        if self.failing and self.failing in location:
            raise StorageError(f"injected: {location}")
        await super().delete(location)


@pytest.fixture
def slow_files() -> SlowFiles:
    return SlowFiles()


@pytest.fixture
def slow(slow_files: SlowFiles, warehouse: Warehouse, start_server: Callable[..., Server]) -> Iterator[RestCatalog]:
    server = start_server(build_app(CatalogConfig(), warehouse, store=MemoryStore(), files=slow_files))
    with contextlib.closing(open_pyiceberg(server.url)) as catalog:
        catalog.create_namespace("db")
        yield catalog


def test_file_that_cannot_be_deleted_keeps_the_metadata_and_is_found_by_the_next_purge(
    slow: RestCatalog, slow_files: SlowFiles, root: Path
):
    slow_files.let_through()
    table = make_table(slow)
    (first, *_) = files_below(path_of(table.location()) / "data")
    slow_files.failing = first.name
    slow.purge_table("db.t")
    assert {first, path_of(table.metadata_location)} <= files_below(root)
    assert len(files_below(path_of(table.location()) / "data")) == 1
    slow_files.failing = ""
    slow.register_table("db.t", table.metadata_location)
    slow.purge_table("db.t")
    assert files_below(root) == set()


def test_long_purge_gets_an_early_response_and_continues_a_few_files_at_a_time(
    slow: RestCatalog, slow_files: SlowFiles, root: Path, monkeypatch: Any, caplog: Any
):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(purge, "RESPONSE_WAIT_S", 0.01)
    table = slow.create_table("db.t", SCHEMA)
    with table.transaction() as transaction:
        for _ in range(2 * purge.PARALLEL_FILES):
            transaction.append(ROWS)
    slow.purge_table("db.t")
    assert not slow.table_exists("db.t")
    assert files_below(root)
    slow_files.let_through()
    wait_for(lambda: "table_purged" in caplog.text)
    assert files_below(root) == set()
    assert slow_files.most_waiting <= purge.PARALLEL_FILES


def wait_for(is_true: Callable[[], bool]) -> None:
    async def poll() -> None:
        async with asyncio.timeout(30):
            while not is_true():  # noqa: ASYNC110 - what is waited for happens in another thread
                await asyncio.sleep(0.01)

    asyncio.run(poll())


@pytest.mark.parametrize("path", [TABLE, "transactions/commit"])
def test_others_commit_while_the_old_metadata_files_of_a_commit_are_deleted(
    warehouse: Warehouse, start_server: Callable[..., Server], connect: Connect, slow_files: SlowFiles, path: str
):
    server = start_server(build_app(CatalogConfig(), warehouse, store=MemoryStore(), files=slow_files))
    client = connect(server)
    client.post("namespaces", {"namespace": ["db"]})
    keep_one = {"write.metadata.previous-versions-max": "1", "write.metadata.delete-after-commit.enabled": "true"}
    client.post(TABLES, create_body(properties=keep_one))

    def commit(number: int) -> int:
        update = {"action": "set-properties", "updates": {"number": str(number)}}
        change = {"identifier": {"namespace": ["db"], "name": "t"}, "requirements": [], "updates": [update]}
        body = change if path == TABLE else {"table-changes": [change]}
        return connect(server).post(path, body)[0]

    with ThreadPoolExecutor() as committers:
        answers = []
        for number in range(1, 4):  # the second and the third have a file to delete, which waits
            answers.append(committers.submit(commit, number))
            wait_for(lambda number=number: client.get(TABLE)[1]["metadata"]["properties"].get("number") == str(number))
        slow_files.let_through()
        assert {answer.result(30) for answer in answers} <= {200, 204}


def test_shutdown_stops_a_purge_and_logs_what_is_left(
    warehouse: Warehouse, start_server, connect: Connect, monkeypatch: Any, caplog: Any, slow_files: SlowFiles
):
    monkeypatch.setattr(purge, "RESPONSE_WAIT_S", 0.01)
    server = start_server(build_app(CatalogConfig(), warehouse, store=MemoryStore(), files=slow_files))
    client = connect(server)
    client.post("namespaces", {"namespace": ["db"]})
    location = client.post(TABLES, create_body())[1]["metadata-location"]
    assert client.delete(f"{TABLE}?purgeRequested=true")[0] == 204
    server.stop()
    (record,) = [record for record in caplog.records if record.message == "purge_incomplete"]
    assert (record.metadata_location, record.reason) == (location, "shutting down")
    assert path_of(location).exists()


def test_purge_on_s3_leaves_the_bucket_empty(s3_server: S3Server, start_server: Callable[..., Server], tmp_path: Path):
    bucket = s3_server.create_bucket()
    settings = s3_server.settings
    warehouse = Warehouse(s3_server.storage(f"s3://{bucket}/lake"))
    server = start_server(build_catalog(CatalogConfig(), warehouse, tmp_path / "s3.db"))
    with contextlib.closing(open_pyiceberg(server.url, s3=settings)) as catalog:
        catalog.create_namespace("db")
        make_table(catalog)
        assert len(s3_server.keys(bucket)) > 10
        catalog.purge_table("db.t")
    assert s3_server.keys(bucket) == []
