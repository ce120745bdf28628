"""Limits of tables and of their sources, which admission asks before changes become durable. Pure.

Each table has a writer, tasks, metrics and catalog metadata for as long as the service runs. A client that puts an id
into a table's name would create tables without bound, so further names are rejected.

Each commit of a table has the marks of all its sources. An id inside a source's name would make commits larger without
bound, until the catalog refuses them all. So a source that is new to a full table is rejected. The sources of a table
are those of its marks, as its writer or a look-up of sources last loaded them, and those that were accepted here.
Nodes that accept sources at the same moment may exceed the limit together: the settings leave room for that.

What is in the log is written anyway: a limit may have been lowered since.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from lakefeed.contract.changes import SourceId, TableName, table_name_of
from lakefeed.contract.properties import is_own_mark

# A source takes one place of `writer.sources_max` per this many bytes of its name, quoted and escaped twice as in a
# commit. A place is at most 1 KiB of a commit, which has the name five times (marks, totals, summary).
PLACE_NAME_BYTES = 64

SOURCES_ADVICE = "if source names have an id in them, put that into a column, else raise writer.sources_max"

# Full tables that /status names: enough to know where to look.
FULL_TABLES_SHOWN = 10


@dataclass(slots=True)
class _TableSources:
    """The sources of one table that are known here, and their size in places."""

    sources: set[SourceId] = field(default_factory=set)
    places: int = 0
    # The table's own marks, as its writer has loaded them.
    marks: Callable[[], Iterable[SourceId]] = tuple

    def add(self, sources: Iterable[SourceId]) -> None:
        added = {source for source in sources if source not in self.sources and not is_own_mark(source)}
        self.sources |= added
        self.places += sum(map(places_of, added))


class TableLimit:
    """The tables that are known and their sources, and how many there may be."""

    def __init__(self, *, tables_max: int, sources_max: int, default_namespace: str) -> None:
        self.tables_max = tables_max
        self.sources_max = sources_max
        self._default_namespace = default_namespace
        self._tables: set[TableName] = set()
        self._sources: dict[TableName, _TableSources] = {}
        # By the sources' names of them, so that nearly every batch is looked up in one step.
        self._by_source_name: dict[str, _TableSources] = {}
        # Tables that have rejected a source.
        self._full: set[str] = set()

    @property
    def count(self) -> int:
        """The number of known tables."""
        return len(self._tables)

    def note(self, table: TableName, *, marks: Callable[[], Iterable[SourceId]] = tuple) -> None:
        """Add a table that exists, whatever the limit; `marks` returns its sources as last loaded."""
        self._tables.add(table)
        self._sources_of(table).marks = marks

    def note_sources(self, table: TableName, sources: Iterable[SourceId]) -> None:
        """Add sources that a table of the catalog has, whatever the limit."""
        self._sources_of(table).add(sources)

    def _sources_of(self, table: TableName) -> _TableSources:
        return self._sources.setdefault(table, _TableSources())

    def take(self, source_names: Collection[str]) -> str | None:
        """Add the tables of a batch, all of them; beyond the limit none, and return the first name in excess."""
        unknown = [name for name in source_names if name not in self._by_source_name]
        if not unknown:
            return None
        tables = {table_name_of(name, self._default_namespace): name for name in sorted(unknown)}
        added = [name for table, name in tables.items() if table not in self._tables]
        room = max(0, self.tables_max - len(self._tables))
        if len(added) > room:
            return added[room]
        self._tables.update(tables)
        for name in unknown:
            self._by_source_name[name] = self._sources_of(table_name_of(name, self._default_namespace))
        return None

    def take_source(self, source: SourceId, source_names: Collection[str]) -> str | None:
        """Add a source to the tables of its batch, which were taken; or to none, and return the first full one."""
        tables = {name: self._by_source_name[name] for name in source_names}
        new_to = {name: table for name, table in tables.items() if source not in table.sources}
        for name in sorted(new_to):
            table = new_to[name]
            table.add(table.marks())
            if source not in table.sources and table.places + places_of(source) > self.sources_max:
                self._full.add(name)
                return name
        for table in new_to.values():
            table.add([source])
        return None

    def problems(self) -> list[str]:
        """Describe the tables that have rejected a source."""
        return [
            f"table has no room for another source, new ones are refused; {SOURCES_ADVICE}:"
            f" table={name} sources_max={self.sources_max}"
            for name in sorted(self._full)[:FULL_TABLES_SHOWN]
        ]


def places_of(source: SourceId) -> int:
    """Return how many places a source takes in a table: one, or more if its name is long."""
    name = json.dumps(json.dumps(str(source), ensure_ascii=False), ensure_ascii=False)  # as in a property of a request
    return -(-len(name.encode()) // PLACE_NAME_BYTES)
