"""Manifests and their entries as scan planning sees them. Core: owns names, defaults and what entries inherit.

An entry that was added with its manifest leaves its snapshot and sequence number null and takes the manifest's; a data
file of format 3 that leaves out its first row id takes its place among the manifest's rows.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeAlias

import fastavro
import orjson

from lakefeed.contract.errors import ManifestUnreadable

# --- catalog.manifest_records -----------------------------------------------------------------------------------------
#
# Iceberg's manifest lists and manifests as records. Core: the one reader of their Avro bytes and of the paths in them.
#
#     manifest list (one per snapshot) -> manifests (data or deletes) -> entries, one per file
#
# Scan planning reads whole records (planning/manifests.py). A purge wants paths alone, so its records are projected
# onto
# them, by the names that their writer uses: statistics are skipped, and no writer's types stand in the way.


# The fields to read; one that is a record has fields of its own.
_Wanted: TypeAlias = Mapping[str, Any]
_OF_LIST: _Wanted = {"manifest_path": None}
_OF_MANIFEST: _Wanted = {"status": None, "data_file": {"file_path": None}}

_MAGIC = b"Obj\x01"
_HEADER = fastavro.parse_schema(
    {
        "type": "record",
        "name": "header",
        "fields": [
            {"name": "magic", "type": {"type": "fixed", "name": "magic", "size": 4}},
            {"name": "meta", "type": {"type": "map", "values": "bytes"}},
            {"name": "sync", "type": {"type": "fixed", "name": "sync", "size": 16}},
        ],
    }
)
# What fastavro and the codecs below it raise for bytes that are not what they should be.
UNREADABLE = (ValueError, TypeError, KeyError, IndexError, EOFError, StopIteration, OverflowError, ArithmeticError)


class Status(IntEnum):
    """What an entry of a manifest says of its file."""

    EXISTING = 0
    ADDED = 1
    DELETED = 2


def manifests_of(manifest_list: bytes, location: str) -> list[str]:
    """Read where the manifests of a list are.

    Raises: ManifestUnreadable if it is damaged.
    """
    try:
        return [record["manifest_path"] for record in read_records(manifest_list, _OF_LIST)]
    except UNREADABLE as error:
        raise _damaged(location) from error


def live_files_of(manifest: bytes, location: str) -> list[str]:
    """Read where the files of a manifest are, each once, but for those that it calls deleted.

    Raises: ManifestUnreadable if it is damaged.
    """
    try:
        records = read_records(manifest, _OF_MANIFEST)
        paths = (record["data_file"]["file_path"] for record in records if record["status"] != Status.DELETED)
        return list(dict.fromkeys(paths))
    except UNREADABLE as error:
        raise _damaged(location) from error


def read_records(data: bytes, wanted: _Wanted | None = None) -> Iterator[dict[str, Any]]:
    """Read the records of a file, or the wanted fields of them.

    Without Avro's logical types: Python's dates end where Iceberg's go on.

    Raises: what UNREADABLE lists, at once or at a later record.
    """
    source = io.BytesIO(data)
    header: Any = fastavro.schemaless_reader(source, _HEADER, None)
    if header["magic"] != _MAGIC:
        raise ValueError("not an Avro file")
    schema = _without_logical_types(orjson.loads(header["meta"]["avro.schema"]))
    header["meta"]["avro.schema"] = orjson.dumps(schema)
    plain = io.BytesIO()
    fastavro.schemaless_writer(plain, _HEADER, header)
    plain.write(data[source.tell() :])
    plain.seek(0)
    records: Any = fastavro.reader(plain, reader_schema=None if wanted is None else _project(schema, wanted))
    return iter(records)


def _without_logical_types(schema: Any) -> Any:
    if isinstance(schema, dict):
        return {key: _without_logical_types(value) for key, value in schema.items() if key != "logicalType"}
    if isinstance(schema, list):
        return [_without_logical_types(item) for item in schema]
    return schema


def _project(record: Any, wanted: _Wanted) -> dict[str, Any]:
    fields = [
        field if (inner := wanted[field["name"]]) is None else {**field, "type": _project(field["type"], inner)}
        for field in record["fields"]
        if field["name"] in wanted
    ]
    return {"type": "record", "name": record["name"], "fields": fields}


def _damaged(location: str) -> ManifestUnreadable:
    return ManifestUnreadable(f"Not an Avro manifest or manifest list: {location}")


# --- catalog.planning.manifests ---------------------------------------------------------------------------------------


ReadTuple: TypeAlias = Callable[[Sequence[Any]], tuple[Any, ...]]

_ADDED_SINCE = ("added_files_count", "added_data_files_count")
_EXISTING_SINCE = ("existing_files_count", "existing_data_files_count")


class Content(IntEnum):
    """What a file holds; a manifest holds DATA, or deletes of both kinds under POSITION_DELETES."""

    DATA = 0
    POSITION_DELETES = 1
    EQUALITY_DELETES = 2


@dataclass(frozen=True, slots=True)
class Manifest:
    """One manifest, as its list describes it. `files_count` is None where an old list does not tell."""

    location: str
    holds_deletes: bool
    spec_id: int
    snapshot_id: int | None
    sequence_number: int
    files_count: int | None
    first_row_id: int | None
    summaries: Sequence[Mapping[str, Any]] | None


@dataclass(frozen=True, slots=True)
class Entry:
    """A live file of a manifest, with all that it inherits. `file` is the manifest's record of it."""

    status: Status
    snapshot_id: int | None
    sequence_number: int
    content: Content
    spec_id: int
    file: dict[str, Any]
    partition: tuple[Any, ...]
    first_row_id: int | None


def decode_manifest_list(data: bytes, location: str) -> list[Manifest]:
    """Read a manifest list.

    Raises: ManifestUnreadable if it is damaged, or if a manifest in it is encrypted.
    """
    try:
        return [_read_manifest(record) for record in read_records(data)]
    except UNREADABLE as error:
        raise ManifestUnreadable(f"Cannot read manifest list: {location}") from error


def decode_entries(data: bytes, manifest: Manifest, read_tuple: ReadTuple) -> Iterator[Entry]:
    """Read the live entries of a manifest, in order. `read_tuple` reads partition tuples of the manifest's spec.

    Raises: ManifestUnreadable if it is damaged.
    """
    try:
        yield from _live_entries(read_records(data), manifest, read_tuple)
    except UNREADABLE as error:
        raise ManifestUnreadable(f"Cannot read manifest: {manifest.location}") from error


def column_value(file: Mapping[str, Any], name: str, field_id: int) -> Any:
    """Look one column up in one of a file's maps, which Avro stores as lists of pairs; None if it is not there."""
    return next((pair["value"] for pair in file.get(name) or () if pair["key"] == field_id), None)


def _read_manifest(record: Mapping[str, Any]) -> Manifest:
    if record.get("key_metadata") is not None:
        raise ManifestUnreadable(f"Cannot read encrypted manifest: {record['manifest_path']}")
    counts = [_first_of(record, names) for names in (_ADDED_SINCE, _EXISTING_SINCE)]
    return Manifest(
        location=record["manifest_path"],
        holds_deletes=record.get("content", Content.DATA) != Content.DATA,
        spec_id=record["partition_spec_id"],
        snapshot_id=record.get("added_snapshot_id"),
        sequence_number=record.get("sequence_number") or 0,
        files_count=None if None in counts else sum(counts),
        first_row_id=record.get("first_row_id"),
        summaries=record.get("partitions"),
    )


def _first_of(record: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((record[name] for name in names if record.get(name) is not None), None)


def _live_entries(records: Iterator[dict[str, Any]], manifest: Manifest, read_tuple: ReadTuple) -> Iterator[Entry]:
    next_row_id = manifest.first_row_id
    for record in records:
        status = Status(record["status"])
        if status is Status.DELETED:
            continue
        file = record["data_file"]
        first_row_id = file.get("first_row_id")
        if next_row_id is None:
            first_row_id = None  # the manifest is from before its table had row ids
        elif first_row_id is None:
            first_row_id = next_row_id
            next_row_id += file["record_count"]
        yield Entry(
            status=status,
            snapshot_id=_inherited(record.get("snapshot_id"), manifest.snapshot_id),
            sequence_number=_inherited(record.get("sequence_number"), manifest.sequence_number) or 0,
            content=Content(file.get("content") or Content.DATA),
            spec_id=manifest.spec_id,
            file=file,
            partition=read_tuple(tuple(file["partition"].values())),
            first_row_id=first_row_id,
        )


def _inherited(own: int | None, manifests: int | None) -> int | None:
    return manifests if own is None else own
