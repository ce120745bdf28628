"""Transactions over several tables: all commits or none, beside other commits."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lakefeed.catalog.app import build_app
from lakefeed.catalog.config import CatalogConfig, Warehouse
from lakefeed.catalog.errors import StoreFailed
from lakefeed.catalog.store.sqlite import SqliteStore
from tests.catalog.conftest import Client, Server
from tests.catalog.documents import append, create_body, require_main
from tests.catalog.local_files import LocalFiles

COMMIT = "transactions/commit"


@pytest.fixture
def tables(client: Client) -> list[str]:
    client.post("namespaces", {"namespace": ["db"]})
    names = ["a", "b", "c"]
    for name in names:
        assert client.post("namespaces/db/tables", create_body(name))[0] == 200
    return names


def change(name: str, snapshot_id: int, sequence: int = 1, *, on: int | None = None):
    return {
        "identifier": {"namespace": ["db"], "name": name},
        "requirements": [require_main(on)],
        "updates": append(snapshot_id, sequence, on),
    }


def creation(name: str):
    body = create_body(name)
    updates = [
        {"action": "upgrade-format-version", "format-version": 2},
        {"action": "add-schema", "schema": body["schema"]},
        {"action": "set-current-schema", "schema-id": -1},
        {"action": "add-spec", "spec": {"spec-id": 0, "fields": []}},
        {"action": "set-default-spec", "spec-id": -1},
        {"action": "add-sort-order", "sort-order": {"order-id": 0, "fields": []}},
        {"action": "set-default-sort-order", "sort-order-id": -1},
    ]
    identifier = {"namespace": ["db"], "name": name}
    return {"identifier": identifier, "requirements": [{"type": "assert-create"}], "updates": updates}


def current(client: Client, name: str) -> int | None:
    status, body = client.get(f"namespaces/db/tables/{name}")
    assert status == 200
    main = body["metadata"]["refs"].get("main")
    return main and main["snapshot-id"]


def files_under(warehouse: Warehouse) -> set[Path]:
    return set(Path(warehouse.location.removeprefix("file://")).rglob("*.metadata.json"))


def test_all_tables_of_a_transaction_are_committed(client: Client, tables: list[str]):
    body = {"table-changes": [change(name, number) for number, name in enumerate(tables, 10)]}
    answer = client.send("POST", COMMIT, body)
    assert (answer.status_code, answer.content) == (204, b"")
    assert [current(client, name) for name in tables] == [10, 11, 12]


@pytest.mark.parametrize("loser", range(3))
def test_a_transaction_of_which_one_table_loses_changes_nothing(
    client: Client, tables: list[str], warehouse: Warehouse, loser: int
):
    client.post(f"namespaces/db/tables/{tables[loser]}", change(tables[loser], 99))
    before = files_under(warehouse)
    status, body = client.post(COMMIT, {"table-changes": [change(name, 10) for name in tables]})
    assert (status, body["error"]["type"]) == (409, "CommitFailedException")
    expected = [99 if number == loser else None for number in range(3)]
    assert [current(client, name) for name in tables] == expected
    assert files_under(warehouse) == before


def test_an_update_that_cannot_be_applied_changes_nothing(client: Client, tables: list[str]):
    bad = {**change("b", 10), "updates": [{"action": "set-current-schema", "schema-id": 77}]}
    status, body = client.post(COMMIT, {"table-changes": [change("a", 10), bad]})
    assert (status, body["error"]["type"]) == (400, "ValidationException")
    assert current(client, "a") is None


def test_a_table_that_is_not_there_changes_nothing(client: Client, tables: list[str]):
    status, body = client.post(COMMIT, {"table-changes": [change("a", 10), change("nowhere", 10)]})
    assert (status, body["error"]["type"]) == (404, "NoSuchTableException")
    assert current(client, "a") is None


def test_tables_are_created_in_the_transaction_that_fills_others(client: Client, tables: list[str]):
    assert client.post(COMMIT, {"table-changes": [change("a", 10), creation("new")]})[0] == 204
    assert (current(client, "a"), client.head("namespaces/db/tables/new")) == (10, 204)
    status, body = client.post(COMMIT, {"table-changes": [change("b", 10), creation("new")]})
    assert (status, body["error"]["type"]) == (409, "CommitFailedException")
    assert current(client, "b") is None


def test_a_change_that_changes_nothing_is_still_required(client: Client, tables: list[str]):
    same = {**change("b", 10), "updates": []}
    assert client.post(COMMIT, {"table-changes": [change("a", 10), same]})[0] == 204
    same["requirements"] = [require_main(5)]
    assert client.post(COMMIT, {"table-changes": [change("a", 11, 2, on=10), same]})[0] == 409
    assert current(client, "a") == 10


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"table-changes": []},
        {"table-changes": [{}]},
        {"table-changes": [{**change("a", 1), "identifier": {"namespace": [], "name": "a"}}]},
        {"table-changes": [change("a", 1), change("a", 2)]},
    ],
    ids=["none", "empty", "no-identifier", "no-namespace", "twice"],
)
def test_invalid_transaction_is_rejected(client: Client, tables: list[str], body: dict):
    status, answer = client.post(COMMIT, body)
    assert (status, answer["error"]["type"]) == (400, "BadRequestException")
    assert current(client, "a") is None


def test_transactions_in_opposite_order_and_commits_between_them_end(server: Server, connect: Callable[..., Client]):
    client = connect(server)
    client.post("namespaces", {"namespace": ["db"]})
    for name in ("a", "b"):
        client.post("namespaces/db/tables", create_body(name))

    def run(worker: int) -> int:
        own, won = connect(server), 0
        order = ("a", "b") if worker % 2 else ("b", "a")
        for attempt in range(10):
            heads = {name: current(own, name) for name in order}
            number = 1_000 * (worker + 1) + attempt
            changes = [change(name, number, number, on=heads[name]) for name in order]
            won += own.send("POST", COMMIT, {"table-changes": changes}).status_code == 204
        return won

    with ThreadPoolExecutor(4) as workers:
        won = sum(workers.map(run, range(4)))
    lengths = [len(client.get(f"namespaces/db/tables/{name}")[1]["metadata"]["snapshots"]) for name in ("a", "b")]
    assert lengths == [won, won]
    assert won > 0


class UnansweredStore(SqliteStore):
    """Makes the moves, or not, and then fails as if no response had come."""

    lands = True

    async def move_pointers(self, moves):
        if self.lands:
            await super().move_pointers(moves)
        raise StoreFailed("Catalog database failed: no answer")


@pytest.mark.parametrize(("lands", "status"), [(True, 204), (False, 500)])
def test_moves_of_unknown_outcome_are_looked_up_and_no_file_is_deleted(
    start_server, connect, warehouse: Warehouse, tmp_path: Path, lands: bool, status: int
):
    store = UnansweredStore(tmp_path / "catalog.db")
    store.lands = lands
    client = connect(start_server(build_app(CatalogConfig(), warehouse, store=store, files=LocalFiles())))
    client.post("namespaces", {"namespace": ["db"]})
    for name in ("a", "b"):
        client.post("namespaces/db/tables", create_body(name))
    before = len(files_under(warehouse))
    answer = client.send("POST", COMMIT, {"table-changes": [change("a", 10), change("b", 10)]})
    assert answer.status_code == status
    assert len(files_under(warehouse)) == before + 2
    assert [current(client, name) for name in ("a", "b")] == ([10, 10] if lands else [None, None])


class LosingStore(SqliteStore):
    """The real store, whose pointers another process always moves first."""

    async def move_pointers(self, moves):
        return False


def test_transaction_that_always_loses_the_swap_is_a_conflict_and_leaves_no_file(
    start_server, connect, warehouse: Warehouse, tmp_path: Path
):
    store = LosingStore(tmp_path / "catalog.db")
    client = connect(start_server(build_app(CatalogConfig(), warehouse, store=store, files=LocalFiles())))
    client.post("namespaces", {"namespace": ["db"]})
    for name in ("a", "b"):
        client.post("namespaces/db/tables", create_body(name))
    before = files_under(warehouse)
    status, body = client.post(COMMIT, {"table-changes": [change("a", 10), {**change("b", 10), "updates": []}]})
    assert (status, body["error"]["type"]) == (409, "CommitFailedException")
    assert files_under(warehouse) == before
    assert [current(client, name) for name in ("a", "b")] == [None, None]
