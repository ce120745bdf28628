"""Fencing: one service per node id. Of two that run under one id, the earlier stops. And the first connection.

Every start takes a generation, a number above all that its node id had before. It stands in two places:

    the tables' markers       every commit writes it and requires that the table has seen no higher one of its node.
                              This is the fence: after the later service's first commit to a table, the earlier one's
                              next commit to that table meets a conflict, looks, and finds itself fenced off
    a namespace's property    `lakefeed.node.<id>` of the default namespace, looked at every few seconds, so that the
                              earlier service stops even while no table that it writes has anything new

What both committed until then is in the tables once: the sources' marks prevent duplicates of any writer.

The property has no compare-and-swap. Two that start at the same moment both write; a service that finds a lower number
than its own writes again, one that finds a higher number stops, and so the highest remains.

Generations are times, so that a start is above all former ones by itself. A clock that was set back is corrected by the
property. Where a catalog keeps no properties, it is corrected by the tables' markers, which are then all read.

A service that cannot reach its catalog at startup accepts nothing: it does not know what its sources have committed,
nor whether another service runs under its node id. Later outages only make the log longer.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable

from lakefeed.backoff import Backoff
from lakefeed.contract.errors import CatalogError, CatalogUnavailable, CommitUnknown, Fenced, TableMissing
from lakefeed.contract.progress import Progress
from lakefeed.writer.commit.rest_catalog import CatalogClient
from lakefeed.writer.commit.sources import load_progress

_log = logging.getLogger(__name__)

NODE_PROPERTY_PREFIX = "lakefeed.node."

# How long two services may run under one id without meeting in a table; each look is one small request.
CHECK_INTERVAL_S = 5.0

# Generations are microseconds: where clocks are about right, they are above all former ones without a request. The
# random part separates two services that start at the same moment, or that both found a number ahead of their clocks.
_MICROSECONDS = 1_000_000
_RANDOM_BITS = 16


def check_fence(progress: Progress, *, node: str, generation: int) -> None:
    """Raise Fenced if a table has seen a later service of a node."""
    found = progress.generations.get(node, 0)
    if found > generation:
        raise _fenced(node, ours=generation, found=found)


class Fence:
    """The generation of this service, and the watch for a later one. `generation` is 0 until it is claimed."""

    def __init__(
        self,
        catalog: CatalogClient,
        *,
        node: str,
        namespace: tuple[str, ...],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.node = node
        self.generation = 0
        self._catalog = catalog
        self._namespace = namespace
        self._property = f"{NODE_PROPERTY_PREFIX}{node}"
        self._clock = clock

    async def claim(self) -> None:
        """Take a generation above all former ones, which stops earlier services of this node.

        A catalog that does not keep properties of namespaces leaves the fence to the tables.

        Raises: CatalogUnavailable, CommitUnknown; then try again.
        """
        try:
            try:
                found = await self._registered()
            except TableMissing:  # the client's error for every 404
                await self._catalog.ensure_namespace(self._namespace)
                found = 0
            self.generation = self._next(found)
            await self._register()
        except (CatalogUnavailable, CommitUnknown):
            raise
        except CatalogError as error:
            _log.warning("node_not_registered", extra={"node": self.node, "reason": str(error)})
            self.generation = max(self.generation, self._next(await self._committed()))
        _log.info("node_claimed", extra={"node": self.node, "generation": self.generation})

    async def run(self) -> None:
        """Watch for a later service of this node until cancelled. Raise Fenced if there is one."""
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            try:
                await self.check()
            except CatalogError as error:
                # Without the catalog no service can commit, and with it the tables' markers are the fence.
                _log.debug("node_not_checked", extra={"node": self.node, "reason": str(error)})

    async def check(self) -> None:
        """Look once for a later service of this node. Raise Fenced if there is one."""
        found = await self._registered()
        if found > self.generation:
            raise _fenced(self.node, ours=self.generation, found=found)
        if found < self.generation:  # an earlier service wrote at the same moment as we did
            await self._register()

    def _next(self, found: int) -> int:
        now = int(self._clock() * _MICROSECONDS)
        return max(now, found + 1) + random.SystemRandom().getrandbits(_RANDOM_BITS)

    async def _registered(self) -> int:
        text = (await self._catalog.load_properties(self._namespace)).get(self._property, "")
        return int(text) if text.isascii() and text.isdecimal() else 0

    async def _committed(self) -> int:
        """Return the highest generation of this node in the tables' markers; 0 if the tables cannot be listed."""
        try:
            tables = await load_progress(self._catalog)
        except CatalogUnavailable:
            raise
        except CatalogError:
            return 0
        return max((progress.generations.get(self.node, 0) for progress in tables.values()), default=0)

    async def _register(self) -> None:
        await self._catalog.set_properties(self._namespace, {self._property: str(self.generation)})


def _fenced(node: str, *, ours: int, found: int) -> Fenced:
    return Fenced(
        "another service has started under our node id, so this one stops; every service needs an id of its own:"
        f" give one of them another server.node_id: node={node} generation={ours} found={found}"
    )


# With the delays about a minute, as long as services of one machine take to start; then the start fails.
ATTEMPTS_MAX = 10
BACKOFF = Backoff(first_s=0.5, max_s=15.0)


async def join_catalog(catalog: CatalogClient, fence: Fence) -> None:
    """Connect to the catalog at startup, with retries: load its configuration and claim our node id.

    Raises:
        CatalogUnavailable, CommitUnknown: it did not answer within the attempts.
        CatalogError: it refuses us.
    """
    for attempt in range(1, ATTEMPTS_MAX + 1):
        try:
            await catalog.load_config()
            await fence.claim()
        except (CatalogUnavailable, CommitUnknown) as error:
            if attempt == ATTEMPTS_MAX:
                raise
            pause_s = BACKOFF.limit_s(attempt)
            _log.warning("catalog_not_reached", extra={"reason": str(error), "attempt": attempt, "retry_s": pause_s})
            await asyncio.sleep(pause_s)
        else:
            return
