"""Column comments: what Lakefeed stores about a column in its comment, where every engine shows it.

    json                   the column's text is a JSON document
    key                    the column is part of the row's key, as its source declared
    formerly ["client"]    earlier names of the column; rows that still use one are meant for this column

These notes follow any other text of the comment, in this order, separated by "; ". They are stored only in the schema,
so that a rename and the memory of the old name are one atomic commit in every catalog. Removing a note from the comment
revokes it.
"""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeAlias

import msgspec

from lakefeed.iceberg.types import Field

# The names from a table's column down to a field, with the steps below into lists and maps.
Path: TypeAlias = tuple[str, ...]
ELEMENT = "element"
KEY = "key"
VALUE = "value"

# The note of a string column whose values are JSON text.
JSON_DOC = "json"
KEY_DOC = "key"

# Names that are kept per column. After that many renames no rows use the first ones any more.
FORMER_NAMES_MAX = 8

# Parsed comments that are cached.
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
    """A parsed comment; `own` is the text that is not Lakefeed's."""

    own: str = ""
    is_json: bool = False
    is_key: bool = False
    former_names: tuple[str, ...] = ()


@lru_cache(maxsize=COMMENTS_MAX)
def read_notes(doc: str | None) -> Notes:
    """Parse a comment."""
    found = _COMMENT.fullmatch(doc or "")
    assert found is not None, "the pattern matches any text"
    try:
        former = msgspec.json.decode(found["names"] or "[]", type=tuple[str, ...])
    except msgspec.DecodeError:
        return Notes(own=doc or "")
    return Notes(found["own"], found["json"] is not None, found["key"] is not None, former)


def write_notes(notes: Notes) -> str | None:
    """Write a comment, None if it would be empty."""
    names = _FORMERLY + msgspec.json.encode(notes.former_names).decode() if notes.former_names else ""
    parts = (notes.own, JSON_DOC if notes.is_json else "", KEY_DOC if notes.is_key else "", names)
    return _SEPARATOR.join(filter(None, parts)) or None


def is_json(doc: str | None) -> bool:
    """Return whether a column's values are JSON text."""
    return doc is not None and read_notes(doc).is_json


def is_key(field: Field) -> bool:
    """Return whether a column is part of the row's key."""
    return read_notes(field.doc).is_key


def former_names(field: Field) -> tuple[str, ...]:
    """Return the earlier names of a field, newest first."""
    return () if field.doc is None else read_notes(field.doc).former_names


def name_in(field: Field, names: Container[str]) -> str | None:
    """Return which of some names means a field: its own, else a former one; None if no name does."""
    if field.name in names:
        return field.name
    return next((name for name in former_names(field) if name in names), None)


def with_former_names(field: Field, names: tuple[str, ...]) -> Field:
    """Return a field with more former names, which are newer than those it already has."""
    notes = read_notes(field.doc)
    every = dict.fromkeys((*names, *notes.former_names))
    every.pop(field.name, None)
    return replace(field, doc=write_notes(replace(notes, former_names=tuple(every)[:FORMER_NAMES_MAX])))


def as_key(field: Field) -> Field:
    """Return a column marked as part of the row's key."""
    return replace(field, doc=write_notes(replace(read_notes(field.doc), is_key=True)))
