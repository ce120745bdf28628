"""Exponential backoff. Standard library only and without a clock: pure folders and Spark clusters import it."""

from __future__ import annotations

import random
from dataclasses import dataclass

# 2**30 times any pause is beyond every maximum, and further powers would only get slower to compute.
_DOUBLINGS_MAX = 30


@dataclass(frozen=True, slots=True)
class Backoff:
    """A pause that doubles with every failed attempt, from `first_s` up to `max_s`."""

    first_s: float
    max_s: float

    def limit_s(self, attempt: int) -> float:
        """Return the longest pause after the attempt with this number, 1 for the first."""
        return min(self.max_s, self.first_s * 2.0 ** min(attempt - 1, _DOUBLINGS_MAX))

    def jittered_s(self, attempt: int) -> float:
        """Return a random pause up to the limit, so that clients that failed together do not return together."""
        return random.uniform(0, self.limit_s(attempt))  # noqa: S311 - spreads load, guards nothing
