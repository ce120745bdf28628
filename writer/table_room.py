"""How many tables a service writes. Owns which it knows, and whether there is room for another.

Every table has a writer, two tasks, metrics and, in the catalog, metadata of its own, for as long as the service runs.
A client that puts an id into a table's name would have them grow without end, so names are refused beyond a number,
before their changes become durable. What is in the log is written whatever its number: it may be from before the number
was lowered. Names are known from when their changes were taken or met in the log since the start.
"""

from __future__ import annotations

from collections.abc import Collection

from writer.changes import TableName, table_name_of


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
