"""How a table gets on, as others see it: its memory, its trouble, when it flushes. Owns these answers, moves nothing.

The feed asks before it gives or takes memory, catch_up.py before it reads again, flush_group.py before it flushes all
tables together, /status and /health whenever somebody looks.
"""

from __future__ import annotations

from typing import Any, Protocol

from writer.buffer import FlushReason
from writer.changes import SourceId, TableName
from writer.flush_control import FlushControl, Threshold
from writer.table_columns import TableColumns
from writer.table_context import TableContext
from writer.table_intake import Quarantine, TableIntake
from writer.table_rows import TableRows
from writer.table_status import Totals
from writer.trouble import Trouble

# How long changes may wait to be fitted, or a flush may take, before the table counts as stuck: rows that it gathers
# meanwhile leave memory if others need it. Longer than a flush of full size takes as a rule; short enough that others
# do not wait long. The flush itself goes on for as long as it gets on.
LAG_MAX_S = 5.0


class Groups(Protocol):
    """Where flushes of all tables are asked for, where these are committed together (flush_group.py)."""

    def request(self, reason: FlushReason) -> None:
        """Start a flush of all tables."""


class TableHealth(TableRows):
    """A table's rows and columns, and whether it gets on with them."""

    def __init__(
        self, name: TableName, context: TableContext, *, quarantine: Quarantine | None, groups: Groups | None
    ) -> None:
        super().__init__()
        self.name = name
        self.trouble = Trouble()
        self.totals = Totals()
        self.columns = TableColumns(name, context)
        self.control = FlushControl(self.columns.settings.config)
        self.moves_away = False
        self._config = self.columns.settings.config
        self._clock = context.clock
        self._intake = TableIntake(self.columns, quarantine, context.metrics)
        self._groups = groups

    @property
    def problem(self) -> str | None:
        """Tell why the table is not committed, or None."""
        aside = self._intake.quarantine_problem if self._inbox else None
        if self.trouble.reason is not None:
            return f"{self.trouble.reason}; {aside}" if aside else self.trouble.reason
        if self._running is not None and self._running.hindrance is not None:
            return self._running.hindrance
        if self._running is not None and self._clock() - self._running.started_at > LAG_MAX_S:
            return f"flush takes long: seconds={self._clock() - self._running.started_at:.0f}"
        return aside

    def late_s(self, *, now: float) -> float | None:
        """Tell for how long the oldest change should have been on its way into a snapshot; None if there is none."""
        since = self.due_since(flush_max_age_s=self._config.flush_max_age_s)
        return None if since is None else now - since

    @property
    def is_failing(self) -> bool:
        """Tell whether the last attempt to open or to flush the table has failed."""
        return self.trouble.reason is not None

    def is_stuck(self, *, now: float) -> bool:
        """Tell whether the table fails, or takes so long that others should not share their memory with it."""
        # With others it takes as long as the slowest of them.
        started = [self._running.started_at] if self._running and self._running.carrier is None else []
        if self._inbox:
            started.append(self._inbox.first.arrived_at)
        return self.is_failing or any(now - each > LAG_MAX_S for each in started)

    def may_be_interrupted(self, *, now: float) -> bool:
        """Tell whether the flush under way is worth nothing: it has failed, or its commit does, or it stands still.

        Any other is left to it, however long it takes: begun again, it would take as long again.
        """
        if self._running is None or self._running.carrier is not None:
            return self.is_failing
        running = self._running
        return self.is_failing or running.hindered_s(now=now) > LAG_MAX_S or running.stands_still(now=now)

    def is_ready(self, *, now: float) -> bool:
        """Tell whether the table, which is behind, can be read again: one run at a time while it does not work."""
        if not self.standing.is_behind or self._inbox or not (self.columns.is_open or self.moves_away):
            return False
        if self.moves_away:
            return True
        if self.is_stuck(now=now):
            return self.buffered_bytes == 0 and now >= self.trouble.retry_at
        return self.holding.waiting_bytes < self._config.flush_max_bytes

    @property
    def quarantined_rows(self) -> int:
        """Rows that this process has put into quarantine."""
        return self._intake.quarantined_rows

    def next_flush(self, *, now: float) -> Threshold | None:
        """Tell when the buffer will be flushed and why, as changes come now; None while it is empty."""
        return self.control.next_flush(self._buffer, now=now)

    def explain_flush(self, *, now: float) -> dict[str, Any]:
        """Say why the last flush happened, and when and why the next will."""
        is_flushing = self._running is not None
        return {"table": str(self.name), "flushing": is_flushing, **self.control.explain(self._buffer, now=now)}

    def snapshot_with(self, source: SourceId) -> int | None:
        """Give the table's snapshot if it holds changes of a source."""
        return self.columns.snapshot_id if source in self.columns.marks else None

    # -- flushes with others

    @property
    def is_grouped(self) -> bool:
        """Tell whether the table is flushed with others, as a rule."""
        return self._groups is not None

    @property
    def joins_groups(self) -> bool:
        """Tell whether the table takes part in the next flush with others: it is where the applier is, and works."""
        is_held_up = bool(self._inbox) and self._intake.quarantine_problem is not None
        return self.is_grouped and not (self.standing.is_behind or self.trouble.is_paused or is_held_up)
