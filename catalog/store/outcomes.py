"""Idempotency records: what a store keeps of a request that has an idempotency key.

A client that got no response repeats its request under the same key. The outcome of a request is therefore recorded in
the same transaction as its change: after a crash both exist or neither.

    key -> fingerprint of the request | outcome (JSON) | time of the record

The claim on a key travels from the HTTP handler to the store in a context variable, past the operations in between,
which it does not concern. If the key has an outcome already, nothing changes and KeyTaken is raised. An outcome holds
only what is needed to build the response again; the response itself contains a table's whole history.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass

import orjson

from lakefeed.catalog.names import Pointer

# Messages repeat the client's words; what is kept of one is bounded.
MESSAGE_MAX_CHARS = 2_000


@dataclass(frozen=True, slots=True)
class KeyClaim:
    """A request under an idempotency key: what it asks, and since when."""

    key: str
    fingerprint: str
    at_ms: int


@dataclass(frozen=True, slots=True)
class RecordedError:
    """An error that the same request always gets."""

    status: int
    type: str
    message: str


@dataclass(frozen=True, slots=True)
class RequestOutcome:
    """What a request did: the metadata that it made current or dropped, the properties it removed, or its error."""

    location: str = ""
    removed: tuple[str, ...] = ()
    refusal: RecordedError | None = None
    digest: str = ""

    @property
    def pointer(self) -> Pointer:
        """Return the pointer to the metadata that the request made current or dropped."""
        return Pointer(self.location, self.digest)

    def to_text(self) -> str:
        """Return the outcome as stores keep it."""
        return orjson.dumps({name: value for name, value in asdict(self).items() if value}).decode()

    @classmethod
    def from_text(cls, text: str) -> RequestOutcome:
        """Read an outcome as stores keep it."""
        kept = orjson.loads(text)
        refusal = kept.pop("refusal", None)
        removed = tuple(kept.pop("removed", ()))
        return cls(**kept, removed=removed, refusal=RecordedError(**refusal) if refusal else None)


@dataclass(frozen=True, slots=True)
class RecordedOutcome:
    """What a store keeps under an idempotency key."""

    fingerprint: str
    outcome: RequestOutcome


def outcome_at(pointer: Pointer) -> RequestOutcome:
    """Return the outcome of a request that made this metadata current, or dropped it."""
    return RequestOutcome(pointer.location, digest=pointer.digest)


# The claim of the request that a task handles; None if it has no key.
current_claim: ContextVar[KeyClaim | None] = ContextVar("claim", default=None)


@contextmanager
def holding_claim(claim: KeyClaim) -> Iterator[None]:
    """Record the outcome of the first change that this task makes in a store under the claim's key."""
    token = current_claim.set(claim)
    try:
        yield
    finally:
        current_claim.reset(token)
