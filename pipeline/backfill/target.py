"""The change table that a backfill fills: create it as the service would, check and alter it, keep the run's record.

A new table gets the columns, partitions and properties that the service gives by default. The service takes it over,
and applies its own settings where they differ.

Which rows are the same row to readers of an existing table:

    an existing mirror                                     the key that it was built with
    a future mirror, if the table's key is declared        the columns of the key; row ids do not matter
    any other                                              row ids, which must be those of live changes

A run is a property of the table, written before each chunk:

    lakefeed.backfill.<run>    {"next":4,"after":8206...,"at":1794830861170000,"owner":"7f...","facts":{...},
                                "source":"shop","key":["id"],"rows":3000,"checksum":"9d0e...","done":false}

Chunks before `next` are committed. Chunk `next` was to be committed after snapshot `after`, with rows received at `at`;
a process that resumes has to find out whether it was:

    between main and `after` there is a snapshot of this chunk    it is committed
    between main and `after` there is none                        it is not
    snapshots in between have expired                             unknown: search for rows received at `at`

`owner` is the process that runs it. A process that finds another owner stops: the later start resumes the run.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lakefeed.contract import changes as cdc
from lakefeed.contract.changes import ROW_ID, Operation, Position, SourceId
from lakefeed.contract.errors import WriterError
from lakefeed.contract.ledger import CHECKSUM_MODULUS, RUN_PROPERTY_PREFIX, TOTALS_PROPERTY, Totals, chunk_mark_of
from lakefeed.contract.progress import (
    PROGRESS_PROPERTY,
    as_hex,
    as_number,
    as_object,
    decode_object,
    encode,
    member,
    progress_from_text,
)
from lakefeed.contract.properties import UPKEEP_PROPERTIES
from lakefeed.pipeline.backfill.rows import column_text, form_problem
from lakefeed.pipeline.backfill.types import FittedColumn
from lakefeed.pipeline.errors import PipelineError
from lakefeed.pipeline.mirrors.settings import MirrorMode, MirrorSettings, mirror_names
from lakefeed.pipeline.mirrors.table import MIRROR_KEY, plan_layout
from lakefeed.pipeline.spark import tables
from lakefeed.pipeline.spark.tables import (
    Snapshot,
    TableIdentifier,
    fields_of,
    has_jvm,
    load_metadata,
    property_pairs,
    quoted,
    text_literal,
    type_sql,
)
from lakefeed.settings import SettingsError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructType


# The properties that the service gives to a new table.
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
    """The table exists and is not a change table: the user has to choose another name."""


# -- the run's record


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """The progress of a run. Without a checksum its rows are not recorded in ledgers."""

    run: str
    source: str
    key: tuple[str, ...]
    owner: str
    facts: Mapping[str, Any]
    next: int = 0
    after: int | None = None
    at_us: int = 0
    rows: int = 0
    checksum: int | None = 0
    is_done: bool = False

    def after_chunk(self, rows: int, checksum: int | None) -> RunRecord:
        """Return the record after the next chunk, which had these rows."""
        both = None if self.checksum is None or checksum is None else (self.checksum + checksum) % CHECKSUM_MODULUS
        return replace(self, next=self.next + 1, rows=self.rows + rows, checksum=both)

    def to_text(self) -> str:
        """Render the property's value."""
        document = {
            "source": self.source,
            "key": list(self.key),
            "owner": self.owner,
            "facts": dict(self.facts),
            "next": self.next,
            "after": self.after,
            "at": self.at_us,
            "rows": self.rows,
            "done": self.is_done,
        }
        return encode(document if self.checksum is None else {**document, "checksum": f"{self.checksum:016x}"})


def parse_record(run: str, text: str) -> RunRecord:
    """Parse a run's property. Raise ValueError if it is damaged."""
    document = decode_object(text)
    after, checksum, key = document.get("after"), document.get("checksum"), member(document, "key")
    if not isinstance(key, list):
        raise ValueError(f"not a list: {key!r}")  # noqa: TRY004 - the caller handles damaged texts alike
    return RunRecord(
        run=run,
        source=str(member(document, "source")),
        key=tuple(map(str, key)),
        owner=str(member(document, "owner")),
        facts=as_object(member(document, "facts")),
        next=as_number(member(document, "next")),
        after=None if after is None else as_number(after),
        at_us=as_number(member(document, "at")),
        rows=as_number(member(document, "rows")),
        checksum=None if checksum is None else as_hex(checksum),
        is_done=member(document, "done") is True,
    )


def find_chunk(lineage: Sequence[Snapshot], *, run: str, chunk: int, after: int | None) -> list[Snapshot] | None:
    """Return the snapshots that commit a chunk, which should be one at most; None if it is unknown.

    `lineage` has the snapshots of main, newest first.
    """
    later = list(itertools.takewhile(lambda each: each.snapshot_id != after, lineage))
    marks = [(each, chunk_mark_of(each.summary)) for each in later]
    found = [each for each, mark in marks if mark is not None and (mark.run, mark.chunk) == (run, chunk)]
    oldest_parent = lineage[-1].parent_id if lineage else None
    is_complete = len(later) < len(lineage) or oldest_parent == after
    return found if found or is_complete else None


# -- the table


@dataclass(frozen=True, slots=True)
class TargetTable:
    """The change table, which may not exist yet."""

    spark: SparkSession
    catalog: str
    name: TableIdentifier

    @property
    def sql(self) -> str:
        """Return the name in SQL."""
        return self.name.sql(self.catalog)

    def columns(self) -> StructType:
        """Return the columns as Spark sees them."""
        return self.spark.table(self.sql).schema

    def metadata(self) -> dict[str, Any] | None:
        """Return the metadata document; None without a JVM."""
        return load_metadata(self.spark, self.sql) if has_jvm(self.spark) else None

    def properties(self) -> dict[str, str]:
        """Return the properties."""
        return tables.properties(self.spark, self.sql)

    def mark(self, source: str) -> Position | None:
        """Return the position of a source's last committed change. Raise PipelineError if the record is damaged."""
        try:
            progress = progress_from_text(self.properties().get(PROGRESS_PROPERTY))
        except WriterError as error:
            raise PipelineError(str(error)) from error
        return progress.sources.get(SourceId(source))

    def check(self) -> None:
        """Raise NotAChangeTable unless the table is a change table."""
        if not tables.is_change_table(self.properties()):
            raise NotAChangeTable(f"not a change table, choose another name: table={self.name}")
        if missing := [name for name in _REQUIRED if name not in self.columns().names]:
            raise NotAChangeTable(
                f"not a change table, columns are missing: table={self.name} columns={','.join(missing)}"
            )

    def create(self, columns: Sequence[FittedColumn], key: Sequence[str]) -> None:
        """Create the table, unless another process came first."""
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
        # Complete from the start: before the service's first commit the table has only rows of backfills.
        properties = {**NEW_TABLE_PROPERTIES, TOTALS_PROPERTY: Totals(is_complete=True).to_text()}
        self.spark.sql(
            f"CREATE TABLE IF NOT EXISTS {self.sql} ({', '.join(lines)}) USING iceberg"
            f" PARTITIONED BY ({_PARTITION}) TBLPROPERTIES ({property_pairs(properties)})"
        )

    def alter(self, changes: Sequence[str]) -> None:
        """Change the columns, and add `_cdc_` columns that are missing."""
        have = self.columns().names
        own = [f"ADD COLUMN {quoted(name)} {type_}" for name, type_ in _OPTIONAL.items() if name not in have]
        for change in (*own, *changes):
            self.spark.sql(f"ALTER TABLE {self.sql} {change}")

    def has_truncates(self, source: str) -> bool:
        """Return whether the source has ever truncated the table."""
        rows = self.spark.table(self.sql).where(
            f"{cdc.OPERATION} = '{Operation.TRUNCATE.value}' AND {cdc.SOURCE} = {text_literal(source)}"
        )
        return bool(rows.limit(1).count())

    def is_one_partition(self) -> bool:
        """Return whether all rows of a chunk belong to one partition; False if that is unknown."""
        metadata = self.metadata()
        if metadata is None:
            return False
        names = {field["id"]: field["name"] for field in fields_of(metadata)}
        spec = next(each for each in metadata["partition-specs"] if each["spec-id"] == metadata["default-spec-id"])
        sources = (names.get(each.get("source-id"), "") for each in spec["fields"] if each["transform"] != "void")
        return all(name.startswith(cdc.RESERVED_PREFIX) for name in sources)

    def load_record(self, run: str) -> RunRecord | None:
        """Load the record of a run; None if there is none. Raise PipelineError if it is damaged."""
        text = self.properties().get(RUN_PROPERTY_PREFIX + run)
        if text is None:
            return None
        try:
            return parse_record(run, text)
        except ValueError as error:
            raise PipelineError(
                f"the run's record is damaged, start another run with --run: run={run}: {error}"
            ) from error

    def save_record(self, record: RunRecord) -> None:
        """Save the record of a run."""
        tables.set_properties(self.spark, self.sql, {RUN_PROPERTY_PREFIX + record.run: record.to_text()})

    def check_owner(self, record: RunRecord) -> None:
        """Raise SettingsError if another process has taken over the run."""
        stored = self.load_record(record.run)
        if stored is not None and stored.owner != record.owner:
            raise SettingsError(f"another process has taken over this run, this one stops: run={record.run}")


# -- the key


def check_row_ids(target: TargetTable, key: Sequence[FittedColumn]) -> None:
    """Raise SettingsError if a mirror identifies rows by row ids, and these would differ from those of live changes."""
    found = ((column, form_problem(column)) for column in key)
    problems = [f"{column_text(column)}: {problem}" for column, problem in found if problem is not None]
    if not problems:
        return
    facts = f"table={target.name}: {'; '.join(problems)}"
    if plan_layout(target.columns(), MirrorSettings()).key_is_row_id:
        raise SettingsError(
            "row ids would differ from those of live changes, declare the key as the table's identifier, so that"
            f" mirrors use its columns: {facts}"
        )
    if mirrors := _mirrors_by_row_id(target):
        raise SettingsError(
            "row ids would differ from those of live changes, which a mirror uses as its key, drop the mirror, so that"
            f" it is rebuilt with the declared key: mirror={','.join(mirrors)} {facts}"
        )


def _mirrors_by_row_id(target: TargetTable) -> list[str]:
    """Return the mirrors that were built before a key was declared, among those with the default names."""
    defaults = (MirrorSettings(), MirrorSettings(mode=MirrorMode.HISTORY))
    names = [mirror_names(target.name, settings, target.catalog) for settings in defaults]
    return [
        str(each.mirror)
        for each in names
        if tables.exists(target.spark, each.mirror_sql)
        and tables.properties(target.spark, each.mirror_sql).get(MIRROR_KEY) == json.dumps([ROW_ID])
    ]
