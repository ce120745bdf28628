"""Memory and log pressure: which tables are evicted, and which drain to quarantine. Pure.

    memory full          rows of stuck tables are evicted beyond their share; else the largest buffer is flushed
    log share exceeded   the paused table furthest behind drains its oldest rows to quarantine

Eviction loses nothing: the rows are in the log, and the table reads them again from its `resume_offset`. The feed's
tasks call in here; nothing here waits for a table.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from lakefeed.contract.properties import is_quarantine
from lakefeed.writer.tables.feed_state import FeedState
from lakefeed.writer.tables.pending import FlushReason, Pending
from lakefeed.writer.tables.table import TableWriter

# What stuck tables may hold together of the memory for rows. The other half is for the tables that can be written:
# enough for flushes of full size at the default settings.
STUCK_MAX_SHARE = 0.5

# What tables that the live reader delivers to may hold while another one catches up. Less than that table's half,
# because it has more to read: where memory is the limit, it would otherwise stay behind forever.
LIVE_MAX_SHARE = 0.25

# Draining to quarantine continues until the paused tables hold this part of their share of the log, so that it is done
# in one go and then not needed for a while.
DRAIN_UNTIL_SHARE = 0.8


def plan_evictions(
    stuck: Mapping[str, Pending], *, interruptible: Collection[str], max_bytes: int
) -> tuple[set[str], set[str]]:
    """Choose which stuck tables are evicted, so that together they hold at most their share of `max_bytes`.

    Return the tables whose waiting rows are evicted, and those whose flush under way is evicted too. The largest first.
    Waiting rows only cost a second reading; a flush has written files, so it comes last, and only where it is
    `interruptible`: one that makes progress, if slowly, would be no faster the second time.
    """
    over = sum(each.bytes for each in stuck.values()) - int(max_bytes * STUCK_MAX_SHARE)
    waiting: set[str] = set()
    for name in sorted(stuck, key=lambda name: -stuck[name].waiting_bytes):
        if over > 0 and stuck[name].waiting_bytes:
            waiting.add(name)
            over -= stuck[name].waiting_bytes
    everything: set[str] = set()
    for name in sorted(stuck, key=lambda name: -stuck[name].flushing_bytes):
        if over > 0 and stuck[name].flushing_bytes and name in interruptible:
            everything.add(name)
            over -= stuck[name].flushing_bytes
    return waiting - everything, everything


def plan_drain(paused: Mapping[str, int], *, held_bytes: int, max_bytes: float, is_draining: bool) -> str | None:
    """Choose whose oldest rows drain to quarantine, given the oldest offset that each paused table needs.

    `held_bytes` is what these tables hold of the log beyond what all others need of it.
    """
    is_over = held_bytes > max_bytes * (DRAIN_UNTIL_SHARE if is_draining else 1)
    return min(paused, key=paused.__getitem__) if paused and is_over else None


class MemoryPressure:
    """What all tables together hold of memory and log."""

    def __init__(self, feed: FeedState, *, table_max_share: float) -> None:
        self._log = feed.log
        self._max_bytes = feed.context.config.buffer_max_bytes
        self._tables = feed.tables
        self._applier = feed.applier
        self._table_max_share = table_max_share
        self._clock = feed.context.clock
        # Decoded and not offered to any table yet, because a transaction is open.
        self.held_bytes = 0

    # -- memory

    @property
    def buffered_bytes(self) -> int:
        """Bytes in memory that are not committed."""
        return sum(table.pending.bytes for table in self._tables.values()) + self.held_bytes

    @property
    def has_room(self) -> bool:
        """Whether more rows fit in memory."""
        return self.buffered_bytes < self._max_bytes

    def has_live_room(self) -> bool:
        """Return whether the next run of the live reader fits in memory.

        While a table catches up, the others leave it a share: they would otherwise take what it has just released.
        """
        tables, now = self._tables.values(), self._clock()
        if not any(table.state.is_behind and not table.is_stuck(now=now) for table in tables):
            return self.has_room
        live_bytes = sum(table.pending.bytes for table in tables if not table.state.is_behind)
        return self.has_room and live_bytes < self._max_bytes * LIVE_MAX_SHARE

    def has_catch_up_room(self, tables: Iterable[TableWriter]) -> bool:
        """Return whether the next run of catch-up fits in memory, beside what these tables hold, which catch up."""
        held_bytes = sum(table.pending.bytes for table in tables)
        return self.has_room and held_bytes < self._max_bytes * STUCK_MAX_SHARE

    def flush_largest(self) -> None:
        """Request a flush of the largest buffer that can be flushed now: a failing table would release nothing.

        A table that is slow to fit its rows is chosen only if there is no other.
        """
        now = self._clock()
        able = [
            table
            for table in self._tables.values()
            if table.pending.buffer.bytes and not (table.is_flushing or table.is_failing)
        ]
        largest = max(able, key=lambda table: (not table.is_stuck(now=now), table.pending.buffer.bytes), default=None)
        if largest is not None:
            largest.request_flush(FlushReason.MEMORY)

    def evict(self) -> bool:
        """Evict stuck tables beyond their share of memory; return whether there were any."""
        tables, now = self._tables, self._clock()
        is_stuck = {name: table.is_stuck(now=now) for name, table in tables.items()}
        # A table that is only slow may use all memory while it is the only one at work: reading ahead gains nothing.
        is_shared = any(table.pending.bytes for name, table in tables.items() if not is_stuck[name])
        stuck = {
            name: table.pending
            for name, table in tables.items()
            if (table.is_failing or (is_shared and is_stuck[name]))
            and not table.is_draining
            # Bounded by the tables that wait for it, one group of each at a time; and the log does not have its rows.
            and not is_quarantine(table.name)
        }
        interruptible = {name for name in stuck if tables[name].may_interrupt(now=now)}
        waiting, everything = plan_evictions(stuck, interruptible=interruptible, max_bytes=self._max_bytes)
        for name in waiting:
            tables[name].evict_waiting()
        for name in everything:
            tables[name].evict_all()
        return bool(waiting or everything)

    # -- the log

    def drain_log(self) -> None:
        """Drain the oldest rows of a paused table to quarantine where paused tables would fill the log."""
        own = {name: table for name, table in self._tables.items() if not is_quarantine(table.name)}
        # In an outage of catalog or store, which affects all tables, the log fills as intended.
        paused = {name: each for name, each in own.items() if each.state.is_paused and each.retry.is_local}
        needed = {name: offset for name, each in paused.items() if (offset := each.pending.needed_offset) is not None}
        others = [table for name, table in own.items() if name not in paused]
        chosen = plan_drain(
            needed,
            held_bytes=self._log_bytes_between(self._needed_by(paused.values()), self._needed_by(others)),
            max_bytes=self._log.max_bytes * self._table_max_share,
            is_draining=any(table.is_draining for table in paused.values()),
        )
        for name, table in own.items():
            if name == chosen and not table.is_draining:
                table.start_draining()
            elif name != chosen and table.is_draining:
                table.stop_draining()

    @property
    def trim_point(self) -> int:
        """The oldest record that some table needs."""
        return self._needed_by(self._tables.values())

    def log_bytes_of(self, table: TableWriter) -> int:
        """Return how much of the log a table keeps from being trimmed."""
        return self._log_bytes_between(self._needed_by([table]), self._applier.offset)

    def _needed_by(self, tables: Iterable[TableWriter]) -> int:
        needed = (table.pending.needed_offset for table in tables)
        return min([self._applier.offset, *(offset for offset in needed if offset is not None)])

    def _log_bytes_between(self, start: int, end: int) -> int:
        return max(0, self._log.bytes_below(end) - self._log.bytes_below(start))
