"""Debezium events as values, and the settings of their source. Rows stay JSON.

A `Change` has the fields of a wire event, and those that only Debezium sends. The wire protocol has INSERT, UPDATE and
DELETE; Debezium also has:

    READ      a row of a snapshot: after-image only; replaces the row as it is known
    TRUNCATE  all rows of the table are gone: no image, no row id
    MESSAGE   pg_logical_emit_message: prefix and content are the after-image, in a table of their own
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import msgspec

from lakefeed.ingest.errors import IngestError

UNAVAILABLE_VALUE = "__debezium_unavailable_value"

NO_IMAGE = msgspec.Raw()
NULL = msgspec.Raw(b"null")


@dataclass(frozen=True, slots=True, kw_only=True)
class TableKeys:
    """The columns that identify a table's rows, and which columns of its before-images are real.

    `columns` are those of the replica identity: the primary key by default. For a table with REPLICA IDENTITY USING
    INDEX they are the columns of the index, and Debezium sends the primary key as zeros. With `replica_identity_full`
    every column of a before-image is real. Otherwise only `columns` are: Debezium fills the others with nulls, zeros,
    empty text or column defaults.
    """

    columns: tuple[str, ...] = ()
    replica_identity_full: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DebeziumConfig:
    """Settings of one Debezium source. Tables are named as the source does: `schema.table`."""

    tables: Mapping[str, TableKeys] = field(default_factory=dict)
    # Returns the declared key columns of a table for which the settings above name none.
    declared_keys: Callable[[str], tuple[str, ...]] = lambda _: ()
    # The connector's unavailable.value.placeholder.
    unavailable_value: str = UNAVAILABLE_VALUE
    # Logical decoding messages belong to no table of the source: they are changes of this one.
    messages_table: str = "debezium_messages"

    def keys_of(self, table: str) -> TableKeys:
        """Return the keys of a source table."""
        known = self.tables.get(table, TableKeys())
        return known if known.columns else replace(known, columns=self.declared_keys(table))


class DebeziumMalformed(IngestError):
    """A request is not what Debezium sends: refuse all of it. The message names path and rule, never a value."""

    def __init__(self, path: str, rule: str) -> None:
        super().__init__(f"{path}: {rule}")
        self.path = path
        self.rule = rule


class SourceOperation(enum.Enum):
    """What a change did."""

    READ = "READ"
    INSERT = "INSERT"
    UPDATE = "UPDATE"
    DELETE = "DELETE"
    TRUNCATE = "TRUNCATE"
    MESSAGE = "MESSAGE"


@dataclass(frozen=True, slots=True)
class Origin:
    """The position of a change in its source. `snapshot` is empty for streamed changes.

    `sequence` is PostgreSQL's pair of positions: of the last commit before the change, and of the change itself.
    """

    database: str = ""
    schema: str = ""
    table: str = ""
    snapshot: str = ""
    lsn: int | None = None
    tx_id: str = ""
    sequence: tuple[int | None, int | None] | None = None

    @property
    def collection(self) -> str:
        """Return the table's name as the source writes it."""
        return f"{self.schema or self.database}.{self.table}".removeprefix(".")


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One change of one row, or of a whole table. Images are empty when absent.

    `unchanged` columns were not sent and are in no image. `irregular` columns hold text or a number that is not a
    regular value of their type: infinities, NaN, years before 1 or after 9999, the time 24:00:00.
    `moved_from` and `moved_to` are row ids: the two halves of a change of key name each other.
    """

    operation: SourceOperation
    table: str
    row_id: str
    timestamp_ms: int
    before: msgspec.Raw
    after: msgspec.Raw
    unchanged: tuple[str, ...]
    irregular: tuple[str, ...]
    metadata: msgspec.Raw
    origin: Origin
    transaction: str
    moved_from: str = ""
    moved_to: str = ""


class TransactionStatus(enum.Enum):
    """Whether a mark begins or ends a transaction."""

    BEGIN = "BEGIN"
    END = "END"


@dataclass(frozen=True, slots=True)
class TransactionMark:
    """The begin or end of a transaction. The end has the number of its events, in total and per table."""

    status: TransactionStatus
    transaction: str
    event_count: int = 0
    collections: Mapping[str, int] | None = None


@dataclass(frozen=True, slots=True)
class Ignored:
    """An event that changes no row: a `heartbeat`, a `tombstone` or a `schema change`."""

    reason: str


DebeziumEvent: TypeAlias = Change | TransactionMark | Ignored
