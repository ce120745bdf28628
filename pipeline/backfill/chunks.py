"""Writing of chunks, and finding what was written: the append, its summary and its ledger.

The ledger must be of the rows that are written, and a database may return other rows the next time: rows are kept on
the executors' disks between counting and writing. If an executor is lost with them, the chunk fails and is read again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql import functions as sql

from lakefeed.contract import changes as cdc
from lakefeed.contract.changes import Operation
from lakefeed.contract.ledger import BACKFILL_KEY, LEDGER_KEY, ChunkMark, Facts, Ledger, ledger_from_text
from lakefeed.pipeline.backfill.rows import ReadContext, as_changes
from lakefeed.pipeline.backfill.target import TargetTable
from lakefeed.pipeline.backfill.types import FittedColumn
from lakefeed.pipeline.errors import PipelineError
from lakefeed.pipeline.spark.metadata import current_fields, load_metadata
from lakefeed.pipeline.spark.tables import Snapshot
from lakefeed.pipeline.verification.scan import facts_of, tally_rows

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


_SUMMARY = "snapshot-property."


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


class ChunkWriter:
    """Appends chunks to one table."""

    def __init__(self, target: TargetTable, columns: Sequence[FittedColumn], *, with_ledger: bool) -> None:
        self._target = target
        self._columns = columns
        self._with_ledger = with_ledger

    def stage(self, rows: DataFrame, context: ReadContext) -> StagedChunk:
        """Read a chunk and count its rows. Nothing is written to the table.

        Raises:
            InputRowsWithoutKey: rows have no key.
            What Spark raises for an input that cannot be read.
        """
        metadata = self._target.metadata()
        changes = as_changes(rows, self._columns, self._target.columns(), context)
        if metadata is not None:
            changes = changes.localCheckpoint()
        count, keyed = changes.agg(sql.count(sql.lit(1)), sql.count(cdc.ROW_ID)).collect()[0]
        if keyed != count:
            raise InputRowsWithoutKey(
                f"some rows have no key, their chunk was not written: key={','.join(context.key)} rows={count - keyed}"
            )
        if not self._with_ledger or metadata is None:
            return StagedChunk(changes, count, None)
        return StagedChunk(changes, count, facts_of(tally_rows(changes, current_fields(metadata)).collect()))

    def commit(self, staged: StagedChunk, mark: ChunkMark) -> CommittedChunk:
        """Append a chunk as one snapshot; none if it has no rows.

        Raises:
            What Spark raises: the chunk may be committed nevertheless.
        """
        summary = {BACKFILL_KEY: mark.to_text()}
        if staged.facts is not None:
            summary[LEDGER_KEY] = Ledger(staged.facts, {}).to_text()
        if staged.rows:
            self._append(staged.changes, summary)
        return CommittedChunk(staged.rows, None if staged.facts is None else _checksum(staged.facts))

    def _append(self, changes: DataFrame, summary: dict[str, str]) -> None:
        # Columns that were added since the rows were read.
        new = [field for field in self._target.columns().fields if field.name not in changes.columns]
        for field in new:
            changes = changes.withColumn(field.name, sql.lit(None).cast(field.dataType))
        writer = changes.writeTo(self._target.sql)
        for key, value in summary.items():
            writer = writer.option(_SUMMARY + key, value)
        if self._target.is_one_partition():
            # Distributed by partition, one task would write all rows.
            writer = writer.option("distribution-mode", "none").option("fanout-enabled", "true")
        writer.append()

    def recorded_in(self, snapshot: Snapshot) -> CommittedChunk:
        """Return what a committed chunk contains, by its snapshot."""
        ledger = ledger_from_text(snapshot.summary.get(LEDGER_KEY))
        rows = int(snapshot.summary.get("added-records", 0))
        return CommittedChunk(rows, None if ledger is None else _checksum(ledger.facts))

    def found_in_rows(self, source: str, at_us: int) -> CommittedChunk | None:
        """Return what a committed chunk contains, by its rows, which share one time of receipt; None if it has none."""
        received_at = sql.timestamp_micros(sql.lit(at_us).cast("long"))
        rows = self._target.spark.table(self._target.sql).where(
            (sql.col(cdc.OPERATION) == Operation.READ.value)
            & (sql.col(cdc.SOURCE) == source)
            & (sql.col(cdc.INGESTED_AT) == received_at)
        )
        if not self._with_ledger:
            count = rows.count()
            return CommittedChunk(count, None) if count else None
        fields = current_fields(load_metadata(self._target.spark, self._target.sql))
        facts = facts_of(tally_rows(rows, fields).collect())
        return CommittedChunk(sum(each.rows for each in facts.values()), _checksum(facts)) if facts else None


def _checksum(facts: Facts) -> int:
    return sum(each.checksum for each in facts.values()) % (1 << 64)
