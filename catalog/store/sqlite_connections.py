"""SQLite connections, each with the one thread that uses it, and the group commit of writes.

A write mostly waits for the disk, so writes are synced together: the thread takes all that wait, runs each in its own
savepoint, and commits them as one transaction. A write that fails is rolled back alone. All futures are resolved after
the COMMIT; if the COMMIT fails, all writes have failed.

    waiting: a b c  ->  BEGIN  [a: done]  [b: failed, rolled back]  [c: done]  COMMIT  ->  results of a, b, c

A write may come with blocking work that must precede it, such as the sync of a file. That work runs in the same
thread before the transaction begins, or in helper threads if several wait together: handing a result from one thread
to another takes nearly as long as the sync of a fast disk.
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

# How long to wait for a write of another process. This process has one writer, so its writes never collide.
_BUSY_TIMEOUT_S = 10.0
# Writes that share a sync. More would gain little and block the writes of other processes for longer.
GROUP_MAX = 64

# Syncs of files overlap; more threads than this only queue at the disk.
_HELPERS = 4

_T = TypeVar("_T")


def store_failed(error: sqlite3.Error) -> StoreFailed:
    """Return the error that clients see if the database fails."""
    return StoreFailed(f"Catalog database failed: {error}")


def connect(path: Path) -> sqlite3.Connection:
    """Open a connection whose transactions are explicit and whose writes are synced."""
    # isolation_level=None: the driver begins no transaction by itself.
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


class ConnectionThread:
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
        """Run work in the thread. Cancelling this does not stop the work.

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
    prepare: Callable[[], None] | None
    result: asyncio.Future[Any]


@dataclass(frozen=True, slots=True)
class _Outcome:
    value: Any = None
    error: Exception | None = None


class GroupCommitThread(ConnectionThread):
    """The connection that writes; all waiting writes go with the next commit."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._waiting: deque[_Write] = deque()
        self._helpers = ThreadPoolExecutor(_HELPERS, thread_name_prefix=f"catalog-sqlite-{name}-prepare")

    async def close(self) -> None:
        """Disconnect after running work."""
        await super().close()
        self._helpers.shutdown(wait=False)

    async def run(self, work: Callable[[sqlite3.Connection], _T], prepare: Callable[[], None] | None = None) -> _T:
        """Run `prepare`, then the work in a transaction, maybe with other writes; return after the sync.

        Cancelling this does not stop the work.

        Raises: StoreFailed, and what `prepare` and the work raise; nothing of the work has happened then.
        """
        loop = asyncio.get_running_loop()
        result: asyncio.Future[_T] = loop.create_future()
        self._waiting.append(_Write(work, prepare, result))
        # One call for each write: the first one takes all that wait, and the later ones may find nothing to do.
        self._executor.submit(self._commit_waiting, loop)
        return await result

    def _commit_waiting(self, loop: asyncio.AbstractEventLoop) -> None:
        group = [self._waiting.popleft() for _ in range(min(len(self._waiting), GROUP_MAX))]
        if group:
            failures = self._prepare([write.prepare for write in group])
            works = [
                write.work if failure is None else _raising(failure)
                for write, failure in zip(group, failures, strict=True)
            ]
            outcomes = _commit_together(self._opened(), works)
            loop.call_soon_threadsafe(_resolve, group, outcomes)

    def _prepare(self, works: Sequence[Callable[[], None] | None]) -> list[Exception | None]:
        """Run the work that precedes each write; return the error of each, or None."""
        is_alone = len(works) - works.count(None) <= 1
        return list(map(_error_of, works) if is_alone else self._helpers.map(_error_of, works))


def _error_of(work: Callable[[], None] | None) -> Exception | None:
    try:
        if work is not None:
            work()
    except Exception as error:  # noqa: BLE001 - raised to the caller of this write, on the event loop
        return error
    return None


def _raising(error: Exception) -> Callable[[sqlite3.Connection], None]:
    def work(_db: sqlite3.Connection) -> None:
        raise error

    return work


def _commit_together(db: sqlite3.Connection, works: Sequence[Callable[[sqlite3.Connection], Any]]) -> list[_Outcome]:
    try:
        if len(works) == 1:
            return [_Outcome(in_transaction(db, works[0]))]
        return in_transaction(db, lambda _: [_run_in_savepoint(db, work) for work in works])
    except Exception as error:  # noqa: BLE001 - raised to all callers, on the event loop
        return [_Outcome(error=error)] * len(works)


def _run_in_savepoint(db: sqlite3.Connection, work: Callable[[sqlite3.Connection], Any]) -> _Outcome:
    """Run one write so that its failure rolls back this write alone.

    Raises: sqlite3.Error if SQLite has rolled back the whole transaction, as it does when the disk is full.
    """
    db.execute("SAVEPOINT one")
    try:
        outcome = _Outcome(work(db))
    except Exception as error:  # raised to the caller of this write, on the event loop
        if not db.in_transaction:
            raise
        db.execute("ROLLBACK TO one")
        outcome = _Outcome(error=error)
    db.execute("RELEASE one")
    return outcome


def _resolve(group: Sequence[_Write], outcomes: Sequence[_Outcome]) -> None:
    for write, outcome in zip(group, outcomes, strict=True):
        if write.result.cancelled():
            continue
        if outcome.error is None:
            write.result.set_result(outcome.value)
        elif isinstance(outcome.error, sqlite3.Error):
            failed = store_failed(outcome.error)
            failed.__cause__ = outcome.error
            write.result.set_exception(failed)
        else:
            write.result.set_exception(outcome.error)
