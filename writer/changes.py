"""The words every part shares: a change's operation, its position in its source, the table it belongs to."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NewType

SourceId = NewType("SourceId", str)


class Operation(enum.Enum):
    """What a change did to its row or, for TRUNCATE, its table; a READ saw a row, a MESSAGE concerns none."""

    INSERT = "INSERT"
    UPDATE = "UPDATE"
    DELETE = "DELETE"
    READ = "READ"
    TRUNCATE = "TRUNCATE"
    MESSAGE = "MESSAGE"


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """Where a change sits in its source: epochs first, then sequences, so a restarted source sorts after its past."""

    epoch: int
    sequence: int


@dataclass(frozen=True, slots=True)
class Span:
    """The positions of one source that some rows cover, first and last; all of one epoch, so a sequence names one."""

    first: Position
    last: Position

    def joined(self, later: Span) -> Span:
        """Reach over a later span of the same source."""
        return Span(self.first, later.last)


@dataclass(frozen=True, slots=True, order=True)
class TableName:
    """An Iceberg table's name: namespace levels, then the table."""

    namespace: tuple[str, ...]
    name: str

    def __str__(self) -> str:
        return ".".join((*self.namespace, self.name))


def table_name_of(source_table: str, default_namespace: str) -> TableName:
    """Name the change table of a source's table: `users` -> `default.users`, `sales.orders` -> `sales.orders`."""
    *namespace, name = source_table.split(".")
    return TableName(tuple(namespace) or (default_namespace,), name)
