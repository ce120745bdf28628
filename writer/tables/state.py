"""Lifecycle of a table: three state machines that advance on the same events, and the retry state. Pure.

Reading: where the table's changes come from, and whether its own progress marks are loaded.

                           LIVE       the live reader delivers each change as it reads it
                           BEHIND     rows are in the log only; catch-up delivers them from `resume_offset`
    marks not loaded yet:  OPENING    like LIVE, and delivered rows wait until the marks are loaded
                           REOPENING  like BEHIND, and delivered rows wait until the marks are loaded

                           OPENED                            ROWS_EVICTED
        OPENING ----------------------------> LIVE ----------------------------> BEHIND
          |  ^  <--------------------------         <----------------------------  |  ^
          |  |              CLOSED                           CAUGHT_UP             |  |
          |  | CAUGHT_UP                                                    CLOSED |  | OPENED
          |  +------------------------------------------------------------+        v  |
          +--------------------------------------------------------------> REOPENING -+
                                   ROWS_EVICTED

Flush: the flush under way.

                FLUSH_STARTED            FILES_WRITTEN
        IDLE ------------------> WRITING -------------> COMMITTING      the outcome of a commit may be unknown
          ^                        |  ^ <----------------- |
          |   FLUSH_COMMITTED,     |  |    FILES_STALE     |
          +-------- CLOSED --------+--+--------------------+

Health: whether the table can be written.

             FAILED            FAILED_AT_LIMIT         LOG_SHARE_EXCEEDED
        OK --------> RETRYING ----------------> PAUSED ------------------> QUARANTINING
        ^               |                        |  ^ <----------------------  |
        |               |                        |        LOG_SHARE_FREED      |
        +---------------+--- FLUSH_COMMITTED, ---+-----------------------------+
                                 EMPTIED

    RETRYING       failed once or twice; callers that wait for a flush keep waiting
    PAUSED         failed three times in a row; callers get the reason instead of waiting. The table is still retried
    QUARANTINING   paused, and over its share of the log: rows that catch-up delivers go to quarantine

An evicted table restarts alone: its rows leave memory, and the log and the table's own marks hold everything it needs
to continue. CLOSED abandons the flush and discards the loaded marks, because the abandoned commit may have landed.

Rules that hold after every event: a table whose marks are not loaded has no flush, and neither has a table that drains
to quarantine.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from lakefeed.backoff import Backoff


class Reading(enum.Enum):
    """Where the table's changes come from."""

    OPENING = "opening"
    LIVE = "live"
    BEHIND = "behind"
    REOPENING = "reopening"


class FlushPhase(enum.Enum):
    """What the table's flush does."""

    IDLE = "idle"
    WRITING = "writing"
    COMMITTING = "committing"


class Health(enum.Enum):
    """Whether the table can be written."""

    OK = "ok"
    RETRYING = "retrying"
    PAUSED = "paused"
    QUARANTINING = "quarantining"


class Event(enum.Enum):
    """What happens to a table."""

    OPENED = "marks are loaded"
    CLOSED = "marks are discarded and the flush is abandoned"
    ROWS_EVICTED = "rows left memory"
    CAUGHT_UP = "catch-up has reached the live reader"
    FLUSH_STARTED = "buffered rows were taken"
    FILES_WRITTEN = "all data files are stored"
    FILES_STALE = "the table changed: files are written again"
    FLUSH_COMMITTED = "the rows are in a snapshot"
    FAILED = "an attempt failed"
    FAILED_AT_LIMIT = "as many attempts in a row failed as pause a table"
    LOG_SHARE_EXCEEDED = "paused tables hold too much of the log"
    LOG_SHARE_FREED = "the log has room again, or another table drains first"
    EMPTIED = "nothing is uncommitted"


State = TypeVar("State", Reading, FlushPhase, Health)
Transitions: TypeAlias = Mapping[State, Mapping[Event, State]]

# An event that stands in any row of a table concerns that machine: in the rows without it, it must not happen. All
# other events leave the machine as it is.
READING: Transitions[Reading] = {
    Reading.OPENING: {
        Event.OPENED: Reading.LIVE,
        Event.CLOSED: Reading.OPENING,
        Event.ROWS_EVICTED: Reading.REOPENING,
        Event.EMPTIED: Reading.OPENING,
    },
    Reading.LIVE: {
        Event.CLOSED: Reading.OPENING,
        Event.ROWS_EVICTED: Reading.BEHIND,
        Event.FLUSH_STARTED: Reading.LIVE,
        Event.EMPTIED: Reading.LIVE,
    },
    Reading.BEHIND: {
        Event.CLOSED: Reading.REOPENING,
        Event.ROWS_EVICTED: Reading.BEHIND,
        Event.CAUGHT_UP: Reading.LIVE,
        Event.FLUSH_STARTED: Reading.BEHIND,
    },
    Reading.REOPENING: {
        Event.OPENED: Reading.BEHIND,
        Event.CLOSED: Reading.REOPENING,
        Event.ROWS_EVICTED: Reading.REOPENING,
        Event.CAUGHT_UP: Reading.OPENING,
    },
}

FLUSH: Transitions[FlushPhase] = {
    FlushPhase.IDLE: {
        Event.FLUSH_STARTED: FlushPhase.WRITING,
        Event.CLOSED: FlushPhase.IDLE,
        Event.LOG_SHARE_EXCEEDED: FlushPhase.IDLE,
        Event.EMPTIED: FlushPhase.IDLE,
    },
    FlushPhase.WRITING: {
        Event.FILES_WRITTEN: FlushPhase.COMMITTING,
        Event.FILES_STALE: FlushPhase.WRITING,
        # Without a commit of ours: another node was first, and the table has all of the rows.
        Event.FLUSH_COMMITTED: FlushPhase.IDLE,
        Event.CLOSED: FlushPhase.IDLE,
    },
    FlushPhase.COMMITTING: {
        Event.FILES_STALE: FlushPhase.WRITING,
        Event.FLUSH_COMMITTED: FlushPhase.IDLE,
        Event.CLOSED: FlushPhase.IDLE,
    },
}

HEALTH: Transitions[Health] = {
    Health.OK: {
        Event.FAILED: Health.RETRYING,
        Event.FLUSH_STARTED: Health.OK,
        Event.FLUSH_COMMITTED: Health.OK,
        Event.EMPTIED: Health.OK,
    },
    Health.RETRYING: {
        Event.FAILED: Health.RETRYING,
        Event.FAILED_AT_LIMIT: Health.PAUSED,
        Event.FLUSH_STARTED: Health.RETRYING,
        Event.FLUSH_COMMITTED: Health.OK,
        Event.EMPTIED: Health.OK,
    },
    Health.PAUSED: {
        Event.FAILED_AT_LIMIT: Health.PAUSED,
        Event.FLUSH_STARTED: Health.PAUSED,
        Event.FLUSH_COMMITTED: Health.OK,
        Event.LOG_SHARE_EXCEEDED: Health.QUARANTINING,
        Event.EMPTIED: Health.OK,
    },
    Health.QUARANTINING: {
        Event.FAILED_AT_LIMIT: Health.QUARANTINING,
        Event.LOG_SHARE_FREED: Health.PAUSED,
        Event.EMPTIED: Health.OK,
    },
}


@dataclass(slots=True)
class Lifecycle:
    """The three states of one table."""

    reading: Reading = Reading.OPENING
    flush: FlushPhase = FlushPhase.IDLE
    health: Health = Health.OK

    def advance(self, event: Event) -> None:
        """Move all three machines on. An event that a machine does not expect is a defect of ours."""
        reading, flush, health = (
            _next(READING, self.reading, event),
            _next(FLUSH, self.flush, event),
            _next(HEALTH, self.health, event),
        )
        if flush is not FlushPhase.IDLE:
            assert reading in (Reading.LIVE, Reading.BEHIND), f"flush without marks: {self} {event}"
            assert health is not Health.QUARANTINING, f"flush while draining to quarantine: {self} {event}"
        self.reading, self.flush, self.health = reading, flush, health

    @property
    def is_open(self) -> bool:
        """Return whether the table's marks are loaded."""
        return self.reading in (Reading.LIVE, Reading.BEHIND)

    @property
    def is_behind(self) -> bool:
        """Return whether catch-up delivers the table's changes."""
        return self.reading in (Reading.BEHIND, Reading.REOPENING)

    @property
    def is_paused(self) -> bool:
        """Return whether the table has failed so often that callers do not wait for it."""
        return self.health in (Health.PAUSED, Health.QUARANTINING)


def _next(transitions: Transitions[State], state: State, event: Event) -> State:
    following = transitions[state].get(event)
    if following is None:
        assert not any(event in row for row in transitions.values()), f"unexpected event: {state} {event}"
        return state
    return following


BACKOFF = Backoff(first_s=0.2, max_s=15.0)

# Failures in a row that pause a table: with the delays above, about a second.
PAUSED_AFTER_ATTEMPTS = 3


@dataclass(slots=True)
class RetryState:
    """The failures of one table since its last success, and when to try again."""

    reason: str | None = None
    since: float | None = None
    attempts: int = 0
    retry_at: float = 0.0
    _commits_at_first: int = 0
    _commits_at_last: int = 0

    @property
    def is_local(self) -> bool:
        """Return whether other tables committed between two failures: then catalog and store work for others."""
        return self._commits_at_last > self._commits_at_first

    def note_failure(self, reason: str, *, now: float, jitter: float, commits: int) -> Event:
        """Count a failure, choose when to try again, and return the event for the lifecycle.

        `jitter` in [0, 1) keeps tables from retrying at the same moment; `commits` counts those of all tables so far.
        """
        self._commits_at_first = self._commits_at_first if self.attempts else commits
        self._commits_at_last = commits
        self.attempts += 1
        self.reason = reason
        self.since = now if self.since is None else self.since
        self.retry_at = now + BACKOFF.limit_s(self.attempts) * (1 + jitter) / 2
        return Event.FAILED_AT_LIMIT if self.attempts >= PAUSED_AFTER_ATTEMPTS else Event.FAILED

    def clear(self) -> None:
        """Forget all failures."""
        self.reason = self.since = None
        self.attempts = 0
        self.retry_at = 0.0
        self._commits_at_first = self._commits_at_last = 0
