"""Many clients at once, other processes that commit in between, and a database that does not answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lakefeed.catalog.app import build_app
from lakefeed.catalog.config import CatalogConfig, Warehouse
from lakefeed.catalog.errors import StoreFailed
from lakefeed.catalog.names import Pointer, TableId
from lakefeed.catalog.store.sqlite import SqliteStore
from tests.catalog.conftest import Client, Server
from tests.catalog.documents import append, create_body, require_main
from tests.catalog.local_files import LocalFiles
from tests.catalog.routes.test_http import Connect, error_of
from tests.catalog.routes.test_tables_http import TABLE, TABLES, commit, path_of, set_property

WRITERS = 8
COMMITS_PER_WRITER = 5


def in_parallel(count: int, work: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(work, range(count)))


def make_table(client: Client) -> str:
    client.post("namespaces", {"namespace": ["db"]})
    return client.post(TABLES, create_body())[1]["metadata-location"]


def test_of_fifty_creates_of_one_name_exactly_one_succeeds(server: Server, connect: Connect):
    clients = [connect(server) for _ in range(50)]
    clients[0].post("namespaces", {"namespace": ["db"]})
    answers = in_parallel(50, lambda number: clients[number].post(TABLES, create_body()))
    created = [body for status, body in answers if status == 200]
    assert len(created) == 1
    assert {error_of(answer)[:2] for answer in answers if answer[0] != 200} == {(409, "AlreadyExistsException")}
    assert clients[0].get(TABLE)[1] == created[0]


def append_until_it_lands(client: Client, snapshot_id: int) -> None:
    while True:
        metadata = client.get(TABLE)[1]["metadata"]
        main = metadata["refs"].get("main", {}).get("snapshot-id")
        updates = append(snapshot_id, metadata["last-sequence-number"] + 1, main)
        status, body = commit(client, *updates, requirements=(require_main(main),))
        if status == 200:
            return
        assert error_of((status, body))[:2] == (409, "CommitFailedException")


def check_chain(metadata: dict, expected: int) -> None:
    """Follow the parents from main to the first snapshot: every snapshot is there, once, in order."""
    by_id = {snapshot["snapshot-id"]: snapshot for snapshot in metadata["snapshots"]}
    at, sequences = metadata["current-snapshot-id"], []
    while at is not None:
        sequences.append(by_id[at]["sequence-number"])
        at = by_id[at].get("parent-snapshot-id")
    assert sequences == list(range(expected, 0, -1))
    assert len(by_id) == expected


@pytest.mark.parametrize("processes", [1, 2])
def test_no_snapshot_of_eight_writers_is_lost(start_server: Callable[..., Server], connect: Connect, processes: int):
    """Two servers over one database stand for two processes: their commits meet in the database only."""
    servers = [start_server() for _ in range(processes)]
    clients = [connect(servers[number % processes]) for number in range(WRITERS)]
    make_table(clients[0])

    def write(number: int) -> None:
        for turn in range(COMMITS_PER_WRITER):
            append_until_it_lands(clients[number], 1000 * (number + 1) + turn)

    in_parallel(WRITERS, write)
    metadata = clients[0].get(TABLE)[1]["metadata"]
    check_chain(metadata, WRITERS * COMMITS_PER_WRITER)
    assert len(metadata["metadata-log"]) == WRITERS * COMMITS_PER_WRITER


def test_concurrent_commits_without_conflict_all_succeed(server: Server, connect: Connect):
    clients = [connect(server) for _ in range(WRITERS)]
    make_table(clients[0])
    answers = in_parallel(WRITERS, lambda number: commit(clients[number], set_property(f"p{number}", "x")))
    assert [status for status, _ in answers] == [200] * WRITERS
    properties = clients[0].get(TABLE)[1]["metadata"]["properties"]
    assert {f"p{number}" for number in range(WRITERS)} <= properties.keys()


class FaultyStore(SqliteStore):
    """The real store, whose swaps lose to another process, or fail before or after the change."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.competitor: Callable[[TableId, str], str] | None = None
        self.fail_before_swap = False
        self.fail_after_swap = False

    async def swap_pointer(
        self, table: TableId, *, expected: Pointer, new: Pointer, prepare: Callable[[], None] | None = None
    ) -> bool:
        if self.competitor is not None:
            competitor, self.competitor = self.competitor, None
            await super().swap_pointer(table, expected=expected, new=Pointer(competitor(table, expected.location)))
        if self.fail_before_swap:
            if prepare is not None:
                await asyncio.to_thread(prepare)
            raise StoreFailed("injected")
        swapped = await super().swap_pointer(table, expected=expected, new=new, prepare=prepare)
        if self.fail_after_swap:
            raise StoreFailed("injected")
        return swapped


@pytest.fixture
def store(tmp_path: Path) -> FaultyStore:
    return FaultyStore(tmp_path / "faulty.db")


@pytest.fixture
def faulty(store: FaultyStore, warehouse: Warehouse, start_server: Callable[..., Server], connect: Connect) -> Client:
    client = connect(start_server(build_app(CatalogConfig(), warehouse, store=store, files=LocalFiles())))
    make_table(client)
    return client


def test_commit_that_lost_the_swap_is_repeated_on_the_winner(faulty: Client, store: FaultyStore):
    won = commit(faulty, set_property("winner", "1"))[1]
    assert commit(faulty, {"action": "remove-properties", "removals": ["winner"]})[0] == 200
    store.competitor = lambda _table, _expected: won["metadata-location"]
    status, body = commit(faulty, set_property("loser", "1"))
    assert status == 200
    assert {"winner", "loser"} <= body["metadata"]["properties"].keys()
    names = [path.name for path in path_of(body["metadata-location"]).parent.iterdir()]
    # The create, the winner, the removal and the repeated commit: the lost attempt left nothing behind.
    assert len(names) == 4


def test_commit_whose_requirement_fails_after_a_lost_swap_is_a_conflict(faulty: Client, store: FaultyStore):
    won = commit(faulty, *append(1, 1))[1]
    start = won["metadata"]["metadata-log"][0]["metadata-file"]
    register = {"name": "t", "metadata-location": start, "overwrite": True}
    assert faulty.post("namespaces/db/register", register)[0] == 200
    store.competitor = lambda _table, _expected: won["metadata-location"]
    answer = error_of(commit(faulty, *append(2, 1), requirements=(require_main(None),)))
    assert answer == (409, "CommitFailedException", "Requirement failed: branch main was created concurrently")


def test_swap_that_landed_without_a_response_is_a_success(faulty: Client, store: FaultyStore):
    store.fail_after_swap = True
    status, body = commit(faulty, set_property("a", "1"))
    assert (status, body["metadata"]["properties"]["a"]) == (200, "1")
    assert faulty.get(TABLE)[1]["metadata-location"] == body["metadata-location"]


def test_swap_of_unknown_outcome_is_reported_as_unknown_and_its_file_is_kept(faulty: Client, store: FaultyStore):
    directory = path_of(faulty.get(TABLE)[1]["metadata-location"]).parent
    store.fail_before_swap = True
    answer = error_of(commit(faulty, set_property("a", "1")))
    assert answer[:2] == (500, "CommitStateUnknownException")
    assert len(list(directory.iterdir())) == 2
