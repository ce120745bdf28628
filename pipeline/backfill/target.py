"""The change table that a backfill fills. Owns creating it as the service would, its marks, and the run's record.

A table that is missing gets the columns, partitions and properties of one that the service creates with its defaults;
the service goes on with it, and lets it follow its settings where they are others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql import types

from pipeline import tables
from pipeline.backfill.fitting import FittedColumn
from pipeline.backfill.records import RunRecord, record_from_text
from pipeline.backfill.type_fits import type_sql
from pipeline.errors import ConfigError, PipelineError
from pipeline.mirrors.sql_text import quoted, text_literal
from pipeline.table_documents import current_fields, has_jvm, load_document
from pipeline.tables import TableName
from writer import columns as cdc
from writer.changes import Operation, Position, SourceId
from writer.errors import WriterError
from writer.iceberg.progress import progress_from_text
from writer.iceberg.properties import UPKEEP_PROPERTIES
from writer.verification.backfills import RUN_PROPERTY_PREFIX
from writer.verification.ledger import TOTALS_PROPERTY, Totals

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# What the service says of a new table: writer/committer.py, writer/layout_plan.py.
NEW_TABLE_PROPERTIES = {
    "format-version": "2",
    tables.APPEND_ONLY: "true",
    "write.parquet.compression-codec": "zstd",
    "lakefeed.partition": "day(_cdc_timestamp)",
    "lakefeed.sort": "",
    **UPKEEP_PROPERTIES,
}
_PARTITION = f"days({cdc.TIMESTAMP})"
_KEY_COMMENT = "key"

_REQUIRED = {
    cdc.SEQUENCE: "BIGINT",
    cdc.TIMESTAMP: "TIMESTAMP",
    cdc.OPERATION: "STRING",
    cdc.ROW_ID: "STRING",
    cdc.SOURCE: "STRING",
    cdc.INGESTED_AT: "TIMESTAMP",
}
_OPTIONAL = {
    cdc.UNCHANGED: "ARRAY<STRING>",
    cdc.METADATA: "STRING",
    cdc.RESCUED: "STRING",
    cdc.EPOCH: "BIGINT",
}


class NotAChangeTable(PipelineError):
    """The table is another kind of table: choose another name."""


@dataclass(frozen=True, slots=True)
class Target:
    """The table, which may not be there yet."""

    spark: SparkSession
    catalog: str
    name: TableName

    @property
    def sql(self) -> str:
        """Its name in SQL."""
        return self.name.sql(self.catalog)

    def exists(self) -> bool:
        """Tell whether the table is there."""
        return tables.exists(self.spark, self.sql)

    def columns(self) -> types.StructType:
        """Give its columns as Spark has them."""
        return self.spark.table(self.sql).schema

    def document(self) -> dict[str, Any] | None:
        """Give its metadata, where the session has a way to it."""
        return load_document(self.spark, self.sql) if has_jvm(self.spark) else None

    def properties(self) -> dict[str, str]:
        """Give its properties."""
        return tables.properties(self.spark, self.sql)

    def mark(self, source: str) -> Position | None:
        """Give where the last committed change of a source is.

        Raises:
            PipelineError: the table's marker is damaged.
        """
        try:
            progress = progress_from_text(self.properties().get(tables.PROGRESS))
        except WriterError as error:
            raise PipelineError(str(error)) from error
        return progress.position_of(SourceId(source))

    # -- the table itself

    def check(self) -> None:
        """Check that it is a change table.

        Raises: NotAChangeTable.
        """
        if not tables.is_change_table(self.properties()):
            raise NotAChangeTable(f"not a table of changes, choose another name: table={self.name}")
        if missing := [name for name in _REQUIRED if name not in self.columns().names]:
            raise NotAChangeTable(f"lacks columns of a table of changes: table={self.name} columns={','.join(missing)}")

    def create(self, columns: Sequence[FittedColumn], key: Sequence[str]) -> None:
        """Create it for some columns; nothing is done if somebody else was first."""
        for depth in range(1, len(self.name.namespace) + 1):
            namespace = map(quoted, (self.catalog, *self.name.namespace[:depth]))
            self.spark.sql(f"CREATE NAMESPACE IF NOT EXISTS {'.'.join(namespace)}")
        folded = {name.lower() for name in key}
        lines = [f"{quoted(name)} {type_} NOT NULL" for name, type_ in _REQUIRED.items()]
        lines += [f"{quoted(name)} {type_}" for name, type_ in _OPTIONAL.items()]
        lines += [
            f"{quoted(each.name)} {type_sql(each.type)}"
            + (f" COMMENT '{_KEY_COMMENT}'" if each.name.lower() in folded else "")
            for each in columns
        ]
        # Complete from the start: what is there before the service's first commit are rows of backfills.
        properties = {**NEW_TABLE_PROPERTIES, TOTALS_PROPERTY: Totals(is_complete=True).to_text()}
        self.spark.sql(
            f"CREATE TABLE IF NOT EXISTS {self.sql} ({', '.join(lines)}) USING iceberg"
            f" PARTITIONED BY ({_PARTITION}) TBLPROPERTIES ({_property_list(properties)})"
        )

    def alter(self, changes: Sequence[str]) -> None:
        """Change its columns; own ones that it lacks are added too."""
        have = self.columns().names
        own = [f"ADD COLUMN {quoted(name)} {type_}" for name, type_ in _OPTIONAL.items() if name not in have]
        for change in (*own, *changes):
            self.spark.sql(f"ALTER TABLE {self.sql} {change}")

    def has_truncates(self, source: str) -> bool:
        """Tell whether the source has ever emptied the table."""
        rows = self.spark.table(self.sql).where(
            f"{cdc.OPERATION} = '{Operation.TRUNCATE.value}' AND {cdc.SOURCE} = {text_literal(source)}"
        )
        return bool(rows.limit(1).count())

    def is_one_partition(self) -> bool:
        """Tell whether all rows of a chunk belong to one partition, as far as that is known."""
        document = self.document()
        if document is None:
            return False
        names = {field["id"]: field["name"] for field in current_fields(document)}
        spec = next(each for each in document["partition-specs"] if each["spec-id"] == document["default-spec-id"])
        sources = (names.get(each.get("source-id"), "") for each in spec["fields"] if each["transform"] != "void")
        return all(name.startswith(cdc.RESERVED_PREFIX) for name in sources)

    # -- the run's record

    def load_record(self, run: str) -> RunRecord | None:
        """Read what a run has remembered.

        Raises: PipelineError.
        """
        text = self.properties().get(RUN_PROPERTY_PREFIX + run)
        if text is None:
            return None
        try:
            return record_from_text(run, text)
        except ValueError as error:
            raise PipelineError(f"the run's record is damaged, start another with --run: run={run}: {error}") from error

    def save_record(self, record: RunRecord) -> None:
        """Remember how far a run has come."""
        properties = _property_list({record.property_name: record.to_text()})
        self.spark.sql(f"ALTER TABLE {self.sql} SET TBLPROPERTIES ({properties})")

    def check_own(self, record: RunRecord) -> None:
        """Check that nobody else has taken over the run.

        Raises: ConfigError.
        """
        stored = self.load_record(record.run)
        if stored is not None and stored.owner != record.owner:
            raise ConfigError(f"another process goes on with this run, this one stops: run={record.run}")


def _property_list(properties: dict[str, str]) -> str:
    return ", ".join(f"{text_literal(name)} = {text_literal(value)}" for name, value in properties.items())
