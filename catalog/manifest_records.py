"""Iceberg's manifest lists and manifests as records. Core: the one reader of their Avro bytes and of the paths in them.

    manifest list (one per snapshot) -> manifests (data or deletes) -> entries, one per file

Scan planning reads whole records (planning/manifests.py). A purge wants paths alone, so its records are projected onto
them, by the names that their writer uses: statistics are skipped, and no writer's types stand in the way.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from enum import IntEnum
from typing import Any, TypeAlias

import fastavro
import orjson

from catalog.errors import StorageFailed

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

    Raises: StorageFailed if it is damaged.
    """
    try:
        return [record["manifest_path"] for record in read_records(manifest_list, _OF_LIST)]
    except UNREADABLE as error:
        raise _damaged(location) from error


def live_files_of(manifest: bytes, location: str) -> list[str]:
    """Read where the files of a manifest are, each once, but for those that it calls deleted.

    Raises: StorageFailed if it is damaged.
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


def _damaged(location: str) -> StorageFailed:
    return StorageFailed(f"File is not what its place says: {location}")
