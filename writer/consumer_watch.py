"""Where the consumers of all tables stand, for /status. Owns looking: rarely, not for long, and only when asked.

    /status asks --> looked within the last seconds: what is known
                 --> else: list the tables; load the refs of those looked at longest ago; what is known then

A look is cut short by its time limit, and the next one goes on with the tables that this one did not come to. So a
catalog that is slow, away or has very many tables makes the answer older, and never /status late.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from writer.changes import TableName
from writer.errors import CatalogError, TableMissing
from writer.iceberg.catalog_client import CatalogClient
from writer.iceberg.consumers import describe_consumers
from writer.parallel import map_parallel

_log = logging.getLogger(__name__)

# What is younger is shown as it is: whoever asks every second costs the catalog nothing more.
LOOK_EVERY_S = 10.0
# How late /status may become by it.
LOOK_MAX_S = 2.0
# Loads of one look: a fraction of a second of the catalog's time.
TABLES_PER_LOOK = 200
# Fewer than the client's connections: commits go on meanwhile.
PARALLEL_REQUESTS = 4


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
                await map_parallel(self._load, oldest, at_once=PARALLEL_REQUESTS)
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
