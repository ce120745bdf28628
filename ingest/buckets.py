"""Token buckets: so much a second, and a burst. Owns the arithmetic; time comes in as `now` in seconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class TokenBucket:
    """`rate_per_s` tokens a second, at most `burst` of them; a rate of 0 never refuses.

    What costs more than the burst is let through a full bucket and leaves a debt, so that the rate holds all the same.
    """

    rate_per_s: float
    burst: float
    tokens: float
    refilled_at: float

    @classmethod
    def full(cls, rate_per_s: float, burst: float, now: float) -> TokenBucket:
        """Start with all tokens."""
        return cls(rate_per_s, burst, burst, now)

    def has(self, cost: float, now: float) -> bool:
        """Tell whether there is enough; takes nothing."""
        if not self.rate_per_s:
            return True
        # A clock that was set back refills nothing and takes nothing.
        elapsed_s = max(0.0, now - self.refilled_at)
        self.tokens = min(self.burst, self.tokens + elapsed_s * self.rate_per_s)
        self.refilled_at = now
        return self.tokens >= min(cost, self.burst)

    def take(self, cost: float) -> None:
        """Take what `has` has found."""
        if self.rate_per_s:
            self.tokens -= cost

    def wait_s(self, cost: float) -> float:
        """Tell how long after the last `has` there will be enough."""
        missing = min(cost, self.burst) - self.tokens
        return missing / self.rate_per_s if missing > 0 and self.rate_per_s else 0.0

    def allowance(self, now: float) -> Allowance:
        """Describe it to a client."""
        self.has(0, now)
        full_in_s = (self.burst - self.tokens) / self.rate_per_s if self.rate_per_s else 0.0
        return Allowance(limit=int(self.burst), remaining=max(0, int(self.tokens)), reset_at=now + full_in_s)


@dataclass(frozen=True, slots=True)
class Allowance:
    """What is left of a limit, and when it is whole again (seconds since 1970)."""

    limit: int
    remaining: int
    reset_at: float
