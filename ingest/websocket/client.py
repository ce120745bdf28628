"""What a connection is told of its batches: an ack or a nack, and a receipt once they are committed.

Owns what follows from a verdict for the connection, and which receipts it is owed; the wording is replies.py's, the
sending server.py's.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from lakefeed.contract.changes import Position, SourceId
from lakefeed.ingest.intake.intake import Intake
from lakefeed.ingest.metrics import IngestMetrics
from lakefeed.ingest.protocol.messages import Ack, BufferStats, ServerMessage
from lakefeed.ingest.protocol.offers import Duplicate, Durable, Refused, Verdict
from lakefeed.ingest.protocol.session import Session
from lakefeed.ingest.websocket import replies
from lakefeed.ingest.websocket.handshake import Gate
from lakefeed.ingest.websocket.replies import Backlog, Receipts
from lakefeed.writer.tables.feed import Feed
from lakefeed.writer.tables.status import BufferFacts

# --- ingest.buffer_view -----------------------------------------------------------------------------------------------
#
# What waits between the log and the tables, as clients are told of it. Owns how often that is looked at.
#
# An ack tells when the next flush will be, and there are too many acks to ask every table for each.


# How old what an ack says may be; far below what a flush takes.
LOOK_MAX_AGE_S = 0.1


class BufferView:
    """The buffers in the wire protocol's words; times are ms since 1970."""

    def __init__(
        self,
        feed: Feed,
        intake: Intake,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._feed = feed
        self._intake = intake
        self._clock = clock
        self._wall_clock = wall_clock
        self._seen: tuple[float, BufferFacts] | None = None

    def utilization(self) -> float:
        """Tell how much of the log's budget is used."""
        return self._feed.log_bytes() / self._feed.log_max_bytes()

    def backlog(self) -> Backlog:
        """Tell what lies before a batch that is durable now."""
        looked_at, facts = self._look()
        longest_s = self._feed.flush_max_age_s()
        in_s = facts.next_flush_in_s if facts.next_flush_in_s is not None else longest_s
        return Backlog(
            utilization=self.utilization(),
            time_until_flush_ms=round(max(0.0, min(in_s, longest_s) - (self._clock() - looked_at)) * 1_000),
            commits_fail=facts.paused_tables > 0,
        )

    def next_flush_time_ms(self) -> int | None:
        """Tell when the next flush will be; None while nothing is buffered."""
        looked_at, facts = self._look()
        if facts.next_flush_in_s is None:
            return None
        return self._ms_at(looked_at + min(facts.next_flush_in_s, self._feed.flush_max_age_s()))

    def stats(self) -> BufferStats:
        """Tell how full the log is, and what of it is not committed."""
        looked_at, facts = self._look()
        newest_us = self._intake.newest_received_at_us
        return BufferStats(
            total_size_bytes=self._feed.log_bytes(),
            utilization=self.utilization(),
            batch_count=facts.batches,
            event_count=facts.changes,
            oldest_batch_time=None if facts.oldest_age_s is None else self._ms_at(looked_at - facts.oldest_age_s),
            newest_batch_time=newest_us // 1_000 if facts.batches and newest_us is not None else None,
        )

    def _look(self) -> tuple[float, BufferFacts]:
        now = self._clock()
        if self._seen is None or now - self._seen[0] > LOOK_MAX_AGE_S:
            self._seen = (now, self._feed.buffer_facts(now=now))
        return self._seen

    def _ms_at(self, moment: float) -> int:
        return int((self._wall_clock() + moment - self._clock()) * 1_000)


# --- ingest.regressions -----------------------------------------------------------------------------------------------
#
# Sources that jump back without a new epoch. Owns the rule that tells a jump from an ordinary resend.
#
# A source that starts its sequences over, after a restore say, and does not say so by a higher epoch, sends changes
# that
# look like old ones: they are answered `duplicate` and taken nowhere. So does one that resends what it has no ack for,
# which is how it should be. A batch of old changes only is a *jump back* if one of these holds:
#
#     fell      a batch before it on the same connection ended higher, and its number was not sent before
#     below     it ends at or below what the source was told, at `connect`, on an earlier connection on which it then
# went
#               on with new changes: by that it has shown that nothing below is missing to it
#     too many  it is one of more such batches in a row, on one connection, than can be without an answer
#
# It is counted, warned about and explained in the ack; what is done with the batch is the same. What no rule finds: a
# source that starts over on a connection of its own, before it was ever seen to go on, with fewer batches than that.


Value = TypeVar("Value")

# Sources that are remembered, the latest ones. One that is forgotten may jump back once without being noticed.
SOURCES_MAX = 16_384

# One line a minute says of a source all that there is to say.
WARN_INTERVAL_S = 60.0


@dataclass(slots=True)
class Course:
    """How the batches of one connection have gone so far."""

    source: SourceId
    told: Position | None = None
    floor: Position | None = None
    reach: Position | None = None
    number: int | None = None
    duplicates: int = 0


@dataclass(slots=True)
class Regressions:
    """What all sources were told and went beyond, and when they were last warned about."""

    resend_max_batches: int
    _floors: dict[SourceId, Position] = field(default_factory=dict)
    _warned_at: dict[SourceId, float] = field(default_factory=dict)

    def begin(self, source: SourceId, told: Position | None = None) -> Course:
        """Follow a connection that speaks for a source, and was told where it is durable if it asked."""
        return Course(source, told, self._floors.get(source))

    def is_jump(self, course: Course, *, number: int, end: Position, is_duplicate: bool) -> bool:
        """Take the next batch of a connection into account; tells whether it jumps back."""
        is_sent_again = course.number is not None and number <= course.number
        has_fallen = course.reach is not None and end < course.reach and not is_sent_again
        is_below = course.floor is not None and end <= course.floor
        course.duplicates = course.duplicates + 1 if is_duplicate else 0
        course.reach = max(end, course.reach or end)
        course.number = max(number, course.number or number)
        if not is_duplicate and course.told is not None:
            _remember(self._floors, course.source, course.told)
        return is_duplicate and (has_fallen or is_below or course.duplicates > self.resend_max_batches)

    def is_warning_due(self, source: SourceId, now: float) -> bool:
        """Tell whether to warn about a source that has jumped back."""
        if now - self._warned_at.get(source, now - WARN_INTERVAL_S) < WARN_INTERVAL_S:
            return False
        _remember(self._warned_at, source, now)
        return True


def _remember(known: dict[SourceId, Value], source: SourceId, value: Value) -> None:
    """Keep a value as the newest; the oldest gives way."""
    known.pop(source, None)
    known[source] = value
    if len(known) > SOURCES_MAX:
        del known[next(iter(known))]


# --- ingest.connection ------------------------------------------------------------------------------------------------
#
# One client's connection: its session, what is counted of it and the answers that it waits for. Plain values.
#
# What happens on it is server.py's; /status shows it.


@dataclass(frozen=True, slots=True)
class PendingAck:
    """A batch that waits for its verdict; its rows do not wait with it."""

    number: int
    changes: int
    correlation_id: str | None
    received_at: float
    verdict: asyncio.Future[Verdict] | None
    position: Position | None = None


@dataclass(slots=True, eq=False)
class Connection:
    """One client, as /status shows it. `pending_events` is what it says to have still to send.

    It `owes_receipt` where a commit may have been told before the client's batch was acked, or while it had no room
    for another answer.
    """

    session: Session
    gate: Gate
    connected_at: float
    last_activity_at: float
    batches: int = 0
    changes: int = 0
    pending_events: int = 0
    charged_bytes: int = 0
    newest_verdict: asyncio.Future[Verdict] | None = None
    course: Course | None = None
    flushes: set[asyncio.Task[None]] = field(default_factory=set)
    receipts: Receipts = field(default_factory=Receipts)
    owes_receipt: bool = False
    answers: asyncio.Queue[PendingAck | ServerMessage | None] = field(default_factory=asyncio.Queue)

    @property
    def remote(self) -> str:
        """The client's address."""
        return str(self.gate.slot.address or "")


# --- ingest.batch_answers ---------------------------------------------------------------------------------------------


logger = logging.getLogger(__name__)


class BatchAnswers:
    """Answers to the batches of all connections."""

    def __init__(self, feed: Feed, buffer: BufferView, *, resend_max_batches: int, metrics: IngestMetrics) -> None:
        self._feed = feed
        self._buffer = buffer
        self._metrics = metrics
        self._regressions = Regressions(resend_max_batches)
        self._last_commit_at = 0.0

    @property
    def last_flush_time_ms(self) -> int | None:
        """When something was last committed; None if nothing was since the start."""
        return int(self._last_commit_at * 1_000) or None

    def begin(self, connection: Connection, source: SourceId, durable: Position | None) -> None:
        """Start over with a connection whose source has just been told where to resume."""
        connection.receipts.clear()
        connection.course = self._regressions.begin(source, durable)

    async def resolve(self, pending: PendingAck, connection: Connection) -> ServerMessage | None:
        """Wait for a batch's verdict and answer it. Cancelling the wait leaves the batch as it is."""
        verdict = await pending.verdict if pending.verdict is not None else None
        is_jump = self._jumps_back(verdict, pending, connection)
        return self.answer(verdict, pending, connection, position=pending.position, is_jump=is_jump)

    def _jumps_back(self, verdict: Verdict | None, pending: PendingAck, connection: Connection) -> bool:
        """Notice a source that seems to have started over without saying so."""
        source, end = connection.session.source, pending.position
        if source is None or end is None or not isinstance(verdict, Durable | Duplicate):
            return False
        connection.course = connection.course or self._regressions.begin(source)
        is_duplicate = isinstance(verdict, Duplicate)
        if not self._regressions.is_jump(connection.course, number=pending.number, end=end, is_duplicate=is_duplicate):
            return False
        self._metrics.sequence_regressions.inc()
        if self._regressions.is_warning_due(source, time.monotonic()):
            facts = {"source": source, "epoch": end.epoch, "sequence": end.sequence}
            logger.warning("source_jumped_back_without_an_epoch", extra=facts)
        return True

    def answer(
        self,
        verdict: Verdict | None,
        pending: PendingAck,
        connection: Connection,
        *,
        position: Position | None,
        is_jump: bool = False,
    ) -> ServerMessage | None:
        """Answer a batch that ends at a position; nothing if its receipt is to be the answer."""
        now = time.time()
        connection.gate.on_verdict(verdict, received_at=pending.received_at, now=now)
        if isinstance(verdict, Refused):
            connection.session.on_refused(pending.number)
            self._metrics.counts.nacks[verdict.reason.value] += 1
            return replies.refusal_nack(verdict, pending.number, pending.correlation_id, now=now)
        self._metrics.ack_s.observe(now - pending.received_at)
        if verdict is not None and position is not None:
            self._expect_receipt(verdict, pending, connection, position=position)
            if connection.session.ack_level == "committed":
                return None
        return replies.ack(
            verdict,
            number=pending.number,
            changes=pending.changes,
            correlation_id=pending.correlation_id,
            backlog=self._buffer.backlog(),
            is_jump=is_jump,
            now=now,
        )

    def _expect_receipt(
        self, verdict: Durable | Duplicate, pending: PendingAck, connection: Connection, *, position: Position
    ) -> None:
        ack_level = connection.session.ack_level
        if ack_level is None:  # a client that never connects expects none
            return
        connection.receipts.expect(
            pending.number, position, pending.correlation_id if ack_level == "committed" else None
        )
        # It may be committed already, and no further commit would tell.
        if isinstance(verdict, Duplicate) or pending.received_at <= self._last_commit_at:
            connection.owes_receipt = True

    def note_commit(self) -> None:
        """Remember when something was committed, for batches that are acked after that."""
        self._last_commit_at = time.time()

    def take_receipt(self, connection: Connection) -> Ack | None:
        """Tell what is committed of a client's batches, if that is news to it."""
        connection.owes_receipt = False
        source = connection.session.source
        committed = self._feed.committed_position(source) if source is not None else None
        batch = connection.receipts.take_due(committed)
        if source is None or batch is None or committed is None:
            return None
        tables = self._feed.snapshots_of(source)
        return replies.receipt(batch, committed=committed, tables=tables, now=time.time())
