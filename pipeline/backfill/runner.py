"""One run of a backfill, from the plan to the last chunk. Owns the order of its steps.

Before the first chunk:

    1. plan         the input is cut into chunks, its columns are fitted to the table's: errors end it here
    2. look         what an earlier process has committed of the run is found out (target.py)
    3. table        it is created, or its columns are changed

Then, chunk by chunk, and a crash after each step leaves:

    4. remember     chunk, position of main, moment            nothing: the next process does the chunk
    5. take mark    and read the chunk, count it               nothing
    6. append       one snapshot that names run and chunk      the chunk, which the next process finds by 4
    7. go on        the next chunk's step 4 says so            nothing

An append that fails may have been committed all the same: it is looked for before it is tried again.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from lakefeed.contract.ledger import ChunkMark
from lakefeed.pipeline.backfill.inputs import BEFORE_ALL, Chunk, Input, InputUnreadable, Plan, ReadAs, default_run
from lakefeed.pipeline.backfill.rows import Reading, key_columns
from lakefeed.pipeline.backfill.settings import BackfillConfig
from lakefeed.pipeline.backfill.target import (
    ChunkWriter,
    Fate,
    Looked,
    RunRecord,
    Staged,
    Target,
    Written,
    check_forms,
    look_for_chunk,
)
from lakefeed.pipeline.backfill.types import Fitting, fit_columns, type_sql
from lakefeed.pipeline.errors import PipelineError
from lakefeed.pipeline.spark import tables
from lakefeed.pipeline.spark.failures import is_spark_error, message_of, root_cause_of
from lakefeed.pipeline.spark.tables import current_fields
from lakefeed.settings import SettingsError

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


logger = logging.getLogger(__name__)

# Appends of one chunk: each is looked for before the next, so that more than one failure in a row is a reason to stop.
ATTEMPTS_MAX = 3
PAUSE_S = 2.0

_US_PER_S = 1_000_000


class NotFitting(PipelineError):
    """Columns of the input do not fit the table: nothing was written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is asked for."""

    source: str
    key: Sequence[str]
    read_as: ReadAs
    run: str = ""
    config: BackfillConfig = field(default_factory=BackfillConfig)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A run before its first step: its chunks, what the table has to change, what was done of it, the input's key."""

    run: str
    plan: Plan
    given: StructType
    fitting: Fitting
    record: RunRecord | None
    is_new_table: bool
    key: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished run: rows in all, and those of this process."""

    run: str
    rows: int
    chunks: int
    own_rows: int
    own_chunks: int


class Backfill:
    """One input, one table. `on_chunk` hears of every chunk that is done, with its number and rows."""

    def __init__(
        self,
        target: Target,
        source_input: Input,
        request: Request,
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

    def prepare(self) -> Prepared:
        """Plan the run and check that it can work. Nothing is changed.

        Raises:
            InputUnreadable: the input is not what it was said to be.
            NotFitting: its columns do not fit the table.
            SettingsError: what was asked for cannot be done.
        """
        target, request = self._target, self._request
        is_new = not target.exists()
        if not is_new:
            target.check()
        run = request.run or default_run(table=str(target.name), source=request.source, address=self._input.address)
        record = None if is_new else target.load_record(run)
        if record is not None and record.source != request.source:
            raise SettingsError(f"the run is of another source, give it another name: run={run} source={record.source}")
        facts = None if record is None else record.facts
        plan = self._input.plan(target.spark, request.config, facts)
        given = self._input.columns(target.spark, plan)
        fitting = self._fit(given, is_new=is_new)
        key = self._check_key(fitting, record, is_new=is_new)
        self._check_position(is_new=is_new)
        return Prepared(run, plan, given, fitting, record, is_new, key)

    def _fit(self, given: StructType, *, is_new: bool) -> Fitting:
        from pyspark.sql.types import StructType  # noqa: PLC0415 - at the top it would be needed for --help

        known = StructType() if is_new else self._target.columns()
        uuids = set() if is_new else _uuids_of(self._target.document())
        fitting = fit_columns(given, known, uuids=uuids, declared=self._input.declared)
        if fitting.problems:
            raise NotFitting("nothing was written: " + "; ".join(fitting.problems))
        return fitting

    def _check_key(self, fitting: Fitting, record: RunRecord | None, *, is_new: bool) -> tuple[str, ...]:
        """Check that rows have the ids that live changes have, and that the run began with; gives the key's columns."""
        key = key_columns(fitting.columns, self._request.key)
        names = tuple(column.given for column in key)
        if record is not None and record.key not in (None, names):
            raise SettingsError(
                "the run was begun with another key, so that its rows have other ids: name that one, or start another"
                f" run with --run: run={record.run} begun_with={','.join(record.key or ())} key={','.join(names)}"
            )
        if not is_new:
            check_forms(self._target, key)
        return names

    def _check_position(self, *, is_new: bool) -> None:
        read_as = self._request.read_as
        mark = None if is_new else self._target.mark(self._request.source)
        position = read_as.position_for(mark)
        if position == BEFORE_ALL and mark is not None and self._target.has_truncates(self._request.source):
            raise SettingsError(
                "the source has truncated the table, which would take away rows from before all changes: say with"
                f" --position when the input was read: mark={mark.epoch}:{mark.sequence}"
            )

    def run(self, prepared: Prepared) -> Outcome:
        """Do all chunks that are not done.

        Raises:
            SettingsError: another process has taken over the run.
            PipelineError: a chunk could not be committed; running it again goes on with it.
        """
        record = self._begin(prepared)
        before = record
        chunks = prepared.plan.chunks
        for number in range(record.next):
            self._on_chunk(number, 0)
        if not record.is_done:
            self._alter(prepared)
            writer = ChunkWriter(self._target, prepared.fitting.columns, with_ledger=self._request.config.ledger)
            for chunk in chunks[record.next :]:
                record = self._do_chunk(chunk, prepared, record, writer)
            self._target.check_own(record)
            record = replace(record, is_done=True, after=None)
            self._target.save_record(record)
        own = record.next - before.next
        return Outcome(record.run, record.rows, len(chunks), record.rows - before.rows, own)

    def _begin(self, prepared: Prepared) -> RunRecord:
        """Take the run over, and find out what is committed of the chunk that an earlier process was at."""
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
        # From here on an earlier process that still lives stops before its next chunk. What a dead one has sent may
        # still be under way: the JVM of a killed Python lives a moment longer.
        self._target.save_record(record)
        time.sleep(PAUSE_S)
        found = self._look(record)
        return record if found is None else record.counting(found.rows, found.checksum)

    def _alter(self, prepared: Prepared) -> None:
        if prepared.is_new_table:
            self._target.create(prepared.fitting.columns, self._request.key)
        else:
            self._target.alter(prepared.fitting.changes)
        # As text: types of nested fields are unlike if only their comments are.
        known = {each.name: type_sql(each.dataType) for each in self._target.columns().fields}
        if others := [each.name for each in prepared.fitting.columns if known.get(each.name) != type_sql(each.type)]:
            raise NotFitting(
                "the table's columns have changed since they were looked at, run it again:"
                f" table={self._target.name} columns={','.join(others)}"
            )

    # -- one chunk

    def _do_chunk(self, chunk: Chunk, prepared: Prepared, record: RunRecord, writer: ChunkWriter) -> RunRecord:
        record = self._remember(record)
        written = self._append(chunk, prepared, record, writer)
        self._on_chunk(chunk.number, written.rows)
        facts = {"table": str(self._target.name), "run": record.run, "chunk": chunk.number, "rows": written.rows}
        logger.info("chunk_committed", extra=facts)
        return record.counting(written.rows, written.checksum)

    def _remember(self, record: RunRecord) -> RunRecord:
        """Write down what is about to be done, so that whoever comes next knows where to look for it."""
        self._target.check_own(record)
        head = tables.current_snapshot(self._target.spark, self._target.sql)
        record = replace(
            record,
            after=None if head is None else head.snapshot_id,
            # Chunks are told apart by it, so that two never have the same.
            at_us=max(int(self._clock() * _US_PER_S), record.at_us + 1),
        )
        self._target.save_record(record)
        return record

    def _append(self, chunk: Chunk, prepared: Prepared, record: RunRecord, writer: ChunkWriter) -> Written:
        # The mark first: what is committed between it and the reading wins over what is read.
        position = self._request.read_as.position_for(self._target.mark(self._request.source))
        reading = Reading(source=self._request.source, key=self._request.key, position=position, at_us=record.at_us)
        staged = self._stage(chunk, prepared, reading, writer)
        mark = ChunkMark(record.run, chunk.number, len(prepared.plan.chunks))
        for _ in range(ATTEMPTS_MAX):
            # Reading takes its time, in which another process may have taken over.
            self._target.check_own(record)
            try:
                written = writer.commit(staged, mark)
            except Exception as error:
                if not is_spark_error(error):
                    raise
                reason = message_of(error)
                logger.warning("append_failed", extra={"chunk": chunk.number, "reason": reason})
            else:
                self._look(record)  # an append has no condition: another process may have done the same chunk
                return written
            time.sleep(PAUSE_S)  # a request that is still under way comes to its end
            found = self._look(record)
            if found is not None:
                return found
        raise PipelineError(
            f"a chunk could not be committed, run it again to go on: run={record.run} chunk={chunk.number}: {reason}"
        )

    def _stage(self, chunk: Chunk, prepared: Prepared, reading: Reading, writer: ChunkWriter) -> Staged:
        try:
            return writer.stage(self._input.read(self._target.spark, chunk, prepared.given), reading)
        except Exception as error:
            if not is_spark_error(error):
                raise
            raise InputUnreadable(f"a chunk cannot be read: chunk={chunk.number}: {root_cause_of(error)}") from error

    def _look(self, record: RunRecord) -> Written | None:
        """Find out whether the record's next chunk is committed, and what it holds; None if it is not."""
        spark, table = self._target.spark, self._target.sql
        head = tables.current_snapshot(spark, table)
        looked: Looked = look_for_chunk(
            tables.snapshots(spark, table),
            None if head is None else head.snapshot_id,
            run=record.run,
            chunk=record.next,
            after=record.after,
        )
        writer = ChunkWriter(self._target, (), with_ledger=record.checksum is not None)
        if looked.fate is Fate.COMMITTED:
            if len(looked.snapshots) > 1:
                ids = ",".join(str(each.snapshot_id) for each in looked.snapshots)
                raise PipelineError(
                    f"two processes have committed one chunk: run={record.run} chunk={record.next} snapshots={ids}"
                )
            return writer.recorded_in(looked.snapshots[0])
        if looked.fate is Fate.UNKNOWN and record.at_us:
            return writer.found_in_rows(record.source, record.at_us)
        return None


def _uuids_of(document: Mapping[str, Any] | None) -> set[str]:
    if document is None:
        return set()
    return {field["name"] for field in current_fields(document) if field["type"] == "uuid"}
