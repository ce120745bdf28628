"""One client's connection: its session, its batches in flight, and the replies and receipts that it is owed.

What follows from a verdict for a connection is decided here; `replies` words it, `server` sends it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field

from lakefeed.contract.changes import Position
from lakefeed.ingest.admission.limits import TOO_MANY_REFUSALS, Closing, ConnectionSlot, MessageLimiter
from lakefeed.ingest.intake.intake import Intake
from lakefeed.ingest.metrics import IngestMetrics
from lakefeed.ingest.protocol.messages import Ack, BufferStats, Nack, ServerMessage
from lakefeed.ingest.protocol.offers import Duplicate, Durable, Refused, Verdict
from lakefeed.ingest.protocol.session import Session
from lakefeed.ingest.websocket import replies
from lakefeed.ingest.websocket.replies import Backlog, Receipts
from lakefeed.ingest.websocket.socket import BudgetedConnection
from lakefeed.writer.tables.feed import Feed
from lakefeed.writer.tables.status import PendingTotals

logger = logging.getLogger(__name__)

# Maximum age of the backlog that an ack reports, far below the time of a flush. There are too many acks to look at
# every table for each of them.
BACKLOG_MAX_AGE_S = 0.1


@dataclass(slots=True)
class SequenceHistory:
    """Detects a source that restarted its sequences on this connection without a higher epoch.

    Such a source sends changes that look like old ones: they are acked as `duplicate` and skipped. A source that
    resends what was not acked does the same, which is right. A duplicate batch is a regression if

        it ends below an earlier batch of the connection, and its number was not sent before, or
        it is one of more duplicates in a row than can be in flight
    """

    highest: Position | None = None
    number: int | None = None
    duplicates: int = 0
    has_warned: bool = False

    def is_regression(self, *, number: int, end: Position, is_duplicate: bool, in_flight_max: int) -> bool:
        """Add the next batch; return whether it is a regression."""
        is_resent = self.number is not None and number <= self.number
        is_below = self.highest is not None and end < self.highest and not is_resent
        self.duplicates = self.duplicates + 1 if is_duplicate else 0
        self.highest = max(end, self.highest or end)
        self.number = max(number, self.number or number)
        return is_duplicate and (is_below or self.duplicates > in_flight_max)


@dataclass(frozen=True, slots=True)
class PendingAck:
    """A batch that waits for its verdict; its rows do not wait with it. `position` is where the batch ends."""

    number: int
    changes: int
    correlation_id: str | None
    received_at: float
    verdict: asyncio.Future[Verdict] | None
    position: Position | None = None


@dataclass(slots=True, eq=False, kw_only=True)
class ClientConnection:
    """One client, as /status shows it. `pending_events` is what the client says it has still to send.

    `closing` says how to close the connection, once that is decided. `closes_at_once` is set where the decision falls
    while the reader waits for a frame, so that the sender has to close. `owes_receipt` is set where a commit may have
    come before the client's batch was acked, or while its queue of replies was full.
    """

    session: Session
    socket: BudgetedConnection
    slot: ConnectionSlot
    limiter: MessageLimiter
    replies: asyncio.Queue[PendingAck | ServerMessage | None]
    connected_at: float
    last_activity_at: float
    batches: int = 0
    changes: int = 0
    pending_events: int = 0
    charged_bytes: int = 0
    newest_verdict: asyncio.Future[Verdict] | None = None
    history: SequenceHistory = field(default_factory=SequenceHistory)
    flushes: set[asyncio.Task[None]] = field(default_factory=set)
    receipts: Receipts = field(default_factory=Receipts)
    owes_receipt: bool = False
    closing: Closing | None = None
    is_closing: bool = False
    closes_at_once: bool = False


class BacklogMonitor:
    """What is durable and not committed, in the wire protocol's terms; times are ms since 1970."""

    def __init__(self, feed: Feed, intake: Intake) -> None:
        self.last_commit_at = 0.0
        self._feed = feed
        self._intake = intake
        self._seen: tuple[float, PendingTotals] | None = None

    @property
    def last_flush_time_ms(self) -> int | None:
        """Return the time of the last commit; None if there was none since the start."""
        return int(self.last_commit_at * 1_000) or None

    def note_commit(self) -> None:
        """Remember the time of a commit, for /status and for batches that are acked after it."""
        self.last_commit_at = time.time()

    def utilization(self) -> float:
        """Return the used share of the log's budget."""
        return self._feed.status.log_bytes() / self._feed.status.log_max_bytes()

    def backlog(self) -> Backlog:
        """Return what is in front of a batch that is durable now."""
        measured_at, totals = self._totals()
        longest_s = self._feed.status.flush_max_age_s()
        in_s = totals.next_flush_in_s if totals.next_flush_in_s is not None else longest_s
        return Backlog(
            utilization=self.utilization(),
            time_until_flush_ms=round(max(0.0, min(in_s, longest_s) - (time.monotonic() - measured_at)) * 1_000),
            commits_fail=totals.paused_tables > 0,
        )

    def next_flush_time_ms(self) -> int | None:
        """Return the time of the next flush; None while nothing is buffered."""
        measured_at, totals = self._totals()
        if totals.next_flush_in_s is None:
            return None
        return self._ms_at(measured_at + min(totals.next_flush_in_s, self._feed.status.flush_max_age_s()))

    def stats(self) -> BufferStats:
        """Return how full the log is, and how much of it is not committed."""
        measured_at, totals = self._totals()
        newest_us = self._intake.newest_received_at_us
        return BufferStats(
            total_size_bytes=self._feed.status.log_bytes(),
            utilization=self.utilization(),
            batch_count=totals.batches,
            event_count=totals.changes,
            oldest_batch_time=None if totals.oldest_age_s is None else self._ms_at(measured_at - totals.oldest_age_s),
            newest_batch_time=newest_us // 1_000 if totals.batches and newest_us is not None else None,
        )

    def _totals(self) -> tuple[float, PendingTotals]:
        now = time.monotonic()
        if self._seen is None or now - self._seen[0] > BACKLOG_MAX_AGE_S:
            self._seen = (now, self._feed.status.pending_totals(now=now))
        return self._seen

    def _ms_at(self, moment: float) -> int:
        return int((time.time() + moment - time.monotonic()) * 1_000)


class BatchReplies:
    """Replies to the batches of all connections, and receipts after commits."""

    def __init__(self, feed: Feed, backlog: BacklogMonitor, *, in_flight_max: int, metrics: IngestMetrics) -> None:
        self._feed = feed
        self._backlog = backlog
        self._metrics = metrics
        self._in_flight_max = in_flight_max

    def reply(self, verdict: Verdict | None, pending: PendingAck, connection: ClientConnection) -> ServerMessage | None:
        """Return the reply to a batch; None if its receipt is to be the reply. A batch without changes has no verdict.

        A client that ignores its retry delays is closed.
        """
        now = time.time()
        connection.limiter.on_verdict(verdict, received_at=pending.received_at, now=now)
        if connection.limiter.ignores_refusals and connection.closing is None:
            connection.closing = TOO_MANY_REFUSALS
            connection.closes_at_once = True
        if isinstance(verdict, Refused):
            connection.session.on_refused(pending.number)
            return self.nack(verdict, pending.number, pending.correlation_id)
        self._metrics.ack_s.observe(now - pending.received_at)
        is_regression = self._is_regression(verdict, pending, connection)
        ack_level = connection.session.ack_level
        # A client that never sent `connect` has no ack level, and expects no receipt.
        if verdict is not None and pending.position is not None and ack_level is not None:
            correlation_id = pending.correlation_id if ack_level == "committed" else None
            connection.receipts.expect(pending.number, pending.position, correlation_id)
            # It may be committed already, and no further commit would trigger the receipt.
            if isinstance(verdict, Duplicate) or pending.received_at <= self._backlog.last_commit_at:
                connection.owes_receipt = True
            if ack_level == "committed":
                return None
        return replies.ack(
            verdict,
            number=pending.number,
            changes=pending.changes,
            correlation_id=pending.correlation_id,
            backlog=self._backlog.backlog(),
            is_regression=is_regression,
            now=now,
        )

    def nack(self, refused: Refused, number: int, correlation_id: str | None) -> Nack:
        """Count a refused message, and return its nack."""
        self._metrics.counts.nacks[refused.reason.value] += 1
        return replies.nack(refused, number, correlation_id, now=time.time())

    def _is_regression(
        self, verdict: Durable | Duplicate | None, pending: PendingAck, connection: ClientConnection
    ) -> bool:
        end, history = pending.position, connection.history
        if verdict is None or pending.verdict is None or end is None:  # no changes, or numbered here (Debezium)
            return False
        is_duplicate = isinstance(verdict, Duplicate)
        if not history.is_regression(
            number=pending.number, end=end, is_duplicate=is_duplicate, in_flight_max=self._in_flight_max
        ):
            return False
        self._metrics.sequence_regressions.inc()
        if not history.has_warned:
            history.has_warned = True
            facts = {"source": connection.session.source, "epoch": end.epoch, "sequence": end.sequence}
            logger.warning("source_sequence_regressed", extra=facts)
        return True

    def take_receipt(self, connection: ClientConnection) -> Ack | None:
        """Return a receipt for a client's newly committed batches; None if there are none."""
        connection.owes_receipt = False
        source = connection.session.source
        committed = self._feed.status.committed_position(source) if source is not None else None
        batch = connection.receipts.take_due(committed)
        if source is None or batch is None or committed is None:
            return None
        tables = self._feed.status.snapshots_of(source)
        return replies.receipt(batch, committed=committed, tables=tables, now=time.time())
