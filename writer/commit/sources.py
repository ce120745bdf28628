"""Sources and consumers of all tables of a catalog: where sources resume, and how far consumers have read.

Resume positions are for a node whose log does not know a source, because the source is new there or the log was lost.
Every commit records up to where its sources were complete in all tables at that time (contract/progress.py). That stays
true, so the *highest* record of all tables counts. It may be lower than what is committed by now: the source then sends
more than is missing, and tables drop what they have.

The newest epoch that any table knows is the one that continues. Where nothing of it is recorded as complete, the source
sends that epoch from its beginning.

Consumers are loaded rarely, within a time limit, and only when /status asks for them:

    /status asks --> loaded within the last seconds: what is known
                 --> else: list the tables; load the refs of those loaded longest ago; what is known then

A load is cut short by its time limit, and the next one continues with the tables that this one did not reach. A catalog
that is slow, away or has very many tables makes the answer older, but never /status late.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from lakefeed.aio import map_parallel
from lakefeed.contract.changes import Position, SourceId, TableName
from lakefeed.contract.consumers import describe_consumers
from lakefeed.contract.errors import CatalogError, CatalogUnavailable, TableMissing
from lakefeed.contract.progress import PROGRESS_PROPERTY, Progress, ProgressUnreadable
from lakefeed.contract.properties import is_own_mark
from lakefeed.writer.commit.rest_catalog import CatalogClient
from lakefeed.writer.commit.state import progress_of

logger = logging.getLogger(__name__)

# Half of the client's connections: commits continue while the tables are read.
PARALLEL_REQUESTS = 8
# Fewer for /status, which may be asked for at any time.
PARALLEL_CONSUMER_REQUESTS = 4

# Consumers that were loaded within this time are shown as they are: frequent requests cost the catalog nothing more.
LOAD_EVERY_S = 10.0
# How much time a load may take from /status.
LOAD_MAX_S = 2.0
# Tables of one load: a fraction of a second of the catalog's time.
TABLES_PER_LOAD = 200

# Below every sequence.
_BEFORE_ALL = -1


async def _list_tables(catalog: CatalogClient, *, at_once: int) -> list[TableName]:
    async def list_namespace(namespace: tuple[str, ...]) -> list[TableName]:
        try:
            return await catalog.list_tables(namespace)
        except TableMissing:  # dropped meanwhile
            return []

    listed = await map_parallel(list_namespace, await catalog.list_namespaces(), at_once=at_once)
    return [name for names in listed for name in names]


async def load_progress(catalog: CatalogClient) -> dict[TableName, Progress]:
    """Load the progress of all tables of a catalog; it is empty for a table whose marker cannot be read.

    Raises: CatalogUnavailable; CatalogError if it refuses to list tables.
    """
    names = await _list_tables(catalog, at_once=PARALLEL_REQUESTS)
    logger.info("table_marks_loading", extra={"tables": len(names)})

    async def load(name: TableName) -> Progress:
        try:
            document = await catalog.load_refs(name)
            if PROGRESS_PROPERTY not in (document.get("properties") or {}):
                document = await catalog.load_table(name)  # with all snapshots
            return progress_of(name, document)
        except TableMissing:  # dropped meanwhile
            return Progress()
        except CatalogUnavailable:
            raise
        except (CatalogError, ProgressUnreadable) as error:  # a foreign table, or one that needs an operator
            logger.warning("table_marks_unreadable", extra={"table": str(name), "error": str(error)})
            return Progress()

    return dict(zip(names, await map_parallel(load, names, at_once=PARALLEL_REQUESTS), strict=True))


async def load_resume_positions(
    catalog: CatalogClient, *, note_sources: Callable[[TableName, Iterable[SourceId]], None] = lambda *_: None
) -> dict[SourceId, Position]:
    """Load the progress of all tables of a catalog and join it. Cancelling it changes nothing.

    `note_sources` gets the sources of each table.

    Raises: CatalogUnavailable.
    """
    started = time.monotonic()
    found = await load_progress(catalog)
    for name, progress in found.items():
        note_sources(name, progress.sources)
    positions = resume_positions(found.values())
    facts = {
        "tables": len(found),
        "with_marks": sum(bool(progress.sources) for progress in found.values()),
        "sources": len(positions),
        "seconds": round(time.monotonic() - started, 3),
    }
    logger.info("table_marks_loaded", extra=facts)
    return positions


def resume_positions(tables: Iterable[Progress]) -> dict[SourceId, Position]:
    """Join the progress of tables: for each source, up to where its newest epoch is complete."""
    found: dict[SourceId, Position] = {}
    for progress in tables:
        for source, mark in progress.sources.items():
            if not is_own_mark(source):
                start = Position(mark.epoch, _BEFORE_ALL)
                found[source] = max(start, found.get(source, start))
        for source, position in progress.complete.items():
            found[source] = max(position, found.get(source, position))
    return found


@dataclass(slots=True)
class _Seen:
    """A table's consumers as of a moment; 0 means never loaded."""

    at: float = 0.0
    document: Any = None


class ConsumerWatch:
    """The consumers of one catalog's tables, as last loaded."""

    def __init__(self, catalog: CatalogClient, *, clock: Callable[[], float]) -> None:
        self._catalog = catalog
        self._clock = clock
        self._loaded_at = 0.0
        self._tables: dict[TableName, _Seen] = {}
        self._lock = asyncio.Lock()

    async def describe(self) -> list[dict[str, Any]]:
        """Describe all consumers, by table and name; an error of the catalog is only logged."""
        async with self._lock:
            if self._clock() - self._loaded_at >= LOAD_EVERY_S:
                await self._load()
        now = self._clock()
        return [
            {"table": str(name), **described, "seenSecondsAgo": round(now - seen.at, 3)}
            for name, seen in sorted(self._tables.items())
            if seen.document is not None
            for described in describe_consumers(seen.document, now_ms=int(now * 1000))
        ]

    async def _load(self) -> None:
        try:
            async with asyncio.timeout(LOAD_MAX_S):
                names = await _list_tables(self._catalog, at_once=PARALLEL_CONSUMER_REQUESTS)
                self._tables = {name: self._tables.get(name, _Seen()) for name in names}
                oldest = sorted(self._tables, key=lambda name: self._tables[name].at)[:TABLES_PER_LOAD]
                await map_parallel(self._load_table, oldest, at_once=PARALLEL_CONSUMER_REQUESTS)
        except (CatalogError, TimeoutError) as error:
            logger.warning("consumers_not_loaded", extra={"reason": str(error) or "timed out"})
        self._loaded_at = self._clock()

    async def _load_table(self, name: TableName) -> None:
        try:
            document = await self._catalog.load_refs(name)
        except TableMissing:  # dropped meanwhile
            self._tables.pop(name, None)
            return
        # Only what describes consumers: a schema can be large.
        kept = {key: document.get(key) for key in ("refs", "snapshots")}
        self._tables[name] = _Seen(self._clock(), kept if len(kept["refs"] or ()) > 1 else None)
