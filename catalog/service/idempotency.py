"""Requests that clients repeat under one idempotency key. Owns whether one is done or told what came of the first.

    key is new       the request is done; the store records its outcome together with the change (store/claims.py)
    key is known     the outcome is told again, unless the request is another one: that is refused
    key is in work   the second request waits for the first, and is then told its outcome

Answers of the kind 4xx are outcomes too, if the same request would always get them; those of the kind 5xx never are,
so that the client may try again. Of two processes that work on one key at once, the database lets one record an
outcome; the other's change is undone and it tells the first one's.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import TypeVar

from lakefeed.aio import Turns
from lakefeed.catalog.config import CatalogConfig
from lakefeed.catalog.errors import BadRequest, CatalogError, KeyTaken, StoreFailed, Unprocessable, error_model
from lakefeed.catalog.store.protocol import MESSAGE_MAX_CHARS, Claim, Outcome, Refusal, Store, claiming
from lakefeed.contract.errors import LakefeedError

# Requests with one key that may wait for the first: a client repeats itself one by one.
_WAITING_MAX = 16
# Outcomes live a little longer than announced, and their number goes a little beyond its limit, by this much.
SWEEP_INTERVAL_S = 60.0

_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
# They say that the moment was wrong, not the request.
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


def fingerprint(method: str, path: str, body: bytes) -> str:
    """Tell one request from another."""
    return hashlib.sha256(b"\0".join((method.encode(), path.encode(), body))).hexdigest()


class Idempotency:
    """Does requests once. The clock comes from outside."""

    def __init__(self, store: Store, config: CatalogConfig, *, clock_ms: Callable[[], int]) -> None:
        self._store = store
        self._lifetime_s = config.idempotency_lifetime_s
        self._kept_max = config.idempotency_keys_max
        self._clock_ms = clock_ms
        self._turns = Turns(waiting_max=_WAITING_MAX)

    @property
    def lifetime(self) -> str:
        """Say how long a key is known at least, as an ISO 8601 duration."""
        return f"PT{self._lifetime_s}S"

    async def once(
        self,
        key: str,
        request_fingerprint: str,
        *,
        do: Callable[[], Awaitable[_T]],
        tell: Callable[[Outcome], Awaitable[_T]],
    ) -> _T:
        """Do a request, or tell what became of it. Cancelling leaves the outcome open, as it does without a key.

        Raises: Unprocessable, TooManyWaiting, StoreFailed, and what `do` and `tell` raise.
        """
        claim = Claim(key, request_fingerprint, self._clock_ms())
        async with self._turns.turn(key):
            known = await self._find(claim)
            if known is None:
                try:
                    return await self._do(claim, do)
                except KeyTaken:
                    known = await self._find(claim)
            if known is None:
                raise StoreFailed(f"Outcome was forgotten while it was looked up: {key}")
            return await tell(known)

    async def _find(self, claim: Claim) -> Outcome | None:
        found = await self._store.load_outcome(claim.key)
        if found is None:
            return None
        if found.fingerprint != claim.fingerprint:
            raise Unprocessable(f"Idempotency-Key was used for another request: {claim.key}")
        return found.outcome

    async def _do(self, claim: Claim, do: Callable[[], Awaitable[_T]]) -> _T:
        try:
            with claiming(claim):
                return await do()
        except KeyTaken:
            raise
        except LakefeedError as error:
            model = error_model(error)
            if model.status < CatalogError.status and model.status not in _TRANSIENT:
                refusal = Refusal(model.status, model.type, str(error)[:MESSAGE_MAX_CHARS])
                await self._store.record_outcome(claim, Outcome(refusal=refusal))
            raise

    async def sweep_forever(self) -> None:
        """Forget outcomes whose time is over, again and again, until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_INTERVAL_S)
            try:
                await self.sweep()
            except StoreFailed as error:
                _logger.warning("outcomes_kept", extra={"reason": str(error)})

    async def sweep(self) -> None:
        """Forget outcomes whose time is over, and the oldest of too many.

        Raises: StoreFailed.
        """
        before_ms = self._clock_ms() - 1000 * self._lifetime_s
        excess = await self._store.forget_outcomes(before_ms=before_ms, kept_max=self._kept_max)
        if excess:
            _logger.warning("outcomes_forgotten_early", extra={"count": excess, "kept_max": self._kept_max})
