"""Databases that an older lakefeed made on PostgreSQL: refused at the start, brought up to date when asked, kept whole.

The schemas are written out as those versions made them, so that a change of an old migration is seen here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import asyncpg
import pytest

from lakefeed.catalog.errors import StoreFailed, StoreUnusable
from lakefeed.catalog.store.postgres import SCHEMA_VERSION, PostgresStore
from tests.catalog.conftest import Client, Server
from tests.catalog.documents import UUID, add_snapshot, create_body
from tests.catalog.routes.test_tables_http import TABLE, TABLES, commit

VERSION_1 = """
    CREATE SCHEMA lakefeed_catalog;
    CREATE TABLE lakefeed_catalog.catalog_schema (version INTEGER NOT NULL);
    INSERT INTO lakefeed_catalog.catalog_schema VALUES (1);
    CREATE TABLE lakefeed_catalog.namespaces (
        name TEXT COLLATE "C" PRIMARY KEY,
        parent TEXT COLLATE "C" REFERENCES lakefeed_catalog.namespaces (name),
        properties TEXT NOT NULL
    );
    CREATE UNIQUE INDEX namespaces_by_parent ON lakefeed_catalog.namespaces (parent, name);
    CREATE TABLE lakefeed_catalog.entries (
        namespace TEXT COLLATE "C" NOT NULL REFERENCES lakefeed_catalog.namespaces (name),
        name TEXT COLLATE "C" NOT NULL,
        kind TEXT COLLATE "C" NOT NULL,
        metadata_location TEXT NOT NULL,
        PRIMARY KEY (namespace, name)
    );
"""
VERSION_2 = f"""
    {VERSION_1}
    UPDATE lakefeed_catalog.catalog_schema SET version = 2;
    CREATE TABLE lakefeed_catalog.outcomes (
        idempotency_key TEXT COLLATE "C" PRIMARY KEY,
        fingerprint TEXT NOT NULL,
        outcome TEXT NOT NULL,
        recorded_ms BIGINT NOT NULL
    );
    CREATE INDEX outcomes_by_time ON lakefeed_catalog.outcomes (recorded_ms);
"""
OLD = {1: VERSION_1, 2: VERSION_2}
# All that a version has, in the order in which it can be filled.
COLUMNS = {
    "namespaces": "name, parent, properties",
    "entries": "namespace, name, kind, metadata_location",
    "outcomes": "idempotency_key, fingerprint, outcome, recorded_ms",
}
HELD = {1: ("namespaces", "entries"), 2: ("namespaces", "entries", "outcomes")}
KEY = {"Idempotency-Key": UUID}


def on(url: str, work: Callable[[Any], Awaitable[Any]]) -> Any:
    """Do something with a connection of its own."""

    async def run() -> Any:
        connection = await asyncpg.connect(url)
        try:
            return await work(connection)
        finally:
            await connection.close()

    return asyncio.run(run())


def read(url: str, sql: str) -> list[tuple[Any, ...]]:
    return [tuple(row) for row in on(url, lambda db: db.fetch(sql))]


async def take_back(db: Any, version: int) -> None:
    """Turn a database into one of an older version, with the same rows."""
    rows = {name: await db.fetch(f"SELECT {COLUMNS[name]} FROM lakefeed_catalog.{name}") for name in HELD[version]}
    await db.execute("DROP SCHEMA lakefeed_catalog CASCADE")
    await db.execute(OLD[version])
    for name, held in rows.items():
        places = ", ".join(f"${number}" for number in range(1, COLUMNS[name].count(",") + 2))
        await db.executemany(f"INSERT INTO lakefeed_catalog.{name} ({COLUMNS[name]}) VALUES ({places})", held)


@pytest.fixture
def url(make_postgres: Callable[[], str]) -> str:
    return make_postgres()


@pytest.fixture(params=sorted(OLD))
def version(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture
def begin(start_server: Callable[..., Server], connect: Callable[[Server], Client], url: str) -> Callable[[], Client]:
    return lambda: connect(start_server(database=url))


@pytest.fixture
def old(start_server: Callable[..., Server], connect: Callable[[Server], Client], url: str, version: int) -> Any:
    """Make a database of an older version, with a table in it; the answer of the request that made it."""
    server = start_server(database=url)
    client = connect(server)
    for namespace in (["db"], ["db", "in"]):
        client.post("namespaces", {"namespace": namespace, "properties": {"owner": "me"}})
    created = client.post(TABLES, create_body(), headers=KEY)
    assert created[0] == 200
    server.stop()
    on(url, lambda db: take_back(db, version))
    return created


def migrate(url: str) -> tuple[int, int]:
    return asyncio.run(PostgresStore(url, timeout_s=30).migrate())


def test_every_older_version_is_tried():
    assert sorted(OLD) == list(range(1, SCHEMA_VERSION))


def test_older_database_is_refused_until_it_is_migrated_and_then_has_all_that_it_had(
    old: Any, begin: Callable[[], Client], url: str, version: int
):
    with pytest.raises(StoreUnusable, match=f"run `lakefeed catalog migrate`: found={version} known={SCHEMA_VERSION}"):
        begin()
    assert read(url, "SELECT version FROM lakefeed_catalog.catalog_schema") == [(version,)]
    assert migrate(url) == (version, SCHEMA_VERSION)
    assert migrate(url) == (SCHEMA_VERSION, SCHEMA_VERSION)
    client = begin()
    assert client.get("namespaces/db%1Fin")[1] == {"namespace": ["db", "in"], "properties": {"owner": "me"}}
    assert client.get(TABLE)[1]["metadata-location"] == old[1]["metadata-location"]
    assert commit(client, add_snapshot(5, 1))[0] == 200
    assert client.delete(f"{TABLE}?purgeRequested=true")[0] == 204


def test_migrated_database_knows_the_requests_whose_outcome_it_had(
    old: Any, begin: Callable[[], Client], url: str, version: int
):
    migrate(url)
    # Before the second version nobody kept outcomes, so that the request is done anew.
    again = begin().post(TABLES, create_body(), headers=KEY)
    assert again == old if version > 1 else again[0] == 409


def test_migrated_database_is_made_as_a_new_one(old: Any, make_postgres: Callable[[], str], url: str):
    columns = (
        "SELECT table_name, column_name, data_type, is_nullable, column_default, collation_name"
        " FROM information_schema.columns WHERE table_schema = 'lakefeed_catalog' ORDER BY table_name, ordinal_position"
    )
    indexes = "SELECT indexdef FROM pg_indexes WHERE schemaname = 'lakefeed_catalog' ORDER BY indexname"
    migrate(url)
    new = make_postgres()
    migrate(new)
    for query in (columns, indexes):
        assert read(url, query) == read(new, query)


def test_processes_that_migrate_at_once_do_it_once(old: Any, url: str, version: int):
    async def all_at_once() -> list[tuple[int, int]]:
        return await asyncio.gather(*(PostgresStore(url, timeout_s=30).migrate() for _ in range(4)))

    found = sorted(asyncio.run(all_at_once()))
    assert found == [(version, SCHEMA_VERSION), *[(SCHEMA_VERSION, SCHEMA_VERSION)] * 3]


def test_migration_that_fails_half_way_changes_nothing(url: str):
    on(url, lambda db: db.execute(VERSION_1 + "CREATE TABLE lakefeed_catalog.outcomes_by_time (x INTEGER);"))
    with pytest.raises(StoreFailed):
        migrate(url)
    assert read(url, "SELECT version FROM lakefeed_catalog.catalog_schema") == [(1,)]
    assert read(url, "SELECT to_regclass('lakefeed_catalog.outcomes')::text") == [(None,)]


def test_newer_database_is_neither_served_nor_migrated(begin: Callable[[], Client], url: str):
    migrate(url)
    on(url, lambda db: db.execute("UPDATE lakefeed_catalog.catalog_schema SET version = 99"))
    for attempt in (begin, lambda: migrate(url)):
        with pytest.raises(StoreUnusable, match=f"newer lakefeed: found=99 known={SCHEMA_VERSION}"):
            attempt()
    assert read(url, "SELECT version FROM lakefeed_catalog.catalog_schema") == [(99,)]
