"""Manifests and manifest lists as Avro bytes, formats 2 and 3. Owns their contents; storing them is the committer's.

    manifest list (one per snapshot) -> manifests (one per flush) -> data files

A manifest holds entries of added files whose sequence number is left null: readers take it from the manifest list. So
a manifest, once written, fits every attempt to commit it, and only the list is written anew after a conflict.

Entries of a list are kept as dictionaries, with every field that the file had: what another writer stored there and we
do not know (fields of a later format) is carried into the next list untouched.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import fastavro
import orjson

from writer.errors import WriterError
from writer.iceberg.avro_schemas import (
    FORMAT_WITH_ROW_IDS,
    MANIFEST_FILE_FIELDS,
    MANIFEST_FILE_NAMES,
    AvroSchema,
    avro_name,
    manifest_list_schema,
    manifest_schema,
)
from writer.iceberg.partitions import Partition, PartitionSpec, fields_to_json, partition_types
from writer.iceberg.single_values import encode_single_value
from writer.types import Schema, schema_to_json

# One manifest as a manifest list describes it, by the specification's field names.
ManifestFile: TypeAlias = Mapping[str, Any]

_CODEC = "deflate"  # the one codec, beside none, that every Avro reader has
_DATA = 0
_ADDED = 1
_NO_ID = -1
_REQUIRED_NAMES = tuple(f["name"] for f in MANIFEST_FILE_FIELDS if "default" not in f)
# Lists of format 1, from before a table was upgraded, lack these: the specification says what to read for them.
_FORMAT_1_DEFAULTS = {"content": _DATA, "sequence_number": 0, "min_sequence_number": 0}


class ManifestUnreadable(WriterError):
    """A manifest list holds what cannot be carried into the next one: a person has to look."""


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


def encode_manifest(files: Sequence[DataFile], *, shape: TableShape, snapshot_id: int) -> bytes:
    """Encode a manifest of added files."""
    names = [avro_name(field.name) for field in shape.spec.fields]
    return encode_entries([_added_entry(file, names, snapshot_id) for file in files], shape)


def encode_entries(entries: Iterable[Mapping[str, Any]], shape: TableShape) -> bytes:
    """Encode a manifest of entries that are spelled out already."""
    types = partition_types(shape.spec, shape.schema)
    schema = manifest_schema(shape.spec, types, shape.format_version)
    return _encode(schema, entries, _manifest_metadata(shape))


def _manifest_metadata(shape: TableShape) -> dict[str, str]:
    return {
        "schema": orjson.dumps(schema_to_json(shape.schema)).decode(),
        "schema-id": str(shape.schema.schema_id),
        "partition-spec": orjson.dumps(fields_to_json(shape.spec)).decode(),
        "partition-spec-id": str(shape.spec.spec_id),
        "format-version": str(shape.format_version),
        "content": "data",
    }


def _added_entry(file: DataFile, names: list[str], snapshot_id: int) -> dict[str, Any]:
    data_file = {
        "content": _DATA,
        "file_path": file.location,
        "file_format": "PARQUET",
        "partition": dict(zip(names, file.partition, strict=True)),
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
    return {"status": _ADDED, "snapshot_id": snapshot_id, "data_file": data_file}


def _pairs(values: Mapping[int, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": value} for key, value in values.items()]


def describe_manifest(
    files: Sequence[DataFile], *, shape: TableShape, snapshot_id: int, location: str, size_bytes: int
) -> ManifestFile:
    """Describe a manifest of added files for a list; its sequence number is set when a list takes it up."""
    return {
        "manifest_path": location,
        "manifest_length": size_bytes,
        "partition_spec_id": shape.spec.spec_id,
        "content": _DATA,
        "added_snapshot_id": snapshot_id,
        "added_files_count": len(files),
        "existing_files_count": 0,
        "deleted_files_count": 0,
        "added_rows_count": sum(file.record_count for file in files),
        "existing_rows_count": 0,
        "deleted_rows_count": 0,
        "partitions": _summarise_partitions([file.partition for file in files], shape),
    }


def _summarise_partitions(partitions: list[Partition], shape: TableShape) -> list[dict[str, Any]]:
    types = partition_types(shape.spec, shape.schema)
    return [_summarise(type_, [partition[i] for partition in partitions]) for i, type_ in enumerate(types)]


def _summarise(type_: str, values: list[Any]) -> dict[str, Any]:
    present = [value for value in values if value is not None and value == value]  # noqa: PLR0124 - NaN differs from itself
    return {
        "contains_null": None in values,
        "contains_nan": any(value != value for value in values),  # noqa: PLR0124 - NaN differs from itself
        "lower_bound": encode_single_value(type_, min(present)) if present else None,
        "upper_bound": encode_single_value(type_, max(present)) if present else None,
    }


def apply_manifest(current: ManifestList, manifest: ManifestFile, *, sequence_number: int) -> ManifestList:
    """Put a new manifest before those of the current snapshot: readers who look for fresh rows meet them first."""
    numbered = {**manifest, "sequence_number": sequence_number, "min_sequence_number": sequence_number}
    return ManifestList((numbered, *current.manifests), current.extra_fields)


def apply_row_ids(current: ManifestList, next_row_id: int) -> tuple[ManifestList, int]:
    """Give row ids to data manifests that have none (format 3); returns the table's next row id beside them."""
    manifests = []
    for manifest in current.manifests:
        numbered = manifest
        if manifest["content"] == _DATA and manifest.get("first_row_id") is None:
            numbered = {**manifest, "first_row_id": next_row_id}
            next_row_id += manifest["added_rows_count"] + manifest["existing_rows_count"]
        manifests.append(numbered)
    return ManifestList(tuple(manifests), current.extra_fields), next_row_id


@dataclass(frozen=True, slots=True)
class ListHeader:
    """What a manifest list says of its snapshot."""

    snapshot_id: int
    parent_snapshot_id: int | None
    sequence_number: int
    format_version: int
    first_row_id: int = 0


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
    schema = manifest_list_schema(header.format_version, current.extra_fields)
    return _encode(schema, current.manifests, metadata)


def decode_manifest_list(data: bytes) -> ManifestList:
    """Read a list that any writer wrote, keeping all its fields.

    Raises:
        ManifestUnreadable: it is not a manifest list, or misses what the next one must say.
    """
    fields, records = decode_avro(data)
    names = {field["name"]: MANIFEST_FILE_NAMES.get(field.get("field-id", _NO_ID), field["name"]) for field in fields}
    known = set(MANIFEST_FILE_NAMES.values())
    extra = tuple(field for field in fields if names[field["name"]] not in known)
    return ManifestList(tuple(_named(record, names) for record in records), extra)


def decode_avro(data: bytes) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Read the fields and the records of an Avro file.

    Raises:
        ManifestUnreadable: it is not one, or is damaged.
    """
    try:
        reader: Any = fastavro.reader(io.BytesIO(data))
        return reader.writer_schema["fields"], list(reader)
    except (ValueError, KeyError, TypeError, EOFError, IndexError, zlib.error) as error:
        raise ManifestUnreadable(f"not a manifest or manifest list: size_bytes={len(data)}") from error


def _named(record: Mapping[str, Any], names: Mapping[str, str]) -> ManifestFile:
    manifest = {**_FORMAT_1_DEFAULTS, **{names[name]: value for name, value in record.items()}}
    missing = [name for name in _REQUIRED_NAMES if manifest.get(name) is None]
    if missing:
        path = manifest.get("manifest_path")
        raise ManifestUnreadable(f"manifest list entry lacks fields: fields={','.join(missing)} manifest={path}")
    return manifest


def _encode(schema: Any, records: Iterable[Mapping[str, Any]], metadata: dict[str, str]) -> bytes:
    sink = io.BytesIO()
    fastavro.writer(sink, schema, records, codec=_CODEC, metadata=metadata)
    return sink.getvalue()
