"""The service with a death sentence: runs `lakefeed` as it is, and kills the process at a named step of its work.

    python dying_service.py PART STEP NTH serve --data-dir=...

The product has no seam for this: the function that a step names is wrapped here, from outside, so that its NTH call
ends in SIGKILL, before or after the real work. Calls count from the process's first append to the log on, so that
every death meets changes that a client has just pushed; those of some parts count from the start.
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
from pathlib import Path
from typing import Any


def _always(*_: Any, **_named: Any) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Step:
    """A moment of the service's life: before or after a call, of which `only` chooses some by their arguments.

    `calls_max` is how many such calls one process is sure to make.
    """

    where: str
    dies: str
    only: Callable[..., bool] = _always
    calls_max: int = 3


def _before(where: str, **options: Any) -> Step:
    return Step(where, "before", **options)


def _after(where: str, **options: Any) -> Step:
    return Step(where, "after", **options)


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


LAST_WORDS_S = 0.05

# How often a process that is to die there looks for old snapshots.
EXPIRY_LOOK_EVERY_SNAPSHOTS = 2

# What is in the way of one table while the process is to die over it: its data files cannot be written before its rows
# have left memory.
STUCK_TABLE = "/events-"

FIRST_APPEND = "lakefeed.writer.wal.log:FileLog.append"

# In the order of docs/invariants.md. Steps of one part are died at one after the other, on the same data.
STEPS: dict[str, dict[str, Step]] = {
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
        "segment retired": _after("lakefeed.writer.wal.directory:LogDirectory.retire", calls_max=2),
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
    "together": {
        "buffers of all tables taken": _after("lakefeed.writer.tables.rounds:FlushRounds._take", calls_max=2),
        "files of all tables written": _before("lakefeed.writer.commit.committer:Committer.commit_all"),
        "before the one request": _before("lakefeed.writer.commit.rest_catalog:CatalogClient.commit_transaction"),
        "first pointer swapped, transaction open": _after("lakefeed.catalog.store.store:_swap_pointer"),
        "all pointers swapped, not answered": _after("lakefeed.catalog.store.sqlite:SqliteStore.move_pointers"),
        "answered, tables not told": _after("lakefeed.writer.commit.rest_catalog:CatalogClient.commit_transaction"),
        "first table told": _after("lakefeed.writer.tables.table:TableWriter.finish_flush"),
    },
    "layout": {
        "before the partitions are changed": _before("lakefeed.writer.commit.committer:Committer.commit_layout"),
        "partitions changed, no rows written": _after("lakefeed.writer.commit.committer:Committer.commit_layout"),
    },
    "expiry": {
        "before the removal is asked for": _before(
            "lakefeed.writer.commit.rest_catalog:CatalogClient.commit_table", only=_removes_snapshots
        ),
        "snapshots removed, nothing deleted": _after(
            "lakefeed.writer.commit.rest_catalog:CatalogClient.commit_table", only=_removes_snapshots
        ),
        "some metadata files deleted": _after("lakefeed.storage.local:LocalStore.delete"),
    },
    "eviction": {
        "rows left memory": _after("lakefeed.writer.tables.pending:LogBacklog.evict_to", calls_max=1),
        "changes passed by": _after("lakefeed.writer.tables.pending:LogBacklog.pass_by"),
        "changes read again, not committed": _after("lakefeed.writer.tables.pending:LogBacklog.reread"),
        "before the table is live again": _before(
            "lakefeed.writer.tables.pending:LogBacklog.advance", only=_reaches_applier, calls_max=1
        ),
        "table is live again": _after("lakefeed.writer.tables.pending:LogBacklog.advance", only=_is_live, calls_max=1),
    },
    "start": {
        "before the torn tail is cut off": _before(
            "lakefeed.writer.wal.directory:LogDirectory._recover_records", calls_max=1
        ),
        "log opened": _after("lakefeed.ingest.intake.intake:load_source_state", calls_max=1),
    },
}


# A start looks at the tables of the changes it finds in the log, and changes their layout, before a client can push.
COUNTED_FROM_THE_START = ("start", "layout")


def last_words(part: str, name: str) -> str:
    """Tell what the process writes to standard error before it dies."""
    return f"killed at: {part}: {name}"


class Sentence:
    """Waits for the call that the process is to die at."""

    def __init__(self, part: str, name: str, nth: int) -> None:
        self._step = STEPS[part][name]
        self._words = last_words(part, name)
        self._calls_left = nth
        self._counts = part in COUNTED_FROM_THE_START

    def arm(self) -> None:
        """Count from now on."""
        self._counts = True

    def maybe_die(self, moment: str, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        """End the process if this is the call."""
        if moment != self._step.dies or not self._counts or not self._step.only(*args, **named):
            return
        self._calls_left -= 1
        if self._calls_left == 0:
            # Where another thread than the event loop's dies here, whatever is told too early has time to get out.
            time.sleep(LAST_WORDS_S)
            os.write(sys.stderr.fileno(), f"{self._words}\n".encode())
            os.kill(os.getpid(), signal.SIGKILL)

    def wrap(self) -> None:
        """Put the sentence around the step's function, and around the first append."""
        _wrap(self._step.where, functools.partial(self.maybe_die, "before"), functools.partial(self.maybe_die, "after"))
        # Outermost: a death at the first append itself comes with the second one.
        _wrap(FIRST_APPEND, lambda *_: None, lambda *_: self.arm())


class Obstacle:
    """Keeps one table from being written for a while, so that it is evicted and has to catch up."""

    def __init__(self) -> None:
        self._is_gone = False

    def maybe_refuse(self, args: tuple[Any, ...], _named: dict[str, Any]) -> None:
        """Fail as a store does that is down for one table."""
        from lakefeed.contract.errors import StorageError  # noqa: PLC0415 - not needed by those who only want the list

        if not self._is_gone and STUCK_TABLE in args[1] and args[1].endswith(".parquet"):
            raise StorageError(f"store is down: location={args[1]}")

    def wrap(self) -> None:
        """Stand in the way of the store, until the table is evicted."""
        _wrap("lakefeed.storage.local:LocalStore.write", self.maybe_refuse, lambda *_: None)
        _wrap("lakefeed.writer.tables.pending:LogBacklog.evict_to", lambda *_: None, lambda *_: self._go())

    def _go(self) -> None:
        self._is_gone = True


Spy = Callable[[tuple[Any, ...], dict[str, Any]], None]


def _wrap(where: str, before: Spy, after: Spy) -> None:
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


def command(part: str, name: str, nth: int) -> list[str]:
    """Build the command that runs the service until it dies at a step."""
    return [sys.executable, str(Path(__file__)), part, name, str(nth)]


def main() -> None:
    """Run the command line under the sentence."""
    part, name, nth, *arguments = sys.argv[1:]
    Sentence(part, name, int(nth)).wrap()
    if part == "eviction":
        Obstacle().wrap()
    if part == "expiry":
        importlib.import_module("lakefeed.writer.commit.expiry").LOOK_EVERY_SNAPSHOTS = EXPIRY_LOOK_EVERY_SNAPSHOTS
    from lakefeed.ingest.cli.main import main as lakefeed  # noqa: PLC0415 - not needed by those who only want the list

    lakefeed(arguments)


if __name__ == "__main__":
    main()
