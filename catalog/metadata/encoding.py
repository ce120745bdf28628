"""Encoding: documents as the bytes of their files, without encoding again what the base document had already.

Snapshots are nearly all of an old table's document, and a commit adds one to them. They come last in a file, and the
next version copies the bytes of the list that it continues:

    base:  {"format-version":2, ... ,"snapshots":[a,b,c]}
    next:  {"format-version":2, ... ,"snapshots":[a,b,c,d]}      the bytes of a, b and c are the base's
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import orjson

from lakefeed.catalog.json_fields import JsonObject

SNAPSHOTS = "snapshots"

_KEY = b',"snapshots":'
_END = b"]}"


@dataclass(frozen=True, slots=True)
class EncodedDocument:
    """A document and its bytes. `snapshots_at` is the position of the list of snapshots, if the bytes end with it."""

    document: JsonObject
    raw: bytes
    snapshots_at: int | None


def encode_document(document: JsonObject, base: EncodedDocument | None = None) -> EncodedDocument:
    """Encode a document. Bytes that it shares with its base are copied."""
    found = document.get(SNAPSHOTS)
    if not isinstance(found, list) or not found:  # a view may have any field of this name
        return EncodedDocument(document, orjson.dumps(document), None)
    head = orjson.dumps({key: value for key, value in document.items() if key != SNAPSHOTS})
    raw = b"".join((memoryview(head)[:-1], _KEY, *_snapshot_bytes(document, base), b"}"))
    return EncodedDocument(document, raw, len(head) - 1 + len(_KEY))


def _snapshot_bytes(document: JsonObject, base: EncodedDocument | None) -> Sequence[bytes | memoryview]:
    found = document[SNAPSHOTS]
    if base is None or base.snapshots_at is None or not _continues(document, base.document):
        return (orjson.dumps(found),)
    known = memoryview(base.raw)[base.snapshots_at : -len(_END)]
    added = orjson.dumps(found[len(base.document[SNAPSHOTS]) :])
    return known, b"" if added == b"[]" else b",", memoryview(added)[1:]


def _continues(document: JsonObject, base: JsonObject) -> bool:
    """Return whether the snapshots begin with all of the base: the same objects, which are never changed."""
    ours, theirs = document[SNAPSHOTS], base[SNAPSHOTS]
    return len(ours) >= len(theirs) and all(map(operator.is_, theirs, ours))
