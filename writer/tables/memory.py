"""Memory and log, kept for the tables that can be written. Owns who gives up what, and when; state.py chooses.

    memory    rows of tables that cannot be written leave it beyond their share; the largest buffer is flushed
    log       the oldest rows of a table that cannot be written go to the quarantine, where it would fill the log

The feed's tasks ask for both. Nothing here waits for a table.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Protocol

from lakefeed.contract.changes import TableName, table_name_of
from lakefeed.contract.properties import is_quarantine
from lakefeed.writer.tables.columns import TableContext
from lakefeed.writer.tables.pending import FlushReason
from lakefeed.writer.tables.state import FLOWING_MAX_SHARE, plan_move, plan_yields
from lakefeed.writer.tables.table import TableWriter
from lakefeed.writer.wal.protocol import Log

# --- writer.relief ----------------------------------------------------------------------------------------------------


class Flow(Protocol):
    """What the feed tells of its tables and of how far it has come."""

    @property
    def tables(self) -> Mapping[str, TableWriter]:
        """All tables by name."""

    @property
    def applied_offset(self) -> int:
        """Where the applier is: everything below has been offered to its table."""


class Relief:
    """What all tables together hold of memory and log."""

    def __init__(
        self,
        log: Log,
        context: TableContext,
        flow: Flow,
        *,
        held_bytes: Callable[[], int],
        table_max_share: float,
    ) -> None:
        self._log = log
        self._config = context.config
        self._clock = context.clock
        self._flow = flow
        # What is in memory for no table yet.
        self._held_bytes = held_bytes
        self._table_max_share = table_max_share

    # -- memory

    @property
    def has_memory(self) -> bool:
        """Tell whether there is room for more rows."""
        return self.buffered_bytes < self._config.buffer_max_bytes

    @property
    def buffered_bytes(self) -> int:
        """What is in memory and not committed."""
        return sum(table.buffered_bytes for table in self._flow.tables.values()) + self._held_bytes()

    def may_read_on(self) -> bool:
        """Tell whether there is room for the next run; a table that catches up has a share of its own, or never would.

        Both would otherwise take what the other has just given back, and the one that is behind has the longer way.
        """
        tables, now = self._flow.tables.values(), self._clock()
        if not any(table.standing.is_behind and not table.is_stuck(now=now) for table in tables):
            return self.has_memory
        flowing = sum(table.buffered_bytes for table in tables if not table.standing.is_behind)
        return self.has_memory and flowing < self._config.buffer_max_bytes * FLOWING_MAX_SHARE

    def flush_largest(self) -> None:
        """Start a flush of the largest buffer that can be flushed now: asking a table that fails frees nothing.

        Of one that is slow to fit its rows only if there is no other.
        """
        now = self._clock()
        able = [
            table
            for table in self._flow.tables.values()
            if table.open_bytes and not (table.is_flushing or table.is_failing)
        ]
        largest = max(able, key=lambda table: (not table.is_stuck(now=now), table.open_bytes), default=None)
        if largest is not None:
            largest.request_flush(FlushReason.MEMORY)

    def relieve_memory(self) -> bool:
        """Take memory from tables that cannot be written, where they hold more than their share; tell if any did."""
        tables, now = self._flow.tables, self._clock()
        is_stuck = {name: table.is_stuck(now=now) for name, table in tables.items()}
        # A table that is only slow may have all memory while it is the only one at work: reading ahead gains nothing.
        is_shared = any(table.buffered_bytes for name, table in tables.items() if not is_stuck[name])
        stuck = {
            name: table.holding
            for name, table in tables.items()
            if (table.is_failing or (is_shared and is_stuck[name]))
            and not table.moves_away
            and not is_quarantine(table.name)
        }
        interruptible = {name for name in stuck if tables[name].may_be_interrupted(now=now)}
        yields = plan_yields(stuck, interruptible=interruptible, max_bytes=self._config.buffer_max_bytes)
        for name in yields.waiting:
            tables[name].park_waiting()
        for name in yields.everything:
            tables[name].park_everything()
        return bool(yields.waiting or yields.everything)

    # -- the log

    def relieve_log(self) -> None:
        """Let the quarantine take the oldest rows of a table that cannot be written, where it would fill the log."""
        own = {name: table for name, table in self._flow.tables.items() if not is_quarantine(table.name)}
        # In an outage of all, the log is what it is there for.
        paused = {name: each for name, each in own.items() if each.trouble.is_paused and each.trouble.is_its_own}
        needed = {name: offset for name, each in paused.items() if (offset := each.needed_offset) is not None}
        others = [table for name, table in own.items() if name not in paused]
        chosen = plan_move(
            needed,
            held_bytes=self._log_bytes_between(self._needed_by(paused.values()), self._needed_by(others)),
            max_bytes=self._log.max_bytes * self._table_max_share,
            is_moving=any(table.moves_away for table in paused.values()),
        )
        for name, table in own.items():
            table.set_moving(moves_away=name == chosen)

    @property
    def trim_point(self) -> int:
        """The oldest record that some table needs."""
        return self._needed_by(self._flow.tables.values())

    def log_bytes_of(self, table: TableWriter) -> int:
        """Tell how much of the log a table keeps from being trimmed."""
        needed_offset = table.needed_offset
        return 0 if needed_offset is None else self._log_bytes_between(needed_offset, self._flow.applied_offset)

    def _needed_by(self, tables: Iterable[TableWriter]) -> int:
        needed = (table.needed_offset for table in tables)
        return min([self._flow.applied_offset, *(offset for offset in needed if offset is not None)])

    def _log_bytes_between(self, start: int, end: int) -> int:
        return max(0, self._log.bytes_below(end) - self._log.bytes_below(start))


# --- writer.table_room ------------------------------------------------------------------------------------------------
#
# How many tables a service writes. Owns which it knows, and whether there is room for another.
#
# Every table has a writer, two tasks, metrics and, in the catalog, metadata of its own, for as long as the service
# runs.
# A client that puts an id into a table's name would have them grow without end, so names are refused beyond a number,
# before their changes become durable. What is in the log is written whatever its number: it may be from before the
# number
# was lowered. Names are known from when their changes were taken or met in the log since the start.


class TableRoom:
    """The tables that are known, and how many there may be."""

    def __init__(self, *, tables_max: int, default_namespace: str) -> None:
        self.tables_max = tables_max
        self._default_namespace = default_namespace
        self._tables: set[TableName] = set()
        # As sources call them, so that nearly every batch is looked up in one step.
        self._source_names: set[str] = set()

    @property
    def count(self) -> int:
        """Count the tables that are known."""
        return len(self._tables)

    def note(self, table: TableName) -> None:
        """Know a table that is there, room or not."""
        self._tables.add(table)

    def take(self, source_names: Collection[str]) -> str | None:
        """Know the tables of a batch, all of them; if there is no room, none, and the name of the first in excess."""
        unknown = [name for name in source_names if name not in self._source_names]
        if not unknown:
            return None
        tables = {table_name_of(name, self._default_namespace): name for name in sorted(unknown)}
        added = [name for table, name in tables.items() if table not in self._tables]
        room = max(0, self.tables_max - len(self._tables))
        if len(added) > room:
            return added[room]
        self._tables.update(tables)
        self._source_names.update(unknown)
        return None
