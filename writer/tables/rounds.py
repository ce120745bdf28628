"""Flushes of many tables at once: buffers taken at one place of the log, committed in one act. Owns who takes part.

    wanted --> tables have no flush under way --> hold the applier --> all have fitted what they were given
           --> take all buffers --> let the applier go --> group: write files, each table its own --> one commit

The applier stands where no transaction is open (rows/runs.py). So what is taken there is whole transactions, and of
each all that is not committed yet. Readers see all of a group or none of it.

What fails is tried again for ever, by the group as a whole: an outage of catalog or store is nobody's own trouble. A
table whose files alone cannot be written leaves after the usual number of failures; if the commit is refused as often,
all go on alone, as it does not say who is to blame. A table that is paused is not waited for: the next groups go
without it. Each of these tears transactions apart, which is counted and told.

Crashes leave what they leave for one table (flush.py): of a group, all is committed or nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from lakefeed.contract.changes import Position, SourceId
from lakefeed.contract.errors import (
    CatalogUnavailable,
    ColumnsChanged,
    CommitUnknown,
    Fenced,
    RowsAlreadyCommitted,
    RowsUnfit,
    TableMissing,
    TableReplaced,
    WriterError,
)
from lakefeed.writer.rows.runs import SplitReason
from lakefeed.writer.tables.columns import TableContext
from lakefeed.writer.tables.flush import Flushed, TableFlush
from lakefeed.writer.tables.pending import FlushReason
from lakefeed.writer.tables.state import PAUSED_AFTER_ATTEMPTS
from lakefeed.writer.tables.table import TableWriter

logger = logging.getLogger(__name__)

# How long all wait, with the applier, until a table has fitted what it was given: far longer than the slowest decoding
# of all that memory holds. Whoever takes longer is left out.
SETTLE_MAX_S = 60.0

# Tries of one commit to several tables, with the pauses about half a second: if only one table is refused, the others
# are not to wait for long. A table alone is tried more often (commit/committer.py).
GROUP_ATTEMPTS_MAX = 4


class Flow(Protocol):
    """What the feed tells of its tables."""

    @property
    def tables(self) -> Mapping[str, TableWriter]:
        """All tables by name."""

    @property
    def applying(self) -> AbstractAsyncContextManager[object]:
        """Hold the applier still while the block runs."""

    def complete_with(self, flushes: Sequence[TableFlush]) -> Mapping[SourceId, Position]:
        """Tell of the sources in these flushes up to where they are in all of their tables, once the flushes are."""


@dataclass(frozen=True, slots=True)
class _Member:
    """A table that takes part, and its flush."""

    table: TableWriter
    flush: TableFlush

    @property
    def is_here(self) -> bool:
        """Tell whether the rows are still in memory: if not, they will be read again, and come with a later group."""
        return self.table.runs(self.flush)


class FlushGroups:
    """Starts groups, one after the other; those that fail go on beside the next ones."""

    def __init__(self, context: TableContext, flow: Flow, *, tasks: asyncio.TaskGroup) -> None:
        self._context = context
        self._flow = flow
        self._tasks = tasks
        self._running: set[asyncio.Task[None]] = set()
        self._wanted = asyncio.Event()
        self._reason = FlushReason.REQUEST
        self._changed = asyncio.Event()
        self._tidying = 0
        self._out: frozenset[str] = frozenset()

    def request(self, reason: FlushReason) -> None:
        """Start a flush of all tables; does nothing while one is wanted already."""
        self._changed.set()
        if not self._wanted.is_set():
            self._reason = reason
            self._wanted.set()

    def wake(self) -> None:
        """Look again who is waited for."""
        self._changed.set()

    async def run(self) -> None:
        """Start groups whenever asked to. Cancelling it leaves the rows in the log."""
        while True:
            await self._wanted.wait()
            await self._wait_while(lambda: self._tidying > 0 or any(map(_is_flushing, self._takers())))
            self._wanted.clear()
            if members := await self._take():
                self.start(members)

    def stop(self) -> None:
        """End the groups under way; what they have not committed stays in the log."""
        for task in self._running:
            task.cancel()

    def start(self, members: Sequence[_Member]) -> None:
        """Bring flushes to their end together."""
        group = _Group(self._context, members, self)
        name = f"flush-group-{members[0].table.name}-{len(members)}"
        task = self._tasks.create_task(group.run(), name=name)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def tidy(self, tables: Sequence[TableWriter]) -> None:
        """Let tables remove old snapshots; their next flush waits for it."""
        self._tidying += 1
        try:
            await asyncio.gather(*(table.tidy() for table in tables))
        finally:
            self._tidying -= 1
            self._changed.set()

    def complete_with(self, flushes: Sequence[TableFlush]) -> Mapping[SourceId, Position]:
        """Tell of the sources in these flushes up to where they are in all of their tables, once the flushes are."""
        return self._flow.complete_with(flushes)

    def note_split(self, why: SplitReason, tables: Sequence[TableWriter]) -> None:
        """Count and tell that transactions may be torn apart."""
        self._context.metrics.split_transactions.labels(why.value).inc()
        logger.warning("transactions_split", extra={"reason": why.value, "tables": [str(each.name) for each in tables]})

    def _takers(self) -> list[TableWriter]:
        """List the tables that take part in the next group, if they have rows."""
        return [table for table in self._flow.tables.values() if table.joins_groups]

    async def _wait_while(self, condition: Callable[[], bool]) -> None:
        while condition():
            self._changed.clear()
            await self._changed.wait()

    async def _take(self) -> list[_Member]:
        """Take all buffers at one place of the log."""
        async with self._flow.applying:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SETTLE_MAX_S):
                    await self._wait_while(lambda: not all(table.is_settled for table in self._takers()))
            settled = [table for table in self._takers() if table.is_settled]
            cut_short = [table for table in settled if table.is_cut_short]
            members = [_Member(table, table.take_buffer(self._reason)) for table in settled if table.open_rows]
        if members:
            self._note_outsiders({str(member.table.name) for member in members})
            if cut_short:
                self.note_split(SplitReason.CUT_SHORT, cut_short)
        return members

    def _note_outsiders(self, names: set[str]) -> None:
        """Tell which tables have rows that this group goes without."""
        out = [
            table
            for name, table in self._flow.tables.items()
            if table.is_grouped and name not in names and not table.is_idle
        ]
        known, self._out = self._out, frozenset(str(table.name) for table in out)
        if self._out - known:
            self.note_split(SplitReason.TABLE_OUT, out)
        elif out:  # told before
            self._context.metrics.split_transactions.labels(SplitReason.TABLE_OUT.value).inc()


def _is_flushing(table: TableWriter) -> bool:
    return table.is_flushing


class _Group:
    """One group on its way, until all that is left of it in memory is committed."""

    def __init__(self, context: TableContext, members: Sequence[_Member], groups: FlushGroups) -> None:
        self._context = context
        self._members = list(members)
        self._groups = groups
        self._refusals = 0
        self._nudged = asyncio.Event()
        self._patience: asyncio.Timeout | None = None
        for member in members:
            member.flush.carrier = self

    def nudge(self) -> None:
        """Try again at once."""
        self._nudged.set()

    def interrupt(self) -> None:
        """Look again whose rows are still in memory, and go on with those."""
        if self._patience is not None:
            self._patience.reschedule(asyncio.get_running_loop().time())
            self._patience = None

    async def run(self) -> None:
        """Commit all, however long it takes. Cancelling it leaves the rows in the log."""
        tables = [member.table for member in self._members]
        while self._members:
            with contextlib.suppress(TimeoutError):  # only `interrupt` ends it early
                async with asyncio.timeout(None) as self._patience:
                    await self._attempt()
            self._patience = None
            self._members = [member for member in self._members if member.is_here]
        # Those that left are at it themselves.
        await self._groups.tidy([table for table in tables if not table.is_flushing])

    async def _attempt(self) -> None:
        count = len(self._members)
        if failed := await self._prepare():
            await self._go_on_without(failed)
        if failed or len(self._members) < count:  # the next attempt is for those that are left
            return
        try:
            if self._members:
                await self._commit()
        except Fenced:
            raise  # nothing of ours can be committed any more: the service ends
        except RowsAlreadyCommitted as error:
            for member in self._members:
                if member.table.name == error.table:
                    member.flush.leave_out(error.marks)
        except ColumnsChanged as error:
            for member in self._members:
                if member.table.name == error.table:
                    member.flush.start_over()
        except Exception as error:  # noqa: BLE001 - the boundary of a task; what is unexpected is logged below
            await self._refuse(error)

    async def _prepare(self) -> list[_Member]:
        """Let each table write its files, unless it has; gives those that could not, and still have their rows."""
        preparing = (member.flush.prepare() for member in self._members)
        failed = []
        for member, outcome in zip(
            self._members, await asyncio.gather(*preparing, return_exceptions=True), strict=True
        ):
            if isinstance(outcome, Fenced) or not isinstance(outcome, Exception | bool):
                raise outcome
            if isinstance(outcome, Exception):
                _note_failure(member, outcome)
                failed.append(member)
            elif not outcome:  # another node was first: the table has all of its rows
                member.table.finish(member.flush, Flushed(member.table.columns.snapshot_id))
        self._members = [member for member in self._members if member.is_here]
        # Their rows have left memory: they are decoded again, and come with a later group.
        unfit = [member.table for member in failed if not member.is_here]
        if unfit and self._members:
            self._groups.note_split(SplitReason.TABLE_LEFT, unfit)
        return [member for member in failed if member.is_here]

    async def _go_on_without(self, failed: Sequence[_Member]) -> None:
        """Try again later; if the others are ready, without those that have failed often enough."""
        leaving = [member for member in failed if member.table.trouble.is_paused]
        if len(failed) == len(self._members):
            leaving = []
        self._part_with(leaving)
        if len(leaving) < len(failed):
            await self._rest()

    def _part_with(self, leaving: Sequence[_Member]) -> None:
        """Let tables go on alone. Rows that have left memory are not theirs to flush: they are read again."""
        leaving = [member for member in leaving if member.is_here]
        if leaving:
            self._members = [member for member in self._members if member not in leaving]
            self._groups.note_split(SplitReason.TABLE_LEFT, [member.table for member in leaving])
            for member in leaving:
                self._groups.start([member])

    async def _commit(self) -> None:
        started = self._context.clock()
        members = list(self._members)
        complete = self._groups.complete_with([member.flush for member in members])
        flushes = [member.flush.prepared_with(complete) for member in members]
        results = await self._context.committer.commit_all(
            flushes,
            on_retry=self._note_hindrance,
            attempts_max=GROUP_ATTEMPTS_MAX if len(flushes) > 1 else None,
        )
        self._context.metrics.commit_s.observe(self._context.clock() - started)
        pairs = zip(members, results, strict=True)
        landed = [(member, await member.flush.land(result)) for member, result in pairs if member.is_here]
        for member, flushed in landed:  # all in one step, so that the next group finds all or none of them ready
            if member.is_here:
                member.table.finish(member.flush, flushed)

    def _note_hindrance(self, reason: str) -> None:
        for member in self._members:
            member.flush.note_hindrance(reason)

    async def _refuse(self, error: Exception) -> None:
        """Try again later; each alone, if it has been refused often enough, as nobody knows for whom."""
        for member in self._members:
            if isinstance(error, TableMissing | TableReplaced):
                member.flush.start_over()
            _note_failure(member, error)
        self._refusals += not await self._is_outage(error)
        if self._refusals >= PAUSED_AFTER_ATTEMPTS and len(self._members) > 1:
            self._part_with(list(self._members))
        else:
            await self._rest()

    async def _is_outage(self, error: Exception) -> bool:
        """Tell whether the catalog does not answer anything, so that no table is to blame."""
        if isinstance(error, CatalogUnavailable | CommitUnknown):
            try:
                await self._context.committer.load(self._members[0].table.name)
            except CatalogUnavailable:
                return True
            except WriterError:
                return False
        return False

    async def _rest(self) -> None:
        retry_at = max((member.table.trouble.retry_at for member in self._members), default=0.0)
        self._nudged.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, retry_at - self._context.clock())):
                await self._nudged.wait()


def _note_failure(member: _Member, error: Exception) -> None:
    if isinstance(error, RowsUnfit):
        member.table.park_everything()
    elif not isinstance(error, WriterError):
        logger.error("table_flush_failed", extra={"table": str(member.table.name)}, exc_info=error)
    known = isinstance(error, WriterError)
    member.table.note_failure(str(error) if known else f"unexpected error: {type(error).__name__}")
