"""Authentication by bearer tokens, for /ws, the control plane, /cdc and the catalog under /v1.

    Authorization: Bearer TOKEN          or, because browsers cannot set that header on a WebSocket,
    Sec-WebSocket-Protocol: bearer.TOKEN

`Auth.admit` returns a `Principal` or `Unauthenticated`. Callers keep the principal with the request or the connection.
Today any token admits to every path, and without tokens every caller is the anonymous principal. Finer rights belong
here: every listener asks this module and no other.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

Text = TypeVar("Text", bound=str)

# A supervisor that restarts a dead process has no token.
OPEN_PATHS = frozenset({"/health/live"})

_SCHEME = "bearer"

SUBPROTOCOL = "lakefeed"
_BEARER_SUBPROTOCOL = "bearer."


@dataclass(frozen=True, slots=True)
class Principal:
    """Who a request or connection acts as; `name` tells tokens apart without showing them."""

    name: str


@dataclass(frozen=True, slots=True)
class Unauthenticated:
    """The caller is not admitted; `message` is shown to it."""

    message: str


ANONYMOUS = Principal("anonymous")
# The writer of this process, which commits through its own catalog.
SERVICE = Principal("service")

TOKEN_MISSING = Unauthenticated("a bearer token is required")
TOKEN_INVALID = Unauthenticated("the bearer token is not valid")


@dataclass(frozen=True, slots=True)
class Auth:
    """The accepted tokens with their principals. Digests have one length, so that comparing them reveals nothing."""

    _principals: tuple[tuple[bytes, Principal], ...] = field(default=(), repr=False)

    @property
    def is_on(self) -> bool:
        """Return whether a token is required."""
        return bool(self._principals)

    def admit(self, path: str, authorization: str | None) -> Principal | Unauthenticated:
        """Admit a request by its path and Authorization header."""
        if not self.is_on or path in OPEN_PATHS:
            return ANONYMOUS
        scheme, _, token = (authorization or "").strip().partition(" ")
        if scheme.lower() != _SCHEME or not token.strip():
            return TOKEN_MISSING
        return self._find(token.strip())

    def admit_websocket(
        self, path: str, authorization: str | None, subprotocols: Sequence[str]
    ) -> Principal | Unauthenticated:
        """Admit a WebSocket by its header or by a subprotocol."""
        bearer = next((text for text in subprotocols if text.startswith(_BEARER_SUBPROTOCOL)), None)
        if authorization is None and bearer is not None and self.is_on:
            return self._find(bearer.removeprefix(_BEARER_SUBPROTOCOL))
        return self.admit(path, authorization)

    def _find(self, token: str) -> Principal | Unauthenticated:
        given = _digest(token)
        # All tokens are compared, also after a match, so that the time does not reveal which one it was.
        found = [principal for digest, principal in self._principals if hmac.compare_digest(given, digest)]
        return found[0] if found else TOKEN_INVALID


def build_auth(tokens: Iterable[str], *, own_token: str = "") -> Auth:
    """Build the authentication; `own_token` admits the service's own catalog client if tokens are required at all."""
    known = [(_digest(token), Principal(f"token-{number}")) for number, token in enumerate(tokens, start=1)]
    if known and own_token:
        known.append((_digest(own_token), SERVICE))
    return Auth(tuple(known))


def bearer_headers(token: str) -> dict[str, str]:
    """Return the request headers that carry a token; none without a token."""
    return {"Authorization": f"Bearer {token}"} if token else {}


def choose_subprotocol(offered: Sequence[Text]) -> Text | None:
    """Return the subprotocol to select: ours if offered, because selecting the other one would repeat the token.

    A browser that offered subprotocols fails the connection unless one of them is selected.
    """
    return next((text for text in offered if text == SUBPROTOCOL), next(iter(offered), None))


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
