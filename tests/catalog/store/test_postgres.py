"""The schema of the PostgreSQL store: created once, refused in other versions, migrated when asked."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import asyncpg
import pytest

from lakefeed.catalog.errors import StoreFailed, StoreUnusable
from lakefeed.catalog.store import postgres
from lakefeed.catalog.store.postgres import SCHEMA, PostgresStore
from tests.catalog.conftest import Client, Server
from tests.catalog.documents import UUID, add_snapshot, create_body
from tests.catalog.routes.test_tables_http import TABLE, TABLES, commit

NEXT = SCHEMA.version + 1
ADD_COLUMN = "ALTER TABLE entries ADD COLUMN owner TEXT NOT NULL DEFAULT ''"
KEY = {"Idempotency-Key": UUID}


def on(url: str, work: Callable[[Any], Awaitable[Any]]) -> Any:
    """Run work with a connection of its own."""

    async def run() -> Any:
        connection = await asyncpg.connect(url, server_settings={"search_path": "lakefeed_catalog"})
        try:
            return await work(connection)
        finally:
            await connection.close()

    return asyncio.run(run())


def version_of(url: str) -> int:
    return on(url, lambda db: db.fetchval("SELECT version FROM catalog_schema"))


def migrate(url: str) -> tuple[int, int]:
    return asyncio.run(PostgresStore(url, timeout_s=30).migrate())


@pytest.fixture
def url(make_postgres: Callable[[], str]) -> str:
    return make_postgres()


@pytest.fixture
def begin(start_server: Callable[..., Server], connect: Callable[[Server], Client], url: str) -> Callable[[], Client]:
    return lambda: connect(start_server(database=url))


@pytest.fixture
def create(start_server: Callable[..., Server], connect: Callable[[Server], Client], url: str) -> Any:
    """Create a database with a table in it; the response to the request that created the table."""
    server = start_server(database=url)
    client = connect(server)
    for namespace in (["db"], ["db", "in"]):
        client.post("namespaces", {"namespace": namespace, "properties": {"owner": "me"}})
    created = client.post(TABLES, create_body(), headers=KEY)
    assert created[0] == 200
    server.stop()
    return created


@pytest.fixture
def next_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the schema of a next version, which has a migration."""
    following = replace(SCHEMA, version=NEXT, migrations={SCHEMA.version: (ADD_COLUMN,)})
    monkeypatch.setattr(postgres, "SCHEMA", following)


def test_older_database_is_rejected_until_it_is_migrated_and_keeps_its_rows(
    create: Any, next_schema: None, begin: Callable[[], Client], url: str
):
    refused = f"run `lakefeed catalog migrate`: found={SCHEMA.version} current={NEXT}"
    with pytest.raises(StoreUnusable, match=refused):
        begin()
    assert version_of(url) == SCHEMA.version
    assert migrate(url) == (SCHEMA.version, NEXT)
    assert migrate(url) == (NEXT, NEXT)
    client = begin()
    assert client.get("namespaces/db%1Fin")[1] == {"namespace": ["db", "in"], "properties": {"owner": "me"}}
    assert client.get(TABLE)[1]["metadata-location"] == create[1]["metadata-location"]
    assert client.post(TABLES, create_body(), headers=KEY) == create
    assert commit(client, add_snapshot(5, 1))[0] == 200
    assert client.delete(f"{TABLE}?purgeRequested=true")[0] == 204


def test_processes_that_migrate_at_once_do_it_once(create: Any, next_schema: None, url: str):
    async def all_at_once() -> list[tuple[int, int]]:
        return await asyncio.gather(*(PostgresStore(url, timeout_s=30).migrate() for _ in range(4)))

    assert sorted(asyncio.run(all_at_once())) == [(SCHEMA.version, NEXT), *[(NEXT, NEXT)] * 3]


def test_migration_that_fails_half_way_changes_nothing(create: Any, url: str, monkeypatch: pytest.MonkeyPatch):
    failing = {SCHEMA.version: (ADD_COLUMN, "ALTER TABLE none ADD COLUMN x TEXT")}
    monkeypatch.setattr(postgres, "SCHEMA", replace(SCHEMA, version=NEXT, migrations=failing))
    with pytest.raises(StoreFailed):
        migrate(url)
    assert version_of(url) == SCHEMA.version
    columns = "SELECT count(*) FROM information_schema.columns WHERE table_name = 'entries' AND column_name = 'owner'"
    assert on(url, lambda db: db.fetchval(columns)) == 0


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (99, f"made by a newer lakefeed, update lakefeed: found=99 oldest={SCHEMA.version}"),
        (SCHEMA.version - 1, r"too old .*catalog backup.* of the version that made it.*catalog restore"),
    ],
)
def test_database_of_another_version_is_neither_served_nor_migrated(
    begin: Callable[[], Client], url: str, version: int, message: str
):
    migrate(url)
    on(url, lambda db: db.execute(f"UPDATE catalog_schema SET version = {version}"))
    for attempt in (begin, lambda: migrate(url)):
        with pytest.raises(StoreUnusable, match=message):
            attempt()
    assert version_of(url) == version
