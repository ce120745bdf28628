"""Healthy tables, and ways to spoil them behind Lakefeed's back: what a verification has to tell apart."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from lakefeed.contract.changes import TableName
from lakefeed.contract.properties import MAIN_BRANCH
from lakefeed.contract.verification import Range, Report
from lakefeed.iceberg.arrow import split_by_partition, to_arrow_schema
from lakefeed.iceberg.manifests import (
    ListHeader,
    Manifest,
    ManifestFile,
    decode_manifest_list,
    describe_manifest,
    encode_entries,
    encode_manifest,
    encode_manifest_list,
    read_entries,
)
from lakefeed.storage.store import open_store
from lakefeed.writer.commit.plan import Request
from lakefeed.writer.commit.state import TableState, data_location, metadata_location
from lakefeed.writer.config import WriterConfig
from lakefeed.writer.files.parquet import write_data_file
from lakefeed.writer.verify import Verifier
from tests.writer.quarantine.bench import USERS, Bench

Change = Callable[[pa.Table], pa.Table]

_DELETED = 2


async def verify(bench: Bench, name: TableName = USERS, wanted: Range | None = None) -> Report:
    """Verify a table as the command does."""
    return await verify_document(bench, await load_document(bench, name), name, wanted)


async def verify_document(
    bench: Bench, document: Mapping[str, Any], name: TableName = USERS, wanted: Range | None = None, **options: Any
) -> Report:
    async with open_store(replace(bench.lake.storage, warehouse=document["location"])) as store:
        verifier = Verifier(name, document, store, **options)
        return await verifier.run(await verifier.plan(wanted or Range()))


async def load_document(bench: Bench, name: TableName = USERS) -> Any:
    return await bench.context.committer._catalog.load_table(name)


# -- commits that Lakefeed would not make


async def leave_out_a_manifest(bench: Bench) -> None:
    """Commit a snapshot that says it appends, and from whose list a manifest is missing."""
    state = await bench.context.committer.load(USERS)
    await _commit(bench, state, (await _manifests(bench, state))[1:], snapshot_id=_new_id(), operation="append")


async def list_a_manifest_as_deletes(bench: Bench) -> None:
    """Commit a snapshot whose list says that a manifest of data files has delete files."""
    state = await bench.context.committer.load(USERS)
    first, *others = await _manifests(bench, state)
    await _commit(bench, state, [{**first, "content": 1}, *others], snapshot_id=_new_id(), operation="append")


async def append_again(bench: Bench) -> None:
    """Append the manifests of the table once more, as another writer might."""
    state, snapshot_id = await bench.context.committer.load(USERS), _new_id()
    manifests = await _manifests(bench, state)
    number = state.last_sequence_number + 1
    again = {**manifests[0], "added_snapshot_id": snapshot_id, "sequence_number": number, "min_sequence_number": number}
    entries = await _entries(bench, manifests[0])
    added = [{**entry, "status": 1, "snapshot_id": snapshot_id, "sequence_number": None} for entry in entries]
    again |= await _write_manifest(bench, state, encode_entries(added, state.shape))
    await _commit(bench, state, [*manifests, again], snapshot_id=snapshot_id, operation="append")


async def compact(bench: Bench, change: Change) -> None:
    """Put all rows into new files, as a compaction does, but for a change."""
    state, snapshot_id = await bench.context.committer.load(USERS), _new_id()
    with contextlib.closing(bench.lake.open_pyiceberg()) as catalog:
        rows = catalog.load_table(str(USERS)).scan().to_arrow()
    rows = rows.cast(to_arrow_schema(state.schema))
    rows = change(rows.sort_by([("_cdc_sequence", "ascending"), ("_cdc_ingested_at", "ascending")]))
    files = []
    for partition, part in split_by_partition(rows, state.spec, state.schema):
        location = data_location(state, partition, f"{uuid.uuid4()}.parquet")
        buffer, file = write_data_file(
            part, schema=state.schema, location=location, partition=partition, config=WriterConfig()
        )
        await bench.context.store.write(location, buffer)
        files.append(file)
    encoded = encode_manifest(files, shape=state.shape, snapshot_id=snapshot_id)
    added = describe_manifest(files, shape=state.shape, snapshot_id=snapshot_id, location="", size_bytes=0)
    number = {"sequence_number": state.last_sequence_number + 1, "min_sequence_number": state.last_sequence_number + 1}
    manifests = [{**added, **number, **await _write_manifest(bench, state, encoded)}]
    for manifest in await _manifests(bench, state):
        entries = await _entries(bench, manifest)
        gone = [{**entry, "status": _DELETED, "snapshot_id": snapshot_id} for entry in entries]
        counts = {"added_files_count": 0, "added_rows_count": 0, "deleted_files_count": len(gone)}
        written = await _write_manifest(bench, state, encode_entries(gone, state.shape))
        manifests.append({**manifest, **number, **counts, "added_snapshot_id": snapshot_id, **written})
    await _commit(bench, state, manifests, snapshot_id=snapshot_id, operation="replace")


async def remove_snapshots(bench: Bench, snapshot_ids: list[int]) -> None:
    await _update(bench, {"action": "remove-snapshots", "snapshot-ids": snapshot_ids})


async def remove_properties(bench: Bench, names: list[str]) -> None:
    await _update(bench, {"action": "remove-properties", "removals": names})


async def _update(bench: Bench, *updates: Mapping[str, Any]) -> None:
    state = await bench.context.committer.load(USERS)
    await bench.context.committer.commit_layout(state, Request((), updates))


def _new_id() -> int:
    return uuid.uuid4().int >> 66


async def _manifests(bench: Bench, state: TableState) -> Sequence[ManifestFile]:
    assert state.manifest_list is not None
    data = await bench.context.store.read(state.manifest_list)
    return decode_manifest_list(data, state.manifest_list).manifests


async def _entries(bench: Bench, manifest: ManifestFile) -> list[dict[str, Any]]:
    data = await bench.context.store.read(manifest["manifest_path"])
    return [entry.to_existing() for entry in read_entries(data, Manifest.of(manifest))]


async def _write_manifest(bench: Bench, state: TableState, encoded: bytes) -> dict[str, Any]:
    location = metadata_location(state, f"{uuid.uuid4()}-m0.avro")
    await bench.context.store.write(location, encoded)
    return {"manifest_path": location, "manifest_length": len(encoded)}


async def _commit(
    bench: Bench, state: TableState, manifests: Sequence[ManifestFile], *, snapshot_id: int, operation: str
) -> None:
    location = metadata_location(state, f"snap-{snapshot_id}-{uuid.uuid4()}.avro")
    number = state.last_sequence_number + 1
    header = ListHeader(snapshot_id, state.snapshot_id, number, state.format_version)
    current = decode_manifest_list(await bench.context.store.read(str(state.manifest_list)), str(state.manifest_list))
    await bench.context.store.write(
        location, encode_manifest_list(replace(current, manifests=tuple(manifests)), header)
    )
    snapshot = {
        "snapshot-id": snapshot_id,
        "parent-snapshot-id": state.snapshot_id,
        "sequence-number": number,
        "timestamp-ms": state.last_updated_ms + 1,
        "manifest-list": location,
        "summary": {"operation": operation},
        "schema-id": state.schema.schema_id,
    }
    ref = {"ref-name": MAIN_BRANCH, "type": "branch", "snapshot-id": snapshot_id}
    await _update(bench, {"action": "add-snapshot", "snapshot": snapshot}, {"action": "set-snapshot-ref", **ref})


# -- files that another writer changed


async def largest_file(bench: Bench) -> str:
    """Locate the data file with the most rows."""
    with contextlib.closing(bench.lake.open_pyiceberg()) as catalog:
        files = [task.file for task in catalog.load_table(str(USERS)).scan().plan_files()]
    return max(files, key=lambda file: file.record_count).file_path


async def spoil_file(bench: Bench, change: Change) -> None:
    """Change rows in the largest data file where it lies, as bit rot or a bad tool would."""
    location = await largest_file(bench)
    rows = pq.read_table(pa.BufferReader(await bench.context.store.read(location)))
    sink = pa.BufferOutputStream()
    pq.write_table(change(rows), sink, store_schema=False)
    await bench.context.store.delete(location)
    await bench.context.store.write(location, sink.getvalue())
