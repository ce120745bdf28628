"""What is wrong with a table: why, since when, when to try again. Owns the growing pauses and what counts as paused.

    well --failed--> failing --failed again and again--> paused --succeeded--> well

A table that fails once or twice may have met a hiccup, and whoever waits for it keeps waiting. A paused one is told to
people with its reason, and nobody waits for it; it is tried all the same, for ever.
"""

from __future__ import annotations

from dataclasses import dataclass

RETRY_FIRST_S = 0.2
RETRY_MAX_S = 15.0

# Failures in a row that make a table paused: with the pauses above, a second or so.
PAUSED_AFTER_ATTEMPTS = 3


@dataclass(slots=True)
class Trouble:
    """One table's trouble, or none."""

    reason: str | None = None
    since: float | None = None
    attempts: int = 0
    retry_at: float = 0.0
    _commits_at_first: int = 0
    _commits_at_last: int = 0

    @property
    def is_its_own(self) -> bool:
        """Tell whether others have committed between two failures: then it is not the catalog or the store as such."""
        return self._commits_at_last > self._commits_at_first

    @property
    def is_paused(self) -> bool:
        """Tell whether the table has failed often enough for others not to wait for it."""
        return self.attempts >= PAUSED_AFTER_ATTEMPTS

    def note_failure(self, reason: str, *, now: float, jitter: float, commits: int) -> None:
        """Count a failure and choose when to try again.

        `jitter` in [0, 1) keeps tables from trying all at once; `commits` counts those of all tables so far.
        """
        self._commits_at_first = self._commits_at_first if self.attempts else commits
        self._commits_at_last = commits
        self.attempts += 1
        self.reason = reason
        self.since = now if self.since is None else self.since
        # The exponent is bounded, so that a year of failures does not end in a number too large for a float.
        pause_s = min(RETRY_MAX_S, RETRY_FIRST_S * 2 ** min(self.attempts - 1, 16))
        self.retry_at = now + pause_s * (1 + jitter) / 2

    def note_success(self) -> None:
        """Forget it all."""
        self.reason = self.since = None
        self.attempts = 0
        self.retry_at = 0.0
        self._commits_at_first = self._commits_at_last = 0
