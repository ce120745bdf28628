"""Manifests and manifest lists as Avro bytes, formats 2 and 3. Owns their contents; storing them is the committer's.

    manifest list (one per snapshot) -> manifests (one per flush) -> data files

A manifest holds entries of added files whose sequence number is left null: readers take it from the manifest list. So
a manifest, once written, fits every attempt to commit it, and only the list is written anew after a conflict.

Entries of a list are kept as dictionaries, with every field that the file had: what another writer stored there and we
do not know (fields of a later format) is carried into the next list untouched.
"""

from __future__ import annotations

import io
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import fastavro
import orjson

from lakefeed.contract.errors import WriterError
from lakefeed.iceberg.layout import Partition, PartitionSpec, fields_to_json, partition_types
from lakefeed.iceberg.terms import PartitionRejected
from lakefeed.iceberg.types import Schema, schema_to_json
from lakefeed.iceberg.values import encode_single_value

# --- writer.iceberg.avro_schemas --------------------------------------------------------------------------------------
#
# Avro schemas of manifests and manifest lists, formats 2 and 3. Owns names, types and field ids, no values.
#
# Readers go by the `field-id` of each Avro field; names are the specification's.


AvroSchema: TypeAlias = dict[str, Any]

FORMAT_WITH_ROW_IDS = 3

_DECIMAL = re.compile(r"decimal\((\d+),\s*(\d+)\)")
_FIXED = re.compile(r"fixed\[(\d+)\]")
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_]")

_PRIMITIVES: dict[str, Any] = {
    "boolean": "boolean",
    "int": "int",
    "long": "long",
    "float": "float",
    "double": "double",
    "date": {"type": "int", "logicalType": "date"},
    "time": {"type": "long", "logicalType": "time-micros"},
    "timestamp": {"type": "long", "logicalType": "timestamp-micros", "adjust-to-utc": False},
    "timestamptz": {"type": "long", "logicalType": "timestamp-micros", "adjust-to-utc": True},
    "timestamp_ns": {"type": "long", "logicalType": "timestamp-nanos", "adjust-to-utc": False},
    "timestamptz_ns": {"type": "long", "logicalType": "timestamp-nanos", "adjust-to-utc": True},
    "string": "string",
    "binary": "bytes",
}


def _required(field_id: int, name: str, type_: Any) -> AvroSchema:
    return {"name": name, "type": type_, "field-id": field_id}


def _optional(field_id: int, name: str, type_: Any) -> AvroSchema:
    return {"name": name, "type": ["null", type_], "default": None, "field-id": field_id}


def _list_of(element_id: int, element: Any) -> AvroSchema:
    return {"type": "array", "items": element, "element-id": element_id}


def _map_of(key_id: int, value_id: int, value: str) -> AvroSchema:
    """Describe a map with integer keys: Avro has none, so it is an array of pairs."""
    pair = {
        "type": "record",
        "name": f"k{key_id}_v{value_id}",
        "fields": [_required(key_id, "key", "int"), _required(value_id, "value", value)],
    }
    return {"type": "array", "logicalType": "map", "items": pair}


_FIELD_SUMMARY = {
    "type": "record",
    "name": "r508",
    "fields": [
        _required(509, "contains_null", "boolean"),
        _optional(518, "contains_nan", "boolean"),
        _optional(510, "lower_bound", "bytes"),
        _optional(511, "upper_bound", "bytes"),
    ],
}

MANIFEST_FILE_FIELDS: tuple[AvroSchema, ...] = (
    _required(500, "manifest_path", "string"),
    _required(501, "manifest_length", "long"),
    _required(502, "partition_spec_id", "int"),
    _required(517, "content", "int"),
    _required(515, "sequence_number", "long"),
    _required(516, "min_sequence_number", "long"),
    _required(503, "added_snapshot_id", "long"),
    _required(504, "added_files_count", "int"),
    _required(505, "existing_files_count", "int"),
    _required(506, "deleted_files_count", "int"),
    _required(512, "added_rows_count", "long"),
    _required(513, "existing_rows_count", "long"),
    _required(514, "deleted_rows_count", "long"),
    _optional(507, "partitions", _list_of(508, _FIELD_SUMMARY)),
    _optional(519, "key_metadata", "bytes"),
)
_FIRST_ROW_ID = _optional(520, "first_row_id", "long")

# Names by field id, because older writers used other names for the same fields.
MANIFEST_FILE_NAMES: dict[int, str] = {f["field-id"]: f["name"] for f in (*MANIFEST_FILE_FIELDS, _FIRST_ROW_ID)}


def manifest_list_schema(format_version: int, extra_fields: Sequence[AvroSchema] = ()) -> Any:
    """Build the schema of a manifest list, with the fields that only its previous writer knows."""
    row_ids = (_FIRST_ROW_ID,) if format_version >= FORMAT_WITH_ROW_IDS else ()
    fields = [*MANIFEST_FILE_FIELDS, *row_ids, *extra_fields]
    return fastavro.parse_schema({"type": "record", "name": "manifest_file", "fields": fields})


@lru_cache(maxsize=256)
def manifest_schema(spec: PartitionSpec, types: tuple[str, ...], format_version: int) -> Any:
    """Build the schema of a manifest: its partition tuple depends on the table's spec."""
    partition = [_partition_field(f.field_id, f.name, type_) for f, type_ in zip(spec.fields, types, strict=True)]
    data_file = {"type": "record", "name": "r2", "fields": _data_file_fields(partition, format_version)}
    fields = [
        _required(0, "status", "int"),
        _optional(1, "snapshot_id", "long"),
        _optional(3, "sequence_number", "long"),
        _optional(4, "file_sequence_number", "long"),
        _required(2, "data_file", data_file),
    ]
    return fastavro.parse_schema({"type": "record", "name": "manifest_entry", "fields": fields})


def _data_file_fields(partition: list[AvroSchema], format_version: int) -> list[AvroSchema]:
    fields = [
        _required(134, "content", "int"),
        _required(100, "file_path", "string"),
        _required(101, "file_format", "string"),
        _required(102, "partition", {"type": "record", "name": "r102", "fields": partition}),
        _required(103, "record_count", "long"),
        _required(104, "file_size_in_bytes", "long"),
        _optional(108, "column_sizes", _map_of(117, 118, "long")),
        _optional(109, "value_counts", _map_of(119, 120, "long")),
        _optional(110, "null_value_counts", _map_of(121, 122, "long")),
        _optional(137, "nan_value_counts", _map_of(138, 139, "long")),
        _optional(125, "lower_bounds", _map_of(126, 127, "bytes")),
        _optional(128, "upper_bounds", _map_of(129, 130, "bytes")),
        _optional(131, "key_metadata", "bytes"),
        _optional(132, "split_offsets", _list_of(133, "long")),
        _optional(135, "equality_ids", _list_of(136, "int")),
        _optional(140, "sort_order_id", "int"),
    ]
    if format_version >= FORMAT_WITH_ROW_IDS:
        fields += [
            _optional(142, "first_row_id", "long"),
            _optional(143, "referenced_data_file", "string"),
            _optional(144, "content_offset", "long"),
            _optional(145, "content_size_in_bytes", "long"),
        ]
    return fields


def _partition_field(field_id: int, name: str, type_: str) -> AvroSchema:
    field = _optional(field_id, avro_name(name), _partition_type(field_id, type_))
    return field if field["name"] == name else {**field, "iceberg-field-name": name}


def _partition_type(field_id: int, type_: str) -> Any:
    # Avro knows fixed types by name and defines each name once, hence the field id in it.
    if type_ in _PRIMITIVES:
        return _PRIMITIVES[type_]
    if type_ == "uuid":
        return {"type": "fixed", "size": 16, "logicalType": "uuid", "name": f"uuid_{field_id}"}
    if fixed := _FIXED.fullmatch(type_):
        return {"type": "fixed", "size": int(fixed[1]), "name": f"fixed_{field_id}"}
    if decimal := _DECIMAL.fullmatch(type_):
        return _decimal(field_id, int(decimal[1]), int(decimal[2]))
    raise PartitionRejected(f"type cannot be a partition: type={type_}")


def _decimal(field_id: int, precision: int, scale: int) -> AvroSchema:
    size = ((10**precision - 1).bit_length() + 8) // 8  # with one bit for the sign
    decimal = {"logicalType": "decimal", "precision": precision, "scale": scale}
    return {"type": "fixed", "size": size, "name": f"decimal_{field_id}", **decimal}


def avro_name(name: str) -> str:
    """Give a field's name in the letters that Avro allows, as other Iceberg writers do."""
    safe = _NOT_IN_NAMES.sub(lambda match: f"_x{ord(match[0]):X}", name)
    return f"_{safe}" if safe[:1].isdigit() else safe


# --- writer.iceberg.manifests -----------------------------------------------------------------------------------------


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
