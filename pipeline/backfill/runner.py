"""One run of a backfill, from the plan to the last chunk.

Before the first chunk:

    1. plan          divide the input into chunks, fit its columns to the table's: errors end the run here
    2. find          find what an earlier process of the run has committed (target.py)
    3. table         create it, or change its columns

Then for each chunk; a crash after the step leaves:

    4. record        chunk, newest snapshot, time              nothing: the next process writes the chunk
    5. take mark     then read the chunk and count its rows    nothing
    6. append        one snapshot that names run and chunk     the chunk, which the next process finds by step 4
    7. next          step 4 of the next chunk records it       nothing

An append that fails may be committed nevertheless: it is searched for before it is retried.

The ledger must be of the rows that are written, and a database may return other rows the next time: rows are kept on
the executors' disks between counting and writing. If an executor is lost with them, the chunk fails and is read again.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from pyspark.sql import DataFrame
from pyspark.sql import functions as sql
from pyspark.sql.types import StructType

from lakefeed.contract import changes as cdc
from lakefeed.contract.changes import Operation
from lakefeed.contract.ledger import (
    BACKFILL_KEY,
    CHECKSUM_MODULUS,
    LEDGER_KEY,
    ChunkMark,
    Facts,
    Ledger,
    ledger_from_text,
)
from lakefeed.pipeline.backfill.inputs import (
    BEFORE_ALL,
    BackfillConfig,
    ChunkPlan,
    Input,
    InputChunk,
    InputUnreadable,
    ReadPosition,
    default_run,
    position_text,
)
from lakefeed.pipeline.backfill.rows import ReadContext, as_changes, key_columns
from lakefeed.pipeline.backfill.target import RunRecord, TargetTable, check_row_ids, find_chunk
from lakefeed.pipeline.backfill.types import FittedColumn, SchemaFit, fit_columns
from lakefeed.pipeline.errors import PipelineError
from lakefeed.pipeline.spark import tables
from lakefeed.pipeline.spark.failures import message_of, root_cause_of, spark_errors
from lakefeed.pipeline.spark.tables import fields_of, load_metadata, type_sql
from lakefeed.pipeline.verification.scan import facts_of, tally_rows
from lakefeed.settings import SettingsError

_log = logging.getLogger(__name__)

# Attempts to append a chunk; each is searched for before the next one, so that repeated failures are a reason to stop.
ATTEMPTS_MAX = 3
RETRY_DELAY_S = 2.0

_US_PER_S = 1_000_000


class SchemaMismatch(PipelineError):
    """Columns of the input do not fit the table: nothing was written."""


class InputRowsWithoutKey(PipelineError):
    """Rows of the input have no key: nothing of their chunk was written."""


@dataclass(frozen=True, slots=True)
class CommittedChunk:
    """A chunk that is committed, or had no rows; the checksum is None if none was recorded."""

    rows: int
    checksum: int | None


@dataclass(frozen=True, slots=True)
class StagedChunk:
    """A chunk that is read and counted; without facts its rows are not recorded."""

    changes: DataFrame
    rows: int
    facts: Facts | None


def stage_chunk(
    target: TargetTable, rows: DataFrame, columns: Sequence[FittedColumn], context: ReadContext, *, with_ledger: bool
) -> StagedChunk:
    """Read a chunk and count its rows. Nothing is written to the table.

    Raises:
        InputRowsWithoutKey: rows have no key.
        What Spark raises for an input that cannot be read.
    """
    metadata = target.metadata()
    changes = as_changes(rows, columns, target.columns(), context)
    if metadata is not None:
        changes = changes.localCheckpoint()
    count, keyed = changes.agg(sql.count(sql.lit(1)), sql.count(cdc.ROW_ID)).collect()[0]
    if keyed != count:
        raise InputRowsWithoutKey(
            f"some rows have no key, their chunk was not written: key={','.join(context.key)} rows={count - keyed}"
        )
    if not with_ledger or metadata is None:
        return StagedChunk(changes, count, None)
    return StagedChunk(changes, count, facts_of(tally_rows(changes, fields_of(metadata)).collect()))


def commit_chunk(target: TargetTable, staged: StagedChunk, mark: ChunkMark) -> CommittedChunk:
    """Append a chunk as one snapshot; none if it has no rows.

    Raises:
        What Spark raises: the chunk may be committed nevertheless.
    """
    checksum = None if staged.facts is None else _checksum(staged.facts)
    if not staged.rows:
        return CommittedChunk(0, checksum)
    changes = staged.changes
    # Columns that were added since the rows were read.
    for each in target.columns().fields:
        if each.name not in changes.columns:
            changes = changes.withColumn(each.name, sql.lit(None).cast(each.dataType))
    writer = changes.writeTo(target.sql).option(f"snapshot-property.{BACKFILL_KEY}", mark.to_text())
    if staged.facts is not None:
        writer = writer.option(f"snapshot-property.{LEDGER_KEY}", Ledger(staged.facts, {}).to_text())
    if target.is_one_partition():
        # Distributed by partition, one task would write all rows.
        writer = writer.option("distribution-mode", "none").option("fanout-enabled", "true")
    writer.append()
    return CommittedChunk(staged.rows, checksum)


def _found_in_rows(target: TargetTable, record: RunRecord) -> CommittedChunk | None:
    """Return what a committed chunk contains, by its rows, which share one time of receipt; None if it has none."""
    received_at = sql.timestamp_micros(sql.lit(record.at_us).cast("long"))
    rows = target.spark.table(target.sql).where(
        (sql.col(cdc.OPERATION) == Operation.READ.value)
        & (sql.col(cdc.SOURCE) == record.source)
        & (sql.col(cdc.INGESTED_AT) == received_at)
    )
    if record.checksum is None:
        count = rows.count()
        return CommittedChunk(count, None) if count else None
    fields = fields_of(load_metadata(target.spark, target.sql))
    facts = facts_of(tally_rows(rows, fields).collect())
    return CommittedChunk(sum(each.rows for each in facts.values()), _checksum(facts)) if facts else None


def _checksum(facts: Facts) -> int:
    return sum(each.checksum for each in facts.values()) % CHECKSUM_MODULUS


@dataclass(frozen=True, slots=True, kw_only=True)
class BackfillRequest:
    """What the user asked for."""

    source: str
    key: Sequence[str]
    position: ReadPosition
    run: str = ""
    config: BackfillConfig = field(default_factory=BackfillConfig)


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """A run before its first step: its chunks, the changes that the table needs, what is done, and the key."""

    run: str
    plan: ChunkPlan
    given: StructType
    fitting: SchemaFit
    record: RunRecord | None
    is_new_table: bool
    key: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BackfillResult:
    """A finished run: all rows, and those of this process."""

    run: str
    rows: int
    chunks: int
    own_rows: int
    own_chunks: int


class Backfill:
    """One input into one table. `on_chunk` is called after every chunk, with its number and rows."""

    def __init__(
        self,
        target: TargetTable,
        source_input: Input,
        request: BackfillRequest,
        *,
        clock: Callable[[], float] = time.time,
        on_chunk: Callable[[int, int], object] = lambda _number, _rows: None,
    ) -> None:
        self._target = target
        self._input = source_input
        self._request = request
        self._clock = clock
        self._on_chunk = on_chunk
        self._owner = uuid.uuid4().hex

    def prepare(self) -> PreparedRun:
        """Plan the run and check that it can work. Nothing is changed.

        Raises:
            InputUnreadable: the input cannot be read as described.
            SchemaMismatch: its columns do not fit the table.
            SettingsError: the request cannot be fulfilled.
        """
        target, request = self._target, self._request
        is_new = not tables.exists(target.spark, target.sql)
        if not is_new:
            target.check()
        run = request.run or default_run(table=str(target.name), source=request.source, address=self._input.address)
        record = None if is_new else target.load_record(run)
        if record is not None and record.source != request.source:
            raise SettingsError(
                f"the run belongs to another source, choose another name with --run: run={run} source={record.source}"
            )
        facts = None if record is None else record.facts
        plan = self._input.plan(target.spark, request.config, facts)
        given = self._input.columns(target.spark, plan)
        metadata = None if is_new else target.metadata()
        uuids = {each["name"] for each in fields_of(metadata) if each["type"] == "uuid"} if metadata else set()
        known = StructType() if is_new else target.columns()
        fitting = fit_columns(given, known, uuids=uuids, declared=self._input.declared)
        if fitting.problems:
            raise SchemaMismatch("nothing was written: " + "; ".join(fitting.problems))
        key = self._check_key(fitting, record, is_new=is_new)
        mark = None if is_new else target.mark(request.source)
        if request.position.resolve(mark) == BEFORE_ALL and mark is not None and target.has_truncates(request.source):
            raise SettingsError(
                "the source has truncated the table, which would delete rows from before all changes: set --position to"
                f" where the input was read: mark={position_text(mark)}"
            )
        return PreparedRun(run, plan, given, fitting, record, is_new, key)

    def _check_key(self, fitting: SchemaFit, record: RunRecord | None, *, is_new: bool) -> tuple[str, ...]:
        """Return the key's columns, if their row ids are those of live changes and of the run's start."""
        key = key_columns(fitting.columns, self._request.key)
        names = tuple(column.given for column in key)
        if record is not None and record.key != names:
            raise SettingsError(
                "the run was started with another key, so its rows have other ids: use that key, or start another run"
                f" with --run: run={record.run} started_with={','.join(record.key)} key={','.join(names)}"
            )
        if not is_new:
            check_row_ids(self._target, key)
        return names

    def run(self, prepared: PreparedRun) -> BackfillResult:
        """Write all chunks that are not committed yet.

        Raises:
            SettingsError: another process has taken over the run.
            PipelineError: a chunk could not be committed; the same command resumes with it.
        """
        record = self._begin(prepared)
        before = record
        chunks = prepared.plan.chunks
        for number in range(record.next):
            self._on_chunk(number, 0)
        if not record.is_done:
            self._alter(prepared)
            for chunk in chunks[record.next :]:
                record = self._write_chunk(chunk, prepared, record)
            self._target.check_owner(record)
            record = replace(record, is_done=True, after=None)
            self._target.save_record(record)
        own = record.next - before.next
        return BackfillResult(record.run, record.rows, len(chunks), record.rows - before.rows, own)

    def _begin(self, prepared: PreparedRun) -> RunRecord:
        """Take over the run, and find out whether the chunk of an earlier process is committed."""
        record = prepared.record
        if record is None:
            checksum = 0 if self._request.config.ledger else None
            return RunRecord(
                run=prepared.run,
                source=self._request.source,
                key=prepared.key,
                owner=self._owner,
                facts=prepared.plan.facts,
                checksum=checksum,
            )
        record = replace(record, owner=self._owner)
        if record.is_done:
            return record
        # From here on an earlier process that is still alive stops before its next chunk. A dead one may still have a
        # request in flight: the JVM of a killed Python lives a moment longer.
        self._target.save_record(record)
        time.sleep(RETRY_DELAY_S)
        found = self._find(record)
        return record if found is None else record.after_chunk(found.rows, found.checksum)

    def _alter(self, prepared: PreparedRun) -> None:
        if prepared.is_new_table:
            self._target.create(prepared.fitting.columns, self._request.key)
        else:
            self._target.alter(prepared.fitting.changes)
        # Compared as text: types of nested fields differ if only their comments do.
        known = {each.name: type_sql(each.dataType) for each in self._target.columns().fields}
        if others := [each.name for each in prepared.fitting.columns if known.get(each.name) != type_sql(each.type)]:
            raise SchemaMismatch(
                "the table's columns have changed during the planning, run the command again:"
                f" table={self._target.name} columns={','.join(others)}"
            )

    # -- one chunk

    def _write_chunk(self, chunk: InputChunk, prepared: PreparedRun, record: RunRecord) -> RunRecord:
        self._target.check_owner(record)
        # What is about to be written is recorded first, so that a later process can find it.
        record = replace(
            record,
            after=tables.current_snapshot_id(self._target.properties()),
            # Rows of a chunk are identified by it, so no two chunks may share it.
            at_us=max(int(self._clock() * _US_PER_S), record.at_us + 1),
        )
        self._target.save_record(record)
        written = self._append(chunk, prepared, record)
        self._on_chunk(chunk.number, written.rows)
        facts = {"table": str(self._target.name), "run": record.run, "chunk": chunk.number, "rows": written.rows}
        _log.info("backfill_chunk_committed", extra=facts)
        return record.after_chunk(written.rows, written.checksum)

    def _append(self, chunk: InputChunk, prepared: PreparedRun, record: RunRecord) -> CommittedChunk:
        # The mark first: changes committed between the mark and the read win over the rows.
        position = self._request.position.resolve(self._target.mark(self._request.source))
        context = ReadContext(source=self._request.source, key=self._request.key, position=position, at_us=record.at_us)
        try:
            rows = self._input.read(self._target.spark, chunk, prepared.given)
            columns, with_ledger = prepared.fitting.columns, self._request.config.ledger
            staged = stage_chunk(self._target, rows, columns, context, with_ledger=with_ledger)
        except spark_errors() as error:
            raise InputUnreadable(f"a chunk cannot be read: chunk={chunk.number}: {root_cause_of(error)}") from error
        mark = ChunkMark(record.run, chunk.number, len(prepared.plan.chunks))
        for _ in range(ATTEMPTS_MAX):
            # Another process may have taken over during the read.
            self._target.check_owner(record)
            try:
                written = commit_chunk(self._target, staged, mark)
            except spark_errors() as error:
                reason = message_of(error)
                _log.warning("backfill_append_failed", extra={"chunk": chunk.number, "reason": reason})
            else:
                self._find(record)  # an append has no condition: another process may have written the same chunk
                return written
            time.sleep(RETRY_DELAY_S)  # a request that is still in flight ends
            found = self._find(record)
            if found is not None:
                return found
        raise PipelineError(
            "a chunk could not be committed, run the same command again to resume:"
            f" run={record.run} chunk={chunk.number}: {reason}"
        )

    def _find(self, record: RunRecord) -> CommittedChunk | None:
        """Return what the record's next chunk contains; None if it is not committed."""
        lineage = tables.lineage(self._target.spark, self._target.sql)
        found = find_chunk(lineage, run=record.run, chunk=record.next, after=record.after)
        if found is None:
            return _found_in_rows(self._target, record) if record.at_us else None
        if len(found) > 1:
            ids = ",".join(str(each.snapshot_id) for each in found)
            raise PipelineError(
                f"two processes have committed the same chunk: run={record.run} chunk={record.next} snapshots={ids}"
            )
        if not found:
            return None
        ledger = ledger_from_text(found[0].summary.get(LEDGER_KEY))
        checksum = None if ledger is None else _checksum(ledger.facts)
        return CommittedChunk(int(found[0].summary.get("added-records", 0)), checksum)
