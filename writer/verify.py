"""Local verification scan: reads a table's files in this process, for contract/verification.py to compare.

Every live file is read once, in the order of its lowest sequence, and counted by the snapshot that added it. A file is
held whole, and the next one is read ahead while one is counted; rows are decoded in batches. Nothing is written.

Duplicates are searched in bounded memory. A row below the lowest sequence of the next file can meet no later row, so
it is checked and dropped, and only rows of overlapping files are held. If these are too many, rows are divided into
parts by a hash of their sequence, and each part is a search of its own over all files.

    sources that never started over    two rows with one sequence
    other sources                      two rows with one sequence that were received at the same moment: a sequence
                                       exists once in each epoch, and old rows do not have theirs
    rows that were READ                two of one row id that were received at the same moment: a backfill gives all
                                       rows of a chunk one position

A second reader, PyIceberg, plans the snapshot too, and both lists of files are compared: a fault in our manifest reader
would hide the same file from every check that uses it. PyIceberg runs in a child process (pyiceberg_plan.py) because
its decoder is compiled code that may crash on damaged manifests: a crash is then a finding. Settings go by stdin, since
other users can see a process's arguments and secrets are among them.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from datetime import UTC, date, datetime, time, timedelta
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lakefeed.contract import changes as cdc
from lakefeed.contract.changes import TableName
from lakefeed.contract.errors import WriterError
from lakefeed.contract.ledger import Facts, join_facts
from lakefeed.contract.verification import (
    EXAMPLES_MAX,
    Duplicates,
    Finding,
    Kind,
    Plan,
    PlannedFile,
    Range,
    Report,
    Scanned,
    compare,
    compare_readers,
    file_miscounted,
    plan,
)
from lakefeed.iceberg.arrow import FIELD_ID_KEY
from lakefeed.iceberg.types import schema_from_json
from lakefeed.storage.config import StorageConfig
from lakefeed.storage.store import ObjectStore
from lakefeed.writer.files.row_hash import hash_rows
from lakefeed.writer.files.scan import (
    READ_ROW,
    LiveFile,
    ScannedFile,
    load_changed,
    load_contents,
    read_rows,
)
from lakefeed.writer.files.xxh64 import hash_longs

# Rows of overlapping files, about 30 bytes each; up to twice as many are held.
HELD_MAX_ROWS = 8_000_000

_READ_ROW_FIELD = pa.field(READ_ROW, pa.string(), metadata={FIELD_ID_KEY: b"1"})
_SURPLUS = "surplus"
_SEED = 7

READER = "PyIceberg"
READER_COMMAND = (sys.executable, "-m", "lakefeed.writer.pyiceberg_plan")
# A plan of a million files takes about a minute.
READER_TIMEOUT_S = 1800.0

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


@dataclass(frozen=True, slots=True)
class FilePlan:
    """A plan, and the live files to read for it in the order of their lowest sequence."""

    plan: Plan
    files: Sequence[LiveFile] = ()
    delete_files: int = 0
    readers: Sequence[Finding] = ()

    @property
    def rows(self) -> int:
        """Return the number of rows to read, by the manifests."""
        return sum(file.rows for file in self.files)


class Verifier:
    """Verifies one table as of one version of its metadata. The second reader needs `storage`; else there is none."""

    def __init__(
        self,
        name: TableName,
        document: Mapping[str, Any],
        store: ObjectStore,
        *,
        on_rows: Callable[[int], object] = lambda _: None,
        held_max_rows: int = HELD_MAX_ROWS,
        storage: StorageConfig | None = None,
    ) -> None:
        self._name = name
        self._document = document
        self._store = store
        self._on_rows = on_rows
        self._held_max_rows = held_max_rows
        self._storage = storage
        current = [each for each in document["schemas"] if each["schema-id"] == document["current-schema-id"]]
        # Columns that were dropped or renamed are known by their last names.
        schemas = [schema_from_json(each).columns for each in (*document["schemas"], *current)]
        self._names = {field.id: field.name for schema in schemas for field in schema.fields}

    async def plan(self, wanted: Range) -> FilePlan:
        """Check the records, and find out which files to read.

        Raises: CatalogError if the table has no such snapshot; WriterError if manifests cannot be read.
        """
        chosen = plan(str(self._name), self._document, wanted)
        if chosen.head is None:
            return FilePlan(chosen)
        sequence_id = next((field_id for field_id, name in self._names.items() if name == cdc.SEQUENCE), 0)
        contents = await load_contents(self._store, chosen.head.manifest_list, sequence_id=sequence_id)
        readers: Sequence[Finding] = ()
        if self._storage is not None:
            readers = await find_disagreements(self._document, self._storage, chosen.head.snapshot_id, contents.files)
        files = [file for file in contents.files if chosen.includes(file.snapshot_id)]
        files.sort(key=lambda file: (file.lowest, file.location))
        return FilePlan(chosen, files, contents.delete_files, readers)

    async def run(self, planned: FilePlan) -> Report:
        """Read all files and compare.

        Raises: WriterError if metadata cannot be read. What is wrong with data files is a finding.
        """
        return compare(planned.plan, await self._scan(planned))

    async def _scan(self, planned: FilePlan) -> Scanned:
        scanned = Scanned(delete_files=planned.delete_files, findings=list(planned.readers))
        facts: dict[int, list[Facts]] = {}
        live_rows: Counter[int] = Counter()
        for file in planned.files:
            live_rows[file.snapshot_id] += file.rows
        parts = count_parts(planned.files, held_max=self._held_max_rows)
        for part in range(parts):
            search = DuplicateSearch(one_epoch=planned.plan.one_epoch, part=part, parts=parts)
            # Rows are counted with the first part. Of other writers' rows nothing is recorded to compare with.
            uncounted = planned.plan.foreign_ids if part == 0 else set(live_rows)
            async for file, rows in self._read(planned.files, scanned, uncounted=uncounted):
                search.add(rows.keys, lowest=file.lowest)
                if part == 0:
                    self._on_rows(rows.rows)
                    scanned.rows += rows.rows
                    scanned.files += 1
                    facts.setdefault(file.snapshot_id, []).append(rows.facts)
                    if rows.rows != file.rows:
                        counts = {"rows": rows.rows, "recorded": file.rows}
                        scanned.findings.append(file_miscounted(file.location, **counts, snapshot_id=file.snapshot_id))
            scanned.duplicates = _merged(scanned.duplicates, search.finish())
        scanned.facts = {snapshot_id: join_facts(counted) for snapshot_id, counted in facts.items()}
        scanned.live_rows = live_rows
        scanned.gone = await self._find_gone(planned.plan, live_rows, {file.location for file in planned.files})
        return scanned

    async def _read(
        self, files: Sequence[LiveFile], scanned: Scanned, *, uncounted: Set[int]
    ) -> AsyncIterator[tuple[LiveFile, ScannedFile]]:
        """Read files in order, and the next one while the caller handles one. An unreadable file is a finding."""
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
                    finding = Finding(Kind.UNREADABLE, str(error), file.snapshot_id, file=file.location)
                    if finding not in scanned.findings:
                        scanned.findings.append(finding)
                        self._on_rows(file.rows)
                    continue
                yield file, rows
        finally:
            if ahead is not None:
                ahead.cancel()
                await asyncio.gather(ahead, return_exceptions=True)

    async def _find_gone(self, chosen: Plan, live_rows: Mapping[int, int], live: Set[str]) -> dict[int, set[str]]:
        """Find files of snapshots that are no longer in the table, and that no rewrite says it has replaced."""
        short = chosen.short_of_rows(live_rows)
        replaced: set[str] = set()
        for each in chosen.rewrites if short else ():
            replaced |= (await load_changed(self._store, each.manifest_list, snapshot_id=each.snapshot_id))[1]
        gone = {}
        for each in short:
            added, _ = await load_changed(self._store, each.manifest_list, snapshot_id=each.snapshot_id)
            gone[each.snapshot_id] = added - live - replaced
        return gone


def count_parts(files: Sequence[LiveFile], *, held_max: int) -> int:
    """Return into how many parts rows must be divided so that those held at once stay within the limit."""
    ends = [(file.lowest, 0, file.rows) for file in files]
    ends += [(file.highest, 1, -file.rows) for file in files]
    held = most = 0
    for _, _, rows in sorted(ends):
        held += rows
        most = max(most, held)
    return max(1, -(-most // held_max))


class DuplicateSearch:
    """A search through one part of a table's rows. Files must be added in the order of their lowest sequence."""

    def __init__(self, *, one_epoch: Set[str], part: int = 0, parts: int = 1) -> None:
        self._found: dict[str, Duplicates] = {}
        self._one_epoch = one_epoch
        self._part = part
        self._parts = parts
        self._held: list[pa.Table] = []
        self._held_rows = 0
        self._check_at = 0

    def add(self, keys: pa.Table, *, lowest: int) -> None:
        """Add the keys of a file's rows. No later file has a sequence below this file's lowest."""
        if self._held_rows > self._check_at:
            held = pa.concat_tables(self._held)
            is_open = pc.greater_equal(held.column(cdc.SEQUENCE), lowest)
            self._check(held.filter(pc.invert(is_open)))
            left = held.filter(is_open)
            # The next time only when as many again have come, so that the work stays linear.
            self._held, self._held_rows, self._check_at = [left], left.num_rows, 2 * left.num_rows
        if self._parts > 1:
            hashes = hash_longs(keys.column(cdc.SEQUENCE).combine_chunks().cast(pa.int64()).to_numpy(), _SEED)
            if keys.column(READ_ROW).null_count < len(keys):
                hashes ^= hash_rows(keys.select([READ_ROW]), [_READ_ROW_FIELD])
            keys = keys.filter(pa.array(hashes % np.uint64(self._parts) == np.uint64(self._part)))
        self._held.append(keys)
        self._held_rows += keys.num_rows

    def finish(self) -> Mapping[str, Duplicates]:
        """Check what is left, and return all duplicates by source."""
        if self._held:
            self._check(pa.concat_tables(self._held))
            self._held = []
        return self._found

    def _check(self, keys: pa.Table) -> None:
        if not keys.num_rows:
            return
        counted = keys.group_by([cdc.SOURCE, cdc.SEQUENCE, READ_ROW]).aggregate(
            [(cdc.SEQUENCE, "count"), (cdc.INGESTED_AT, "count_distinct")]
        )
        one_epoch = pc.is_in(counted.column(cdc.SOURCE), pa.array(sorted(self._one_epoch), pa.string()))
        once = pc.and_(one_epoch, pc.is_null(counted.column(READ_ROW)))
        allowed = pc.if_else(once, 1, counted.column(f"{cdc.INGESTED_AT}_count_distinct"))
        surplus = pc.subtract(counted.column(f"{cdc.SEQUENCE}_count"), allowed)
        repeated = counted.append_column(_SURPLUS, surplus).filter(pc.greater(surplus, 0))
        for source in pc.unique(repeated.column(cdc.SOURCE)).to_pylist():
            own = repeated.filter(pc.equal(repeated.column(cdc.SOURCE), source))
            examples = own.column(cdc.SEQUENCE).slice(0, EXAMPLES_MAX).to_pylist()
            found = Duplicates(pc.sum(own.column(_SURPLUS)).as_py(), sorted(examples))
            self._found = _merged(self._found, {source: found})


def _merged(left: Mapping[str, Duplicates], right: Mapping[str, Duplicates]) -> dict[str, Duplicates]:
    merged = dict(left)
    for source, found in right.items():
        known = merged.get(source, Duplicates())
        merged[source] = Duplicates(known.rows + found.rows, [*known.examples, *found.examples][:EXAMPLES_MAX])
    return merged


# -- the second reader


async def find_disagreements(
    document: Mapping[str, Any], storage: StorageConfig, snapshot_id: int, files: Sequence[LiveFile]
) -> list[Finding]:
    """Compare our plan of a snapshot with PyIceberg's. A reader that fails or crashes is a finding too."""
    request = {"metadata": document, "storage": asdict(storage), "snapshot_id": snapshot_id}
    child = await asyncio.create_subprocess_exec(
        *READER_COMMAND, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(READER_TIMEOUT_S):
            output, errors = await child.communicate(json.dumps(request).encode())
    except TimeoutError:
        return [Finding(Kind.READERS, f"{READER} did not plan the table within {READER_TIMEOUT_S:.0f} s", snapshot_id)]
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    assert child.returncode is not None, "communicate waits for the end"
    if child.returncode < 0:
        name = signal.Signals(-child.returncode).name
        return [Finding(Kind.UNREADABLE, f"{READER} crashed while it planned the table: {name}", snapshot_id)]
    if child.returncode:
        last_line = errors.decode(errors="replace").strip().rpartition("\n")[2]
        return [Finding(Kind.UNREADABLE, f"{READER} cannot plan the table: {last_line}", snapshot_id)]
    # PyIceberg leaves out files without rows.
    own = {file.location: PlannedFile(file.rows, partition_text(file.partition)) for file in files if file.rows}
    other = {path: PlannedFile(*facts) for path, facts in json.loads(output).items()}
    return list(compare_readers(own, other, reader=READER))


def partition_text(values: Iterable[Any]) -> str:
    """Return partition values as text that is the same for both readers, whose Avro decoders use different types."""
    return json.dumps([_plain(value) for value in values])


def _plain(value: Any) -> Any:
    match value:
        case datetime():
            return ((value if value.tzinfo else value.replace(tzinfo=UTC)) - _EPOCH) // _MICROSECOND
        case date():
            return (value - _EPOCH.date()).days
        case time():
            return ((value.hour * 60 + value.minute) * 60 + value.second) * 1_000_000 + value.microsecond
        case UUID():
            return value.bytes.hex()
        case bytes():
            return value.hex()
        case None | bool() | int() | str():
            return value
        case _:
            return str(value)
