"""What a connection is told of its batches: an ack or a nack, and a receipt once they are committed.

Owns what follows from a verdict for the connection, and which receipts it is owed; the wording is answers.py's, the
sending server.py's.
"""

from __future__ import annotations

import logging
import time

from ingest import answers
from ingest.buffer_view import BufferView
from ingest.connection import Connection, PendingAck
from ingest.metrics import IngestMetrics
from ingest.offers import Duplicate, Durable, Refused, Verdict
from ingest.protocol import Ack, ServerMessage
from ingest.regressions import Regressions
from writer.changes import Position, SourceId
from writer.feed import Feed

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
            self._metrics.nacks.labels(verdict.reason.value).inc()
            return answers.refusal_nack(verdict, pending.number, pending.correlation_id, now=now)
        self._metrics.ack_s.observe(now - pending.received_at)
        if verdict is not None and position is not None:
            self._expect_receipt(verdict, pending, connection, position=position)
            if connection.session.ack_level == "committed":
                return None
        return answers.ack(
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
        return answers.receipt(batch, committed=committed, tables=tables, now=time.time())
