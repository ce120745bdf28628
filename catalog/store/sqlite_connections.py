"""Connections to a SQLite file, each with the one thread that uses it. Owns transactions, and who shares a sync.

A write is mostly waiting for the disk, so writes wait together: the thread takes all that are there, runs each in a
savepoint of its own, and commits them as one. What goes wrong in one is rolled back alone; all are answered after the
COMMIT, and if that fails, all have failed.

    waiting: a b c  ->  BEGIN  [a: done]  [b: refused, rolled back]  [c: done]  COMMIT  ->  answers: a b c

A write may have something to do first that blocks as well, such as a file to sync. That is done in the same thread, or
beside it for those who wait together, before the transaction begins: handing a result from thread to thread takes
nearly as long as the sync of a fast disk.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from lakefeed.catalog.errors import StoreFailed

# How long to wait for another process that writes; ours never collide, having one writer.
_BUSY_TIMEOUT_S = 10.0
# Writes that share a sync. More would win little and keep other processes from writing for longer.
GROUP_MAX = 64

# Syncs of files overlap; more threads than this only queue at the disk.
_HELPERS = 4

_T = TypeVar("_T")


def store_failed(error: sqlite3.Error) -> StoreFailed:
    """Say that the database failed, in the words that clients see."""
    return StoreFailed(f"Catalog database failed: {error}")


def connect(path: Path) -> sqlite3.Connection:
    """Open a connection whose transactions are explicit and whose writes are synced."""
    # autocommit off the driver's hands: transactions below are explicit. The thread check stays on.
    connection = sqlite3.connect(path, timeout=_BUSY_TIMEOUT_S, isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA foreign_keys = ON")
    return connection


def in_transaction(
    db: sqlite3.Connection, work: Callable[[sqlite3.Connection], _T], *, begin: str = "BEGIN IMMEDIATE"
) -> _T:
    """Run work in a transaction of its own."""
    db.execute(begin)
    try:
        result = work(db)
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise
    return result


class Line:
    """One connection and the only thread that uses it."""

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=f"catalog-sqlite-{name}")
        self._connection: sqlite3.Connection | None = None

    async def open(self, path: Path) -> None:
        """Connect."""
        self._connection = await self._in_thread(lambda: connect(path))

    async def close(self) -> None:
        """Disconnect after running work."""
        if self._connection is not None:
            await self._in_thread(self._connection.close)
        self._executor.shutdown(wait=False)

    async def run(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        """Run work in the thread. Cancelling this leaves the work going on to its end.

        Raises: StoreFailed, and what the work raises.
        """
        return await self._in_thread(lambda: work(self._opened()))

    def _opened(self) -> sqlite3.Connection:
        assert self._connection is not None, "store is not open"
        return self._connection

    async def _in_thread(self, work: Callable[[], _T]) -> _T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, work)
        except sqlite3.Error as error:
            raise store_failed(error) from error


@dataclass(frozen=True, slots=True)
class _Write:
    work: Callable[[sqlite3.Connection], Any]
    first: Callable[[], None] | None
    answer: asyncio.Future[Any]


@dataclass(frozen=True, slots=True)
class _Result:
    value: Any = None
    error: Exception | None = None


class WriteLine(Line):
    """The line of those who write: whoever waits goes with the next commit."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._waiting: deque[_Write] = deque()
        self._helpers = ThreadPoolExecutor(_HELPERS, thread_name_prefix=f"catalog-sqlite-{name}-first")

    async def close(self) -> None:
        """Disconnect after running work."""
        await super().close()
        self._helpers.shutdown(wait=False)

    async def run(self, work: Callable[[sqlite3.Connection], _T], first: Callable[[], None] | None = None) -> _T:
        """Do what is to be done first, then run work in a transaction, maybe with others; return after the sync.

        Cancelling this leaves the work going on to its end.

        Raises: StoreFailed, and what `first` and the work raise; nothing of the work has happened then.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[_T] = loop.create_future()
        self._waiting.append(_Write(work, first, answer))
        # One call for each write: whichever comes first takes them all, and the later ones find nothing left to do.
        self._executor.submit(self._commit_waiting, loop)
        return await answer

    def _commit_waiting(self, loop: asyncio.AbstractEventLoop) -> None:
        group = [self._waiting.popleft() for _ in range(min(len(self._waiting), GROUP_MAX))]
        if group:
            failures = self._do_first([write.first for write in group])
            works = [
                write.work if failure is None else _raising(failure)
                for write, failure in zip(group, failures, strict=True)
            ]
            results = _commit_together(self._opened(), works)
            loop.call_soon_threadsafe(_answer, group, results)

    def _do_first(self, firsts: Sequence[Callable[[], None] | None]) -> list[Exception | None]:
        """Do what has to be done first; return, for each, what went wrong."""
        is_alone = len(firsts) - firsts.count(None) <= 1
        return list(map(_failure_of, firsts) if is_alone else self._helpers.map(_failure_of, firsts))


def _failure_of(first: Callable[[], None] | None) -> Exception | None:
    try:
        if first is not None:
            first()
    except Exception as error:  # noqa: BLE001 - goes to whoever waits for this write, on the event loop
        return error
    return None


def _raising(error: Exception) -> Callable[[sqlite3.Connection], None]:
    def work(_db: sqlite3.Connection) -> None:
        raise error

    return work


def _commit_together(db: sqlite3.Connection, works: Sequence[Callable[[sqlite3.Connection], Any]]) -> list[_Result]:
    try:
        if len(works) == 1:
            return [_Result(in_transaction(db, works[0]))]
        return in_transaction(db, lambda _: [_run_apart(db, work) for work in works])
    except Exception as error:  # noqa: BLE001 - goes to all who wait, on the event loop
        return [_Result(error=error)] * len(works)


def _run_apart(db: sqlite3.Connection, work: Callable[[sqlite3.Connection], Any]) -> _Result:
    """Run one work so that its failure undoes it alone.

    Raises: sqlite3.Error if SQLite has undone the whole transaction, as it does when the disk is full.
    """
    db.execute("SAVEPOINT one")
    try:
        result = _Result(work(db))
    except Exception as error:  # goes to whoever waits for this work, on the event loop
        if not db.in_transaction:
            raise
        db.execute("ROLLBACK TO one")
        result = _Result(error=error)
    db.execute("RELEASE one")
    return result


def _answer(group: Sequence[_Write], results: Sequence[_Result]) -> None:
    for write, result in zip(group, results, strict=True):
        if write.answer.cancelled():
            continue
        if result.error is None:
            write.answer.set_result(result.value)
        elif isinstance(result.error, sqlite3.Error):
            failed = store_failed(result.error)
            failed.__cause__ = result.error
            write.answer.set_exception(failed)
        else:
            write.answer.set_exception(result.error)
