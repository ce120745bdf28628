"""The SQLite store by itself: what HTTP tests do not reach."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from lakefeed.catalog.errors import StoreFailed, StoreUnusable
from lakefeed.catalog.names import Pointer, TableId
from lakefeed.catalog.store.sqlite import SqliteStore
from tests.catalog.conftest import Server

TABLE = TableId(("db",), "t")


async def test_database_of_another_version_is_left_alone(tmp_path: Path):
    path = tmp_path / "catalog.db"
    store = SqliteStore(path)
    await store.open()
    await store.close()
    with sqlite3.connect(path) as database:
        database.execute("UPDATE catalog_schema SET version = 99")
    database.close()
    newer = SqliteStore(path)
    with pytest.raises(StoreUnusable, match="found=99 known=4"):
        await newer.open()
    await newer.close()


async def test_database_of_the_first_version_is_brought_up_to_date(tmp_path: Path):
    path = tmp_path / "catalog.db"
    with sqlite3.connect(path) as database:
        database.executescript(
            """
            CREATE TABLE catalog_schema (version INTEGER NOT NULL) STRICT;
            INSERT INTO catalog_schema VALUES (1);
            CREATE TABLE namespaces (name TEXT NOT NULL PRIMARY KEY, parent TEXT NOT NULL, properties TEXT NOT NULL)
                STRICT, WITHOUT ROWID;
            CREATE UNIQUE INDEX namespaces_by_parent ON namespaces (parent, name);
            CREATE TABLE tables (
                namespace TEXT NOT NULL REFERENCES namespaces (name), name TEXT NOT NULL,
                metadata_location TEXT NOT NULL, PRIMARY KEY (namespace, name)) STRICT, WITHOUT ROWID;
            INSERT INTO namespaces VALUES ('db', '', '{}');
            INSERT INTO tables VALUES ('db', 't', 'here');
            """
        )
    database.close()
    old = SqliteStore(path)
    with pytest.raises(StoreUnusable, match=r"run `lakefeed catalog migrate`: found=1 known=4"):
        await old.open()
    await old.close()
    assert await SqliteStore(path).migrate() == (1, 4)
    for _ in range(2):
        store = SqliteStore(path)
        await store.open()
        assert await store.load_pointer(TABLE) == Pointer("here")
        assert await store.list_tables(("db",), after="", limit=None) == [TABLE]
        assert await store.list_views(("db",), after="", limit=None) == []
        await store.close()


async def test_swap_moves_the_pointer_only_from_where_it_is_expected(tmp_path: Path):
    store = SqliteStore(tmp_path / "catalog.db")
    await store.open()
    await store.create_namespace(("db",), {})
    await store.create_entry(TABLE, Pointer("one"))
    assert not await store.swap_pointer(TABLE, expected=Pointer("none"), new=Pointer("two"))
    assert await store.load_pointer(TABLE) == Pointer("one")
    assert await store.swap_pointer(TABLE, expected=Pointer("one"), new=Pointer("two"))
    assert await store.load_pointer(TABLE) == Pointer("two")
    await store.close()


async def test_writes_are_synced_and_reads_do_not_block_them(tmp_path: Path):
    store = SqliteStore(tmp_path / "catalog.db")
    await store.open()

    def settings(db: sqlite3.Connection) -> list[object]:
        return [db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("journal_mode", "synchronous", "foreign_keys")]

    for line in (store._writer, store._reader):
        assert await line.run(settings) == ["wal", 2, 1]
    await store.close()


async def test_database_failure_is_no_bare_sqlite_error_and_leaves_no_open_transaction(tmp_path: Path):
    store = SqliteStore(tmp_path / "catalog.db")
    await store.open()

    def break_constraint(db: sqlite3.Connection) -> None:
        db.execute("INSERT INTO tables VALUES ('none', 't', 'somewhere')")

    with pytest.raises(StoreFailed):
        await store._write(break_constraint)
    await store.create_namespace(("db",), {})
    assert await store.load_namespace(("db",)) == {}
    await store.close()


def test_service_does_not_start_on_an_unusable_database(tmp_path: Path, start_server: Callable[..., Server]):
    (tmp_path / "catalog.db").write_bytes(b"this is no database" * 100)
    with pytest.raises(StoreFailed):
        start_server()
