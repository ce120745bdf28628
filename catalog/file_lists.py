"""Which files Iceberg's manifest lists and manifests name. Core: reads paths from Avro bytes, and nothing else.

    manifest list  ->  manifest_path             of every manifest
    manifest       ->  status, data_file.file_path   of every entry that is live

The records are projected onto these fields, named as their writer names them, so that statistics are skipped and no
writer's types stand in the way.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import fastavro

from catalog.errors import StorageFailed

_DELETED = 2

# The fields to read; one that is a record has fields of its own.
_Wanted: TypeAlias = Mapping[str, Any]
_OF_LIST: _Wanted = {"manifest_path": None}
_OF_MANIFEST: _Wanted = {"status": None, "data_file": {"file_path": None}}

# What fastavro and the codecs below it raise for bytes that are not what they should be.
_UNREADABLE = (ValueError, TypeError, KeyError, IndexError, EOFError, StopIteration, OverflowError, ArithmeticError)


def manifests_of(manifest_list: bytes, location: str) -> list[str]:
    """Read where the manifests of a list are.

    Raises: StorageFailed if it is damaged.
    """
    return [record["manifest_path"] for record in _read(manifest_list, _OF_LIST, location)]


def live_files_of(manifest: bytes, location: str) -> list[str]:
    """Read where the files of a manifest are, each once, but for those that it calls deleted.

    Raises: StorageFailed if it is damaged.
    """
    records = _read(manifest, _OF_MANIFEST, location)
    paths = (record["data_file"]["file_path"] for record in records if record["status"] != _DELETED)
    return list(dict.fromkeys(paths))


def _read(data: bytes, wanted: _Wanted, location: str) -> Iterator[Any]:
    try:
        written: Any = fastavro.reader(io.BytesIO(data)).writer_schema
        yield from fastavro.reader(io.BytesIO(data), reader_schema=_project(written, wanted))
    except _UNREADABLE as error:
        raise StorageFailed(f"File is not what its place says: {location}") from error


def _project(record: Any, wanted: _Wanted) -> dict[str, Any]:
    fields = [
        field if (inner := wanted[field["name"]]) is None else {**field, "type": _project(field["type"], inner)}
        for field in record["fields"]
        if field["name"] in wanted
    ]
    return {"type": "record", "name": record["name"], "fields": fields}
