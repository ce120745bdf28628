"""Settings of Debezium's tables. Owns where their keys come from; reading events is ingest/debezium's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

from ingest.debezium.config import UNAVAILABLE_VALUE, DebeziumConfig, TableKeys
from writer.changes import table_name_of
from writer.config import WriterConfig, check
from writer.rows.column_notes import read_notes
from writer.table_settings import TableSections

# Tables whose declared keys are kept: far more than one connector has.
DECLARED_KEYS_MAX_TABLES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class DebeziumSettings:
    """What Debezium does not say about its tables."""

    keys: str = field(
        default="",
        metadata={"why": "key columns per table, as `public.users: id; public.lines: order_id, line`; none are sent"},
    )
    replica_identity_full: str = field(
        default="", metadata={"why": "tables with REPLICA IDENTITY FULL, by commas; only their before-images are whole"}
    )
    unavailable_value: str = field(
        default=UNAVAILABLE_VALUE, metadata={"why": "the connector's unavailable.value.placeholder"}
    )
    messages_table: str = field(
        default="debezium_messages", metadata={"why": "table of logical decoding messages, which belong to none"}
    )

    def __post_init__(self) -> None:
        self.to_config()

    def to_config(self, tables: TableSections | None = None, writer: WriterConfig | None = None) -> DebeziumConfig:
        """Read the settings as what reading events needs; keys that they do not name are those declared of tables."""
        full = {name.strip() for name in self.replica_identity_full.split(",") if name.strip()}
        columns = {}
        for entry in filter(None, (part.strip() for part in self.keys.split(";"))):
            table, colon, names = entry.partition(":")
            check(bool(colon and names.strip()), f"keys must be `table: column, column; ...`: entry={entry}")
            columns[table.strip()] = tuple(name.strip() for name in names.split(","))
        return DebeziumConfig(
            tables={
                name: TableKeys(columns=columns.get(name, ()), replica_identity_full=name in full)
                for name in columns.keys() | full
            },
            declared_keys=_declared_keys(tables or TableSections(), writer or WriterConfig()),
            unavailable_value=self.unavailable_value,
            messages_table=self.messages_table,
        )


def _declared_keys(tables: TableSections, writer: WriterConfig) -> Callable[[str], tuple[str, ...]]:
    """Give what finds the `identifier` of a source's table in the sections of single tables."""

    @lru_cache(maxsize=DECLARED_KEYS_MAX_TABLES)
    def find(source_table: str) -> tuple[str, ...]:
        name = table_name_of(source_table, writer.default_namespace)
        declared = tables.settings_for(str(name), writer).declared
        return tuple(each.name for each in declared.fields if read_notes(each.doc).is_key)

    return find
