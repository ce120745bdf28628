"""Avro schemas of manifests and manifest lists, formats 2 and 3. Owns names, types and field ids, no values.

Readers go by the `field-id` of each Avro field; names are the specification's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import fastavro

from writer.iceberg.partitions import PartitionSpec
from writer.iceberg.terms import PartitionRejected

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
