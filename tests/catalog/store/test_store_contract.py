"""What every store does, on all of them: SQLite, a real PostgreSQL, and memory."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from lakefeed.catalog.errors import (
    AlreadyExists,
    BadRequest,
    CatalogError,
    KeyTaken,
    NamespaceNotEmpty,
    NoSuchNamespace,
    NoSuchTable,
    NoSuchView,
    StoreUnusable,
)
from lakefeed.catalog.names import Pointer, TableId, ViewId
from lakefeed.catalog.service.backup import decode_backup, encode_backup
from lakefeed.catalog.store.outcomes import KeyClaim, RecordedError, RecordedOutcome, RequestOutcome, holding_claim
from lakefeed.catalog.store.postgres import PostgresStore
from lakefeed.catalog.store.sqlite import MemoryStore, SqliteStore
from lakefeed.catalog.store.store import PointerMove, Store, StoreContents
from lakefeed.contract.errors import StorageError

DB = ("db",)
TABLE, OTHER, VIEW = TableId(DB, "t"), TableId(DB, "u"), ViewId(DB, "v")


async def test_pointer_moves_after_its_preparation_and_not_without_it(store: Store):
    await store.create_entry(TABLE, Pointer("one"))
    done: list[int] = []

    def fail() -> None:
        raise StorageError("disk full")

    with pytest.raises(StorageError):
        await store.swap_pointer(TABLE, expected=Pointer("one"), new=Pointer("two"), prepare=fail)
    assert await store.load_pointer(TABLE) == Pointer("one")
    assert await store.swap_pointer(TABLE, expected=Pointer("one"), new=Pointer("two"), prepare=lambda: done.append(1))
    assert (done, await store.load_pointer(TABLE)) == ([1], Pointer("two"))


async def test_tables_are_found_by_their_uuid_and_those_of_unknown_uuid_with_them(store: Store):
    pointers = {
        TableId(DB, "same"): Pointer("file:///elsewhere/1.json", "", "uuid"),
        TableId(DB, "unknown"): Pointer("file:///c/metadata/1.json"),
        TableId(DB, "beside"): Pointer("file:///a_b/%1/metadata/1.json", "", "other"),
        TableId(DB, "foreign"): Pointer("file:///aXb/%1/metadata/1.json", "", "other"),
    }
    for entry, pointer in pointers.items():
        await store.create_entry(entry, pointer)
    await store.create_entry(VIEW, Pointer("file:///a_b/%1/metadata/2.json"))
    found = await store.find_tables(table_uuid="uuid", directory="/a_b/%1/")
    assert found == {entry: pointer for entry, pointer in pointers.items() if entry.name != "foreign"}
    assert await store.find_tables(table_uuid="", directory="nowhere") == pointers


async def test_namespaces_nest_and_are_listed_level_by_level(store: Store):
    await store.create_namespace(("db", "in"), {})
    await store.create_namespace(("db", "in", "deep"), {})
    await store.create_namespace(("é",), {})
    assert await store.list_namespaces((), after="", limit=None) == [DB, ("é",)]
    assert await store.list_namespaces(DB, after="", limit=None) == [("db", "in")]
    assert await store.list_namespaces((), after="db", limit=1) == [("é",)]
    with pytest.raises(NoSuchNamespace, match="none"):
        await store.list_namespaces(("none",), after="", limit=None)
    with pytest.raises(NoSuchNamespace, match="none"):
        await store.create_namespace(("none", "child"), {})
    with pytest.raises(AlreadyExists, match="Namespace already exists: db"):
        await store.create_namespace(DB, {})


async def test_namespace_properties_are_set_removed_and_kept(store: Store):
    assert await store.load_namespace(DB) == {"owner": "me"}
    assert await store.update_namespace(DB, removals=["owner", "none"], updates={"a": "ü"}) == ["owner"]
    assert await store.load_namespace(DB) == {"a": "ü"}
    for missing in (store.load_namespace(("x",)), store.update_namespace(("x",), removals=[], updates={})):
        with pytest.raises(NoSuchNamespace):
            await missing


@pytest.mark.parametrize("held", [TABLE, VIEW, ("db", "in")])
async def test_only_an_empty_namespace_is_dropped(store: Store, held: TableId | ViewId | tuple[str, ...]):
    if isinstance(held, tuple):
        await store.create_namespace(held, {})
    else:
        await store.create_entry(held, Pointer("here"))
    with pytest.raises(NamespaceNotEmpty, match="db is not empty"):
        await store.drop_namespace(DB)
    await (store.drop_namespace(held) if isinstance(held, tuple) else store.drop_entry(held))
    await store.drop_namespace(DB)
    with pytest.raises(NoSuchNamespace):
        await store.drop_namespace(DB)


async def test_tables_and_views_share_their_names_but_not_their_lists(store: Store):
    await store.create_entry(TABLE, Pointer("table"))
    await store.create_entry(VIEW, Pointer("view"))
    assert await store.list_entries(TableId, DB, after="", limit=None) == [TABLE]
    assert await store.list_entries(ViewId, DB, after="", limit=None) == [VIEW]
    assert await store.load_pointer(ViewId(DB, "t")) is None
    with pytest.raises(AlreadyExists, match=r"^Table already exists: db\.t$"):
        await store.create_entry(TABLE, Pointer("again"))
    for put in (store.create_entry, store.put_entry):
        with pytest.raises(AlreadyExists, match=r"^View with same name already exists: db\.v$"):
            await put(TableId(DB, "v"), Pointer("other"))
    with pytest.raises(NoSuchNamespace):
        await store.create_entry(TableId(("none",), "t"), Pointer("here"))
    assert await store.load_pointer(VIEW) == Pointer("view")


async def test_lists_are_paged_by_name_byte_by_byte(store: Store):
    names = ["B", "a", "a_b", "aa", "b", "é"]
    for name in reversed(names):
        await store.create_entry(TableId(DB, name), Pointer(name))
    assert [table.name for table in await store.list_entries(TableId, DB, after="", limit=None)] == names
    assert [table.name for table in await store.list_entries(TableId, DB, after="a", limit=2)] == ["a_b", "aa"]
    with pytest.raises(NoSuchNamespace):
        await store.list_entries(TableId, ("none",), after="", limit=None)


async def test_pointer_moves_only_from_where_it_is_expected(store: Store):
    await store.create_entry(TABLE, Pointer("one"))
    assert not await store.swap_pointer(TABLE, expected=Pointer("none"), new=Pointer("two"))
    assert await store.load_pointer(TABLE) == Pointer("one")
    assert await store.swap_pointer(TABLE, expected=Pointer("one"), new=Pointer("two"))
    assert not await store.swap_pointer(OTHER, expected=Pointer("two"), new=Pointer("three"))
    assert await store.load_pointer(TABLE) == Pointer("two")


async def test_pointer_moves_only_from_the_content_that_is_expected(store: Store):
    """A file that is registered again under its old name is another version, which a running commit has not seen."""
    await store.create_entry(TABLE, Pointer("one", "first"))
    await store.put_entry(TABLE, Pointer("one", "second"))
    assert not await store.swap_pointer(TABLE, expected=Pointer("one", "first"), new=Pointer("two"))
    assert not await store.move_pointers([PointerMove(TABLE, Pointer("one", "first"), Pointer("two"))])
    assert await store.load_pointer(TABLE) == Pointer("one", "second")
    assert await store.swap_pointer(TABLE, expected=Pointer("one", "second"), new=Pointer("two", "", "uuid"))
    assert await store.load_pointer(TABLE) == Pointer("two", "", "uuid")


async def test_of_many_swaps_from_one_place_one_is_made(store: Store):
    await store.create_entry(TABLE, Pointer("one"))
    done = await asyncio.gather(
        *(store.swap_pointer(TABLE, expected=Pointer("one"), new=Pointer(f"{n}")) for n in range(20))
    )
    assert done.count(True) == 1
    assert await store.load_pointer(TABLE) == Pointer(f"{done.index(True)}")


async def test_of_many_creates_of_one_name_one_is_made(store: Store):
    made = await asyncio.gather(
        *(store.create_entry(TABLE, Pointer(f"{n}")) for n in range(20)), return_exceptions=True
    )
    assert [error for error in made if error is not None and not isinstance(error, AlreadyExists)] == []
    assert made.count(None) == 1


async def test_namespace_is_dropped_or_filled_but_not_both(store: Store):
    await store.create_namespace(("busy",), {})
    creates = [store.create_entry(TableId(("busy",), f"t{number}"), Pointer("here")) for number in range(10)]
    results = await asyncio.gather(*creates[:5], store.drop_namespace(("busy",)), *creates[5:], return_exceptions=True)
    dropped, created = results.pop(5), results.count(None)
    if dropped is None:
        assert all(isinstance(result, NoSuchNamespace) for result in results)
    else:
        assert isinstance(dropped, NamespaceNotEmpty)
        assert len(await store.list_entries(TableId, ("busy",), after="", limit=None)) == created == 10


async def test_of_many_renames_to_one_name_one_is_made(store: Store):
    sources = [TableId(DB, f"t{number}") for number in range(10)]
    for source in sources:
        await store.create_entry(source, Pointer(source.name))
    done = await asyncio.gather(*(store.rename_entry(source, TABLE) for source in sources), return_exceptions=True)
    assert sum(isinstance(error, AlreadyExists) for error in done) == 9
    assert await store.load_pointer(TABLE) == Pointer(sources[done.index(None)].name)
    assert len(await store.list_entries(TableId, DB, after="", limit=None)) == 10


async def test_several_pointers_move_together_or_not_at_all(store: Store):
    await store.create_entry(TABLE, Pointer("one"))
    assert not await store.move_pointers(
        [PointerMove(OTHER, None, Pointer("new")), PointerMove(TABLE, Pointer("elsewhere"), Pointer("two"))]
    )
    assert await store.load_pointer(OTHER) is None
    with pytest.raises(AlreadyExists):
        await store.move_pointers(
            [PointerMove(TABLE, Pointer("one"), Pointer("two")), PointerMove(TableId(DB, "t"), None, Pointer("again"))]
        )
    assert await store.load_pointer(TABLE) == Pointer("one")
    await store.create_entry(VIEW, Pointer("view"))
    assert await store.move_pointers(
        [
            PointerMove(TABLE, Pointer("one"), Pointer("two")),
            PointerMove(VIEW, Pointer("view"), Pointer("view")),
            PointerMove(OTHER, None, Pointer("new")),
        ]
    )
    assert [await store.load_pointer(entry) for entry in (TABLE, VIEW, OTHER)] == list(
        map(Pointer, ("two", "view", "new"))
    )


async def test_entry_is_renamed_into_another_namespace(store: Store):
    await store.create_namespace(("other",), {})
    await store.create_entry(TABLE, Pointer("here"))
    await store.create_entry(VIEW, Pointer("view"))
    moved = TableId(("other",), "t")
    await store.rename_entry(TABLE, moved)
    await store.rename_entry(moved, moved)
    assert await store.load_pointer(moved) == Pointer("here")
    assert await store.load_pointer(TABLE) is None
    with pytest.raises(AlreadyExists, match=r"Cannot rename other.t to db.v. View already exists"):
        await store.rename_entry(moved, TableId(DB, "v"))
    with pytest.raises(NoSuchNamespace):
        await store.rename_entry(moved, TableId(("none",), "t"))
    with pytest.raises(NoSuchTable):
        await store.rename_entry(TABLE, OTHER)


async def test_drop_returns_the_last_pointer(store: Store):
    await store.create_entry(TABLE, Pointer("here"))
    with pytest.raises(NoSuchView):
        await store.drop_entry(ViewId(DB, "t"))
    assert await store.drop_entry(TABLE) == Pointer("here")
    with pytest.raises(NoSuchTable):
        await store.drop_entry(TABLE)


async def test_put_creates_or_replaces_an_entry(store: Store):
    await store.put_entry(TABLE, Pointer("one"))
    await store.put_entry(TABLE, Pointer("two"))
    assert await store.load_pointer(TABLE) == Pointer("two")
    with pytest.raises(NoSuchNamespace):
        await store.put_entry(TableId(("none",), "t"), Pointer("here"))


# Every change, and the outcome that is recorded for a request with a key.
CHANGES: dict[str, tuple[Callable[[Store], Awaitable[Any]], RequestOutcome]] = {
    "create namespace": (lambda store: store.create_namespace(("new",), {}), RequestOutcome()),
    "update namespace": (
        lambda store: store.update_namespace(DB, removals=["none", "owner"], updates={"a": "b"}),
        RequestOutcome(removed=("owner",)),
    ),
    "drop namespace": (lambda store: store.drop_namespace(("empty",)), RequestOutcome()),
    "create entry": (lambda store: store.create_entry(TableId(DB, "new"), Pointer("new")), RequestOutcome("new")),
    "swap pointer": (
        lambda store: store.swap_pointer(TABLE, expected=Pointer("one"), new=Pointer("two")),
        RequestOutcome("two"),
    ),
    "move pointers": (
        lambda store: store.move_pointers(
            [PointerMove(TABLE, Pointer("one"), Pointer("two")), PointerMove(OTHER, None, Pointer("u"))]
        ),
        RequestOutcome(),
    ),
    "put entry": (
        lambda store: store.put_entry(TABLE, Pointer("two", "digest")),
        RequestOutcome("two", digest="digest"),
    ),
    "rename entry": (lambda store: store.rename_entry(TABLE, OTHER), RequestOutcome()),
    "drop entry": (lambda store: store.drop_entry(TABLE), RequestOutcome("one")),
}


@pytest.mark.parametrize("name", CHANGES)
async def test_a_change_and_its_outcome_are_recorded_together_or_not_at_all(store: Store, name: str):
    await store.create_namespace(("empty",), {})
    await store.create_entry(TABLE, Pointer("one"))
    change, outcome = CHANGES[name]
    before = await store.export()
    await store.record_outcome(KeyClaim("taken", "other", 0), RequestOutcome())
    with holding_claim(KeyClaim("taken", "print", 0)), pytest.raises(KeyTaken):
        await change(store)
    assert await store.export() == before
    assert await store.load_outcome("taken") == RecordedOutcome("other", RequestOutcome())
    with holding_claim(KeyClaim("free", "print", 0)):
        await change(store)
    assert await store.export() != before
    assert await store.load_outcome("free") == RecordedOutcome("print", outcome)


async def test_change_that_is_not_made_has_no_outcome(store: Store):
    await store.create_entry(TABLE, Pointer("one"))
    with holding_claim(KeyClaim("key", "print", 0)):
        assert not await store.swap_pointer(TABLE, expected=Pointer("elsewhere"), new=Pointer("two"))
        assert not await store.move_pointers([PointerMove(TABLE, Pointer("elsewhere"), Pointer("two"))])
        with pytest.raises(AlreadyExists):
            await store.create_entry(TABLE, Pointer("two"))
        with pytest.raises(NoSuchTable):
            await store.drop_entry(OTHER)
    assert await store.load_outcome("key") is None
    refused = RequestOutcome(refusal=RecordedError(409, "AlreadyExistsException", "Täble already exists"))
    await store.record_outcome(KeyClaim("key", "print", 0), refused)
    assert await store.load_outcome("key") == RecordedOutcome("print", refused)
    with pytest.raises(KeyTaken):
        await store.record_outcome(KeyClaim("key", "print", 0), RequestOutcome())


async def test_waiting_writes_succeed_or_fail_one_by_one(store: Store):
    names = [TableId(DB, f"t{number % 30}") for number in range(60)]
    made = await asyncio.gather(*(store.create_entry(name, Pointer("here")) for name in names), return_exceptions=True)
    assert sum(error is None for error in made) == 30
    assert all(isinstance(error, AlreadyExists) for error in made if error is not None)
    assert len(await store.list_entries(TableId, DB, after="", limit=None)) == 30


async def test_export_of_one_store_fills_any_other(store: Store, tmp_path: Path):
    await store.create_namespace(("db", "in"), {"a": "b"})
    await store.create_entry(TABLE, Pointer("table", "d", "u"))
    await store.create_entry(VIEW, Pointer("view"))
    contents = await store.export()
    assert contents == StoreContents(
        {DB: {"owner": "me"}, ("db", "in"): {"a": "b"}}, {TABLE: Pointer("table", "d", "u"), VIEW: Pointer("view")}
    )
    assert decode_backup(encode_backup(contents)) == contents
    with pytest.raises(StoreUnusable, match="not empty"):
        await store.restore(contents)
    for other in (MemoryStore(), SqliteStore(tmp_path / "other.db")):
        await other.open()
        await other.restore(contents)
        assert await other.export() == contents
        await other.close()


async def test_empty_store_is_filled_from_an_export(make_postgres, tmp_path: Path):
    contents = StoreContents(
        {DB: {}, ("db", "in"): {"a": "b"}}, {TABLE: Pointer("table", "d", "u"), VIEW: Pointer("view")}
    )
    url = await asyncio.to_thread(make_postgres)
    empty = PostgresStore(url, timeout_s=30)
    await empty.open()
    await empty.restore(contents)
    assert await empty.export() == contents
    await empty.close()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "lakefeed-catalog-backup"),
        (b'{"lakefeed-catalog-backup":3}', "unknown version"),
        (b'{"lakefeed-catalog-backup":2}', "incomplete"),
        (b'{"lakefeed-catalog-backup":1}\n{"namespace":[]}', "line=2"),
        (b'{"lakefeed-catalog-backup":1}\n{"kind":"Table","namespace":["a"],"name":"t"}', "does not come before"),
    ],
)
def test_backup_that_cannot_be_read_is_refused_with_its_line(text: bytes, words: str):
    with pytest.raises(BadRequest, match=words):
        decode_backup(text)


async def test_two_processes_may_open_one_new_postgres_at_once(make_postgres):
    url = await asyncio.to_thread(make_postgres)
    stores = [PostgresStore(url, timeout_s=30) for _ in range(4)]
    await asyncio.gather(*(each.open() for each in stores))
    await stores[0].create_namespace(DB, {})
    await stores[1].create_entry(TABLE, Pointer("here"))
    assert await stores[2].load_pointer(TABLE) == Pointer("here")
    for each in stores:
        await each.close()


async def test_unreachable_postgres_is_reported():
    store = PostgresStore("postgresql://127.0.0.1:1/none", timeout_s=5)
    with pytest.raises(CatalogError, match="cannot connect to the catalog's database"):
        await store.open()
    await store.close()
