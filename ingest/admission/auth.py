"""Who may come in. Owns the decision, for every door: /ws, the control plane, /cdc and the catalog under /v1.

A caller shows a token, as `Authorization: Bearer TOKEN` or, because browsers cannot set that header on a WebSocket, as
the subprotocol `bearer.TOKEN`. Any of the tokens opens every door; without tokens all doors are open. One place
decides, so that rights finer than that are added here and nowhere else.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import ipaddress
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

# --- ingest.auth ------------------------------------------------------------------------------------------------------


Text = TypeVar("Text", bound=str)

# The one door that stays open: whoever restarts a dead process has no token.
OPEN_PATHS = frozenset({"/health/live"})

# What RFC 6750 lets a bearer token be.
_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")
_SCHEME = "bearer"

# A token that can be tried out is none: 16 characters of base64 are 96 bits.
TOKEN_MIN_CHARS = 16
TOKEN_MAX_CHARS = 4096

SUBPROTOCOL = "lakefeed"
_BEARER_SUBPROTOCOL = "bearer."


class Refusal(enum.Enum):
    """Why a caller is not let in. The values are shown to it."""

    NOT_SHOWN = "a bearer token is required"
    NOT_VALID = "the bearer token is not valid"


@dataclass(frozen=True, slots=True)
class Auth:
    """The tokens, kept as digests: all of one length, so that comparing them tells nothing about them."""

    _digests: tuple[bytes, ...] = field(default=(), repr=False)

    @property
    def is_on(self) -> bool:
        """Tell whether tokens are asked for."""
        return bool(self._digests)

    def admit(self, path: str, authorization: str | None) -> Refusal | None:
        """Let a request in by its path and Authorization header, or say why not."""
        if not self.is_on or path in OPEN_PATHS:
            return None
        scheme, _, token = (authorization or "").strip().partition(" ")
        if scheme.lower() != _SCHEME or not token.strip():
            return Refusal.NOT_SHOWN
        return self._check(token.strip())

    def admit_socket(self, path: str, authorization: str | None, subprotocols: Sequence[str]) -> Refusal | None:
        """Let a WebSocket in, by its header or by a subprotocol."""
        bearer = next((text for text in subprotocols if text.startswith(_BEARER_SUBPROTOCOL)), None)
        if authorization is None and bearer is not None and self.is_on:
            return self._check(bearer.removeprefix(_BEARER_SUBPROTOCOL))
        return self.admit(path, authorization)

    def _check(self, token: str) -> Refusal | None:
        given = _digest(token)
        # All are compared, whatever the first ones say, so that time does not tell which it was.
        matches = [hmac.compare_digest(given, known) for known in self._digests]
        return None if any(matches) else Refusal.NOT_VALID


def bearer_headers(token: str) -> dict[str, str]:
    """Show a token, if there is one."""
    return {"Authorization": f"Bearer {token}"} if token else {}


def choose_subprotocol(offered: Sequence[Text]) -> Text | None:
    """Choose what to answer: a browser that offered any wants one of them back. Ours, rather than repeat its token."""
    return next((text for text in offered if text == SUBPROTOCOL), next(iter(offered), None))


def auth_from(tokens: Iterable[str]) -> Auth:
    """Build the decision from secrets.

    Raises: ValueError if one can not be a token; the text does not show it.
    """
    digests = []
    for number, token in enumerate(tokens, start=1):
        check_token(token, number)
        digests.append(_digest(token))
    return Auth(tuple(digests))


def check_token(token: str, number: int) -> None:
    """Refuse what no client could send, or everybody could guess."""
    if not _TOKEN.fullmatch(token):
        raise ValueError(f"a token must be letters, digits and -._~+/ (with = at its end): number={number}")
    if not TOKEN_MIN_CHARS <= len(token) <= TOKEN_MAX_CHARS:
        raise ValueError(
            f"a token must have {TOKEN_MIN_CHARS} to {TOKEN_MAX_CHARS} characters: number={number} has={len(token)}"
        )


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


def build_auth(tokens: Iterable[str], *, own_token: str) -> Auth:
    """Build the decision; `own_token` lets the service's own catalog client in, once tokens are asked for at all."""
    tokens = tuple(tokens)
    return auth_from((*tokens, own_token)) if tokens else Auth()


def is_loopback(host: str) -> bool:
    """Tell whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
