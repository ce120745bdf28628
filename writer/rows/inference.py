"""The type of a column that nobody declared, from the values that came for it. Owns the rules.

Values are added to a `Seen`, which settles on a general type that holds them all, never on a special one: text that
looks like a time stays text.

    true, false          boolean             objects            struct
    integers             long                lists of one type  list
    other numbers        double              null, {}, []       nothing yet
    text                 string              any mixture        JSON text
    __bigint__:123       long                numbers too long   JSON text

An object whose fields change their type from row to row is JSON text as a whole, and so are a list of such objects, an
object with very many fields (its names are data) or with names that no column can have, and what is nested too deeply.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from writer.rows import exact_numbers as numbers
from writer.rows.column_notes import JSON_DOC
from writer.rows.field_names import are_usable_together
from writer.rows.misfits import as_double, as_integer, plain_number
from writer.rows.parse_types import ELEMENT, Path
from writer.types import UNNUMBERED, Field, ListType, StructType, Type

# Deeper objects are documents, not columns; engines also walk types recursively.
NESTING_MAX_DEPTH = 12
# An object with more fields than this in its first rows uses its names as data.
STRUCT_MAX_FIELDS = 200


class Text(enum.Enum):
    """Why values become JSON text."""

    MIXED = "values of several types"
    DOCUMENT = "a shape that columns do not have"


# What values settle on; fields of a type are not numbered yet.
Settled: TypeAlias = Type | Text


def field_of(name: str, settled: Settled) -> Field:
    """Make a field of what its values settled on."""
    if isinstance(settled, Text):
        return Field(UNNUMBERED, name, "string", doc=JSON_DOC)
    return Field(UNNUMBERED, name, settled)


@dataclass(slots=True)
class Seen:
    """What has come for one field."""

    depth: int = 1
    kinds: set[str] = field(default_factory=set)
    fields: dict[str, Seen] = field(default_factory=dict)
    element: Seen | None = None

    def add(self, value: Any) -> None:
        """Take one more value into account."""
        if value is None:
            return
        self.kinds.add(_kind_of(value))
        if self.depth >= NESTING_MAX_DEPTH:
            return
        if isinstance(value, dict):
            self._add_members(value)
        elif isinstance(value, list):
            self.element = self.element or Seen(self.depth + 1)
            for each in value:
                self.element.add(each)

    def _add_members(self, members: dict[str, Any]) -> None:
        for name, value in members.items():
            # One more than allowed is enough to know that there are too many.
            if name in self.fields or len(self.fields) <= STRUCT_MAX_FIELDS:
                self.fields.setdefault(name, Seen(self.depth + 1)).add(value)

    def settle(self) -> Settled | None:
        """Choose the type, None if nothing that came has one."""
        if not self.kinds:
            return None
        if self.kinds == {"long", "double"}:
            return "double"
        if len(self.kinds) > 1:
            return Text.MIXED
        (kind,) = self.kinds
        match kind:
            case "object":
                return self._settle_object()
            case "list":
                return self._settle_list()
            case "long number":
                return Text.DOCUMENT
        return kind

    def _settle_object(self) -> Settled | None:
        if self.depth >= NESTING_MAX_DEPTH or len(self.fields) > STRUCT_MAX_FIELDS:
            return Text.DOCUMENT
        fields = {name: settled for name, seen in self.fields.items() if (settled := seen.settle()) is not None}
        if Text.MIXED in fields.values() or not are_usable_together(fields):
            return Text.DOCUMENT
        return StructType(tuple(field_of(name, settled) for name, settled in fields.items())) if fields else None

    def _settle_list(self) -> Settled | None:
        if self.element is None:
            return Text.DOCUMENT
        element = self.element.settle()
        if isinstance(element, Text):
            return Text.DOCUMENT
        return None if element is None else ListType(UNNUMBERED, element)

    def vacancies(self, path: Path) -> Iterator[Path]:
        """Give the paths at and below `path` where only nulls have come."""
        if not self.kinds:
            yield path
        for name, seen in self.fields.items():
            yield from seen.vacancies((*path, name))
        if self.element is not None and self.element.kinds:
            yield from self.element.vacancies((*path, ELEMENT))


# Python's types for parsed JSON; whatever is not here has to be looked at.
_KINDS = {bool: "boolean", dict: "object", list: "list", int: "long"}


def _kind_of(value: Any) -> str:
    if (kind := _KINDS.get(type(value))) is not None:
        return kind
    if isinstance(value, str) and numbers.bigint_of(value) is None:
        return "string"
    if numbers.is_integer_text(plain_number(value) or ""):
        return "long number" if as_integer(value, numbers.INT64_MIN, numbers.INT64_MAX) is None else "long"
    return "long number" if as_double(value, single=False) is None else "double"
