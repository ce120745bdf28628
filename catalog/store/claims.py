"""Idempotency keys as stores see them: the claim that a request makes, and the outcome that is kept under its key.

A client that got no answer sends its request again under the same key. So that this does nothing twice, the outcome is
written in the very transaction that makes the change: after a crash there are both or neither. A claim therefore has
to reach the store from the far end of a request, through operations that it does not concern: it travels with the
task, in a context variable.

    key -> fingerprint of the request | outcome (JSON) | when it was recorded

An outcome is as much as the answer cannot be told without; the answer itself, with a table's whole history, is built
again from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass

import orjson

from catalog.pointers import Pointer

# Clients' own words come back in messages; what is kept of one is bounded.
MESSAGE_MAX_CHARS = 2_000


@dataclass(frozen=True, slots=True)
class Claim:
    """A request under a key: what it asks, and since when."""

    key: str
    fingerprint: str
    at_ms: int


@dataclass(frozen=True, slots=True)
class Refusal:
    """An error that the same request would always be answered with."""

    status: int
    type: str
    message: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a request came to: the metadata that it made current or dropped, the properties it removed, a refusal."""

    location: str = ""
    removed: tuple[str, ...] = ()
    refusal: Refusal | None = None
    digest: str = ""

    @property
    def pointer(self) -> Pointer:
        """Return where the metadata is that it made current or dropped."""
        return Pointer(self.location, self.digest)


def outcome_at(pointer: Pointer) -> Outcome:
    """Say which metadata a request made current or dropped."""
    return Outcome(pointer.location, digest=pointer.digest)


@dataclass(frozen=True, slots=True)
class Remembered:
    """What is kept under a key."""

    fingerprint: str
    outcome: Outcome


_claim: ContextVar[Claim | None] = ContextVar("claim", default=None)


@contextmanager
def claiming(claim: Claim) -> Iterator[None]:
    """Let the first change that this task makes in a store carry the claim."""
    token = _claim.set(claim)
    try:
        yield
    finally:
        _claim.reset(token)


def current_claim() -> Claim | None:
    """Return the claim of the request that this task works for, if it has a key."""
    return _claim.get()


def encode_outcome(outcome: Outcome) -> str:
    """Write an outcome as a store keeps it."""
    return orjson.dumps({name: value for name, value in asdict(outcome).items() if value}).decode()


def decode_outcome(text: str) -> Outcome:
    """Read an outcome back."""
    kept = orjson.loads(text)
    refusal = kept.get("refusal")
    return Outcome(
        location=kept.get("location", ""),
        removed=tuple(kept.get("removed", ())),
        refusal=Refusal(**refusal) if refusal else None,
        digest=kept.get("digest", ""),
    )
