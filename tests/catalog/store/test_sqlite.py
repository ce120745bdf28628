"""The SQLite store by itself: what HTTP tests do not reach."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from lakefeed.catalog.errors import StoreFailed, StoreUnusable
from lakefeed.catalog.names import Pointer, TableId
from lakefeed.catalog.store import sqlite
from lakefeed.catalog.store.sqlite import SCHEMA, MemoryStore, SqliteStore
from lakefeed.catalog.store.store import Operation
from tests.catalog.conftest import Server
from tests.earlier_data_directory import unpack

TABLE = TableId(("db",), "t")


async def new_database(path: Path) -> None:
    store = SqliteStore(path)
    await store.open()
    await store.close()


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (SCHEMA.version + 1, "made by a newer lakefeed, update lakefeed: found=5 oldest=4 current=4"),
        (SCHEMA.version - 1, r"too old .*catalog backup.* of the version that made it.*catalog restore.*: found=3"),
    ],
)
async def test_database_of_another_version_is_neither_opened_nor_migrated(tmp_path: Path, version: int, message: str):
    path = tmp_path / "catalog.db"
    await new_database(path)
    with closing(sqlite3.connect(path)) as database, database:
        database.execute(f"UPDATE catalog_schema SET version = {version}")
    store = SqliteStore(path)
    with pytest.raises(StoreUnusable, match=message):
        await store.open()
    await store.close()
    with pytest.raises(StoreUnusable, match=message):
        await SqliteStore(path).migrate()
    with closing(sqlite3.connect(path)) as database:
        assert database.execute("SELECT version FROM catalog_schema").fetchall() == [(version,)]


async def test_next_version_is_reached_by_migrate_only_and_keeps_the_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "catalog.db"
    store = SqliteStore(path)
    await store.open()
    await store.create_namespace(("db",), {})
    await store.create_entry(TABLE, Pointer("here"))
    await store.close()
    add_column = "ALTER TABLE entries ADD COLUMN owner TEXT NOT NULL DEFAULT ''"
    following = replace(SCHEMA, version=SCHEMA.version + 1, migrations={SCHEMA.version: (add_column,)})
    monkeypatch.setattr(sqlite, "SCHEMA", following)
    store = SqliteStore(path)
    with pytest.raises(StoreUnusable, match=r"run `lakefeed catalog migrate`: found=4 current=5"):
        await store.open()
    await store.close()
    assert await SqliteStore(path).migrate() == (4, 5)
    assert await SqliteStore(path).migrate() == (5, 5)
    store = SqliteStore(path)
    await store.open()
    assert await store.load_pointer(TABLE) == Pointer("here")
    await store.close()


async def test_new_database_has_the_schema_of_an_earlier_data_directory(tmp_path: Path):
    unpack(tmp_path)
    await new_database(tmp_path / "new.db")
    assert schema_of(tmp_path / "new.db") == schema_of(tmp_path / "data" / "catalog.sqlite")


def schema_of(path: Path) -> dict[str, list[tuple[object, ...]]]:
    with closing(sqlite3.connect(path)) as database:
        names = [name for (name,) in database.execute("SELECT name FROM sqlite_schema ORDER BY name")]
        return {
            name: [*database.execute(f"PRAGMA table_xinfo({name})"), *database.execute(f"PRAGMA index_xinfo({name})")]
            for name in names
        }


async def test_store_in_memory_keeps_its_contents_when_it_is_opened_again():
    store = MemoryStore()
    await store.open()
    await store.create_namespace(("db",), {})
    await store.close()
    await store.open()
    await store.create_entry(TABLE, Pointer("here"))
    assert await store.load_pointer(TABLE) == Pointer("here")


async def test_writes_are_synced_and_reads_do_not_block_them(tmp_path: Path):
    store = SqliteStore(tmp_path / "catalog.db")
    await store.open()

    def settings(db: sqlite3.Connection) -> list[object]:
        return [db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("journal_mode", "synchronous", "foreign_keys")]

    for thread in (store._writer, store._reader):
        assert await thread.run(settings) == ["wal", 2, 1]
    await store.close()


async def test_database_failure_is_no_bare_sqlite_error_and_leaves_no_open_transaction(tmp_path: Path):
    store = SqliteStore(tmp_path / "catalog.db")
    await store.open()

    def break_constraint() -> Operation[None]:
        yield "INSERT INTO entries VALUES ('none', 't', 'somewhere', 'Table', '', '')", ()

    with pytest.raises(StoreFailed):
        await store._write(break_constraint())
    await store.create_namespace(("db",), {})
    assert await store.load_namespace(("db",)) == {}
    await store.close()


def test_service_does_not_start_on_an_unusable_database(tmp_path: Path, start_server: Callable[..., Server]):
    (tmp_path / "catalog.db").write_bytes(b"this is no database" * 100)
    with pytest.raises(StoreFailed):
        start_server()
