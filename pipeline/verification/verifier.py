"""Verifies a change table in Spark: its records against one another, its files against its records. Owns the order.

    1. records     ledgers, marks and totals agree          writer/verification/history.py, as without Spark
    2. files       rows are counted by file, in one scan    tally.py, reads.py
    3. snapshots   of each append whose files are all live: ledger = files
    4. totals      of the newest snapshot: totals = all files
    5. duplicates  no change twice                          duplicates.py

The report is that of `lakefeed verify` without Spark, for tables that one machine would read too long. Nothing is
written. A file that cannot be read ends the scan: the report then names that file and what Spark says.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as sql

from pipeline.spark_errors import is_spark_error, message_of
from pipeline.table_documents import load_document
from pipeline.tables import TableName
from pipeline.verification.duplicates import find_duplicates
from pipeline.verification.live_files import (
    PATH,
    RECORDS,
    SNAPSHOT,
    Held,
    count_delete_files,
    find_gone,
    held_by_snapshot,
    live_files,
)
from pipeline.verification.reads import Read, Reads, plan_reads
from pipeline.verification.tally import FIRST, ROWS, add_tallies, facts_of, tally_rows
from writer.changes import SourceId
from writer.iceberg.progress import PROGRESS_PROPERTY, Progress, progress_from_text
from writer.verification.backfills import count_backfilled
from writer.verification.findings import Finding, Kind, Report, State, compare_ledger, compare_whole, describe_gone
from writer.verification.history import (
    History,
    Recorded,
    check_history,
    choose_after,
    read_history,
    sources_of_one_epoch,
)
from writer.verification.ledger import (
    TOTALS_PROPERTY,
    LedgerUnreadable,
    RowFacts,
    Totals,
    join_facts,
    totals_from_text,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# Files with other numbers of rows than their manifest says that are named; all are counted in their snapshot.
MISCOUNTED_SHOWN_MAX = 20

_FILE = "_file"
_DATA_FILE = re.compile(r"[a-z0-9]+:/\S+?\.parquet")
_NOT_WHOLE = (
    "columns were dropped, and snapshots from before are expired: verify the table without --spark, rows are not"
    " compared with the totals"
)


class SparkVerifier:
    """One verification of one table, as of one version of its metadata."""

    def __init__(
        self,
        spark: SparkSession,
        table: str,
        document: Mapping[str, Any],
        *,
        name: str,
        on_step: Callable[[str], object] = lambda _: None,
    ) -> None:
        self.report = Report(name)
        self._spark = spark
        self._table = table
        self._document = document
        self._properties: Mapping[str, str] = document.get("properties") or {}
        self._progress: Progress = progress_from_text(self._properties.get(PROGRESS_PROPERTY))
        self._on_step = on_step
        self._totals = self._read_totals()

    def _read_totals(self) -> Totals | None:
        try:
            return totals_from_text(self._properties.get(TOTALS_PROPERTY))
        except LedgerUnreadable as error:
            self.report.findings.append(Finding(Kind.UNREADABLE, str(error)))
            return None

    def run(self, *, after_id: int | None = None, to_id: int | None = None) -> Report:
        """Check the records, read all files and compare.

        Raises:
            CatalogError: the table has no such snapshot.
        """
        main_id = ((self._document.get("refs") or {}).get("main") or {}).get("snapshot-id")
        head_id = to_id if to_id is not None else main_id
        self.report.snapshot_id = head_id
        if head_id is None:
            empty = count_backfilled(self._properties, (), known_after={None})
            compare_whole(self.report, self._totals, empty, is_whole=True)
            return self.report
        self._on_step("comparing records")
        history = read_history(self._document, head_id)
        is_whole = after_id is None and head_id == main_id
        self.report.findings += check_history(history, self._progress, self._totals if is_whole else None)
        self._check_delete_files(head_id)
        chosen = choose_after(history, after_id)
        files = live_files(self._spark, self._table, head_id)
        if after_id is not None:
            files = files.where(files[SNAPSHOT].isin(*(each.snapshot_id for each in chosen)))
        files = files.cache()
        try:
            self._check_files(history, chosen, files, is_part=after_id is not None, is_whole=is_whole)
        finally:
            files.unpersist()
        return self.report

    def _check_delete_files(self, head_id: int) -> None:
        head = next(each for each in self._document["snapshots"] if each["snapshot-id"] == head_id)
        if (head.get("summary") or {}).get("total-delete-files") == "0":
            return
        count = count_delete_files(self._spark, self._table, head_id)
        if count:
            text = f"rows are deleted by delete files of somebody else: delete_files={count}"
            self.report.findings.append(Finding(Kind.LOSS, text, head_id))

    def _check_files(
        self, history: History, chosen: Sequence[Recorded], files: DataFrame, *, is_part: bool, is_whole: bool
    ) -> None:
        held = held_by_snapshot(files)
        self.report.files = sum(each.files for each in held.values())
        reads = plan_reads(self._document, [each.snapshot_id for each in history.snapshots])
        self._on_step(f"counting {sum(each.rows for each in held.values()):,} rows")
        counted = self._by_file(reads, files, is_part=is_part).cache()
        try:
            by_snapshot = self._facts_by_snapshot(counted, files)
            self._note_miscounted(counted, files)
            self._on_step("looking for duplicates")
            rows = self._of(files if is_part else None, reads.scans[0])
            one_epoch = sources_of_one_epoch(self._progress, self._totals)
            self.report.findings += find_duplicates(rows, one_epoch)
        except Exception as error:  # noqa: BLE001 - raised again unless it is a file that cannot be read
            self._note_unreadable(error)
            return
        finally:
            counted.unpersist()
        self._check_snapshots(history, chosen, files, held=held, by_snapshot=by_snapshot)
        self._compare_totals(history, by_snapshot, is_whole=is_whole, are_whole=reads.are_whole)

    # -- rows

    def _by_file(self, reads: Reads, files: DataFrame, *, is_part: bool) -> DataFrame:
        """Count rows by file, those of dropped columns by an older schema."""
        newest, *older = reads.scans
        elsewhere = frozenset[int]().union(*(read.snapshot_ids for read in older))
        rest = files if is_part else None
        if elsewhere:
            rest = files.where(~files[SNAPSHOT].isin(*elsewhere))
        tallies = tally_rows(self._of(rest, newest), newest.fields, by=(_FILE,))
        for read in older:
            own = files.where(files[SNAPSHOT].isin(*read.snapshot_ids))
            tallies = tallies.unionByName(tally_rows(self._of(own, read), read.fields, by=(_FILE,)))
        return tallies

    def _of(self, files: DataFrame | None, read: Read) -> DataFrame:
        """Give the rows of some files or of all, as a version of the table shows them."""
        rows = self._spark.sql(f"SELECT *, {_FILE} FROM {self._table} VERSION AS OF {read.version}")
        if files is None:
            return rows
        wanted = files.select(files[PATH].alias(_FILE))
        return rows.join(sql.broadcast(wanted), on=_FILE, how="left_semi")

    def _facts_by_snapshot(self, counted: DataFrame, files: DataFrame) -> dict[int, dict[SourceId, RowFacts]]:
        joined = counted.join(files, counted[_FILE] == files[PATH], how="inner").select(SNAPSHOT, *counted.columns)
        groups: dict[int, list[Any]] = {}
        for row in add_tallies(joined, by=(SNAPSHOT,)).collect():
            self.report.rows += row[ROWS]
            if row[FIRST] is not None:  # rows of others may lack what ours have
                groups.setdefault(row[SNAPSHOT], []).append(row)
        return {snapshot_id: facts_of(rows) for snapshot_id, rows in groups.items()}

    def _note_miscounted(self, counted: DataFrame, files: DataFrame) -> None:
        """Tell of files that hold other numbers of rows than their manifest says."""
        rows = counted.groupBy(sql.col(_FILE).alias(PATH)).agg(sql.sum(ROWS).alias(ROWS))
        found = sql.coalesce(sql.col(ROWS), sql.lit(0))
        joined = files.join(rows, on=PATH, how="left").where(found != sql.col(RECORDS))
        for row in joined.orderBy(PATH).limit(MISCOUNTED_SHOWN_MAX).collect():
            count = row[ROWS] or 0
            kind = Kind.LOSS if count < row[RECORDS] else Kind.SURPLUS
            text = f"file has {count:,} rows, its manifest says {row[RECORDS]:,}"
            self.report.findings.append(Finding(kind, text, row[SNAPSHOT], file=row[PATH]))

    def _note_unreadable(self, error: Exception) -> None:
        """Tell of a data file that Spark cannot read; any other failure is no finding but an error."""
        named = _DATA_FILE.search(str(error)) if is_spark_error(error) else None
        if named is None:
            raise error
        text = f"not a readable file of this table, nothing else was compared: {message_of(error)}"
        self.report.findings.append(Finding(Kind.UNREADABLE, text, file=named.group()))

    # -- comparing

    def _check_snapshots(
        self,
        history: History,
        chosen: Sequence[Recorded],
        files: DataFrame,
        *,
        held: Mapping[int, Held],
        by_snapshot: Mapping[int, Mapping[SourceId, RowFacts]],
    ) -> None:
        nothing = Held(0, 0)
        short = [
            each.snapshot_id
            for each in chosen
            if each.ledger is not None and held.get(each.snapshot_id, nothing).rows < each.ledger.rows
        ]
        rewrites = [each.snapshot_id for each in history.snapshots if each.is_rewrite]
        gone = find_gone(self._spark, self._table, live=files, snapshot_ids=short, rewrite_ids=rewrites)
        for each in chosen:
            self.report.snapshots[each.snapshot_id] = self._check_snapshot(
                each,
                by_snapshot.get(each.snapshot_id, {}),
                gone=gone.get(each.snapshot_id, set()),
                is_short=each.snapshot_id in short,
            )

    def _check_snapshot(
        self, snapshot: Recorded, found: Mapping[SourceId, RowFacts], *, gone: set[str], is_short: bool
    ) -> State:
        if not snapshot.is_own or not snapshot.is_append:
            return State.REWRITE if snapshot.is_rewrite else State.FOREIGN
        if snapshot.ledger is None:
            return State.NOT_RECORDED
        if gone:
            self.report.findings.append(describe_gone(gone, snapshot_id=snapshot.snapshot_id))
        elif is_short:
            return State.REWRITTEN
        differences = list(compare_ledger(snapshot.ledger.facts, found, snapshot_id=snapshot.snapshot_id))
        self.report.findings += differences
        return State.DIFFERENT if differences else State.VERIFIED

    def _compare_totals(
        self,
        history: History,
        by_snapshot: Mapping[int, Mapping[SourceId, RowFacts]],
        *,
        is_whole: bool,
        are_whole: bool,
    ) -> None:
        foreign = {each.snapshot_id for each in history.snapshots if each.is_append and not each.is_own}
        self.report.facts = join_facts(facts for each, facts in by_snapshot.items() if each not in foreign)
        if is_whole and not are_whole:
            self.report.notes.append(_NOT_WHOLE)
            return
        chunks = ((each.chunk, each.ledger) for each in history.snapshots)
        backfilled = count_backfilled(self._properties, chunks, known_after=history.known_after)
        compare_whole(self.report, self._totals, backfilled, is_whole=is_whole)


def open_verifier(
    spark: SparkSession, name: TableName, catalog: str, *, on_step: Callable[[str], object] = lambda _: None
) -> SparkVerifier:
    """Open a table to verify it as it is now, beside whoever commits to it.

    Raises: NoDocument; what Spark says of a table that is not there.
    """
    table = name.sql(catalog)
    return SparkVerifier(spark, table, load_document(spark, table), name=str(name), on_step=on_step)
