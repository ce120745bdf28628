"""Group commit: which writes share a sync, and what happens to the others if one fails."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from lakefeed.catalog.errors import AlreadyExists, StoreFailed
from lakefeed.catalog.store.sqlite import GROUP_MAX, GroupCommitThread, connect
from lakefeed.contract.errors import StorageError

HELD_MAX_S = 20.0


class ObservedThread(GroupCommitThread):
    """The real thread, whose commits are counted and which can be held."""

    def __init__(self) -> None:
        super().__init__("test")
        self.commits = 0
        self.gate = threading.Event()

    async def open(self, path: Path) -> None:
        await super().open(path)
        await self.run(lambda db: db.execute("CREATE TABLE numbers (number INTEGER PRIMARY KEY)"))
        await self._in_thread(lambda: self._opened().set_trace_callback(self._watch))

    def _watch(self, statement: str) -> None:
        self.commits += statement == "COMMIT"

    async def hold(self) -> asyncio.Future[bool]:
        """Keep the thread busy until the gate opens."""
        self.gate.clear()
        begun = threading.Event()

        def wait(_: sqlite3.Connection) -> bool:
            begun.set()
            return self.gate.wait(HELD_MAX_S)

        held = asyncio.ensure_future(self.run(wait))
        await asyncio.to_thread(begun.wait, HELD_MAX_S)
        return held

    async def run_together(self, *works: Callable[[sqlite3.Connection], object]) -> list[object]:
        """Let works wait behind one that is held, then release it."""
        held = await self.hold()
        waiting = [asyncio.ensure_future(self.run(work)) for work in works]
        await asyncio.sleep(0)
        self.commits = 0
        self.gate.set()
        await held
        return await asyncio.gather(*waiting, return_exceptions=True)


@pytest_asyncio.fixture
async def writer(tmp_path: Path) -> AsyncIterator[ObservedThread]:
    opened = ObservedThread()
    await opened.open(tmp_path / "numbers.db")
    yield opened
    opened.gate.set()
    await opened.close()


def insert(number: int) -> Callable[[sqlite3.Connection], int]:
    def work(db: sqlite3.Connection) -> int:
        db.execute("INSERT INTO numbers VALUES (?)", (number,))
        return number

    return work


def stored(path: Path) -> list[int]:
    """Read through another connection, which sees only what is committed."""
    db = connect(path)
    found = [number for (number,) in db.execute("SELECT number FROM numbers ORDER BY number")]
    db.close()
    return found


async def test_waiting_writes_share_one_commit_and_each_gets_its_own_result(writer: ObservedThread, tmp_path: Path):
    results = await writer.run_together(*(insert(number) for number in range(10)))
    assert results == list(range(10))
    assert writer.commits == 2  # the one that was held, and all that waited
    assert stored(tmp_path / "numbers.db") == list(range(10))


async def test_a_group_is_bounded(writer: ObservedThread):
    results = await writer.run_together(*(insert(number) for number in range(2 * GROUP_MAX)))
    assert results == list(range(2 * GROUP_MAX))
    assert writer.commits == 3


async def test_failed_write_is_rolled_back_alone(writer: ObservedThread, tmp_path: Path):
    def fail(db: sqlite3.Connection) -> None:
        db.execute("INSERT INTO numbers VALUES (77)")
        raise AlreadyExists("refused")

    results = await writer.run_together(insert(1), fail, insert(1), insert(2))
    assert [type(result) for result in results] == [int, AlreadyExists, StoreFailed, int]
    assert stored(tmp_path / "numbers.db") == [1, 2]


async def test_transaction_that_the_database_rolled_back_fails_all_its_writes(writer: ObservedThread, tmp_path: Path):
    def give_up(db: sqlite3.Connection) -> None:
        db.execute("ROLLBACK")  # as SQLite does by itself when the disk is full
        raise sqlite3.OperationalError("database or disk is full")

    results = await writer.run_together(insert(1), give_up, insert(2))
    assert [str(result) for result in results] == ["Catalog database failed: database or disk is full"] * 3
    assert stored(tmp_path / "numbers.db") == []
    assert await writer.run(insert(3)) == 3


async def test_preparation_runs_before_the_transaction_and_its_failure_fails_one_write(
    writer: ObservedThread, tmp_path: Path
):
    seen: list[list[int]] = []

    def look() -> None:
        seen.append(stored(tmp_path / "numbers.db"))

    def fail() -> None:
        raise StorageError("disk full")

    held = await writer.hold()
    prepared = (look, fail, None, look)
    waiting = [asyncio.ensure_future(writer.run(insert(number), prepare)) for number, prepare in enumerate(prepared)]
    await asyncio.sleep(0)
    writer.gate.set()
    await held
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(result) for result in results] == [int, StorageError, int, int]
    assert seen == [[], []]
    assert stored(tmp_path / "numbers.db") == [0, 2, 3]
    with pytest.raises(StorageError):
        await writer.run(insert(4), fail)
    assert stored(tmp_path / "numbers.db") == [0, 2, 3]


async def test_preparations_of_waiting_writes_run_in_parallel(writer: ObservedThread):
    meeting = threading.Barrier(2)

    def meet() -> None:
        meeting.wait(HELD_MAX_S)

    held = await writer.hold()
    waiting = [asyncio.ensure_future(writer.run(insert(number), meet)) for number in range(2)]
    await asyncio.sleep(0)
    writer.gate.set()
    await held
    assert await asyncio.gather(*waiting) == [0, 1]


async def test_write_of_a_cancelled_caller_is_made_nevertheless(writer: ObservedThread, tmp_path: Path):
    held = await writer.hold()
    gone = asyncio.ensure_future(writer.run(insert(1)))
    await asyncio.sleep(0)
    gone.cancel()
    writer.gate.set()
    await held
    assert await writer.run(insert(2)) == 2
    assert stored(tmp_path / "numbers.db") == [1, 2]
