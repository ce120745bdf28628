"""The connection to the catalog: joining it, and noticing when it stops and starts to answer.

    JOINING --the catalog answers--> UP --it does not answer--> DOWN --it answers--> UP
     |   ^                           |  ^                       |  ^
     +---+ asked every second        +--+ asked every           +--+ asked every second
                                          few seconds

Joining loads the catalog's configuration and claims the node id. Until then no table is loaded or committed, and the
log is not read. Except while it is up, `CatalogClient.outage` has the reason: flushes, and sources that only the tables
know, are refused with it at once. When the catalog is back, all tables are retried at once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from lakefeed.contract.errors import CatalogError, CatalogUnavailable, CommitUnknown
from lakefeed.writer.commit.fencing import Fence
from lakefeed.writer.commit.rest_catalog import CatalogClient

_log = logging.getLogger(__name__)

# How long two services may run under one id without meeting in a table; each check is one small request.
CHECK_INTERVAL_S = 5.0
# How soon a catalog that is back is used again.
RETRY_INTERVAL_S = 1.0
# How long an answer may take. The start waits as long, and then accepts changes without the catalog.
ANSWER_MAX_S = 5.0


class CatalogWatch:
    """Whether the catalog answers. `on_return` is called at the end of each outage."""

    def __init__(
        self,
        catalog: CatalogClient,
        fence: Fence,
        *,
        on_return: Callable[[], object] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.joined = asyncio.Event()
        self._catalog = catalog
        self._fence = fence
        self._on_return = on_return
        self._clock = clock
        self._down_since = clock()
        catalog.outage = "catalog is not available: it has not answered since the start"

    @property
    def is_down(self) -> bool:
        """Whether the catalog did not answer when it was last asked."""
        return self._catalog.outage is not None

    def problems(self, *, now: float) -> list[str]:
        """Describe the outage, if there is one."""
        return [f"{self._catalog.outage}: seconds={self.down_s(now=now):.0f}"] if self.is_down else []

    def down_s(self, *, now: float) -> float:
        """Return for how long the catalog has been down, 0 if it is not."""
        return now - self._down_since if self.is_down else 0.0

    async def run(self) -> None:
        """Ask again and again until cancelled. Raise Fenced if a later service has claimed our node id."""
        while True:
            await asyncio.sleep(RETRY_INTERVAL_S if self.is_down else CHECK_INTERVAL_S)
            try:
                await self.ask()
            except CatalogError as error:  # a gateway may answer before the catalog behind it does
                self._note_outage(error)

    async def ask(self) -> None:
        """Ask the catalog once: join it, or look for a later service of our node.

        Raises:
            Fenced: a later service has claimed our node id.
            CatalogError: the catalog refuses to be joined.
        """
        try:
            async with asyncio.timeout(ANSWER_MAX_S):
                if self.joined.is_set():
                    await self._fence.check()
                else:
                    await self._catalog.load_config()
                    await self._fence.claim()
        except TimeoutError:
            self._note_outage(CatalogUnavailable(f"catalog did not answer in time: seconds={ANSWER_MAX_S:.0f}"))
            return
        except (CatalogUnavailable, CommitUnknown) as error:
            self._note_outage(error)
            return
        except CatalogError as error:
            if not self.joined.is_set():
                raise
            # It answers. Without the property, the tables' markers are the fence.
            _log.debug("node_not_checked", extra={"node": self._fence.node, "reason": str(error)})
        self.joined.set()
        if self.is_down:
            _log.info("catalog_reached", extra={"seconds": round(self.down_s(now=self._clock()), 3)})
            self._catalog.outage = None
            self._on_return()

    def _note_outage(self, error: CatalogError) -> None:
        outage = f"catalog is not available: {error}"
        if not self.is_down:
            self._down_since = self._clock()
        if outage != self._catalog.outage:  # once, not every second
            _log.warning("catalog_not_reached", extra={"reason": str(error), "retry_s": RETRY_INTERVAL_S})
        self._catalog.outage = outage
