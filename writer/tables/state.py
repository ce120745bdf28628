"""Where a table stands in the log. Owns when its rows leave memory, what is read again for it, and who goes first.

             the applier gives it all of its changes, as it comes to them
    FLOWING ---------------------------------------------------------------
       |  ^
  park |  | join: what it has read again reaches to where the applier is
       v  |
    BEHIND ----------------------------------------------------------------
             the applier passes by; the table is read again from `resume_offset`, a stretch at a time, when it is ready

Parking is a restart of one table: rows leave memory, and the log and the table's own marks have all that it takes to
go on. Nothing is lost, because `resume_offset` keeps the log from being trimmed there; nothing comes twice or out of
order, because whatever lies below `resume_offset` is in memory or committed, and whatever lies above is neither.

The log is shared too. When tables that cannot be written hold more than their share of it, while others commit, the one
that is furthest back goes on without its oldest rows: they are read again like all others, and go to the quarantine.

Tables that are behind share one reading of the log. The one that is furthest back goes first, up to where the next one
waits; from there they go on together. So a table pays for what it missed, and an outage of all is read again once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from lakefeed.contract.changes import Position, SourceId, Span

# --- writer.trouble ---------------------------------------------------------------------------------------------------
#
# What is wrong with a table: why, since when, when to try again. Owns the growing pauses and what counts as paused.
#
#     well --failed--> failing --failed again and again--> paused --succeeded--> well
#
# A table that fails once or twice may have met a hiccup, and whoever waits for it keeps waiting. A paused one is told
# to
# people with its reason, and nobody waits for it; it is tried all the same, for ever.


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


# --- writer.parking ---------------------------------------------------------------------------------------------------


# What tables that cannot be written may hold together of the memory for rows. The other half is for those that can:
# enough for flushes of full size at the default settings.
STUCK_MAX_SHARE = 0.5

# What all others may hold of it while a table catches up. Less than that table's half, because it has the longer way to
# go: where memory is the limit, it would otherwise stay behind for ever.
FLOWING_MAX_SHARE = 0.25

# Moving rows to the quarantine goes on until the stuck tables hold this part of their share, so that it is done in one
# go and then not needed for a while.
MOVE_UNTIL_SHARE = 0.8

Name = TypeVar("Name")


@dataclass(slots=True)
class Standing:
    """One table's standing: flowing while there is no offset to resume from."""

    resume_offset: int | None = None
    since: float | None = None
    # Of each source, the positions between which changes of this table lie in the log and not in memory. The first is
    # a lower bound.
    _passed: dict[SourceId, Span] = field(default_factory=dict)

    @property
    def is_behind(self) -> bool:
        """Tell whether the table is read again from the log."""
        return self.resume_offset is not None

    def park(self, offset: int, spans: Iterable[Mapping[SourceId, Span]], *, since: float) -> None:
        """Remember that everything of the table from `offset` on has left memory; `spans` are what left.

        `since` is when the oldest of it came.
        """
        assert self.resume_offset is None or offset <= self.resume_offset, "what is behind cannot be skipped"
        self.resume_offset = offset
        self.since = since if self.since is None else min(since, self.since)
        for each in spans:
            for source, span in each.items():
                self._note(source, span)

    def pass_by(self, spans: Mapping[SourceId, Span]) -> None:
        """Note changes that the applier has met and not given."""
        assert self.is_behind
        for source, span in spans.items():
            self._note(source, span)

    def _note(self, source: SourceId, span: Span) -> None:
        known = self._passed.get(source, span)
        self._passed[source] = Span(min(known.first, span.first), max(known.last, span.last))

    def take_again(self, spans: Mapping[SourceId, Span]) -> None:
        """Note changes that were read again and are in memory now."""
        for source, span in spans.items():
            known = self._passed.get(source)
            if known is None or known.last <= span.last:
                self._passed.pop(source, None)
            else:
                self._passed[source] = Span(max(known.first, _behind(span.last)), known.last)

    def advance(self, offset: int, *, applied_offset: int) -> None:
        """Note that the log has been read again up to `offset`; the table flows again if the applier is no further."""
        assert self.resume_offset is not None
        assert self.resume_offset <= offset <= applied_offset, "a table reads behind the applier"
        self.resume_offset = offset
        if offset == applied_offset:
            self.resume_offset = self.since = None
            self._passed.clear()

    @property
    def passed_spans(self) -> Mapping[SourceId, Span]:
        """Tell between which positions of each source changes are in the log only; the first is a lower bound."""
        return self._passed

    def first_passed(self, source: SourceId) -> Position | None:
        """Find a lower bound of the positions of a source that are in the log only; None if there are none."""
        span = self._passed.get(source)
        return span.first if span else None


def _behind(position: Position) -> Position:
    return Position(position.epoch, position.sequence + 1)


@dataclass(frozen=True, slots=True)
class Stretch(Generic[Name]):
    """What to read again next: the records [start, until), for these tables."""

    start: int
    until: int
    tables: frozenset[Name]


def plan_stretch(resume_offsets: Mapping[Name, int], *, applied_offset: int) -> Stretch[Name] | None:
    """Choose what to read next for the tables that are behind and ready; None if there are none."""
    if not resume_offsets:
        return None
    start = min(resume_offsets.values())
    later = [offset for offset in resume_offsets.values() if offset > start]
    members = frozenset(name for name, offset in resume_offsets.items() if offset == start)
    return Stretch(start, min([applied_offset, *later]), members)


@dataclass(frozen=True, slots=True)
class Holding:
    """What a table holds in memory: rows that wait, and rows of the flush under way."""

    waiting_bytes: int
    flushing_bytes: int


@dataclass(frozen=True, slots=True)
class Yields(Generic[Name]):
    """Tables whose rows leave memory: those that wait, or all of them with the flush under way."""

    waiting: frozenset[Name]
    everything: frozenset[Name]


def plan_yields(stuck: Mapping[Name, Holding], *, interruptible: Collection[Name], max_bytes: int) -> Yields[Name]:
    """Choose which stuck tables give up memory, so that together they hold at most their share of `max_bytes`.

    The largest first. What waits costs only a second reading; a flush under way has written files, so it comes last,
    and only where it is `interruptible`: one that gets on, if slowly, would come no further the second time.
    """
    over = sum(each.waiting_bytes + each.flushing_bytes for each in stuck.values()) - int(max_bytes * STUCK_MAX_SHARE)
    waiting: set[Name] = set()
    for name in sorted(stuck, key=lambda name: -stuck[name].waiting_bytes):
        if over > 0 and stuck[name].waiting_bytes:
            waiting.add(name)
            over -= stuck[name].waiting_bytes
    everything: set[Name] = set()
    for name in sorted(stuck, key=lambda name: -stuck[name].flushing_bytes):
        if over > 0 and stuck[name].flushing_bytes and name in interruptible:
            everything.add(name)
            over -= stuck[name].flushing_bytes
    return Yields(frozenset(waiting - everything), frozenset(everything))


def plan_move(paused: Mapping[Name, int], *, held_bytes: int, max_bytes: float, is_moving: bool) -> Name | None:
    """Choose whose oldest rows go to the quarantine, given the oldest offset that each paused table needs.

    `held_bytes` is what these tables hold of the log beyond what all others need of it.
    """
    is_over = held_bytes > max_bytes * (MOVE_UNTIL_SHARE if is_moving else 1)
    return min(paused, key=paused.__getitem__) if paused and is_over else None
