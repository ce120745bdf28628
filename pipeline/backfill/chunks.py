"""Writes chunks, and finds again what was written. Owns the append, its summary and its ledger.

The ledger has to be of the rows that are written, and a database may give others the next time: rows are kept on the
executors' disks between counting and writing. If an executor is lost with them, the chunk fails and is read again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql import functions as sql

from pipeline.backfill.fitting import FittedColumn
from pipeline.backfill.reads import Reading, as_changes
from pipeline.backfill.target import Target
from pipeline.errors import PipelineError
from pipeline.table_documents import current_fields, load_document
from pipeline.tables import Snapshot
from pipeline.verification.tally import facts_of, tally_rows
from writer import columns as cdc
from writer.changes import Operation
from writer.verification.backfills import BACKFILL_KEY, ChunkMark
from writer.verification.ledger import LEDGER_KEY, Facts, Ledger, ledger_from_text

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

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
