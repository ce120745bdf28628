"""Verifies a table: its records against one another, its files against its records. Owns the order of the work.

    1. records     ledgers, marks and totals agree                            history.py
    2. files       every live file is read once, in the order of its lowest sequence, and counted per snapshot
    3. snapshots   of each append whose files are all live: ledger = files    findings.py
    4. totals      of the newest snapshot: totals = all files; after rewrites and expiry this is what counts
    5. duplicates  no change twice                                            duplicates.py

Nothing is written. A file is held whole, one ahead of the one being counted; rows are decoded in batches.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from writer import columns as cdc
from writer.changes import TableName
from writer.errors import WriterError
from writer.iceberg.progress import PROGRESS_PROPERTY, Progress, progress_from_text
from writer.iceberg.table_state import MAIN_BRANCH
from writer.storage import ObjectStore
from writer.types import schema_from_json
from writer.verification.backfills import count_backfilled
from writer.verification.duplicates import HELD_MAX_ROWS, DuplicateSearch, count_parts
from writer.verification.file_rows import FileRows, read_rows
from writer.verification.findings import Finding, Kind, Report, State, compare_ledger, compare_whole, describe_gone
from writer.verification.history import (
    History,
    Recorded,
    check_history,
    choose_after,
    read_history,
    sources_of_one_epoch,
)
from writer.verification.ledger import TOTALS_PROPERTY, Facts, LedgerUnreadable, Totals, join_facts, totals_from_text
from writer.verification.live_files import LiveFile, load_added, load_contents
from writer.verification.plan import Plan, Range


class Verifier:
    """One verification of one table, as of one version of its metadata."""

    def __init__(
        self,
        name: TableName,
        document: Mapping[str, Any],
        store: ObjectStore,
        *,
        on_rows: Callable[[int], object] = lambda _: None,
        held_max_rows: int = HELD_MAX_ROWS,
    ) -> None:
        self.report = Report(str(name))
        self._name = name
        self._document = document
        self._store = store
        self._on_rows = on_rows
        self._held_max_rows = held_max_rows
        properties = document.get("properties") or {}
        self._progress: Progress = progress_from_text(properties.get(PROGRESS_PROPERTY))
        self._totals = self._read_totals(properties)
        schemas = [schema_from_json(each).columns for each in document["schemas"]]
        current = next(each for each in document["schemas"] if each["schema-id"] == document["current-schema-id"])
        # Columns that were dropped or renamed go by what they were called last.
        columns = [field for schema in (*schemas, schema_from_json(current).columns) for field in schema.fields]
        self._names = {field.id: field.name for field in columns}
        self._by_snapshot: dict[int, list[Facts]] = {}

    def _read_totals(self, properties: Mapping[str, str]) -> Totals | None:
        try:
            return totals_from_text(properties.get(TOTALS_PROPERTY))
        except LedgerUnreadable as error:
            self.report.findings.append(Finding(Kind.UNREADABLE, str(error)))
            return None

    async def plan(self, wanted: Range) -> Plan:
        """Check the records, and find out which files are to be read.

        Raises:
            CatalogError: the table has no such snapshot.
            WriterError: manifests cannot be read.
        """
        refs = self._document.get("refs") or {}
        main_id = (refs.get(MAIN_BRANCH) or {}).get("snapshot-id")
        head_id = wanted.to_id if wanted.to_id is not None else main_id
        self.report.snapshot_id = head_id
        if head_id is None:
            return Plan(History(()), chosen=(), files=(), is_whole=True)
        history = read_history(self._document, head_id)
        is_whole = wanted.after_id is None and head_id == main_id
        totals = self._totals if is_whole else None
        self.report.findings += check_history(history, self._progress, totals)
        contents = await load_contents(self._store, history.snapshots[-1].manifest_list, sequence_id=self._sequence_id)
        if contents.delete_files:
            text = f"rows are deleted by delete files of somebody else: delete_files={contents.delete_files}"
            self.report.findings.append(Finding(Kind.LOSS, text, head_id))
        chosen = choose_after(history, wanted.after_id)
        ids = {snapshot.snapshot_id for snapshot in chosen}
        files = [file for file in contents.files if wanted.after_id is None or file.snapshot_id in ids]
        return Plan(history, chosen=chosen, files=files, is_whole=is_whole)

    @property
    def _sequence_id(self) -> int:
        return next((field_id for field_id, name in self._names.items() if name == cdc.SEQUENCE), 0)

    async def run(self, plan: Plan) -> Report:
        """Read all files and compare. Cancelling it leaves nothing behind.

        Raises:
            WriterError: metadata cannot be read; what is wrong with data files is a finding.
        """
        one_epoch = sources_of_one_epoch(self._progress, self._totals)
        parts = count_parts([file.extent for file in plan.files], held_max=self._held_max_rows)
        search = DuplicateSearch(one_epoch=one_epoch, parts=parts)
        appended = {each.snapshot_id for each in plan.history.snapshots if each.is_append and not each.is_own}
        async for file, rows in self._read(plan.files, uncounted=appended):
            self._count(file, rows)
            search.add(rows.keys, lowest=file.extent.lowest)
        self._note_duplicates(search)
        for part in range(1, parts):
            search = DuplicateSearch(one_epoch=one_epoch, part=part, parts=parts)
            every = {file.snapshot_id for file in plan.files}
            async for file, rows in self._read(plan.files, uncounted=every):
                search.add(rows.keys, lowest=file.extent.lowest)
            self._note_duplicates(search)
        await self._check_snapshots(plan)
        self._compare_totals(plan, appended)
        return self.report

    async def _read(
        self, files: Sequence[LiveFile], *, uncounted: set[int]
    ) -> AsyncIterator[tuple[LiveFile, FileRows]]:
        """Read files in order, the next one while one is counted; one that cannot be read is a finding."""
        ahead = asyncio.create_task(self._store.read(files[0].location)) if files else None
        try:
            for number, file in enumerate(files):
                assert ahead is not None
                reading, ahead = ahead, None
                await asyncio.wait([reading])
                if number + 1 < len(files):
                    ahead = asyncio.create_task(self._store.read(files[number + 1].location))
                try:
                    is_counted = file.snapshot_id not in uncounted
                    rows = await asyncio.to_thread(read_rows, reading.result(), self._names, is_counted=is_counted)
                except WriterError as error:
                    self._note_unreadable(file, error)
                    continue
                yield file, rows
        finally:
            if ahead is not None:
                ahead.cancel()
                await asyncio.gather(ahead, return_exceptions=True)

    def _note_unreadable(self, file: LiveFile, error: WriterError) -> None:
        finding = Finding(Kind.UNREADABLE, str(error), file.snapshot_id, file=file.location)
        if finding not in self.report.findings:
            self.report.findings.append(finding)
            self._on_rows(file.rows)

    def _count(self, file: LiveFile, rows: FileRows) -> None:
        self.report.rows += rows.rows
        self.report.files += 1
        self._on_rows(rows.rows)
        self._by_snapshot.setdefault(file.snapshot_id, []).append(rows.facts)
        if rows.rows != file.rows:
            kind = Kind.LOSS if rows.rows < file.rows else Kind.SURPLUS
            text = f"file has {rows.rows:,} rows, its manifest says {file.rows:,}"
            self.report.findings.append(Finding(kind, text, file.snapshot_id, file=file.location))

    def _note_duplicates(self, search: DuplicateSearch) -> None:
        for source, doubled in sorted(search.finish().items()):
            shown = ", ".join(map(str, doubled.examples))
            text = f"{doubled.rows:,} rows are there again, such as sequences {shown}"
            self.report.findings.append(Finding(Kind.DUPLICATE, text, source=source))

    async def _check_snapshots(self, plan: Plan) -> None:
        live: dict[int, int] = {}
        for file in plan.files:
            live[file.snapshot_id] = live.get(file.snapshot_id, 0) + file.rows
        for snapshot in plan.chosen:
            self.report.snapshots[snapshot.snapshot_id] = await self._check_snapshot(snapshot, plan, live)

    async def _check_snapshot(self, snapshot: Recorded, plan: Plan, live: Mapping[int, int]) -> State:
        if not snapshot.is_own or not snapshot.is_append:
            return State.REWRITE if snapshot.is_rewrite else State.FOREIGN
        if snapshot.ledger is None:
            return State.NOT_RECORDED
        if live.get(snapshot.snapshot_id, 0) < snapshot.ledger.rows:
            findings = await self._find_gone(snapshot, plan)
            self.report.findings += findings
            if not findings:
                return State.REWRITTEN
        found = join_facts(self._by_snapshot.get(snapshot.snapshot_id, ()))
        differences = list(compare_ledger(snapshot.ledger.facts, found, snapshot_id=snapshot.snapshot_id))
        self.report.findings += differences
        return State.DIFFERENT if differences else State.VERIFIED

    async def _find_gone(self, snapshot: Recorded, plan: Plan) -> list[Finding]:
        """Find files of a snapshot that are no longer in the table, and that no rewrite says it has replaced."""
        added = await load_added(self._store, snapshot.manifest_list, snapshot_id=snapshot.snapshot_id)
        gone = added - {file.location for file in plan.files}
        gone -= await plan.load_replaced(self._store)
        return [describe_gone(gone, snapshot_id=snapshot.snapshot_id)] if gone else []

    def _compare_totals(self, plan: Plan, appended: set[int]) -> None:
        self.report.facts = join_facts(
            facts for snapshot_id, parts in self._by_snapshot.items() if snapshot_id not in appended for facts in parts
        )
        snapshots = plan.history.snapshots
        backfilled = count_backfilled(
            self._document.get("properties") or {},
            ((each.chunk, each.ledger) for each in snapshots),
            known_after=plan.history.known_after,
        )
        compare_whole(self.report, self._totals, backfilled, is_whole=plan.is_whole)
