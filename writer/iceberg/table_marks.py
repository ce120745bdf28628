"""Where sources stand by the tables' own marks. Owns reading them from every table, and what they say together.

For those whose log does not know a source, because it is new or was lost. Each table knows how far it has come itself,
so of a source the *lowest* mark counts, in its newest epoch: a change between the lowest and the highest may belong to
the table that is behind, and the others drop it when it comes again. A table that gets nothing more of a source keeps
its mark where it is, so more may come again than is missing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Iterable, Mapping
from typing import Any, TypeAlias, TypeVar

from writer.changes import Position, SourceId, TableName
from writer.errors import CatalogError, CatalogUnavailable, TableMissing
from writer.iceberg.catalog_client import CatalogClient
from writer.iceberg.progress import PROGRESS_PROPERTY, ProgressUnreadable, progress_from_text
from writer.quarantine.names import is_own_mark

logger = logging.getLogger(__name__)

# Half of the client's connections: commits go on while the tables are read.
PARALLEL_REQUESTS = 8

Marks: TypeAlias = Mapping[SourceId, Position]
T = TypeVar("T")


async def load_lowest_marks(catalog: CatalogClient) -> dict[SourceId, Position]:
    """Read the marks of all tables of a catalog and join them. Cancelling it changes nothing.

    Raises: CatalogUnavailable.
    """
    started = time.monotonic()
    turns = asyncio.Semaphore(PARALLEL_REQUESTS)
    namespaces = await catalog.list_namespaces()
    listed = await _all(_list_tables(catalog, namespace, turns) for namespace in namespaces)
    names = [name for names in listed for name in names]
    logger.info("table_marks_begun", extra={"tables": len(names), "namespaces": len(namespaces)})
    found = await _all(_load_marks(catalog, name, turns) for name in names)
    lowest = lowest_marks(found)
    facts = {
        "tables": len(names),
        "with_marks": sum(bool(marks) for marks in found),
        "sources": len(lowest),
        "seconds": round(time.monotonic() - started, 3),
    }
    logger.info("table_marks_read", extra=facts)
    return lowest


def lowest_marks(tables: Iterable[Marks]) -> dict[SourceId, Position]:
    """Join the marks of tables: per source the lowest of its newest epoch."""
    lowest: dict[SourceId, Position] = {}
    for marks in tables:
        for source, mark in marks.items():
            known = lowest.get(source)
            if known is None or mark.epoch > known.epoch or (mark.epoch == known.epoch and mark < known):
                lowest[source] = mark
    return lowest


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


async def _load_marks(catalog: CatalogClient, name: TableName, turns: asyncio.Semaphore) -> Marks:
    async with turns:
        try:
            properties = await catalog.load_table_properties(name)
            marks = progress_from_text(properties.get(PROGRESS_PROPERTY)).sources
            return {source: mark for source, mark in marks.items() if not is_own_mark(source)}
        except TableMissing:  # dropped meanwhile
            return {}
        except CatalogUnavailable:
            raise
        except (CatalogError, ProgressUnreadable) as error:  # a table of somebody else, or one that has to be looked at
            logger.warning("table_marks_unreadable", extra={"table": str(name), "error": str(error)})
            return {}
