"""Evicted tables that catch up, against a model with random stalls: each change once, in order, not trimmed."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lakefeed.contract.changes import Position, SourceId, Span
from lakefeed.writer.tables.memory import plan_evictions
from lakefeed.writer.tables.pending import (
    Flushing,
    FlushReason,
    LogBacklog,
    Pending,
    TableBuffer,
    complete_positions,
    plan_catch_up,
)

TABLES = ("a", "b", "c")
SOURCES = (SourceId("shop"), SourceId("bank"))


@dataclass(frozen=True, slots=True)
class Change:
    """A change of the model's log: one record holds one change of each of its tables."""

    offset: int
    table: str
    source: SourceId
    sequence: int

    @property
    def spans(self) -> dict[SourceId, Span]:
        position = Position(0, self.sequence)
        return {self.source: Span(position, position)}


@dataclass(slots=True)
class Table:
    """A table with rows in memory, a flush under way and rows that are committed; its backlog is the real one."""

    backlog: LogBacklog = field(default_factory=LogBacklog)
    waiting: list[Change] = field(default_factory=list)
    flushing: list[Change] = field(default_factory=list)
    committed: list[Change] = field(default_factory=list)

    @property
    def is_behind(self) -> bool:
        return self.backlog.resume_offset is not None

    def offer(self, change: Change) -> None:
        if self.is_behind:
            self.backlog.pass_by(change.spans)
        else:
            self.take(change)

    def take(self, change: Change) -> None:
        if change not in self.committed:  # the table's own marks, after a flush that was given up had landed
            self.waiting.append(change)

    def evict(self, *, everything: bool) -> None:
        leaving = self.waiting + (self.flushing if everything else [])
        if not leaving:
            return
        offsets = [change.offset for change in leaving]
        if self.backlog.resume_offset is not None:
            offsets.append(self.backlog.resume_offset)
        self.backlog.evict_to(min(offsets), *(change.spans for change in leaving), since=0.0)
        self.waiting = []
        self.flushing = [] if everything else self.flushing

    @property
    def in_memory(self) -> list[Change]:
        return self.flushing + self.waiting

    @property
    def needed_offset(self) -> int | None:
        offsets = [change.offset for change in self.in_memory]
        if self.backlog.resume_offset is not None:
            offsets.append(self.backlog.resume_offset)
        return min(offsets, default=None)

    def first_waiting(self, source: SourceId) -> int | None:
        found = [change.sequence for change in self.in_memory if change.source == source]
        passed = self.backlog.spans.get(source)
        return min([*found, *([passed.first.sequence] if passed else [])], default=None)

    def waiting_spans(self, *, is_landing: bool) -> list[Mapping[SourceId, Span]]:
        left = self.waiting if is_landing else self.in_memory
        return [self.backlog.spans, *(change.spans for change in left)]


@dataclass(slots=True)
class World:
    """A log, an applier that waits for no table, and three tables."""

    records: list[list[Change]] = field(default_factory=list)
    tables: dict[str, Table] = field(default_factory=lambda: {name: Table() for name in TABLES})
    applied: int = 0
    trimmed: int = 0

    def append(self, tables: set[str], source: SourceId) -> None:
        offset = len(self.records)
        self.records.append([Change(offset, table, source, offset) for table in sorted(tables)])

    def apply(self, count: int) -> None:
        until = min(self.applied + count, len(self.records))
        for change in self.changes(self.applied, until):
            self.tables[change.table].offer(change)
        self.applied = until

    def catch_up(self, ready: set[str], count: int) -> None:
        offsets = {
            name: table.backlog.resume_offset
            for name, table in self.tables.items()
            if name in ready and table.backlog.resume_offset is not None
        }
        following = plan_catch_up(offsets, applied_offset=self.applied)
        if following is None:
            return
        until = min(following.until, following.start + count)
        for change in self.changes(following.start, until):
            if change.table in following.tables:
                self.tables[change.table].backlog.reread(change.spans)
                self.tables[change.table].take(change)
        for name in following.tables:
            self.tables[name].backlog.advance(until, applied_offset=self.applied)

    def changes(self, start: int, until: int) -> list[Change]:
        assert start >= self.trimmed, "read below what was trimmed"
        return [change for record in self.records[start:until] for change in record]

    def changes_ever(self) -> list[Change]:
        return [change for record in self.records for change in record]

    def trim(self) -> None:
        needed = [table.needed_offset for table in self.tables.values()]
        self.trimmed = max(self.trimmed, min([self.applied, *(offset for offset in needed if offset is not None)]))

    def drain(self) -> None:
        self.apply(len(self.records))
        while any(table.needed_offset is not None for table in self.tables.values()):
            for table in self.tables.values():
                commit(table)
            self.catch_up(set(TABLES), 3)


def take(table: Table) -> None:
    if not table.flushing:
        table.flushing, table.waiting = table.waiting, []


def complete_with(world: World, name: str) -> dict[SourceId, Position]:
    """Return the watermarks that a commit of one table's flush would record."""
    applied = {c.source: Position(0, c.sequence) for c in world.changes_ever() if c.offset < world.applied}
    parts = (table.waiting_spans(is_landing=each == name) for each, table in world.tables.items())
    return complete_positions(applied, waiting=itertools.chain.from_iterable(parts), applied=applied)


def check_complete(world: World, complete: dict[SourceId, Position]) -> None:
    for change in world.changes_ever():
        if change.source in complete and change.sequence <= complete[change.source].sequence:
            assert change in world.tables[change.table].committed, "called complete too early"


def commit(table: Table) -> None:
    take(table)
    table.committed += [change for change in table.flushing if change not in table.committed]
    table.flushing = []


def check(world: World) -> None:
    for name, table in world.tables.items():
        own = [change for change in world.changes_ever() if change.table == name]
        assert table.committed == own[: len(table.committed)], "lost, doubled or out of order"
        missing = own[len(table.committed) :]
        for source in SOURCES:
            first = next((c.sequence for c in missing if c.source == source and c.offset < world.applied), None)
            waiting = table.first_waiting(source)
            if first is None:
                continue
            assert waiting is not None, "reported as committed too early"
            assert waiting <= first, "reported as committed too early"
        first_missing = min((change.offset for change in missing if change.offset < world.applied), default=None)
        if first_missing is not None:
            assert table.needed_offset is not None
            assert table.needed_offset <= first_missing


_OPERATIONS = st.one_of(
    st.tuples(st.just("append"), st.sets(st.sampled_from(TABLES), min_size=1), st.sampled_from(SOURCES)),
    st.tuples(st.just("apply"), st.integers(1, 4)),
    st.tuples(st.just("take"), st.sampled_from(TABLES)),
    st.tuples(st.just("commit"), st.sampled_from(TABLES)),
    st.tuples(st.just("land and give up"), st.sampled_from(TABLES)),
    st.tuples(st.just("evict"), st.sampled_from(TABLES), st.booleans()),
    st.tuples(st.just("catch up"), st.sets(st.sampled_from(TABLES)), st.integers(1, 4)),
    st.tuples(st.just("trim")),
)


@given(st.lists(_OPERATIONS, max_size=60))
@settings(max_examples=300, deadline=None)
def test_each_change_is_committed_once_and_in_order_whatever_stalls(operations):
    world = World()
    for operation in operations:
        match operation:
            case ("append", tables, source):
                world.append(tables, source)
            case ("apply", count):
                world.apply(count)
            case ("take", name):
                take(world.tables[name])
            case ("commit", name):
                take(world.tables[name])
                complete = complete_with(world, name)
                commit(world.tables[name])
                check_complete(world, complete)
            case ("land and give up", name):
                table = world.tables[name]
                take(table)
                complete = complete_with(world, name)
                table.committed += table.flushing
                check_complete(world, complete)
                table.evict(everything=True)
            case ("evict", name, everything):
                world.tables[name].evict(everything=everything)
            case ("catch up", ready, count):
                world.catch_up(ready, count)
            case ("trim",):
                world.trim()
        check(world)
    world.drain()
    check(world)
    ends = {c.source: Position(0, c.sequence) for c in world.changes_ever()}
    assert complete_with(world, "a") == ends
    assert sum(len(table.committed) for table in world.tables.values()) == len(world.changes_ever())
    assert not any(table.is_behind for table in world.tables.values())


def test_the_table_furthest_behind_is_read_first_and_meets_the_next_one_exactly_where_it_waits():
    following = plan_catch_up({"a": 10, "b": 4, "c": 4}, applied_offset=50)
    assert following is not None
    assert (following.start, following.until, following.tables) == (4, 10, {"b", "c"})


def test_nothing_is_read_again_beyond_the_applier():
    following = plan_catch_up({"a": 10}, applied_offset=12)
    assert following is not None
    assert following.until == 12


def test_table_that_has_passed_its_last_change_of_a_source_no_longer_holds_that_source_back():
    backlog = LogBacklog()
    backlog.evict_to(3, {SOURCES[0]: Span(Position(0, 5), Position(0, 6))}, since=1.0)
    backlog.pass_by({SOURCES[1]: Span(Position(0, 9), Position(0, 9))})
    backlog.reread({SOURCES[0]: Span(Position(0, 5), Position(0, 5))})
    assert backlog.spans[SOURCES[0]].first == Position(0, 6)
    backlog.reread({SOURCES[0]: Span(Position(0, 6), Position(0, 6))})
    assert SOURCES[0] not in backlog.spans
    assert backlog.spans[SOURCES[1]].first == Position(0, 9)


def holding(waiting_bytes: int, flushing_bytes: int) -> Pending:
    flushing = Flushing(TableBuffer(bytes=flushing_bytes), FlushReason.AGE, started_at=0.0, progress_at=0.0)
    return Pending(buffer=TableBuffer(bytes=waiting_bytes), flushing=flushing)


@pytest.mark.parametrize(
    ("stuck", "waiting", "everything"),
    [
        ({"a": holding(30, 20)}, set(), set()),
        ({"a": holding(40, 20)}, {"a"}, set()),
        ({"a": holding(30, 10), "b": holding(20, 0)}, {"a"}, set()),
        ({"a": holding(0, 60), "b": holding(0, 30)}, set(), {"a"}),
        ({"a": holding(5, 40), "b": holding(5, 30)}, {"b"}, {"a"}),
        ({"a": holding(60, 70)}, set(), {"a"}),
    ],
)
def test_waiting_rows_of_stuck_tables_are_evicted_before_flushes_and_the_largest_first(stuck, waiting, everything):
    assert plan_evictions(stuck, interruptible=stuck, max_bytes=100) == (waiting, everything)


def test_a_flush_that_makes_progress_is_not_evicted_whatever_it_holds():
    stuck = {"a": holding(10, 60), "b": holding(10, 50)}
    assert plan_evictions(stuck, interruptible={"b"}, max_bytes=100) == ({"a"}, {"b"})
    assert plan_evictions(stuck, interruptible=(), max_bytes=100)[1] == set()
