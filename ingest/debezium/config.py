"""Settings of a Debezium source: what events do not say about their tables, such as keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

UNAVAILABLE_VALUE = "__debezium_unavailable_value"


@dataclass(frozen=True, slots=True, kw_only=True)
class TableKeys:
    """The key of a table's rows.

    `columns` are those of the replica identity: the primary key by default, the columns of the index where a table has
    REPLICA IDENTITY USING INDEX (there the primary key arrives as zeros). With `replica_identity_full` every column of
    a before-image is real; without it only these columns are, because Debezium fills the others with nulls, zeros,
    empty text or column defaults.
    """

    columns: tuple[str, ...] = ()
    replica_identity_full: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DebeziumConfig:
    """Settings of one Debezium source. Tables are named as the source does: `schema.table`."""

    tables: Mapping[str, TableKeys] = field(default_factory=dict)
    other_tables: TableKeys = TableKeys()
    # Returns the declared key columns of a table for which the settings above name none.
    declared_keys: Callable[[str], tuple[str, ...]] = lambda _: ()
    # The connector's unavailable.value.placeholder.
    unavailable_value: str = UNAVAILABLE_VALUE
    # Logical decoding messages belong to no table of the source: they are changes of this one.
    messages_table: str = "debezium_messages"

    def keys_of(self, table: str) -> TableKeys:
        """Return the keys of a source table."""
        known = self.tables.get(table, self.other_tables)
        return known if known.columns else replace(known, columns=self.declared_keys(table))
