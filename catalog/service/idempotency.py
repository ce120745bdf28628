"""Idempotency keys: a request that is repeated under its key is handled once.

    key is new        the request is handled; the store records its outcome together with its change
    key is recorded   the response is built again from the outcome; another request under the key is rejected
    key is in use     the second request waits for the first one, then gets a response from its outcome

Errors 4xx that the same request always gets are outcomes too. Errors 5xx never are, so that the client can retry. If
two processes handle one key at once, the database lets one record its outcome; the change of the other is rolled back,
and it responds with the first one's outcome.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import TypeVar

from lakefeed.aio import KeyedLocks
from lakefeed.catalog.config import CatalogConfig
from lakefeed.catalog.errors import BadRequest, CatalogError, KeyTaken, StoreFailed, Unprocessable, error_model
from lakefeed.catalog.store.outcomes import MESSAGE_MAX_CHARS, KeyClaim, RecordedError, RequestOutcome, holding_claim
from lakefeed.catalog.store.store import Store
from lakefeed.contract.errors import LakefeedError

# Requests under one key that may wait for the first one. Clients repeat requests one by one.
_WAITING_MAX = 16
# Outcomes live up to this much longer than announced, and their number may exceed its limit for as long.
SWEEP_INTERVAL_S = 60.0

_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
# The same request may succeed later, so these are no outcomes.
_TRANSIENT = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS)

_logger = logging.getLogger(__name__)

_T = TypeVar("_T")


def parse_key(text: str) -> str:
    """Read the value of an Idempotency-Key header.

    Raises: BadRequest.
    """
    key = text.strip().lower()
    if not _UUID.fullmatch(key):
        raise BadRequest("Invalid Idempotency-Key: expected a UUID")
    return key


class Idempotency:
    """Handles requests with a key."""

    def __init__(self, store: Store, config: CatalogConfig, *, clock_ms: Callable[[], int]) -> None:
        self._store = store
        self._lifetime_s = config.idempotency_lifetime_s
        self._kept_max = config.idempotency_keys_max
        self._clock_ms = clock_ms
        self._locks = KeyedLocks(waiting_max=_WAITING_MAX)

    @property
    def lifetime(self) -> str:
        """Return how long outcomes are kept at least, as an ISO 8601 duration."""
        return f"PT{self._lifetime_s}S"

    async def run_once(
        self,
        key: str,
        fingerprint: str,
        *,
        handle: Callable[[], Awaitable[_T]],
        replay: Callable[[RequestOutcome], Awaitable[_T]],
    ) -> _T:
        """Handle a request, or replay its outcome. The outcome of a cancelled request is unknown.

        Raises: Unprocessable, TooManyWaiting, StoreFailed, and what `handle` and `replay` raise.
        """
        claim = KeyClaim(key, fingerprint, self._clock_ms())
        async with self._locks.hold(key):
            outcome = await self._find(claim)
            if outcome is None:
                try:
                    return await self._handle(claim, handle)
                except KeyTaken:
                    outcome = await self._find(claim)
            if outcome is None:
                raise StoreFailed(f"Outcome was deleted while it was looked up: {key}")
            return await replay(outcome)

    async def _find(self, claim: KeyClaim) -> RequestOutcome | None:
        recorded = await self._store.load_outcome(claim.key)
        if recorded is None:
            return None
        if recorded.fingerprint != claim.fingerprint:
            raise Unprocessable(f"Idempotency-Key was used for another request: {claim.key}")
        return recorded.outcome

    async def _handle(self, claim: KeyClaim, handle: Callable[[], Awaitable[_T]]) -> _T:
        try:
            with holding_claim(claim):
                return await handle()
        except KeyTaken:
            raise
        except LakefeedError as error:
            model = error_model(error)
            if model.status < CatalogError.status and model.status not in _TRANSIENT:
                recorded = RecordedError(model.status, model.type, str(error)[:MESSAGE_MAX_CHARS])
                await self._store.record_outcome(claim, RequestOutcome(refusal=recorded))
            raise

    async def sweep_forever(self) -> None:
        """Delete expired outcomes at intervals until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_INTERVAL_S)
            try:
                await self.sweep()
            except StoreFailed as error:
                _logger.warning("idempotency_sweep_failed", extra={"reason": str(error)})

    async def sweep(self) -> None:
        """Delete expired outcomes, and the oldest beyond the limit.

        Raises: StoreFailed.
        """
        before_ms = self._clock_ms() - 1000 * self._lifetime_s
        excess = await self._store.delete_outcomes(before_ms=before_ms, kept_max=self._kept_max)
        if excess:
            _logger.warning("idempotency_keys_expired_early", extra={"count": excess, "kept_max": self._kept_max})
