"""Who we are to a catalog: the Authorization header of every request. Owns fetching and renewing OAuth2 tokens.

    nothing given        no header
    a token              the same header for ever
    a client's secret    a token by OAuth2's client credentials (RFC 6749, section 4.4), renewed before it expires,
                         and once more when the catalog answers 401, because tokens can be revoked

One renewal runs at a time: whoever comes meanwhile waits for its token. Neither tokens nor secrets get into messages.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import aiohttp
import orjson

from lakefeed.contract.errors import CatalogError, CatalogUnavailable

# A token is renewed when this share of its life has passed, so that none expires on its way.
_RENEW_AFTER_SHARE = 0.8
# For a token server that does not say how long its tokens live; the catalog's 401 corrects a wrong guess.
_LIFE_DEFAULT_S = 600.0
# More of an error than anybody reads, and less than a page of HTML.
_ERROR_MAX_CHARS = 200

_BAD_REQUEST = 400
_TOO_MANY_REQUESTS = 429
_FIRST_SERVER_ERROR = 500


class Credentials(Protocol):
    """Makes the header, and makes another if the catalog did not like it."""

    async def header(self) -> str | None:
        """Give the Authorization header, or None for none.

        Raises: CatalogError, CatalogUnavailable.
        """

    async def renew(self, refused: str | None) -> bool:
        """Replace a header that the catalog refused; tells whether another one can be tried.

        Raises: CatalogError, CatalogUnavailable.
        """


@dataclass(frozen=True, slots=True)
class FixedToken:
    """A token that somebody else looks after; empty for none."""

    token: str = field(default="", repr=False)

    async def header(self) -> str | None:
        """Give the header."""
        return f"Bearer {self.token}" if self.token else None

    async def renew(self, refused: str | None) -> bool:
        """There is no other."""
        del refused
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class OAuthClient:
    """What a token server wants to know of us."""

    token_uri: str
    client_id: str
    client_secret: str = field(repr=False)
    scope: str = ""


class OAuthToken:
    """A token from a token server, kept while it lives."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        client: OAuthClient,
        *,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._session = session
        self._client = client
        self._timeout_s = timeout_s
        self._clock = clock
        self._renewing = asyncio.Lock()
        self._header: str | None = None
        self._renew_at = 0.0

    async def header(self) -> str | None:
        """Give the header, with a new token if the last one is about to expire."""
        if self._header is None or self._clock() >= self._renew_at:
            await self.renew(self._header)
        return self._header

    async def renew(self, refused: str | None) -> bool:
        """Fetch a token in place of the refused one, unless somebody has done so meanwhile."""
        async with self._renewing:
            if self._header is None or self._header == refused:
                await self._fetch()
        return True

    async def _fetch(self) -> None:
        client = self._client
        form = {
            "grant_type": "client_credentials",
            "client_id": client.client_id,
            "client_secret": client.client_secret,
        }
        if client.scope:
            form["scope"] = client.scope
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                self._session.post(client.token_uri, data=form, headers={"Accept": "application/json"}) as response,
            ):
                answer = await response.read()
        except (aiohttp.ClientError, OSError) as error:  # TimeoutError is an OSError
            reason = str(error) or type(error).__name__
            raise CatalogUnavailable(f"token server did not answer: {reason}: url={client.token_uri}") from error
        self._take(response.status, answer)

    def _take(self, status: int, answer: bytes) -> None:
        facts = f"status={status} url={self._client.token_uri}"
        if status >= _FIRST_SERVER_ERROR or status == _TOO_MANY_REQUESTS:
            raise CatalogUnavailable(f"token server failed: {facts}")
        body = _object_from(answer)
        if status >= _BAD_REQUEST:
            raise CatalogError(f"token server refused us: {_error_of(body)}: {facts}")
        token = body.get("access_token")
        if not isinstance(token, str) or not token:
            raise CatalogError(f"token server answered without a token: {facts}")
        self._header = f"Bearer {token}"
        self._renew_at = self._clock() + _RENEW_AFTER_SHARE * _life_of(body)


def _object_from(answer: bytes) -> Mapping[str, Any]:
    try:
        body = orjson.loads(answer)
    except orjson.JSONDecodeError:
        return {}
    return body if isinstance(body, dict) else {}


def _error_of(body: Mapping[str, Any]) -> str:
    """Find the server's own words; RFC 6749 has `error` as text, Iceberg's catalogs as an object."""
    error = body.get("error")
    message = error.get("message") if isinstance(error, dict) else body.get("error_description") or error
    return str(message or "no reason given")[:_ERROR_MAX_CHARS]


def _life_of(body: Mapping[str, Any]) -> float:
    life_s = body.get("expires_in")
    return float(life_s) if isinstance(life_s, int | float) and life_s > 0 else _LIFE_DEFAULT_S
