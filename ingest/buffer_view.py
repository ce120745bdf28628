"""What waits between the log and the tables, as clients are told of it. Owns how often that is looked at.

An ack tells when the next flush will be, and there are too many acks to ask every table for each.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ingest.answers import Backlog
from ingest.intake import Intake
from ingest.protocol import BufferStats
from writer.buffer_facts import BufferFacts
from writer.feed import Feed

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
