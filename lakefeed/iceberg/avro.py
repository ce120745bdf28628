"""Avro form of manifests and manifest lists: one reader, one writer, and the schemas of formats 2 and 3.

Values are read without Avro's logical types: Python's dates end at year 9999, which Iceberg's do not, and a decimal is
read as its stored bytes. Every error of unreadable bytes is raised as ManifestUnreadable.

Readers of Iceberg match fields by the `field-id` of each Avro field; the names are those of the specification.
"""

from __future__ import annotations

import io
import re
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, TypeAlias

import fastavro
import orjson
from fastavro.schema import SchemaParseException

from lakefeed.contract.errors import ManifestUnreadable
from lakefeed.iceberg.layout import PartitionSpec
from lakefeed.iceberg.terms import PartitionRejected
from lakefeed.iceberg.types import decimal_parts, fixed_length

AvroSchema: TypeAlias = dict[str, Any]
Record: TypeAlias = dict[str, Any]

# The fields to read; one that is a record has fields of its own.
Projection: TypeAlias = Mapping[str, Any]

FORMAT_WITH_ROW_IDS = 3

_CODEC = "deflate"  # the one codec, beside none, that every Avro reader has
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
# Logical types that fastavro would apply, or a backslash that may hide one. Maps are skipped: they are arrays in Avro.
_LOGICAL_TYPE = re.compile(rb'\\|"logicalType"\s*:\s*"(?!map")')
# What fastavro and its codecs raise for damaged bytes.
_UNREADABLE = (
    *(ValueError, TypeError, KeyError, IndexError, AttributeError, EOFError, StopIteration),
    *(ArithmeticError, MemoryError, RecursionError, struct.error, zlib.error, SchemaParseException),
)


@contextmanager
def reading(location: str) -> Iterator[None]:
    """Raise every error of unreadable bytes as ManifestUnreadable."""
    try:
        yield
    except _UNREADABLE as error:
        raise ManifestUnreadable(f"not a readable manifest or manifest list: {location}") from error


def read_avro(data: bytes, *, wanted: Projection | None = None) -> tuple[list[AvroSchema], Iterator[Record]]:
    """Read the fields of an Avro file's schema, and its records, with the wanted fields only.

    Call it and read the records inside `reading`: damaged bytes raise various errors, at once or at a later record.
    """
    source = io.BytesIO(data)
    header: Any = fastavro.schemaless_reader(source, _HEADER, None)
    if header["magic"] != _MAGIC:
        raise ValueError("not an Avro file")
    text = header["meta"]["avro.schema"]
    schema = plain_schema = orjson.loads(text)
    if _LOGICAL_TYPE.search(text):
        plain_schema = _without_logical_types(schema)
        header["meta"]["avro.schema"] = orjson.dumps(plain_schema)
        records = data[source.tell() :]
        source = io.BytesIO()
        fastavro.schemaless_writer(source, _HEADER, header)
        source.write(records)
    source.seek(0)
    reader: Any = fastavro.reader(source, reader_schema=None if wanted is None else _project(plain_schema, wanted))
    return schema["fields"], iter(reader)


def write_avro(schema: Any, records: Iterable[Mapping[str, Any]], metadata: dict[str, str]) -> bytes:
    """Encode records by a parsed schema."""
    sink = io.BytesIO()
    fastavro.writer(sink, schema, records, codec=_CODEC, metadata=metadata)
    return sink.getvalue()


def _without_logical_types(schema: Any) -> Any:
    if isinstance(schema, dict):
        return {key: _without_logical_types(value) for key, value in schema.items() if key != "logicalType"}
    if isinstance(schema, list):
        return [_without_logical_types(item) for item in schema]
    return schema


def _project(record: Any, wanted: Projection) -> AvroSchema:
    fields = [
        field if (inner := wanted[field["name"]]) is None else {**field, "type": _project(field["type"], inner)}
        for field in record["fields"]
        if field["name"] in wanted
    ]
    return {"type": "record", "name": record["name"], "fields": fields}


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
    partition = []
    for part, type_ in zip(spec.fields, types, strict=True):
        field = _optional(part.field_id, avro_name(part.name), _partition_type(part.field_id, type_))
        partition.append(field if field["name"] == part.name else {**field, "iceberg-field-name": part.name})
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


def _partition_type(field_id: int, type_: str) -> Any:
    # Avro refers to fixed types by name and defines each name once, so the field id is part of the name.
    if type_ in _PRIMITIVES:
        return _PRIMITIVES[type_]
    if type_ == "uuid":
        return {"type": "fixed", "size": 16, "logicalType": "uuid", "name": f"uuid_{field_id}"}
    if (length := fixed_length(type_)) is not None:
        return {"type": "fixed", "size": length, "name": f"fixed_{field_id}"}
    if decimal := decimal_parts(type_):
        precision, scale = decimal
        logical = {"logicalType": "decimal", "precision": precision, "scale": scale}
        return {"type": "fixed", "size": decimal_size(precision), "name": f"decimal_{field_id}", **logical}
    raise PartitionRejected(f"type cannot be a partition: type={type_}")


def decimal_size(precision: int) -> int:
    """Return how many bytes a decimal takes in Avro, with one bit for the sign."""
    return (int(10**precision - 1).bit_length() + 8) // 8


def avro_name(name: str) -> str:
    """Return a field's name in the letters that Avro allows, as other Iceberg writers do."""
    safe = _NOT_IN_NAMES.sub(lambda match: f"_x{ord(match[0]):X}", name)
    return f"_{safe}" if safe[:1].isdigit() else safe
