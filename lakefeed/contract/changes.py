"""Changes: their operation, position and table; the `_cdc_` columns; names and values that columns can have."""

from __future__ import annotations

import enum
from collections.abc import Collection
from dataclasses import dataclass
from typing import NewType

SourceId = NewType("SourceId", str)


class Operation(enum.Enum):
    """What a change did to its row. TRUNCATE empties the table, READ copies an existing row, MESSAGE has no row."""

    INSERT = "INSERT"
    UPDATE = "UPDATE"
    DELETE = "DELETE"
    READ = "READ"
    TRUNCATE = "TRUNCATE"
    MESSAGE = "MESSAGE"


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """The position of a change in its source. Ordered by epoch first, so a restarted source comes after its past."""

    epoch: int
    sequence: int


@dataclass(frozen=True, slots=True)
class Span:
    """The first and last position of one source that some rows cover, both of one epoch."""

    first: Position
    last: Position

    def joined(self, later: Span) -> Span:
        """Return the span from here to the end of a later span of the same source."""
        return Span(self.first, later.last)


@dataclass(frozen=True, slots=True, order=True)
class TableName:
    """An Iceberg table's name: namespace levels, then the table."""

    namespace: tuple[str, ...]
    name: str

    def __str__(self) -> str:
        return ".".join((*self.namespace, self.name))


def table_name_of(source_table: str, default_namespace: str) -> TableName:
    """Return the change table of a source's table: `users` -> `default.users`, `sales.orders` -> `sales.orders`."""
    *namespace, name = source_table.split(".")
    return TableName(tuple(namespace) or (default_namespace,), name)


# -- columns that Lakefeed adds to a row, in their order


SEQUENCE = "_cdc_sequence"
TIMESTAMP = "_cdc_timestamp"
OPERATION = "_cdc_operation"
ROW_ID = "_cdc_row_id"
SOURCE = "_cdc_source"
INGESTED_AT = "_cdc_ingested_at"
BEFORE = "_cdc_before"
UNCHANGED = "_cdc_unchanged"
METADATA = "_cdc_metadata"
RESCUED = "_cdc_rescued"
# Null for epoch 0. Sequences restart with an epoch: the order of a source's changes is that of (epoch, sequence).
EPOCH = "_cdc_epoch"

# Columns with this prefix belong to Lakefeed; a row's own field of such a name is rescued.
RESERVED_PREFIX = "_cdc_"

ALL = (
    *(SEQUENCE, TIMESTAMP, OPERATION, ROW_ID, SOURCE, INGESTED_AT),
    *(BEFORE, UNCHANGED, METADATA, RESCUED, EPOCH),
)


# -- names that a column can have
#
# The names of a row come from a database that may allow what readers of the table do not. Fields with these names are
# rescued:
#
# - the empty name, control characters (some catalogs cannot store them), and names longer than in any database,
# - names that start with `_cdc_`, and the names of Iceberg's metadata columns: Spark refuses a table that has one,
# - names that differ from another only by case: Spark, DuckDB and Trino take them for one column and refuse the table.
#   The first one keeps its column,
# - names with dots that spell another column's path: Iceberg finds nested columns by such names.

NAME_MAX_CHARS = 255

_FIRST_PRINTABLE = " "

# Iceberg specification, "Reserved Field IDs".
_ICEBERG_NAMES = (
    *("_file", "_pos", "_deleted", "_spec_id", "_partition", "_row_id", "_last_updated_sequence_number"),
    *("_change_type", "_change_ordinal", "_commit_snapshot_id"),
)


def is_usable(name: str) -> bool:
    """Return whether a name can be a field's name at any depth."""
    return 0 < len(name) <= NAME_MAX_CHARS and min(name) >= _FIRST_PRINTABLE


def is_usable_column(name: str) -> bool:
    """Return whether a name can be a column's name."""
    folded = fold(name)
    return is_usable(name) and not folded.startswith(RESERVED_PREFIX) and folded not in _ICEBERG_NAMES


def are_usable_together(names: Collection[str]) -> bool:
    """Return whether names can be the fields of one struct."""
    return all(map(is_usable, names)) and len({fold(name) for name in names}) == len(names)


def fold(name: str) -> str:
    """Return the form that names have in common that differ only by case."""
    return name.lower()


# -- limits

# Fields of one table at all depths. More make every reader slow; a source with more has data in its names.
FIELDS_MAX = 2000
# Deeper objects are documents, not columns; engines also walk types recursively.
NESTING_MAX_DEPTH = 12

INT64_MAX = 2**63 - 1

# The years 1 to 9999: what Iceberg's timestamptz, Spark, DuckDB and Python can all show.
TIMESTAMP_MIN_MS = -62_135_596_800_000
TIMESTAMP_MAX_MS = 253_402_300_799_999
