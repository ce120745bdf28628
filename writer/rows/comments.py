"""What Lakefeed remembers of a column in its comment, where every engine shows it. Owns the comment's form.

    json                   its text is a JSON document
    key                    it is part of the row's key, as its source declared
    formerly ["client"]    names that it had before; rows that still use one are meant for this column

Notes stand behind whatever else the comment says, in this order, parted by "; ". They live in the schema and nowhere
else, so a rename and the memory of the old name are one atomic commit, whichever catalog keeps the table. Who removes
a note from the comment takes it back.
"""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeAlias

import msgspec

from lakefeed.iceberg.types import Field

# --- writer.rows.column_notes -----------------------------------------------------------------------------------------


# The note of a string column whose values are JSON text.
JSON_DOC = "json"
KEY_DOC = "key"

# Names that one column is remembered by. Who renames more often than that has no rows left under the first ones.
FORMER_NAMES_MAX = 8

# Comments whose notes are kept read.
COMMENTS_MAX = 4096

_SEPARATOR = "; "
_FORMERLY = "formerly "
_COMMENT = re.compile(
    rf"(?P<own>.*?)(?:(?:^|; )(?P<json>{JSON_DOC}))?(?:(?:^|; )(?P<key>{KEY_DOC}))?"
    rf"(?:(?:^|; ){_FORMERLY}(?P<names>\[.*\]))?",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Notes:
    """A comment taken apart; `own` is what is not ours."""

    own: str = ""
    is_json: bool = False
    is_key: bool = False
    former_names: tuple[str, ...] = ()


@lru_cache(maxsize=COMMENTS_MAX)
def read_notes(doc: str | None) -> Notes:
    """Take a comment apart."""
    found = _COMMENT.fullmatch(doc or "")
    assert found is not None, "the pattern takes any text"
    try:
        former = msgspec.json.decode(found["names"] or "[]", type=tuple[str, ...])
    except msgspec.DecodeError:
        return Notes(own=doc or "")
    return Notes(found["own"], found["json"] is not None, found["key"] is not None, former)


def write_notes(notes: Notes) -> str | None:
    """Put a comment together, None where it would be empty."""
    names = _FORMERLY + msgspec.json.encode(notes.former_names).decode() if notes.former_names else ""
    parts = (notes.own, JSON_DOC if notes.is_json else "", KEY_DOC if notes.is_key else "", names)
    return _SEPARATOR.join(filter(None, parts)) or None


def is_json(doc: str | None) -> bool:
    """Tell whether a column's values are JSON text."""
    return doc is not None and read_notes(doc).is_json


def is_key(field: Field) -> bool:
    """Tell whether a column is part of the row's key."""
    return read_notes(field.doc).is_key


def former_names(field: Field) -> tuple[str, ...]:
    """Give the names that a field had before, newest first."""
    return () if field.doc is None else read_notes(field.doc).former_names


def name_in(field: Field, names: Container[str]) -> str | None:
    """Tell under which of some names a field is meant: its own, else a former one; None if under none."""
    if field.name in names:
        return field.name
    return next((name for name in former_names(field) if name in names), None)


def with_former_names(field: Field, names: tuple[str, ...]) -> Field:
    """Remember names that a field had before those it is remembered by already."""
    notes = read_notes(field.doc)
    every = dict.fromkeys((*names, *notes.former_names))
    every.pop(field.name, None)
    return replace(field, doc=write_notes(replace(notes, former_names=tuple(every)[:FORMER_NAMES_MAX])))


def as_key(field: Field) -> Field:
    """Mark a column as part of the row's key."""
    return replace(field, doc=write_notes(replace(read_notes(field.doc), is_key=True)))


# Paths of fields that rows name but that have only been null so far, so that nobody knows their type: no column holds
# them, and the strict decoder has to be told that they may come. The step into a list's elements is "element".
Path: TypeAlias = tuple[str, ...]
ELEMENT = "element"
# The steps into a map's entries.
KEY = "key"
VALUE = "value"
