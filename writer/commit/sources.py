"""Where sources resume by what the tables say. Owns reading it from every table, and what it says together.

For those whose log does not know a source, because it is new or was lost. Every commit says up to where its sources
were complete in all tables then (progress.py); that stays true, so of all tables the *highest* counts. It may be lower
than what is committed by now, so more may come again than is missing, and tables drop what they have.

The newest epoch that any table knows is the one that goes on. If something of an earlier one was not committed yet,
nothing of the newest is known to be complete: the source sends that epoch from its beginning.

Where no table has such a word, versions before it have written all of them. Then of a source the *lowest* mark counts,
in its newest epoch, which passes over what belongs to a table that has no mark of it yet.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from lakefeed.aio import map_parallel
from lakefeed.contract.changes import Position, SourceId, TableName
from lakefeed.contract.consumers import describe_consumers
from lakefeed.contract.errors import CatalogError, CatalogUnavailable, TableMissing
from lakefeed.contract.progress import PROGRESS_PROPERTY, Progress, ProgressUnreadable, progress_from_text
from lakefeed.contract.properties import is_own_mark
from lakefeed.writer.commit.rest_catalog import CatalogClient

# --- writer.iceberg.table_marks ---------------------------------------------------------------------------------------


logger = logging.getLogger(__name__)

# Half of the client's connections: commits go on while the tables are read.
PARALLEL_REQUESTS = 8

# Below every sequence.
_BEFORE_ALL = -1

T = TypeVar("T")


async def load_resume_positions(catalog: CatalogClient) -> dict[SourceId, Position]:
    """Read what all tables of a catalog say of their sources, and join it. Cancelling it changes nothing.

    Raises: CatalogUnavailable.
    """
    started = time.monotonic()
    turns = asyncio.Semaphore(PARALLEL_REQUESTS)
    namespaces = await catalog.list_namespaces()
    listed = await _all(_list_tables(catalog, namespace, turns) for namespace in namespaces)
    names = [name for names in listed for name in names]
    logger.info("table_marks_begun", extra={"tables": len(names), "namespaces": len(namespaces)})
    found = await _all(_load_progress(catalog, name, turns) for name in names)
    positions = resume_positions(found)
    facts = {
        "tables": len(names),
        "with_marks": sum(bool(progress.sources) for progress in found),
        "sources": len(positions),
        "seconds": round(time.monotonic() - started, 3),
    }
    logger.info("table_marks_read", extra=facts)
    return positions


def resume_positions(tables: Iterable[Progress]) -> dict[SourceId, Position]:
    """Join what tables say: per source, in its newest epoch, up to where it is complete."""
    lowest: dict[SourceId, Position] = {}
    complete: dict[SourceId, Position] = {}
    for progress in tables:
        for source, mark in progress.sources.items():
            if not is_own_mark(source):
                lowest[source] = _lower_of_newest(lowest.get(source, mark), mark)
        for source, position in progress.complete.items():
            complete[source] = max(position, complete.get(source, position))
    return {source: _resume_at(lowest.get(source), complete.get(source)) for source in lowest | complete}


def _lower_of_newest(known: Position, mark: Position) -> Position:
    return min(known, mark) if mark.epoch == known.epoch else max(known, mark)


def _resume_at(lowest: Position | None, complete: Position | None) -> Position:
    if lowest is not None and (complete is None or lowest.epoch > complete.epoch):
        return lowest if complete is None else Position(lowest.epoch, _BEFORE_ALL)
    assert complete is not None
    return complete


async def _all(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Await all; the first error ends the others and is raised by itself."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except* CatalogError as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


async def _list_tables(catalog: CatalogClient, namespace: tuple[str, ...], turns: asyncio.Semaphore) -> list[TableName]:
    async with turns:
        try:
            return await catalog.list_tables(namespace)
        except TableMissing:  # dropped meanwhile
            return []


async def _load_progress(catalog: CatalogClient, name: TableName, turns: asyncio.Semaphore) -> Progress:
    async with turns:
        try:
            properties = await catalog.load_table_properties(name)
            return progress_from_text(properties.get(PROGRESS_PROPERTY))
        except TableMissing:  # dropped meanwhile
            return Progress()
        except CatalogUnavailable:
            raise
        except (CatalogError, ProgressUnreadable) as error:  # a table of somebody else, or one that has to be looked at
            logger.warning("table_marks_unreadable", extra={"table": str(name), "error": str(error)})
            return Progress()


# --- writer.consumer_watch --------------------------------------------------------------------------------------------
#
# Where the consumers of all tables stand, for /status. Owns looking: rarely, not for long, and only when asked.
#
#     /status asks --> looked within the last seconds: what is known
#                  --> else: list the tables; load the refs of those looked at longest ago; what is known then
#
# A look is cut short by its time limit, and the next one goes on with the tables that this one did not come to. So a
# catalog that is slow, away or has very many tables makes the answer older, and never /status late.


_log = logging.getLogger(__name__)

# What is younger is shown as it is: whoever asks every second costs the catalog nothing more.
LOOK_EVERY_S = 10.0
# How late /status may become by it.
LOOK_MAX_S = 2.0
# Loads of one look: a fraction of a second of the catalog's time.
TABLES_PER_LOOK = 200
# Fewer than the client's connections: commits go on meanwhile.
CONSUMER_WATCH_PARALLEL_REQUESTS = 4


@dataclass(slots=True)
class _Seen:
    """A table's consumers as they were at a moment; never looked at where that is 0."""

    at: float = 0.0
    document: Any = None


class ConsumerWatch:
    """The consumers of one catalog's tables, as last seen."""

    def __init__(self, catalog: CatalogClient, *, clock: Callable[[], float]) -> None:
        self._catalog = catalog
        self._clock = clock
        self._looked_at = 0.0
        self._tables: dict[TableName, _Seen] = {}
        self._turn = asyncio.Lock()

    async def describe(self) -> list[dict[str, Any]]:
        """Describe all consumers, by table and name. Cancelling it changes nothing. Never raises for the catalog."""
        async with self._turn:
            if self._clock() - self._looked_at >= LOOK_EVERY_S:
                await self._look()
        now = self._clock()
        return [
            {"table": str(name), **described, "seenSecondsAgo": round(now - seen.at, 3)}
            for name, seen in sorted(self._tables.items())
            if seen.document is not None
            for described in describe_consumers(seen.document, now_ms=int(now * 1000))
        ]

    async def _look(self) -> None:
        try:
            async with asyncio.timeout(LOOK_MAX_S):
                await self._list()
                oldest = sorted(self._tables, key=lambda name: self._tables[name].at)[:TABLES_PER_LOOK]
                await map_parallel(self._load, oldest, at_once=CONSUMER_WATCH_PARALLEL_REQUESTS)
        except (CatalogError, TimeoutError) as error:
            _log.warning("consumers_not_seen", extra={"reason": str(error) or "timed out"})
        self._looked_at = self._clock()

    async def _list(self) -> None:
        """Find out which tables there are."""
        names = set()
        for namespace in await self._catalog.list_namespaces():
            try:
                names |= set(await self._catalog.list_tables(namespace))
            except TableMissing:  # dropped meanwhile
                continue
        self._tables = {name: self._tables.get(name, _Seen()) for name in names}

    async def _load(self, name: TableName) -> None:
        try:
            document = (await self._catalog.load_refs(name)).document
        except TableMissing:  # dropped meanwhile
            self._tables.pop(name, None)
            return
        # Only what is needed to describe them: a schema can be large.
        kept = {key: document.get(key) for key in ("refs", "snapshots")}
        self._tables[name] = _Seen(self._clock(), kept if len(kept["refs"] or ()) > 1 else None)
