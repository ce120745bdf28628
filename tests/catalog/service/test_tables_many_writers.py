"""Many writers on one table, in one catalog process and in two that share a PostgreSQL: every append is there, once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.catalog.conftest import Server
from tests.catalog.documents import append, create_body, require_main
from tests.catalog.routes.test_tables_http import TABLE, TABLES
from tests.catalog.service.test_tables_concurrency import check_chain
from tests.catalog.service.test_tables_transactions import change
from tests.catalog_process import CatalogProcess, catalog_processes

MINIMAL = {"Prefer": "return=minimal"}


class Writer:
    """Appends snapshots as an engine does: load, commit on top, and start over if another writer was first."""

    def __init__(self, session: aiohttp.ClientSession, url: str, number: int) -> None:
        self._session = session
        self._base = f"{url}/v1/"
        self._first_id = 1_000_000 * (number + 1)
        self.conflicts = 0

    async def get(self, path: str) -> Any:
        async with self._session.get(self._base + path) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.json()

    async def post(self, path: str, body: Any) -> int:
        async with self._session.post(self._base + path, json=body, headers=MINIMAL) as answer:
            assert answer.status in (200, 204, 409), await answer.text()
            return answer.status

    async def append(self, count: int, table: str = TABLE) -> None:
        for snapshot_id in range(self._first_id, self._first_id + count):
            while not await self._append_one(snapshot_id, table):
                self.conflicts += 1

    async def _append_one(self, snapshot_id: int, table: str) -> bool:
        metadata = (await self.get(f"{table}?snapshots=refs"))["metadata"]
        main = metadata["refs"].get("main", {}).get("snapshot-id")
        updates = append(snapshot_id, metadata["last-sequence-number"] + 1, main)
        return await self.post(table, {"requirements": [require_main(main)], "updates": updates}) == 200


async def write_together(urls: Sequence[str], writers: int, appends: int) -> Any:
    """Let writers append at once, spread over the catalogs; return the table's metadata and the number of conflicts."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        crew = [Writer(session, urls[number % len(urls)], number) for number in range(writers)]
        assert await crew[0].post("namespaces", {"namespace": ["db"]}) == 200
        assert await crew[0].post(TABLES, create_body()) == 200
        async with asyncio.TaskGroup() as group:
            for writer in crew:
                group.create_task(writer.append(appends))
        return (await crew[-1].get(TABLE))["metadata"], sum(writer.conflicts for writer in crew)


def test_appends_of_sixteen_concurrent_writers_make_one_chain(server: Server):
    metadata, conflicts = asyncio.run(write_together([server.url], writers=16, appends=20))
    check_chain(metadata, 320)
    assert conflicts > 0


@pytest.fixture
def two_catalogs(tmp_path: Path, make_postgres: Callable[[], str]) -> Iterator[list[CatalogProcess]]:
    with catalog_processes(tmp_path, 2, database=make_postgres()) as catalogs:
        for catalog in catalogs:
            catalog.start()
        yield catalogs


def test_writers_at_two_processes_over_one_postgres_make_one_chain(two_catalogs: list[CatalogProcess]):
    metadata, conflicts = asyncio.run(write_together([each.url for each in two_catalogs], writers=8, appends=10))
    check_chain(metadata, 80)
    assert conflicts > 0
    assert [catalog.stop() for catalog in two_catalogs] == [0, 0]


def test_of_transactions_over_three_tables_at_two_processes_all_tables_have_the_same(
    two_catalogs: list[CatalogProcess],
):
    names = ("t", "u", "v")

    async def run() -> list[list[int]]:
        async with aiohttp.ClientSession() as session:
            crew = [Writer(session, two_catalogs[number % 2].url, number) for number in range(4)]
            await crew[0].post("namespaces", {"namespace": ["db"]})
            for name in names:
                await crew[0].post(TABLES, create_body(name))
            async with asyncio.TaskGroup() as group:
                for number, writer in enumerate(crew):
                    # Half of them commit to one table only, so that transactions over all three conflict with them.
                    group.create_task(commit_all(writer, number, names if number < 2 else names[1:2]))
            tables = [await crew[0].get(f"{TABLES}/{name}") for name in names]
            return [[each["snapshot-id"] for each in table["metadata"]["snapshots"]] for table in tables]

    first, middle, last = asyncio.run(run())
    together = [each for each in middle if each < 30_000]
    assert first == last == together
    assert (len(together), len(middle)) == (20, 40)


async def commit_all(writer: Writer, number: int, names: Sequence[str]) -> None:
    for turn in range(10):
        while not await _commit_one(writer, 10_000 * (number + 1) + turn, names):
            pass


async def _commit_one(writer: Writer, snapshot_id: int, names: Sequence[str]) -> bool:
    changes = []
    for name in names:
        metadata = (await writer.get(f"{TABLES}/{name}"))["metadata"]
        main = metadata["refs"].get("main", {}).get("snapshot-id")
        changes.append(change(name, snapshot_id, metadata["last-sequence-number"] + 1, on=main))
    return await writer.post("transactions/commit", {"table-changes": changes}) == 204
