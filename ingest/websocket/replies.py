"""Replies of the WebSocket: acks, nacks and receipts, built from plain values."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from lakefeed.contract.changes import Position
from lakefeed.ingest.admission.limits import Allowance
from lakefeed.ingest.protocol.messages import (
    Ack,
    AckDetails,
    Nack,
    RateLimit,
)
from lakefeed.ingest.protocol.offers import Duplicate, Durable, Refused

# Above this share of the log's budget acks ask clients to slow down, before the log is full.
SLOW_DOWN_UTILIZATION = 0.8
SLOW_DOWN_MAX_DELAY_MS = 500

# Batches that wait for their receipt, per connection. Beyond it neighbours share one, with the higher number.
WAITING_MAX_BATCHES = 4_096


@dataclass(frozen=True, slots=True)
class WaitingBatch:
    """A durable batch and where it ends. Its receipt also covers all batches with lower numbers."""

    number: int
    position: Position
    correlation_id: str | None

    def merged(self, earlier: WaitingBatch) -> WaitingBatch:
        """Return one entry for both: committed once both are, with the higher number."""
        higher = max(self, earlier, key=lambda waiting: waiting.number)
        return WaitingBatch(higher.number, max(self.position, earlier.position), higher.correlation_id)


@dataclass(slots=True)
class Receipts:
    """The batches of one connection that wait for a commit, in the order of their acks and of their numbers."""

    _waiting: deque[WaitingBatch] = field(default_factory=deque)

    def expect(self, number: int, position: Position, correlation_id: str | None = None) -> None:
        """Remember a durable batch and where it ends, and the correlation id if the receipt is its only reply.

        A batch that was resent after others with higher numbers is merged with those: a receipt covers all numbers up
        to its own, so none of them may be sent before it.
        """
        batch = WaitingBatch(number, position, correlation_id)
        while self._waiting and self._waiting[-1].number >= number:
            batch = batch.merged(self._waiting.pop())
        if len(self._waiting) >= WAITING_MAX_BATCHES:
            batch = batch.merged(self._waiting.pop())
        self._waiting.append(batch)

    def take_due(self, committed: Position | None) -> WaitingBatch | None:
        """Remove the batches that are committed, and return the one with the highest number."""
        due: WaitingBatch | None = None
        while committed is not None and self._waiting and self._waiting[0].position <= committed:
            due = self._waiting.popleft()
        return due

    def clear(self) -> None:
        """Forget all batches: the source connected again, and old positions cannot be compared with new ones."""
        self._waiting.clear()


@dataclass(frozen=True, slots=True, kw_only=True)
class Backlog:
    """What is durable and not committed: the used share of the log's budget, and the time of the next flush."""

    utilization: float
    time_until_flush_ms: int
    commits_fail: bool


def ack(
    verdict: Durable | Duplicate | None,
    *,
    number: int,
    changes: int,
    correlation_id: str | None,
    backlog: Backlog,
    is_regression: bool,
    now: float,
) -> Ack:
    """Return the ack of a durable batch; a verdict of None is for a batch without changes.

    A duplicate of a source whose sequences regressed says how to restart them.
    """
    if isinstance(verdict, Duplicate):
        return Ack(
            timestamp=_ms(now),
            sequence_number=number,
            status="duplicate",
            correlation_id=correlation_id,
            last_durable_sequence=verdict.mark_sequence,
            details=None
            if not is_regression
            else AckDetails(
                events_processed=0,
                buffer_utilization=round(backlog.utilization, 4),
                duplicates=changes,
                message="all sequences are at or below what is durable, so nothing was accepted; a source that starts"
                f" over has to connect with a higher epoch: lastDurableSequence={verdict.mark_sequence}",
            ),
        )
    slow_down = backlog.utilization > SLOW_DOWN_UTILIZATION
    new = verdict.changes if verdict is not None else 0
    return Ack(
        timestamp=_ms(now),
        sequence_number=number,
        status="buffered" if slow_down else "ok",
        batch_id=str(verdict.offset) if verdict is not None else None,
        correlation_id=correlation_id,
        details=AckDetails(
            events_processed=new,
            buffer_utilization=round(backlog.utilization, 4),
            time_until_flush=backlog.time_until_flush_ms,
            duplicates=changes - new or None,
            suggested_delay_ms=int(backlog.utilization * SLOW_DOWN_MAX_DELAY_MS) if slow_down else None,
            circuit_breaker_state="open" if backlog.commits_fail else "closed",
        ),
    )


def receipt(batch: WaitingBatch, *, committed: Position, tables: Mapping[str, int], now: float) -> Ack:
    """Return the receipt: everything up to a batch is committed, in these snapshots."""
    return Ack(
        timestamp=_ms(now),
        sequence_number=batch.number,
        status="persisted",
        correlation_id=batch.correlation_id,
        last_committed_sequence=committed.sequence,
        tables=tables,
    )


def add_allowance(reply: Ack | Nack, allowance: Allowance) -> None:
    """Add to a reply what is left of the limit on messages."""
    reply.rate_limit = RateLimit(limit=allowance.limit, remaining=allowance.remaining, reset_at=int(allowance.reset_at))
    if isinstance(reply, Ack) and reply.details is not None:
        reply.details.remaining_tokens = allowance.remaining
        reply.details.bucket_capacity = allowance.limit


def nack(refused: Refused, number: int, correlation_id: str | None, *, now: float) -> Nack:
    """Return the nack of a refused message."""
    return Nack(
        timestamp=_ms(now),
        sequence_number=number,
        reason=refused.reason.value,
        error_message=refused.message,
        should_retry=refused.retry,
        retry_delay_ms=refused.retry_delay_ms,
        max_size=refused.max_size,
        actual_size=refused.actual_size,
        received_size=refused.actual_size,
        last_durable_sequence=refused.last_durable_sequence,
        correlation_id=correlation_id,
    )


def sequence_in(position: Position | None, epoch: int) -> int | None:
    """Return the sequence of a position; None if it is of another epoch or before the first."""
    if position is None or position.epoch != epoch or position.sequence < 0:
        return None
    return position.sequence


def _ms(now: float) -> int:
    return int(now * 1_000)
