"""Manifests and manifest lists, formats 1 to 3 read, 2 and 3 written: their Avro schemas, contents and inheritance.

    manifest list (one per snapshot) -> manifests (data or deletes) -> entries, one per file

An entry that was added with its manifest leaves its snapshot and sequence numbers null: readers take them from the
manifest list. So a manifest, once written, fits every attempt to commit it, and only the list is written again after a
conflict. A data file of format 3 without a first row id gets its id by its position among the manifest's rows.

A list's manifests are dictionaries with every field that the file had. Fields of a later format that another writer
stored are carried into the next list unchanged. `Manifest` and `Entry` are what readers need.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from enum import IntEnum
from typing import Any, TypeAlias

import orjson

from lakefeed.contract.errors import ManifestUnreadable
from lakefeed.iceberg.avro import (
    FORMAT_WITH_ROW_IDS,
    MANIFEST_FILE_FIELDS,
    MANIFEST_FILE_NAMES,
    AvroSchema,
    Projection,
    Record,
    avro_name,
    decimal_size,
    manifest_list_schema,
    manifest_schema,
    read_avro,
    reading,
    write_avro,
)
from lakefeed.iceberg.layout import Partition, PartitionSpec, fields_to_json, partition_types
from lakefeed.iceberg.types import Schema, decimal_parts, schema_to_json
from lakefeed.iceberg.values import decode_stored, encode_single_value, is_nan, unscaled

# One manifest as a manifest list describes it, by the specification's field names.
ManifestFile: TypeAlias = Mapping[str, Any]

_NO_ID = -1
_REQUIRED_NAMES = tuple(f["name"] for f in MANIFEST_FILE_FIELDS if "default" not in f)
# Names of writers that leave out field ids.
_OLDER_NAMES = {f"{kind}_data_files_count": f"{kind}_files_count" for kind in ("added", "existing", "deleted")}
# Lists of format 1, from before a table was upgraded, lack these: the specification says to read 0.
_ZERO_BY_DEFAULT = ("content", "sequence_number", "min_sequence_number")
# Optional arrays of a data file. fastavro finds the branch of a union by validating the value against each, which takes
# as long as writing it; a pair (branch, value) names the branch.
_OPTIONAL_ARRAYS = (
    *("column_sizes", "value_counts", "null_value_counts", "nan_value_counts", "lower_bounds", "upper_bounds"),
    *("split_offsets", "equality_ids"),
)
# A purge wants paths only: statistics are skipped, and no writer's types stand in the way.
_PATH_OF_MANIFEST: Projection = {"manifest_path": None}
_PATH_OF_FILE: Projection = {"status": None, "data_file": {"file_path": None}}


class Status(IntEnum):
    """What an entry of a manifest says of its file."""

    EXISTING = 0
    ADDED = 1
    DELETED = 2


class Content(IntEnum):
    """What a file holds; a manifest holds DATA, or deletes of both kinds under POSITION_DELETES."""

    DATA = 0
    POSITION_DELETES = 1
    EQUALITY_DELETES = 2


@dataclass(frozen=True, slots=True)
class DataFile:
    """A data file and its statistics by field id, as a manifest describes it."""

    location: str
    partition: Partition
    record_count: int
    size_bytes: int
    column_sizes: Mapping[int, int]
    value_counts: Mapping[int, int]
    null_counts: Mapping[int, int]
    lower_bounds: Mapping[int, bytes]
    upper_bounds: Mapping[int, bytes]
    split_offsets: tuple[int, ...]
    sort_order_id: int | None = None


@dataclass(frozen=True, slots=True)
class ManifestList:
    """The manifests of a snapshot, and the Avro fields that only their writer knows."""

    manifests: tuple[ManifestFile, ...] = ()
    extra_fields: tuple[AvroSchema, ...] = ()


@dataclass(frozen=True, slots=True)
class TableShape:
    """What a manifest says of its table: the columns and the partitions of the files in it."""

    schema: Schema
    spec: PartitionSpec
    format_version: int


@dataclass(frozen=True, slots=True)
class ListHeader:
    """What a manifest list says of its snapshot."""

    snapshot_id: int
    parent_snapshot_id: int | None
    sequence_number: int
    format_version: int
    first_row_id: int = 0


@dataclass(frozen=True, slots=True)
class Manifest:
    """What readers need of a manifest. `files_count` is None where an old list does not say."""

    location: str
    holds_deletes: bool
    spec_id: int
    snapshot_id: int | None
    sequence_number: int
    files_count: int | None
    first_row_id: int | None
    summaries: Sequence[Mapping[str, Any]] | None

    @classmethod
    def of(cls, listed: ManifestFile) -> Manifest:
        """Read what a list says of a manifest."""
        counts = [listed.get(name) for name in ("added_files_count", "existing_files_count")]
        return cls(
            location=listed["manifest_path"],
            holds_deletes=listed["content"] != Content.DATA,
            spec_id=listed["partition_spec_id"],
            snapshot_id=listed.get("added_snapshot_id"),
            sequence_number=listed["sequence_number"],
            files_count=None if None in counts else sum(count for count in counts if count is not None),
            first_row_id=listed.get("first_row_id"),
            summaries=listed.get("partitions"),
        )


@dataclass(frozen=True, slots=True)
class Entry:
    """A file of a manifest, with all that it inherits. `file` is the manifest's record of it."""

    status: Status
    snapshot_id: int | None
    sequence_number: int
    content: Content
    spec_id: int
    file: Record
    partition: Partition
    first_row_id: int | None
    file_sequence_number: int = 0

    def to_existing(self) -> Record:
        """Return the record of this file for another manifest, with all that it inherited written out."""
        return {
            "status": Status.EXISTING,
            "snapshot_id": self.snapshot_id,
            "sequence_number": self.sequence_number,
            "file_sequence_number": self.file_sequence_number,
            "data_file": {**self.file, "partition": self.partition, "first_row_id": self.first_row_id},
        }


def encode_manifest(files: Sequence[DataFile], *, shape: TableShape, snapshot_id: int) -> bytes:
    """Encode a manifest of added files."""
    records = (
        {
            "content": Content.DATA,
            "file_path": file.location,
            "file_format": "PARQUET",
            "partition": file.partition,
            "record_count": file.record_count,
            "file_size_in_bytes": file.size_bytes,
            "column_sizes": _pairs(file.column_sizes),
            "value_counts": _pairs(file.value_counts),
            "null_value_counts": _pairs(file.null_counts),
            "lower_bounds": _pairs(file.lower_bounds),
            "upper_bounds": _pairs(file.upper_bounds),
            "split_offsets": list(file.split_offsets),
            "sort_order_id": file.sort_order_id,
        }
        for file in files
    )
    added = {"status": Status.ADDED, "snapshot_id": snapshot_id}
    return encode_entries(({**added, "data_file": record} for record in records), shape)


def _pairs(values: Mapping[int, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": value} for key, value in values.items()]


def encode_entries(entries: Iterable[Record], shape: TableShape) -> bytes:
    """Encode a manifest of entries, whose partitions are tuples."""
    types = partition_types(shape.spec, shape.schema)
    names = [avro_name(field.name) for field in shape.spec.fields]
    metadata = {
        "schema": orjson.dumps(schema_to_json(shape.schema)).decode(),
        "schema-id": str(shape.schema.schema_id),
        "partition-spec": orjson.dumps(fields_to_json(shape.spec)).decode(),
        "partition-spec-id": str(shape.spec.spec_id),
        "format-version": str(shape.format_version),
        "content": "data",
    }
    records = (_with_named_branches(entry, names, types) for entry in entries)
    return write_avro(manifest_schema(shape.spec, types, shape.format_version), records, metadata)


def _with_named_branches(entry: Record, names: Sequence[str], types: Sequence[str]) -> Record:
    file = dict(entry["data_file"])
    for name in _OPTIONAL_ARRAYS:
        if (values := file.get(name)) is not None:
            file[name] = ("array", values)
    stored = map(_encode_stored, types, file["partition"])
    file["partition"] = dict(zip(names, stored, strict=True))
    return {**entry, "data_file": file}


def _encode_stored(type_: str, value: Any) -> Any:
    """Return a partition value as Avro stores it: decimals as bytes of their type's size."""
    decimal = decimal_parts(type_)
    if value is None or decimal is None:
        return value
    number = unscaled(type_, value) if isinstance(value, Decimal) else int(value)
    return number.to_bytes(decimal_size(decimal[0]), "big", signed=True)


def describe_manifest(
    files: Sequence[DataFile], *, shape: TableShape, snapshot_id: int, location: str, size_bytes: int
) -> ManifestFile:
    """Describe a manifest of added files for a list; its sequence number is set when a list takes it up."""
    return {
        "manifest_path": location,
        "manifest_length": size_bytes,
        "partition_spec_id": shape.spec.spec_id,
        "content": Content.DATA,
        "added_snapshot_id": snapshot_id,
        "added_files_count": len(files),
        "existing_files_count": 0,
        "deleted_files_count": 0,
        "added_rows_count": sum(file.record_count for file in files),
        "existing_rows_count": 0,
        "deleted_rows_count": 0,
        "partitions": summarise_partitions([file.partition for file in files], shape),
    }


def summarise_partitions(partitions: Sequence[Partition], shape: TableShape) -> list[dict[str, Any]]:
    """Summarise the partitions of a manifest's files, field by field."""
    summaries = []
    for index, type_ in enumerate(partition_types(shape.spec, shape.schema)):
        values = [partition[index] for partition in partitions]
        ordinary = [value for value in values if value is not None and not is_nan(value)]
        summary = {
            "contains_null": None in values,
            "contains_nan": any(map(is_nan, values)),
            "lower_bound": encode_single_value(type_, min(ordinary)) if ordinary else None,
            "upper_bound": encode_single_value(type_, max(ordinary)) if ordinary else None,
        }
        summaries.append(summary)
    return summaries


def apply_manifest(current: ManifestList, manifest: ManifestFile, *, sequence_number: int) -> ManifestList:
    """Put a new manifest before those of the current snapshot: readers who look for fresh rows meet them first."""
    numbered = {**manifest, "sequence_number": sequence_number, "min_sequence_number": sequence_number}
    return ManifestList((numbered, *current.manifests), current.extra_fields)


def apply_row_ids(current: ManifestList, next_row_id: int) -> tuple[ManifestList, int]:
    """Assign row ids to data manifests that have none (format 3); return the list and the table's next row id."""
    manifests = []
    for manifest in current.manifests:
        numbered = manifest
        if manifest["content"] == Content.DATA and manifest.get("first_row_id") is None:
            numbered = {**manifest, "first_row_id": next_row_id}
            next_row_id += manifest["added_rows_count"] + manifest["existing_rows_count"]
        manifests.append(numbered)
    return ManifestList(tuple(manifests), current.extra_fields), next_row_id


def encode_manifest_list(current: ManifestList, header: ListHeader) -> bytes:
    """Encode the list of a snapshot's manifests."""
    metadata = {
        "snapshot-id": str(header.snapshot_id),
        "parent-snapshot-id": "null" if header.parent_snapshot_id is None else str(header.parent_snapshot_id),
        "sequence-number": str(header.sequence_number),
        "format-version": str(header.format_version),
    }
    if header.format_version >= FORMAT_WITH_ROW_IDS:
        metadata["first-row-id"] = str(header.first_row_id)
    return write_avro(manifest_list_schema(header.format_version, current.extra_fields), current.manifests, metadata)


def decode_manifest_list(data: bytes, location: str) -> ManifestList:
    """Read a list that any writer wrote, keeping all its fields for the next list.

    Raises: ManifestUnreadable if it is damaged, or misses what the next list must say.
    """
    with reading(location):
        fields, manifests = _read_list(data)
    for manifest in manifests:
        missing = [name for name in _REQUIRED_NAMES if manifest.get(name) is None]
        if missing:
            path = manifest.get("manifest_path")
            raise ManifestUnreadable(f"manifest list entry lacks fields: fields={','.join(missing)} manifest={path}")
    extra = (field for field in fields if _name_of(field) not in MANIFEST_FILE_NAMES.values())
    return ManifestList(tuple(manifests), tuple(extra))


def list_manifests(data: bytes, location: str) -> list[Manifest]:
    """Read the manifests of a list for a scan.

    Raises: ManifestUnreadable if it is damaged, or a manifest in it is encrypted.
    """
    with reading(location):
        listed = _read_list(data)[1]
        encrypted = [each["manifest_path"] for each in listed if each.get("key_metadata") is not None]
        found = [Manifest.of(each) for each in listed]
    if encrypted:
        raise ManifestUnreadable(f"cannot read an encrypted manifest: {encrypted[0]}")
    return found


def _read_list(data: bytes) -> tuple[list[AvroSchema], list[dict[str, Any]]]:
    fields, records = read_avro(data)
    names = {field["name"]: _name_of(field) for field in fields}
    manifests = [{names[name]: value for name, value in record.items()} for record in records]
    for manifest in manifests:
        for name in _ZERO_BY_DEFAULT:
            manifest[name] = manifest.get(name) or 0
    return fields, manifests


def _name_of(field: AvroSchema) -> str:
    name: str = field["name"]
    return MANIFEST_FILE_NAMES.get(field.get("field-id", _NO_ID), _OLDER_NAMES.get(name, name))


def read_entries(data: bytes, manifest: Manifest, types: Sequence[str] | None = None) -> Iterator[Entry]:
    """Read the entries of a manifest in order, deleted ones too. `types` are those of its spec's partition values.

    Without types, decimals in partitions are left as bytes.

    Raises: ManifestUnreadable if it is damaged, or its partitions are not of these types.
    """
    with reading(manifest.location):
        next_row_id = manifest.first_row_id
        for record in read_avro(data)[1]:
            status, file = Status(record["status"]), record["data_file"]
            # A manifest without row ids is from before its table had them.
            first_row_id = None if next_row_id is None else file.get("first_row_id")
            if next_row_id is not None and first_row_id is None and status is not Status.DELETED:
                first_row_id = next_row_id
                next_row_id += file["record_count"]
            partition = tuple(file["partition"].values())
            if types is not None:
                partition = tuple(decode_stored(*pair) for pair in zip(types, partition, strict=True))
            yield Entry(
                status=status,
                snapshot_id=_inherited(record.get("snapshot_id"), manifest.snapshot_id),
                sequence_number=_inherited(record.get("sequence_number"), manifest.sequence_number) or 0,
                content=Content(file.get("content") or Content.DATA),
                spec_id=manifest.spec_id,
                file=file,
                partition=partition,
                first_row_id=first_row_id,
                file_sequence_number=_inherited(record.get("file_sequence_number"), manifest.sequence_number) or 0,
            )


def _inherited(own: int | None, manifests: int | None) -> int | None:
    return manifests if own is None else own


def column_value(file: Mapping[str, Any], name: str, field_id: int) -> Any:
    """Look one column up in one of a file's maps, which Avro stores as lists of pairs; None if it is not there."""
    return next((pair["value"] for pair in file.get(name) or () if pair["key"] == field_id), None)


def manifest_paths(data: bytes, location: str) -> list[str]:
    """Read where the manifests of a list are. Raise ManifestUnreadable if it is damaged."""
    with reading(location):
        return [record["manifest_path"] for record in read_avro(data, wanted=_PATH_OF_MANIFEST)[1]]


def live_file_paths(data: bytes, location: str) -> list[str]:
    """Read where the files of a manifest are, each once, except those that it marks as deleted.

    Raises: ManifestUnreadable if it is damaged.
    """
    with reading(location):
        records = read_avro(data, wanted=_PATH_OF_FILE)[1]
        paths = (record["data_file"]["file_path"] for record in records if record["status"] != Status.DELETED)
        return list(dict.fromkeys(paths))
