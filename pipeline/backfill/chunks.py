"""Writes chunks, and finds again what was written. Owns the append, its summary and its ledger.

The ledger has to be of the rows that are written, and a database may give others the next time: rows are kept on the
executors' disks between counting and writing. If an executor is lost with them, the chunk fails and is read again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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


class ChunkWriter:
    """Appends chunks to one table."""

    def __init__(self, target: Target, columns: Sequence[FittedColumn], *, with_ledger: bool) -> None:
        self._target = target
        self._columns = columns
        self._with_ledger = with_ledger

    def write(self, rows: DataFrame, reading: Reading, *, run: str, chunk: int, chunks: int) -> Written:
        """Append a chunk as one snapshot; one without rows is none.

        Raises:
            KeyMissing: rows have no key.
            What Spark raises: it may be committed all the same.
        """
        document = self._target.document()
        changes = as_changes(rows, self._columns, self._target.columns(), reading).localCheckpoint()
        counts = changes.agg(sql.count(sql.lit(1)).alias("rows"), sql.count(cdc.ROW_ID).alias("keyed")).collect()[0]
        if counts["keyed"] != counts["rows"]:
            without = counts["rows"] - counts["keyed"]
            raise KeyMissing(f"rows have no key: key={','.join(reading.key)} rows={without} chunk={chunk}")
        if not counts["rows"]:
            return Written(0, 0 if self._with_ledger else None)
        summary = {BACKFILL_KEY: ChunkMark(run, chunk, chunks).to_text()}
        facts: Facts = {}
        if self._with_ledger and document is not None:
            facts = facts_of(tally_rows(changes, current_fields(document)).collect())
            summary[LEDGER_KEY] = Ledger(facts, {}).to_text()
        self._append(changes, summary, document)
        return Written(counts["rows"], _checksum(facts) if facts else None)

    def _append(self, changes: DataFrame, summary: dict[str, str], document: dict[str, Any] | None) -> None:
        writer = changes.writeTo(self._target.sql)
        for key, value in summary.items():
            writer = writer.option(_SUMMARY + key, value)
        if document is not None and not self._target.is_spread_by_rows(document):
            # All rows are of one partition: brought together by it, one task would write them all.
            writer = writer.option("distribution-mode", "none").option("fanout-enabled", "true")
        writer.append()

    def recorded_in(self, snapshot: Snapshot) -> Written:
        """Tell what a committed chunk holds, from its snapshot."""
        ledger = ledger_from_text(snapshot.summary.get(LEDGER_KEY))
        rows = int(snapshot.summary.get("added-records", 0))
        return Written(rows, None if ledger is None else _checksum(ledger.facts))

    def found_in_rows(self, source: str, at_us: int) -> Written | None:
        """Tell what a committed chunk holds, from its rows, which were received at one moment; None if there are none."""
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
