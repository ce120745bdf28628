"""Writes that share a sync: who goes together, and what happens to the others when one goes wrong."""

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


class WatchedLine(GroupCommitThread):
    """The real line, whose commits are counted and whose thread can be held."""

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
        """Have works wait behind one that is held, and let them go."""
        held = await self.hold()
        waiting = [asyncio.ensure_future(self.run(work)) for work in works]
        await asyncio.sleep(0)
        self.commits = 0
        self.gate.set()
        await held
        return await asyncio.gather(*waiting, return_exceptions=True)


@pytest_asyncio.fixture
async def line(tmp_path: Path) -> AsyncIterator[WatchedLine]:
    opened = WatchedLine()
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
    """Look from another connection, which sees only what is committed."""
    db = connect(path)
    found = [number for (number,) in db.execute("SELECT number FROM numbers ORDER BY number")]
    db.close()
    return found


async def test_writes_that_wait_share_one_commit_and_each_gets_its_own_answer(line: WatchedLine, tmp_path: Path):
    answers = await line.run_together(*(insert(number) for number in range(10)))
    assert answers == list(range(10))
    assert line.commits == 2  # the one that was held, and all that waited
    assert stored(tmp_path / "numbers.db") == list(range(10))


async def test_a_group_is_bounded(line: WatchedLine):
    answers = await line.run_together(*(insert(number) for number in range(2 * GROUP_MAX)))
    assert answers == list(range(2 * GROUP_MAX))
    assert line.commits == 3


async def test_what_one_write_did_before_it_failed_is_undone_alone(line: WatchedLine, tmp_path: Path):
    def fail(db: sqlite3.Connection) -> None:
        db.execute("INSERT INTO numbers VALUES (77)")
        raise AlreadyExists("refused")

    answers = await line.run_together(insert(1), fail, insert(1), insert(2))
    assert [type(answer) for answer in answers] == [int, AlreadyExists, StoreFailed, int]
    assert stored(tmp_path / "numbers.db") == [1, 2]


async def test_a_transaction_that_the_database_gave_up_fails_all_who_shared_it(line: WatchedLine, tmp_path: Path):
    def give_up(db: sqlite3.Connection) -> None:
        db.execute("ROLLBACK")  # as SQLite does by itself when the disk is full
        raise sqlite3.OperationalError("database or disk is full")

    answers = await line.run_together(insert(1), give_up, insert(2))
    assert [str(answer) for answer in answers] == ["Catalog database failed: database or disk is full"] * 3
    assert stored(tmp_path / "numbers.db") == []
    assert await line.run(insert(3)) == 3


async def test_what_has_to_be_done_first_is_done_before_the_transaction_and_fails_its_own_write_alone(
    line: WatchedLine, tmp_path: Path
):
    seen: list[list[int]] = []

    def look() -> None:
        seen.append(stored(tmp_path / "numbers.db"))

    def fail() -> None:
        raise StorageError("disk full")

    held = await line.hold()
    firsts = (look, fail, None, look)
    waiting = [asyncio.ensure_future(line.run(insert(number), first)) for number, first in enumerate(firsts)]
    await asyncio.sleep(0)
    line.gate.set()
    await held
    answers = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(answer) for answer in answers] == [int, StorageError, int, int]
    assert seen == [[], []]
    assert stored(tmp_path / "numbers.db") == [0, 2, 3]
    with pytest.raises(StorageError):
        await line.run(insert(4), fail)
    assert stored(tmp_path / "numbers.db") == [0, 2, 3]


async def test_what_those_who_wait_have_to_do_first_goes_on_at_once(line: WatchedLine):
    meeting = threading.Barrier(2)

    def meet() -> None:
        meeting.wait(HELD_MAX_S)

    held = await line.hold()
    waiting = [asyncio.ensure_future(line.run(insert(number), meet)) for number in range(2)]
    await asyncio.sleep(0)
    line.gate.set()
    await held
    assert await asyncio.gather(*waiting) == [0, 1]


async def test_a_write_whose_caller_has_gone_is_made_all_the_same(line: WatchedLine, tmp_path: Path):
    held = await line.hold()
    gone = asyncio.ensure_future(line.run(insert(1)))
    await asyncio.sleep(0)
    gone.cancel()
    line.gate.set()
    await held
    assert await line.run(insert(2)) == 2
    assert stored(tmp_path / "numbers.db") == [1, 2]
