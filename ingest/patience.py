"""When a client has kept us waiting too long, and how connections end. Owns close codes and the decision.

Time comes in as `now` in seconds; a limit of 0 waits for ever.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class CloseCode(enum.IntEnum):
    """Why the server ends a connection. The values are the wire protocol's."""

    GOODBYE = 1000
    SHUTTING_DOWN = 1001
    POLICY = 1008
    FAILED = 1011
    HEARTBEAT_TIMEOUT = 4000
    NOT_AUTHENTICATED = 4001
    RATE_LIMITED = 4002
    BUFFER_OVERFLOW = 4003


@dataclass(frozen=True, slots=True)
class Closing:
    """How to end a connection."""

    code: CloseCode
    reason: str


GOODBYE = Closing(CloseCode.GOODBYE, "goodbye")
FAILED = Closing(CloseCode.FAILED, "internal error: connect again")
SHUTTING_DOWN = Closing(CloseCode.SHUTTING_DOWN, "shutting down")
TOO_MANY_REFUSALS = Closing(CloseCode.RATE_LIMITED, "rate limited: too many refused messages")
BUFFER_OVERFLOW = Closing(CloseCode.BUFFER_OVERFLOW, "buffer full: too many batches sent again too early")
TOO_MANY_SIZE_VIOLATIONS = Closing(CloseCode.POLICY, "too many size violations")
TOO_MANY_CONNECTIONS = Closing(CloseCode.POLICY, "too many connections of this source")
_NOTHING_HEARD = Closing(CloseCode.HEARTBEAT_TIMEOUT, "heartbeat timeout")
_MESSAGE_NOT_ENDED = Closing(CloseCode.POLICY, "message did not arrive in time")
_ANSWERS_UNREAD = Closing(CloseCode.POLICY, "does not read its answers")


def not_authenticated(why: str) -> Closing:
    """End a connection whose client has shown no valid token."""
    return Closing(CloseCode.NOT_AUTHENTICATED, f"authentication failed: {why}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long a client may keep us waiting; 0 is for ever."""

    heartbeat_s: float
    message_s: float
    answers_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SignsOfLife:
    """Since when a client has not been heard, has not ended its message, has not read; None where that is not so."""

    silent_since: float | None
    arriving_since: float | None
    unread_since: float | None


def find_overdue(signs: SignsOfLife, patience: Patience, now: float) -> Closing | None:
    """Decide whether to wait for a client any longer."""
    if _is_over(signs.unread_since, patience.answers_s, now):
        return _ANSWERS_UNREAD
    if _is_over(signs.arriving_since, patience.message_s, now):
        return _MESSAGE_NOT_ENDED
    return _NOTHING_HEARD if _is_over(signs.silent_since, patience.heartbeat_s, now) else None


def _is_over(since: float | None, limit_s: float, now: float) -> bool:
    return since is not None and bool(limit_s) and now - since > limit_s
