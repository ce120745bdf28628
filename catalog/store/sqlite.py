"""SQLite: the schema, the connections, each with the one thread that uses it, and the group commit of writes.

One connection writes and one lists, each in its own thread: in WAL mode a read never waits for a writer's sync. A
third one looks up pointers and outcomes on the event loop, because a lookup takes microseconds, less than handing it
to a thread. Other processes may use the same file: the pointer swap compares in SQL, which is safe, if slow.

Every write is synced before it returns (synchronous=FULL). A write mostly waits for the disk, so writes are synced
together: the thread takes all that wait, runs each in its own savepoint, and commits them as one transaction. A write
that fails is rolled back alone. All futures are resolved after the COMMIT; if the COMMIT fails, all writes have failed.

    waiting: a b c  ->  BEGIN  [a: done]  [b: failed, rolled back]  [c: done]  COMMIT  ->  results of a, b, c

A write may come with blocking work that must precede it, such as the sync of a file. That work runs in the same
thread before the transaction begins, or in helper threads if several wait together: handing a result from one thread
to another takes nearly as long as the sync of a fast disk.

A new file gets the current schema at its first open. An existing file is only changed by `migrate`.
"""

from __future__ import annotations

import asyncio
import functools
import re
import sqlite3
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from lakefeed.catalog.errors import StoreFailed
from lakefeed.catalog.store.store import Operation, SqlSchema, Store

SCHEMA = SqlSchema(
    version=4,
    find="SELECT 1 FROM sqlite_schema WHERE name = 'catalog_schema'",
    create=(
        "CREATE TABLE catalog_schema (version INTEGER NOT NULL) STRICT",
        """CREATE TABLE namespaces (
            name TEXT NOT NULL PRIMARY KEY,
            parent TEXT NOT NULL,
            properties TEXT NOT NULL
        ) STRICT, WITHOUT ROWID""",
        "CREATE UNIQUE INDEX namespaces_by_parent ON namespaces (parent, name)",
        """CREATE TABLE entries (
            namespace TEXT NOT NULL REFERENCES namespaces (name),
            name TEXT NOT NULL,
            metadata_location TEXT NOT NULL,
            kind TEXT NOT NULL DEFAULT 'Table',
            digest TEXT NOT NULL DEFAULT '',
            table_uuid TEXT NOT NULL DEFAULT '',
            PRIMARY KEY (namespace, name)
        ) STRICT, WITHOUT ROWID""",
        """CREATE TABLE outcomes (
            idempotency_key TEXT NOT NULL PRIMARY KEY,
            fingerprint TEXT NOT NULL,
            outcome TEXT NOT NULL,
            recorded_ms INTEGER NOT NULL
        ) STRICT, WITHOUT ROWID""",
        "CREATE INDEX outcomes_by_time ON outcomes (recorded_ms)",
    ),
)

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


def connect(path: Path | str, *, check_same_thread: bool = True) -> sqlite3.Connection:
    """Open a connection whose transactions are explicit and whose writes are synced."""
    # isolation_level=None: the driver begins no transaction by itself.
    connection = sqlite3.connect(
        path, timeout=_BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=check_same_thread
    )
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


class SqliteStore(Store):
    """Names and pointers in one SQLite file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writer = GroupCommitThread("write")
        self._reader = ConnectionThread("read")
        self._lookups: sqlite3.Connection | None = None

    async def open(self) -> None:
        """Open the file, and create or check its schema."""
        await asyncio.to_thread(lambda: self._path.parent.mkdir(parents=True, exist_ok=True))
        await self._writer.open(self._path)
        await self._write(SCHEMA.open(migrate=False))
        await self._reader.open(self._path)
        self._lookups = connect(self._path)

    async def migrate(self) -> tuple[int, int]:
        """Bring the file to the current version."""
        await self._writer.open(self._path)
        try:
            return await self._write(SCHEMA.open(migrate=True)), SCHEMA.version
        finally:
            await self._writer.close()

    async def close(self) -> None:
        """Close the connections after running work."""
        if self._lookups is not None:
            self._lookups.close()
        await self._reader.close()
        await self._writer.close()

    async def _read(self, operation: Operation[_T]) -> _T:
        return await self._reader.run(lambda db: in_transaction(db, _running(operation), begin="BEGIN"))

    async def _look_up(self, operation: Operation[_T]) -> _T:
        assert self._lookups is not None, "store is not open"
        try:
            return _run(self._lookups, operation)
        except sqlite3.Error as error:
            raise store_failed(error) from error

    async def _write(
        self, operation: Operation[_T], prepare: Callable[[], None] | None = None, *, is_single: bool = False
    ) -> _T:
        del is_single  # every write needs a transaction here, because it is synced with others
        return await self._writer.run(_running(operation), prepare)


class MemoryStore(Store):
    """Names and pointers in a SQLite database in memory, for tests and simulations: nothing survives the process.

    No operation awaits anything, so each is one transaction, and no threads are involved. The database lives as long
    as this object, so that a catalog can be stopped and started on it.
    """

    def __init__(self) -> None:
        self._db = connect(":memory:", check_same_thread=False)
        weakref.finalize(self, self._db.close)
        in_transaction(self._db, _running(SCHEMA.open(migrate=False)))

    async def open(self) -> None:
        """Do nothing: the database is open."""

    async def migrate(self) -> tuple[int, int]:
        """Do nothing: a new database has the current schema."""
        return SCHEMA.version, SCHEMA.version

    async def close(self) -> None:
        """Do nothing: the database ends with this object."""

    async def _read(self, operation: Operation[_T]) -> _T:
        return in_transaction(self._db, _running(operation))

    async def _look_up(self, operation: Operation[_T]) -> _T:
        return await self._read(operation)

    async def _write(
        self, operation: Operation[_T], prepare: Callable[[], None] | None = None, *, is_single: bool = False
    ) -> _T:
        del is_single
        if prepare is not None:
            await asyncio.to_thread(prepare)
        return await self._read(operation)


def _running(operation: Operation[_T]) -> Callable[[sqlite3.Connection], _T]:
    return lambda db: _run(db, operation)


def _run(db: sqlite3.Connection, operation: Operation[_T]) -> _T:
    try:
        sql, parameters = next(operation)
        while True:
            if isinstance(parameters, list):
                rows = db.executemany(_translate(sql), parameters).fetchall()
            else:
                rows = db.execute(_translate(sql), parameters).fetchall()
            sql, parameters = operation.send(rows)
    except StopIteration as end:
        result: _T = end.value
        return result


@functools.cache  # the statements of store.py
def _translate(sql: str) -> str:
    """Return a statement of store.py for SQLite, which has no row locks, because it has one writer at a time."""
    return re.sub(r" FOR (UPDATE|KEY SHARE)$", "", sql).replace("$", "?")
