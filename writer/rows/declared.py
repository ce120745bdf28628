"""Columns that a source or an operator declares: the form and its checks. What becomes of them is declaring.py's.

    {"columns": {"id": "long",
                 "price": "decimal(18, 2)",
                 "document": "json",
                 "tags": {"type": "list", "element": "string"},
                 "home": {"type": "struct", "fields": {"zip": {"type": "int", "renamedFrom": "code"}}},
                 "rates": {"type": "map", "key": "string", "value": "double"}},
     "identifier": ["id"]}

The same in JSON (from a source, in `connect`) and in TOML (from an operator). A type is named as Iceberg names it, and
`json` is text that holds a JSON document. There is no `required`: a delete may bring nothing but its key, so columns of
a change table are optional.

What passes here is a struct of fields without ids, of which those that declare a former name or a key say so in their
comments (column_notes.py).
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache
from typing import Any

import msgspec

from writer.errors import WriterError
from writer.rows.column_notes import JSON_DOC, as_key, with_former_names
from writer.rows.evolution import FIELDS_MAX, full_names
from writer.rows.exact_numbers import DECIMAL_MAX_PRECISION, decimal_parts
from writer.rows.field_names import NAME_MAX_CHARS, is_usable, is_usable_column
from writer.rows.inference import NESTING_MAX_DEPTH
from writer.rows.map_keys import can_be_key
from writer.types import PRIMITIVES, UNNUMBERED, Field, ListType, MapType, StructType, Type

# All that a source declares at once. A column takes some thirty bytes, so this is room for two thousand.
DECLARATIONS_MAX_BYTES = 64 * 1024

# Declarations that are kept read: those of the sources that are connected, most of them alike.
DECLARATIONS_MAX = 256

_FIXED = re.compile(r"fixed\[([1-9][0-9]{0,4})\]")

# What may stand beside the type, by type.
_PARTS = {"struct": {"fields"}, "list": {"element"}, "map": {"key", "value"}}
_RENAMED_FROM = "renamedFrom"


NOTHING_DECLARED = StructType(())


class DeclarationMalformed(WriterError):
    """What is declared breaks a rule of the form: refuse it. The message names the place and the rule."""


def parse_declarations(document: Any, *, path: str) -> dict[str, StructType]:
    """Read what is declared of several tables, by the name of the source's table.

    Raises: DeclarationMalformed.
    """
    tables = _object(document, path)
    return {table: parse_declaration(each, path=f"{path}.{table}") for table, each in tables.items()}


@lru_cache(maxsize=DECLARATIONS_MAX)
def declaration_from_text(text: str) -> StructType:
    """Read what is declared of one table from a record of the log, which only has what passed before."""
    return parse_declaration(msgspec.json.decode(text), path="declared")


def parse_declaration(document: Any, *, path: str = "") -> StructType:
    """Read what is declared of one table; `path` is where that stands, for messages.

    Raises: DeclarationMalformed.
    """
    parts = _object(document, path)
    _check_parts(parts, {"columns", "identifier"}, path)
    columns = _below(path, "columns")
    fields = _fields(parts.get("columns", {}), columns, depth=1)
    for field in fields:
        _check(is_usable_column(field.name), f"{columns}.{field.name}", "expected another name: this one is taken")
    names = list(full_names(fields))
    _check(len(names) <= FIELDS_MAX, columns, f"expected at most {FIELDS_MAX} columns and fields")
    _check(len(set(names)) == len(names), columns, "expected names that differ by more than case")
    return StructType(_with_keys(fields, parts.get("identifier", []), _below(path, "identifier")))


def _below(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _with_keys(fields: tuple[Field, ...], names: Any, path: str) -> tuple[Field, ...]:
    known = {field.name for field in fields}
    right = isinstance(names, list) and all(isinstance(name, str) and name in known for name in names)
    _check(right, path, "expected a list of names of declared columns")
    return tuple(as_key(field) if field.name in names else field for field in fields)


def _fields(document: Any, path: str, *, depth: int) -> tuple[Field, ...]:
    return tuple(_field(name, each, f"{path}.{name}", depth=depth) for name, each in _object(document, path).items())


def _field(name: str, document: Any, path: str, *, depth: int) -> Field:
    _check(
        is_usable(name), path, f"expected a name of 1 to {NAME_MAX_CHARS} characters, none of them control characters"
    )
    former = document.get(_RENAMED_FROM) if isinstance(document, dict) else None
    if former is not None:
        _check(isinstance(former, str) and is_usable(former), f"{path}.{_RENAMED_FROM}", "expected a name")
        _check(former != name, f"{path}.{_RENAMED_FROM}", "expected another name than the column's own")
        document = {key: value for key, value in document.items() if key != _RENAMED_FROM}
    if document in (JSON_DOC, {"type": JSON_DOC}):
        field = Field(UNNUMBERED, name, "string", doc=JSON_DOC)
    else:
        field = Field(UNNUMBERED, name, _type(document, path, depth=depth))
    return field if former is None else with_former_names(field, (former,))


def _type(document: Any, path: str, *, depth: int) -> Type:
    if isinstance(document, str):
        return _primitive(document, path)
    parts = _object(document, path, expected="the name of a type, or an object with `type`")
    kind = parts.get("type")
    if kind not in _PARTS:
        _check_parts(parts, {"type"}, path)
        return _primitive(kind, f"{path}.type")
    _check_parts(parts, {"type", *_PARTS[kind]}, path)
    _check(depth < NESTING_MAX_DEPTH, path, f"expected at most {NESTING_MAX_DEPTH} levels")
    match kind:
        case "struct":
            fields = _fields(parts.get("fields"), f"{path}.fields", depth=depth + 1)
            _check(bool(fields), f"{path}.fields", "expected at least one field")
            return StructType(fields)
        case "list":
            return ListType(UNNUMBERED, _type(parts.get("element"), f"{path}.element", depth=depth + 1))
    key = _type(parts.get("key"), f"{path}.key", depth=depth + 1)
    _check(
        isinstance(key, str) and can_be_key(key), f"{path}.key", "expected a type whose values JSON can write as a name"
    )
    return MapType(UNNUMBERED, key, UNNUMBERED, _type(parts.get("value"), f"{path}.value", depth=depth + 1))


def _primitive(name: Any, path: str) -> str:
    if isinstance(name, str):
        if (parts := decimal_parts(name)) is not None:
            precision, scale = parts
            right = 1 <= precision <= DECIMAL_MAX_PRECISION and scale <= precision
            _check(
                right, path, f"expected at most {DECIMAL_MAX_PRECISION} digits, and no more of them behind the point"
            )
            return f"decimal({precision}, {scale})"
        if name in PRIMITIVES or _FIXED.fullmatch(name):
            return name
    known = ", ".join((*PRIMITIVES, "decimal(p, s)", "fixed[n]", *_PARTS))
    raise DeclarationMalformed(f"{path}: expected a type, one of {known}; or {JSON_DOC} for a column or field")


def _object(document: Any, path: str, *, expected: str = "an object") -> dict[str, Any]:
    if not isinstance(document, dict):
        raise DeclarationMalformed(f"{path}: expected {expected}")
    return document


def _check_parts(parts: dict[str, Any], known: set[str], path: str) -> None:
    unknown = sorted(parts.keys() - known)
    _check(not unknown, _below(path, "".join(unknown[:1])), f"expected one of {', '.join(sorted(known))}")


def _check(condition: bool, path: str, rule: str) -> None:
    if not condition:
        raise DeclarationMalformed(f"{path}: {rule}")


def without_nanoseconds(fields: tuple[Field, ...]) -> tuple[Field, ...]:
    """Give the same declaration for a table whose format has no nanoseconds: there moments are in microseconds."""
    return tuple(replace(field, type=_without_nanoseconds(field.type)) for field in fields)


def _without_nanoseconds(type_: Type) -> Type:
    match type_:
        case StructType(fields):
            return StructType(without_nanoseconds(fields))
        case ListType(element=element):
            return replace(type_, element=_without_nanoseconds(element))
        case MapType(key=key, value=value):
            return replace(type_, key=_without_nanoseconds(key), value=_without_nanoseconds(value))
        case str():
            return type_.removesuffix("_ns")
