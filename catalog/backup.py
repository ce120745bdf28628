"""What a store holds, as text. Core: owns the layout of a backup, which is the same for every kind of store.

    {"lakefeed-catalog-backup": 1}
    {"namespace": [level, ...], "properties": {...}}
    {"kind": "Table" or "View", "namespace": [level, ...], "name": name, "metadata-location": location,
     "digest": digest, "table-uuid": uuid}

One JSON object a line, namespaces first and parents before their children. Digest and uuid are left out where they are
not known.
"""

from __future__ import annotations

from typing import Any

import orjson

from catalog.errors import BadRequest
from catalog.fields import as_object, maybe_text, parse_object, read_int, read_text, read_text_map
from catalog.names import EntryId, Namespace, check_name, namespace_from_json
from catalog.pointers import Pointer
from catalog.store.protocol import Contents, entry_of

_VERSION_KEY = "lakefeed-catalog-backup"
_VERSION = 1


def encode_backup(contents: Contents) -> bytes:
    """Lay out a backup."""
    lines: list[dict[str, Any]] = [{_VERSION_KEY: _VERSION}]
    lines += [{"namespace": name, "properties": dict(held)} for name, held in contents.namespaces.items()]
    lines += [_entry_line(entry, pointer) for entry, pointer in contents.entries.items()]
    return b"".join(orjson.dumps(line) + b"\n" for line in lines)


def _entry_line(entry: EntryId, pointer: Pointer) -> dict[str, Any]:
    known = {"digest": pointer.digest, "table-uuid": pointer.table_uuid}
    return {
        "kind": entry.kind,
        "namespace": entry.namespace,
        "name": entry.name,
        "metadata-location": pointer.location,
        **{key: value for key, value in known.items() if value},
    }


def decode_backup(text: bytes) -> Contents:
    """Read a backup.

    Raises: BadRequest, with the number of the line.
    """
    head, *lines = text.splitlines() or [b"{}"]
    if read_int(parse_object(head), _VERSION_KEY) != _VERSION:
        raise BadRequest(f"Backup is of an unknown version: {head.decode(errors='replace')}")
    namespaces: dict[Namespace, dict[str, str]] = {}
    entries: dict[EntryId, Pointer] = {}
    for number, line in enumerate(lines, start=2):
        try:
            _read_line(line, namespaces, entries)
        except BadRequest as error:
            raise BadRequest(f"Backup cannot be read: {error}: line={number}") from error
    return Contents(namespaces, entries)


def _read_line(line: bytes, namespaces: dict[Namespace, dict[str, str]], entries: dict[EntryId, Pointer]) -> None:
    document = as_object(parse_object(line), "line")
    namespace = namespace_from_json(document)
    if "kind" not in document:
        namespaces[namespace] = read_text_map(document, "properties")
        return
    if namespace not in namespaces:
        raise BadRequest("the namespace does not come before what it holds")
    entry = entry_of(read_text(document, "kind"), namespace, check_name(document.get("name"), "name"))
    entries[entry] = Pointer(
        read_text(document, "metadata-location"),
        digest=maybe_text(document, "digest") or "",
        table_uuid=maybe_text(document, "table-uuid") or "",
    )
