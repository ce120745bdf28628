"""The first words with the catalog, before any client is let in. Owns how long a start waits for it.

A service that cannot reach its catalog takes nothing: it does not know yet what its sources have committed, nor whether
another service runs under its node id. Later outages only make the log longer.
"""

from __future__ import annotations

import asyncio
import logging

from writer.errors import CatalogUnavailable, CommitUnknown
from writer.fencing import Fence
from writer.iceberg.catalog_client import CatalogClient

_log = logging.getLogger(__name__)

# With the pauses about a minute, as long as services of one machine take to come up; then whoever started us decides.
ATTEMPTS_MAX = 10
PAUSE_FIRST_S = 0.25
PAUSE_MAX_S = 15.0


async def join_catalog(catalog: CatalogClient, fence: Fence) -> None:
    """Learn how the catalog wants to be used, and claim our node id there.

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
            pause_s = min(PAUSE_MAX_S, PAUSE_FIRST_S * 2**attempt)
            _log.warning("catalog_not_reached", extra={"reason": str(error), "attempt": attempt, "retry_s": pause_s})
            await asyncio.sleep(pause_s)
        else:
            return
