"""A source that moves between nodes which lose their logs, against a model: each change is in its table once.

Nodes, tables and the source are plain lists; what is complete, the marks and where to resume are the real ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from lakefeed.contract.changes import Position, SourceId, Span
from lakefeed.contract.progress import Progress, progress_from_text
from lakefeed.writer.commit.sources import resume_positions
from lakefeed.writer.tables.pending import complete_positions

SHOP = SourceId("shop")
TABLES = ("a", "b", "c")
NODES = ("n1", "n2", "n3")


@dataclass(frozen=True, slots=True)
class Change:
    sequence: int
    table: str

    @property
    def spans(self) -> dict[SourceId, Span]:
        position = Position(0, self.sequence)
        return {SHOP: Span(position, position)}


@dataclass(slots=True)
class Table:
    progress: Progress = field(default_factory=Progress)
    committed: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Node:
    """What its log holds and no table of it has committed; `mark` is how far the source is durable here."""

    mark: int | None = None
    waiting: list[Change] = field(default_factory=list)

    def take(self, changes: list[Change]) -> None:
        fresh = [change for change in changes if self.mark is None or change.sequence > self.mark]
        self.waiting += fresh
        self.mark = fresh[-1].sequence if fresh else self.mark


@dataclass(slots=True)
class World:
    tables: dict[str, Table] = field(default_factory=lambda: {name: Table() for name in TABLES})
    nodes: dict[str, Node] = field(default_factory=lambda: {name: Node() for name in NODES})
    current: str = NODES[0]
    # The source keeps everything, and numbers with gaps.
    history: list[Change] = field(default_factory=list)
    # What the tables have said of the source; a node may have looked some time ago.
    looks: list[int] = field(default_factory=lambda: [-1])

    def send(self, tables: list[str]) -> None:
        first = 2 * len(self.history)
        changes = [Change(first + 2 * number, table) for number, table in enumerate(tables)]
        self.history += changes
        self.nodes[self.current].take(changes)

    def commit(self, node: str, tables: set[str]) -> None:
        """Commit what a node has for some tables, in one act."""
        here = self.nodes[node]
        landing = [change for change in here.waiting if change.table in tables]
        here.waiting = [change for change in here.waiting if change.table not in tables]
        applied = {} if here.mark is None else {SHOP: Position(0, here.mark)}
        complete = complete_positions([SHOP], waiting=[change.spans for change in here.waiting], applied=applied)
        for name in tables:
            self._append(node, name, [change.sequence for change in landing if change.table == name], complete)
        self.looks.append(self._resume_at())

    def _append(self, node: str, name: str, sequences: list[int], complete: dict[SourceId, Position]) -> None:
        table = self.tables[name]
        mark = table.progress.sources.get(SHOP)
        fresh = [sequence for sequence in sequences if mark is None or sequence > mark.sequence]
        if not fresh:
            return
        table.committed += fresh
        after = table.progress.advance(node=node, log_to=0, sources={SHOP: Position(0, fresh[-1])}, complete=complete)
        table.progress = progress_from_text(after.to_text())

    def _resume_at(self) -> int:
        found = resume_positions(table.progress for table in self.tables.values()).get(SHOP)
        return -1 if found is None else found.sequence

    def move(self, node: str, age: int) -> None:
        """Connect to a node, and send what it does not know to be durable or committed."""
        self.current = node
        here = self.nodes[node]
        resume = here.mark if here.mark is not None else self.looks[max(0, len(self.looks) - 1 - age)]
        here.take([change for change in self.history if change.sequence > resume])

    def lose(self, node: str) -> None:
        """Lose a node's log; a source that was there connects anew."""
        self.nodes[node] = Node()
        if node == self.current:
            self.move(node, 0)

    def check(self) -> None:
        for name, table in self.tables.items():
            assert table.committed == [change.sequence for change in self.history if change.table == name]


_OPERATIONS = st.one_of(
    st.tuples(st.just("send"), st.lists(st.sampled_from(TABLES), min_size=1, max_size=4)),
    st.tuples(st.just("commit"), st.sampled_from(NODES), st.sets(st.sampled_from(TABLES), min_size=1)),
    st.tuples(st.just("move"), st.sampled_from(NODES), st.integers(0, 3)),
    st.tuples(st.just("lose"), st.sampled_from(NODES)),
)


@given(st.lists(_OPERATIONS, max_size=40), st.permutations(NODES), st.permutations(TABLES))
@settings(max_examples=500, deadline=None)
def test_each_change_is_in_its_table_once_however_its_source_moves(operations, last_nodes, last_tables):
    world = World()
    for operation in operations:
        match operation:
            case ("send", tables):
                world.send(tables)
            case ("commit", node, tables):
                world.commit(node, tables)
            case ("move", node, age):
                world.move(node, age)
            case ("lose", node):
                world.lose(node)
    for node in last_nodes:
        for table in last_tables:
            world.commit(node, {table})
    world.check()
