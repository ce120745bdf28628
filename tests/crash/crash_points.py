"""Crash points: the named steps of the service at which a test kills its process with SIGKILL.

The product has no seam for this. The function that a crash point names is wrapped in the process under test: its n-th
call ends in SIGKILL, before or after the real work. Calls count from the process's first append to the log, so that
every crash happens while a client pushes changes; some parts count from the start of the process.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.lakefeed_process import run_main


def _always(*_: Any, **_named: Any) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class CrashPoint:
    """A moment before or after a call. `only` selects calls by their arguments.

    `calls_max` is how many such calls every process makes.
    """

    where: str
    moment: str
    only: Callable[..., bool] = _always
    calls_max: int = 3


def _before(where: str, **options: Any) -> CrashPoint:
    return CrashPoint(where, "before", **options)


def _after(where: str, **options: Any) -> CrashPoint:
    return CrashPoint(where, "after", **options)


def _to(suffix: str) -> Callable[..., bool]:
    return lambda _files, _source, target: target.name.endswith(suffix)


def _named(*marks: str) -> Callable[..., bool]:
    return lambda _store, location, _data: all(mark in location for mark in marks)


def _has_rows(_client: Any, _name: Any, request: Any, **_: Any) -> bool:
    return any(update["action"] == "add-snapshot" for update in request.updates)


def _removes_snapshots(_client: Any, _name: Any, request: Any, **_: Any) -> bool:
    return any(update["action"] == "remove-snapshots" for update in request.updates)


def _reaches_applier(_backlog: Any, offset: int, **at: int) -> bool:
    return offset == at["applied_offset"]


def _is_live(backlog: Any, *_: Any, **_at: int) -> bool:
    return backlog.resume_offset is None


# A thread other than the event loop's waits this long before it kills the process, so that a reply that was sent too
# early reaches its client.
KILL_DELAY_S = 0.05

# Processes that are killed during expiry look for old snapshots this often.
EXPIRY_LOOK_EVERY_SNAPSHOTS = 2

# The data files of this table cannot be written until its rows are evicted.
STUCK_TABLE = "/events-"

FIRST_APPEND = "lakefeed.writer.wal.log:FileLog.append"

# In the order of docs/invariants.md. A test goes through the crash points of one part on the same data.
CRASH_POINTS: dict[str, dict[str, CrashPoint]] = {
    "intake": {
        "group decided": _after("lakefeed.ingest.intake.dedup:Dedup.decide"),
        "before the group is written": _before("lakefeed.writer.wal.log:write_all"),
        "group written": _after("lakefeed.writer.wal.log:write_all"),
        "group synced, not recorded": _after(FIRST_APPEND),
        "group recorded, not answered": _before("lakefeed.ingest.intake.intake:Intake._resolve"),
        "group answered, acks not sent": _after("lakefeed.ingest.intake.intake:Intake._resolve"),
    },
    "rotation": {
        "spare created, not filled": _before("lakefeed.writer.wal.directory:allocate_zeros", calls_max=1),
        "header synced": _before("lakefeed.writer.wal.directory:Filesystem.rename", only=_to(".wal"), calls_max=2),
        "spare renamed": _after("lakefeed.writer.wal.directory:LogDirectory.begin", calls_max=2),
        "name synced, before the first record": _after(
            "lakefeed.writer.wal.directory:LogDirectory.sync_names", calls_max=2
        ),
    },
    "trim": {
        "before the segment is retired": _before("lakefeed.writer.wal.directory:LogDirectory.retire", calls_max=2),
        "segment renamed to a spare": _after(
            "lakefeed.writer.wal.directory:Filesystem.rename", only=_to(".spare"), calls_max=2
        ),
        "segment retired": _after("lakefeed.writer.wal.log:FileLog._retire_oldest", calls_max=2),
    },
    "flush": {
        "namespace created": _after("lakefeed.writer.commit.rest_catalog:CatalogClient.ensure_namespace", calls_max=1),
        "table's first metadata written": _before(
            "lakefeed.catalog.store.sqlite:SqliteStore.create_entry", calls_max=1
        ),
        "table created": _after("lakefeed.writer.commit.rest_catalog:CatalogClient.create_table", calls_max=1),
        "buffer taken": _after("lakefeed.writer.tables.pending:Pending.take"),
        "schema committed": _after("lakefeed.writer.commit.committer:Committer.commit_schema"),
        "first data file written": _after("lakefeed.storage.local:LocalStore.write", only=_named("-00000.parquet")),
        "second data file written": _after("lakefeed.storage.local:LocalStore.write", only=_named("-00001.parquet")),
        "manifest written": _after(
            "lakefeed.storage.local:LocalStore.write", only=_named("/metadata/lakefeed-", ".avro")
        ),
        "manifest list written": _after(
            "lakefeed.storage.local:LocalStore.write", only=_named("/metadata/snap-", ".avro")
        ),
    },
    "commit": {
        "before the request": _before("lakefeed.writer.commit.rest_catalog:CatalogClient.commit_table", only=_has_rows),
        "metadata file written, pointer not swapped": _before("lakefeed.catalog.store.store:_swap_pointer"),
        "pointer swapped, transaction open": _after("lakefeed.catalog.store.store:_swap_pointer"),
        "pointer swapped, not answered": _after("lakefeed.catalog.store.sqlite:SqliteStore.swap_pointer"),
        "answered, log not trimmed": _after("lakefeed.writer.commit.committer:Committer.commit_all"),
    },
    "transaction": {
        "buffers of all tables taken": _after("lakefeed.writer.tables.rounds:FlushRounds._take", calls_max=2),
        "files of all tables written": _before("lakefeed.writer.commit.committer:Committer.commit_all"),
        "before the transaction request": _before(
            "lakefeed.writer.commit.rest_catalog:CatalogClient.commit_transaction"
        ),
        "first pointer swapped, transaction open": _after("lakefeed.catalog.store.store:_swap_pointer"),
        "all pointers swapped, not answered": _after("lakefeed.catalog.store.sqlite:SqliteStore.move_pointers"),
        "answered, no table updated": _after("lakefeed.writer.commit.rest_catalog:CatalogClient.commit_transaction"),
        "first table updated": _after("lakefeed.writer.tables.table:TableWriter.finish_flush"),
    },
    "layout": {
        "before the partitions are changed": _before("lakefeed.writer.commit.committer:Committer.commit_layout"),
        "partitions changed, no rows written": _after("lakefeed.writer.commit.committer:Committer.commit_layout"),
    },
    "expiry": {
        "before the removal request": _before(
            "lakefeed.writer.commit.rest_catalog:CatalogClient.commit_table", only=_removes_snapshots
        ),
        "snapshots removed, nothing deleted": _after(
            "lakefeed.writer.commit.rest_catalog:CatalogClient.commit_table", only=_removes_snapshots
        ),
        "some metadata files deleted": _after("lakefeed.storage.local:LocalStore.delete"),
    },
    "eviction": {
        "rows evicted": _after("lakefeed.writer.tables.pending:LogBacklog.evict_to", calls_max=1),
        "changes skipped while evicted": _after("lakefeed.writer.tables.pending:LogBacklog.pass_by"),
        "changes reread, not committed": _after("lakefeed.writer.tables.pending:LogBacklog.reread"),
        "before the table is live again": _before(
            "lakefeed.writer.tables.pending:LogBacklog.advance", only=_reaches_applier, calls_max=1
        ),
        "table is live again": _after("lakefeed.writer.tables.pending:LogBacklog.advance", only=_is_live, calls_max=1),
    },
    "startup": {
        "before the torn tail is cut off": _before(
            "lakefeed.writer.wal.directory:LogDirectory._recover_records", calls_max=1
        ),
        "log opened": _after("lakefeed.ingest.intake.intake:load_source_state", calls_max=1),
    },
}


# These are reached before a client can push: a start opens the log, and changes the layout of tables that have changes
# in the log.
COUNTED_FROM_THE_START = ("startup", "layout")


def crash_message(part: str, name: str) -> str:
    """Return what the process writes to standard error before it is killed."""
    return f"killed at: {part}: {name}"


def crash_at(part: str, name: str, nth: int, arguments: list[str]) -> None:
    """Run the command line, and kill the process at the n-th call of a crash point."""
    _Crash(part, name, nth).install()
    if part == "eviction":
        _StuckTable().install()
    if part == "expiry":
        importlib.import_module("lakefeed.writer.commit.expiry").LOOK_EVERY_SNAPSHOTS = EXPIRY_LOOK_EVERY_SNAPSHOTS
    run_main(arguments)


def crash_at_first_call(moment: str, where: str, arguments: list[str]) -> None:
    """Run the command line, and kill the process `before` or `after` its first call of a function."""

    def kill(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    _wrap(where, before=kill if moment == "before" else _ignore, after=kill if moment == "after" else _ignore)
    run_main(arguments)


class _Crash:
    """Counts the calls of a crash point, and kills the process at the n-th."""

    def __init__(self, part: str, name: str, nth: int) -> None:
        self._point = CRASH_POINTS[part][name]
        self._message = crash_message(part, name)
        self._calls_left = nth
        self._is_counting = part in COUNTED_FROM_THE_START

    def install(self) -> None:
        _wrap(
            self._point.where,
            before=functools.partial(self._count, "before"),
            after=functools.partial(self._count, "after"),
        )
        # The outermost wrapper: the first append itself is not counted.
        _wrap(FIRST_APPEND, before=_ignore, after=self._start_counting)

    def _start_counting(self, *_: Any) -> None:
        self._is_counting = True

    def _count(self, moment: str, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        if moment != self._point.moment or not self._is_counting or not self._point.only(*args, **named):
            return
        self._calls_left -= 1
        if self._calls_left == 0:
            time.sleep(KILL_DELAY_S)
            os.write(sys.stderr.fileno(), f"{self._message}\n".encode())
            os.kill(os.getpid(), signal.SIGKILL)


class _StuckTable:
    """Makes the store refuse one table's data files until the table is evicted, so that the table has to catch up."""

    def __init__(self) -> None:
        self._is_evicted = False

    def install(self) -> None:
        _wrap("lakefeed.storage.local:LocalStore.write", before=self._refuse, after=_ignore)
        _wrap("lakefeed.writer.tables.pending:LogBacklog.evict_to", before=_ignore, after=self._evicted)

    def _refuse(self, args: tuple[Any, ...], _named: dict[str, Any]) -> None:
        from lakefeed.contract.errors import StorageError  # noqa: PLC0415 - only the process under test needs it

        if not self._is_evicted and STUCK_TABLE in args[1] and args[1].endswith(".parquet"):
            raise StorageError(f"store is down: location={args[1]}")

    def _evicted(self, *_: Any) -> None:
        self._is_evicted = True


Hook = Callable[[tuple[Any, ...], dict[str, Any]], None]


def _ignore(*_: Any) -> None:
    pass


def _wrap(where: str, *, before: Hook, after: Hook) -> None:
    module, _, path = where.partition(":")
    *owners, name = path.split(".")
    owner = functools.reduce(getattr, owners, importlib.import_module(module))
    original = getattr(owner, name)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        before(args, kwargs)
        result = original(*args, **kwargs)
        after(args, kwargs)
        return result

    @functools.wraps(original)
    async def call_async(*args: Any, **kwargs: Any) -> Any:
        before(args, kwargs)
        result = await original(*args, **kwargs)
        after(args, kwargs)
        return result

    @functools.wraps(original)
    def call_generator(*args: Any, **kwargs: Any) -> Any:
        before(args, kwargs)
        result = yield from original(*args, **kwargs)
        after(args, kwargs)
        return result

    if inspect.isgeneratorfunction(original):
        setattr(owner, name, call_generator)
    else:
        setattr(owner, name, call_async if inspect.iscoroutinefunction(original) else call)
