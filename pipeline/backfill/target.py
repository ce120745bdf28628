"""The change table that a backfill fills. Owns creating it as the service would, its marks, and the run's record.

A table that is missing gets the columns, partitions and properties of one that the service creates with its defaults;
the service goes on with it, and lets it follow its settings where they are others.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as sql
from pyspark.sql import types

from lakefeed.contract import changes as cdc
from lakefeed.contract.changes import ROW_ID, Operation, Position, SourceId
from lakefeed.contract.errors import WriterError
from lakefeed.contract.ledger import (
    BACKFILL_KEY,
    LEDGER_KEY,
    RUN_PROPERTY_PREFIX,
    TOTALS_PROPERTY,
    ChunkMark,
    Facts,
    Ledger,
    Totals,
    chunk_mark_of,
    ledger_from_text,
)
from lakefeed.contract.progress import as_hex, as_number, as_object, decode_object, encode, member, progress_from_text
from lakefeed.contract.properties import UPKEEP_PROPERTIES
from lakefeed.pipeline.backfill.rows import Reading, as_changes, form_problem, shown
from lakefeed.pipeline.backfill.types import FittedColumn, type_sql
from lakefeed.pipeline.errors import PipelineError
from lakefeed.pipeline.mirrors.marker import MIRROR_KEY
from lakefeed.pipeline.mirrors.settings import MirrorMode, MirrorSettings, mirror_names
from lakefeed.pipeline.mirrors.table import plan_layout
from lakefeed.pipeline.spark import tables
from lakefeed.pipeline.spark.tables import (
    Snapshot,
    TableName,
    current_fields,
    has_jvm,
    load_document,
    quoted,
    text_literal,
)
from lakefeed.pipeline.verification.scan import facts_of, tally_rows
from lakefeed.settings import SettingsError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


# --- pipeline.backfill.records ----------------------------------------------------------------------------------------
#
# What a run remembers in the table, and what is committed of it. Owns the record and the decision.
#
# A run is remembered by a property of the table, written before each chunk:
#
#     lakefeed.backfill.<run>   {"next":4,"after":8206...,"at":1794830861170000,"owner":"7f...","facts":{...},
#                                "source":"shop","key":["id"],"rows":3000,"checksum":"9d0e...","done":false}
#
# Chunks before `next` are committed. Of chunk `next` that is not known: it was to be committed after snapshot `after`,
# its rows received at `at`. Whoever goes on has to look:
#
#     from main back to `after` there is a snapshot of this chunk     COMMITTED
#     from main back to `after` there is none                         ABSENT
#     snapshots in between are expired                                UNKNOWN    look for rows received at `at`
#
# The owner is the process that runs it. One that finds another owner stops: the later start goes on.


_MODULUS = 1 << 64


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """How far a run has come. Without a checksum its rows are not recorded. Old records do not tell the key."""

    run: str
    source: str
    key: tuple[str, ...] | None = None
    owner: str
    facts: Mapping[str, Any]
    next: int = 0
    after: int | None = None
    at_us: int = 0
    rows: int = 0
    checksum: int | None = 0
    is_done: bool = False

    @property
    def property_name(self) -> str:
        """The table property that it is kept in."""
        return RUN_PROPERTY_PREFIX + self.run

    def counting(self, rows: int, checksum: int | None) -> RunRecord:
        """Go on behind the next chunk, which had these rows."""
        both = None if self.checksum is None or checksum is None else (self.checksum + checksum) % _MODULUS
        return replace(self, next=self.next + 1, rows=self.rows + rows, checksum=both)

    def to_text(self) -> str:
        """Render the property."""
        document = {
            "source": self.source,
            "key": None if self.key is None else list(self.key),
            "owner": self.owner,
            "facts": dict(self.facts),
            "next": self.next,
            "after": self.after,
            "at": self.at_us,
            "rows": self.rows,
            "done": self.is_done,
        }
        return encode(document if self.checksum is None else {**document, "checksum": f"{self.checksum:016x}"})


def record_from_text(run: str, text: str) -> RunRecord:
    """Read a run's property.

    Raises: ValueError.
    """
    document = decode_object(text)
    after, checksum, key = document.get("after"), document.get("checksum"), document.get("key")
    return RunRecord(
        run=run,
        source=str(member(document, "source")),
        key=tuple(map(str, key)) if isinstance(key, list) else None,
        owner=str(member(document, "owner")),
        facts=as_object(member(document, "facts")),
        next=as_number(member(document, "next")),
        after=None if after is None else as_number(after),
        at_us=as_number(member(document, "at")),
        rows=as_number(member(document, "rows")),
        checksum=None if checksum is None else as_hex(checksum),
        is_done=member(document, "done") is True,
    )


class Fate(enum.Enum):
    """What became of a chunk; drawn in the module's head."""

    COMMITTED = "committed"
    ABSENT = "absent"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Looked:
    """What the snapshots say of a chunk; if it is there, all snapshots that are it, which should be one."""

    fate: Fate
    snapshots: Sequence[Snapshot] = ()


def look_for_chunk(
    snapshots: Sequence[Snapshot], head_id: int | None, *, run: str, chunk: int, after: int | None
) -> Looked:
    """Find out from a table's snapshots whether a chunk is committed; `head_id` is where main is."""
    by_id = {snapshot.snapshot_id: snapshot for snapshot in snapshots}
    found: list[Snapshot] = []
    at = head_id
    while at is not None and at != after and at in by_id:
        mark = chunk_mark_of(by_id[at].summary)
        if mark is not None and (mark.run, mark.chunk) == (run, chunk):
            found.append(by_id[at])
        at = by_id[at].parent_id
    if found:
        return Looked(Fate.COMMITTED, found)
    return Looked(Fate.ABSENT if at == after else Fate.UNKNOWN)


# --- pipeline.backfill.target -----------------------------------------------------------------------------------------


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

        Raises: SettingsError.
        """
        stored = self.load_record(record.run)
        if stored is not None and stored.owner != record.owner:
            raise SettingsError(f"another process goes on with this run, this one stops: run={record.run}")


def _property_list(properties: dict[str, str]) -> str:
    return ", ".join(f"{text_literal(name)} = {text_literal(value)}" for name, value in properties.items())


# --- pipeline.backfill.chunks -----------------------------------------------------------------------------------------
#
# Writes chunks, and finds again what was written. Owns the append, its summary and its ledger.
#
# The ledger has to be of the rows that are written, and a database may give others the next time: rows are kept on the
# executors' disks between counting and writing. If an executor is lost with them, the chunk fails and is read again.


_SUMMARY = "snapshot-property."


class KeyMissing(PipelineError):
    """Rows of the input have no key: nothing of their chunk was written."""


@dataclass(frozen=True, slots=True)
class Written:
    """A chunk that is committed, or had no rows; the checksum is None if none was recorded."""

    rows: int
    checksum: int | None


@dataclass(frozen=True, slots=True)
class Staged:
    """A chunk that is read; without facts its rows are not recorded."""

    changes: DataFrame
    rows: int
    facts: Facts | None


class ChunkWriter:
    """Appends chunks to one table."""

    def __init__(self, target: Target, columns: Sequence[FittedColumn], *, with_ledger: bool) -> None:
        self._target = target
        self._columns = columns
        self._with_ledger = with_ledger

    def stage(self, rows: DataFrame, reading: Reading) -> Staged:
        """Read a chunk and count it. Nothing is written to the table.

        Raises:
            KeyMissing: rows have no key.
            What Spark raises of an input that cannot be read.
        """
        document = self._target.document()
        changes = as_changes(rows, self._columns, self._target.columns(), reading)
        if document is not None:
            changes = changes.localCheckpoint()
        count, keyed = changes.agg(sql.count(sql.lit(1)), sql.count(cdc.ROW_ID)).collect()[0]
        if keyed != count:
            raise KeyMissing(f"rows have no key: key={','.join(reading.key)} rows={count - keyed}")
        if not self._with_ledger or document is None:
            return Staged(changes, count, None)
        return Staged(changes, count, facts_of(tally_rows(changes, current_fields(document)).collect()))

    def commit(self, staged: Staged, mark: ChunkMark) -> Written:
        """Append a chunk as one snapshot; one without rows is none.

        Raises:
            What Spark raises: it may be committed all the same.
        """
        summary = {BACKFILL_KEY: mark.to_text()}
        if staged.facts is not None:
            summary[LEDGER_KEY] = Ledger(staged.facts, {}).to_text()
        if staged.rows:
            self._append(staged.changes, summary)
        return Written(staged.rows, None if staged.facts is None else _checksum(staged.facts))

    def _append(self, changes: DataFrame, summary: dict[str, str]) -> None:
        # Columns that somebody has added since the rows were read.
        new = [field for field in self._target.columns().fields if field.name not in changes.columns]
        for field in new:
            changes = changes.withColumn(field.name, sql.lit(None).cast(field.dataType))
        writer = changes.writeTo(self._target.sql)
        for key, value in summary.items():
            writer = writer.option(_SUMMARY + key, value)
        if self._target.is_one_partition():
            # Brought together by their partition, one task would write them all.
            writer = writer.option("distribution-mode", "none").option("fanout-enabled", "true")
        writer.append()

    def recorded_in(self, snapshot: Snapshot) -> Written:
        """Tell what a committed chunk holds, from its snapshot."""
        ledger = ledger_from_text(snapshot.summary.get(LEDGER_KEY))
        rows = int(snapshot.summary.get("added-records", 0))
        return Written(rows, None if ledger is None else _checksum(ledger.facts))

    def found_in_rows(self, source: str, at_us: int) -> Written | None:
        """Tell what a committed chunk holds, by its rows, which have one moment of receipt; None if there are none."""
        moment = sql.timestamp_micros(sql.lit(at_us).cast("long"))
        rows = self._target.spark.table(self._target.sql).where(
            (sql.col(cdc.OPERATION) == Operation.READ.value)
            & (sql.col(cdc.SOURCE) == source)
            & (sql.col(cdc.INGESTED_AT) == moment)
        )
        if not self._with_ledger:
            count = rows.count()
            return Written(count, None) if count else None
        fields = current_fields(load_document(self._target.spark, self._target.sql))
        facts = facts_of(tally_rows(rows, fields).collect())
        return Written(sum(each.rows for each in facts.values()), _checksum(facts)) if facts else None


def _checksum(facts: Facts) -> int:
    return sum(each.checksum for each in facts.values()) % (1 << 64)


# --- pipeline.backfill.key_checks -------------------------------------------------------------------------------------
#
# Whether a key will do for a table that is there. Owns the refusal of keys whose rows mirrors would take for others.
#
# who reads the table                                   goes by
# a mirror that is built already                        the key that it was built with
# any mirror to come, if the table's key is declared    the columns of the key: row ids do not matter
# any other                                             row ids, which have to be those of live changes


def check_forms(target: Target, key: Sequence[FittedColumn]) -> None:
    """Check that ids are those of live changes, where somebody goes by them.

    Raises: SettingsError.
    """
    found = ((column, form_problem(column)) for column in key)
    problems = [f"{shown(column)}: {problem}" for column, problem in found if problem is not None]
    if not problems:
        return
    facts = f"table={target.name}: {'; '.join(problems)}"
    if plan_layout(target.columns(), MirrorSettings()).key_is_row_id:
        raise SettingsError(
            "ids of rows would not be those that live changes have: declare the key as the table's identifier, so that"
            f" mirrors go by its columns: {facts}"
        )
    if mirrors := _mirrors_by_row_id(target):
        raise SettingsError(
            "ids of rows would not be those that live changes have, by which a mirror goes: drop it, so that it is"
            f" built anew by the key that is declared: mirror={','.join(mirrors)} {facts}"
        )


def _mirrors_by_row_id(target: Target) -> list[str]:
    """Name the mirrors that were built before a key was declared, as far as they have their usual names."""
    usual = (MirrorSettings(), MirrorSettings(mode=MirrorMode.HISTORY))
    names = [mirror_names(target.name, settings, target.catalog) for settings in usual]
    return [
        str(each.mirror)
        for each in names
        if tables.exists(target.spark, each.mirror_sql)
        and tables.properties(target.spark, each.mirror_sql).get(MIRROR_KEY) == json.dumps([ROW_ID])
    ]
