"""What waits between the log and the tables, in a few numbers for those who send and those who watch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from writer.flush_control import Threshold
from writer.trouble import Trouble


class Waiting(Protocol):
    """A table, as far as it matters here."""

    trouble: Trouble

    @property
    def buffered_rows(self) -> int:
        """Rows in memory."""

    def oldest_age_s(self, *, now: float) -> float | None:
        """Tell how long the oldest change that is not committed has been here."""

    def next_flush(self, *, now: float) -> Threshold | None:
        """Tell when the buffer will be flushed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferFacts:
    """What is durable and not committed: log records, rows of them in memory, the oldest's age, the next flush.

    Commits to the paused tables have failed several times in a row.
    """

    batches: int
    changes: int
    oldest_age_s: float | None
    next_flush_in_s: float | None
    paused_tables: int


def gather_facts(tables: Iterable[Waiting], *, uncommitted_records: int, now: float) -> BufferFacts:
    """Sum up all tables."""
    every = list(tables)
    ages = (table.oldest_age_s(now=now) for table in every)
    flushes = (table.next_flush(now=now) for table in every)
    return BufferFacts(
        batches=uncommitted_records,
        changes=sum(table.buffered_rows for table in every),
        oldest_age_s=max((age for age in ages if age is not None), default=None),
        next_flush_in_s=min((max(0.0, flush.in_s) for flush in flushes if flush is not None), default=None),
        paused_tables=sum(table.trouble.is_paused for table in every),
    )
