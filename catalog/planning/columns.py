"""The columns of a schema, as filters and statistics refer to them. Core: owns lookup by id and by full name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from catalog.errors import ValidationFailed
from catalog.fields import JsonObject

FLOATS = ("float", "double")


@dataclass(frozen=True, slots=True)
class Column:
    """One field at any depth. `type_` of a struct, list or map is that word, of others the type with its parameters."""

    field_id: int
    name: str
    type_: str
    nullable: bool
    nested: bool
    in_collection: bool


class Columns:
    """The columns of one schema. Names are looked up with or without regard to case."""

    def __init__(self, schema: Mapping[str, Any], *, case_sensitive: bool) -> None:
        self._case_sensitive = case_sensitive
        self._by_id: dict[int, Column] = {}
        self._by_name: dict[str, list[Column]] = {}
        for column in _walk(schema, prefix="", nullable=False, in_collection=False):
            self._by_id[column.field_id] = column
            self._by_name.setdefault(self._key(column.name), []).append(column)

    def by_id(self, field_id: int) -> Column | None:
        """Return a column by its field id."""
        return self._by_id.get(field_id)

    def named(self, name: str) -> Column:
        """Return a column by its full name.

        Raises: ValidationFailed if there is none, or more than one that differ by case only.
        """
        found = self._by_name.get(self._key(name), [])
        if not found:
            raise ValidationFailed(f"Cannot find field '{name}' in the schema")
        if len(found) > 1:
            raise ValidationFailed(f"Field name is ambiguous without regard to case: {name}")
        return found[0]

    def _key(self, name: str) -> str:
        return name if self._case_sensitive else name.lower()


def _walk(struct: Mapping[str, Any], *, prefix: str, nullable: bool, in_collection: bool) -> Iterator[Column]:
    """Walk the fields of a struct. A field is nullable if it or anything around it may be null."""
    for field in struct["fields"]:
        name = prefix + field["name"]
        may_be_null = nullable or not field["required"]
        yield Column(field["id"], name, _type_name(field["type"]), may_be_null, bool(prefix), in_collection)
        yield from _walk_type(field["type"], prefix=f"{name}.", nullable=may_be_null, in_collection=in_collection)


def _walk_type(type_: Any, *, prefix: str, nullable: bool, in_collection: bool) -> Iterator[Column]:
    if isinstance(type_, str):
        return
    if type_["type"] == "struct":
        yield from _walk(type_, prefix=prefix, nullable=nullable, in_collection=in_collection)
        return
    for part in ("element",) if type_["type"] == "list" else ("key", "value"):
        name = prefix + part
        yield Column(type_[f"{part}-id"], name, _type_name(type_[part]), True, True, True)
        yield from _walk_type(type_[part], prefix=f"{name}.", nullable=True, in_collection=True)


def _type_name(type_: str | JsonObject) -> str:
    return type_.replace(" ", "") if isinstance(type_, str) else str(type_["type"])
