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
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

from writer.changes import Position, SourceId, TableName
from writer.errors import CatalogError, CatalogUnavailable, TableMissing
from writer.iceberg.catalog_client import CatalogClient
from writer.iceberg.progress import PROGRESS_PROPERTY, Progress, ProgressUnreadable, progress_from_text
from writer.quarantine.names import is_own_mark

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
