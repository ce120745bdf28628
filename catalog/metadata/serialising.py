"""Documents as the bytes of their files. Core: owns that a commit does not serialise again what its base had already.

Snapshots are nearly all of an old table's document, and a commit adds one to those that were there. So they come last
in a file, and the next version takes over the bytes of the list that it continues:

    base:  {"format-version":2, ... ,"snapshots":[a,b,c]}
    next:  {"format-version":2, ... ,"snapshots":[a,b,c,d]}      the bytes of a, b and c are the base's
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import orjson

from catalog.fields import JsonObject

SNAPSHOTS = "snapshots"

_KEY = b',"snapshots":'
_END = b"]}"


@dataclass(frozen=True, slots=True)
class Serialised:
    """A document and its bytes. `snapshots_at` is where the list of snapshots begins in them, if they end with it."""

    document: JsonObject
    raw: bytes
    snapshots_at: int | None


def serialise(document: JsonObject, base: Serialised | None = None) -> Serialised:
    """Serialise a document, reusing what it shares with the one that it was made from."""
    found = document.get(SNAPSHOTS)
    if not isinstance(found, list) or not found:  # a view may carry anything under this name
        return Serialised(document, orjson.dumps(document), None)
    head = orjson.dumps({key: value for key, value in document.items() if key != SNAPSHOTS})
    raw = b"".join((memoryview(head)[:-1], _KEY, *_snapshot_bytes(document, base), b"}"))
    return Serialised(document, raw, len(head) - 1 + len(_KEY))


def _snapshot_bytes(document: JsonObject, base: Serialised | None) -> Sequence[bytes | memoryview]:
    found = document[SNAPSHOTS]
    if base is None or base.snapshots_at is None or not _continues(document, base.document):
        return (orjson.dumps(found),)
    known = memoryview(base.raw)[base.snapshots_at : -len(_END)]
    added = orjson.dumps(found[len(base.document[SNAPSHOTS]) :])
    return known, b"" if added == b"[]" else b",", memoryview(added)[1:]


def _continues(document: JsonObject, base: JsonObject) -> bool:
    """Tell whether a list of snapshots begins with all of another one; the very same ones, which nobody changes."""
    ours, theirs = document[SNAPSHOTS], base[SNAPSHOTS]
    return len(ours) >= len(theirs) and all(map(operator.is_, theirs, ours))
