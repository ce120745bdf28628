"""Credentials: the Authorization header of every request to a catalog, and renewal of OAuth2 tokens.

    no credentials       no header
    a token              a constant header
    a client's secret    a token by OAuth2's client credentials grant (RFC 6749, section 4.4), renewed before it
                         expires, and when the catalog responds 401, because tokens can be revoked

One renewal runs at a time; concurrent requests wait for its token. Messages contain neither tokens nor secrets.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Protocol

import aiohttp
import orjson

from lakefeed.contract.errors import CatalogError, CatalogUnavailable

# A token is renewed when this share of its lifetime has passed, so that it does not expire during a request.
_RENEW_AFTER_SHARE = 0.8
# For a token server that does not send a lifetime; the catalog's 401 corrects a wrong guess.
_LIFETIME_DEFAULT_S = 600.0
# Enough for an error message, and less than a page of HTML.
_ERROR_MAX_CHARS = 200


class Credentials(Protocol):
    """Source of the Authorization header, which can be renewed if the catalog refuses it."""

    async def header(self) -> str | None:
        """Return the Authorization header, or None to send none.

        Raises: CatalogError, CatalogUnavailable.
        """

    async def renew(self, refused: str | None) -> bool:
        """Replace a header that the catalog refused; return whether there is a new one to try.

        Raises: CatalogError, CatalogUnavailable.
        """


@dataclass(frozen=True, slots=True)
class FixedToken:
    """A token that is not renewed here; empty to send none."""

    token: str = field(default="", repr=False)

    async def header(self) -> str | None:
        """Return the header."""
        return f"Bearer {self.token}" if self.token else None

    async def renew(self, refused: str | None) -> bool:
        """Return False: there is no other token."""
        del refused
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class OAuthClient:
    """What is sent to the token server."""

    token_uri: str
    client_id: str
    client_secret: str = field(repr=False)
    scope: str = ""


class OAuthToken:
    """A token from a token server, reused during its lifetime."""

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
        """Return the header, with a new token if the last one is about to expire."""
        if self._header is None or self._clock() >= self._renew_at:
            await self.renew(self._header)
        return self._header

    async def renew(self, refused: str | None) -> bool:
        """Fetch a token to replace the refused one, unless another request has done so meanwhile."""
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
                body = await response.read()
        except (aiohttp.ClientError, OSError) as error:  # TimeoutError is an OSError
            reason = str(error) or type(error).__name__
            raise CatalogUnavailable(f"token server did not answer: {reason}: url={client.token_uri}") from error
        self._accept(response.status, body)

    def _accept(self, status: int, response: bytes) -> None:
        facts = f"status={status} url={self._client.token_uri}"
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR or status == HTTPStatus.TOO_MANY_REQUESTS:
            raise CatalogUnavailable(f"token server failed: {facts}")
        body = _parse_object(response)
        if status >= HTTPStatus.BAD_REQUEST:
            raise CatalogError(f"token server refused the credential: {_error_of(body)}: {facts}")
        token = body.get("access_token")
        if not isinstance(token, str) or not token:
            raise CatalogError(f"token server responded without a token: {facts}")
        self._header = f"Bearer {token}"
        given_s = body.get("expires_in")
        lifetime_s = given_s if isinstance(given_s, int | float) and given_s > 0 else _LIFETIME_DEFAULT_S
        self._renew_at = self._clock() + _RENEW_AFTER_SHARE * lifetime_s


def _parse_object(response: bytes) -> Mapping[str, Any]:
    try:
        body = orjson.loads(response)
    except orjson.JSONDecodeError:
        return {}
    return body if isinstance(body, dict) else {}


def _error_of(body: Mapping[str, Any]) -> str:
    """Return the server's own message. `error` is text in RFC 6749, an object in Iceberg's catalogs."""
    error = body.get("error")
    message = error.get("message") if isinstance(error, dict) else body.get("error_description") or error
    return str(message or "no reason given")[:_ERROR_MAX_CHARS]
