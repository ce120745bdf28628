"""Declared columns: what a source or an operator declares about a table, and how its columns change for it.

    {"columns": {"id": "long",
                 "price": "decimal(18, 2)",
                 "document": "json",
                 "tags": {"type": "list", "element": "string"},
                 "home": {"type": "struct", "fields": {"zip": {"type": "int", "renamedFrom": "code"}}},
                 "rates": {"type": "map", "key": "string", "value": "double"}},
     "identifier": ["id"]}

The form is the same in JSON (from a source, in `connect`) and in TOML (from an operator). Types have Iceberg's names;
`json` is text that holds a JSON document. There is no `required`: a delete may bring only its key, so columns of a
change table are optional. A parsed declaration is a struct of fields without ids; former names and keys are in the
fields' comments (comments.py).

    a field that the table lacks      is added with the declared type, if the table can take it (evolution.py)
    a field under a former name       is renamed; its id, and so its values in every file, stay
    a wider type                      int -> long, float -> double, decimal with more digits before the point
    part of the row's key             is noted in the column's comment

No other type changes: Iceberg allows no more. If a declaration asks for one, the column stays as it is, the refusal is
logged, and values that do not fit are rescued one by one. A declaration never removes anything.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import msgspec

from lakefeed.contract.changes import FIELDS_MAX, NAME_MAX_CHARS, NESTING_MAX_DEPTH, fold, is_usable, is_usable_column
from lakefeed.contract.errors import WriterError
from lakefeed.iceberg.types import (
    DECIMAL_MAX_PRECISION,
    PRIMITIVES,
    UNNUMBERED,
    Field,
    ListType,
    MapType,
    StructType,
    Type,
    decimal_parts,
    map_type,
    promotes,
)
from lakefeed.writer.rows.comments import (
    ELEMENT,
    JSON_DOC,
    VALUE,
    Path,
    as_key,
    former_names,
    is_json,
    is_key,
    name_in,
    with_former_names,
)
from lakefeed.writer.rows.evolution import SchemaUpdate, describe, full_names, own_fields
from lakefeed.writer.rows.values import can_be_key

# All that a source declares at once. A column takes about thirty bytes, so two thousand columns fit.
DECLARATIONS_MAX_BYTES = 64 * 1024

# Parsed declarations that are cached: those of connected sources, many of which are alike.
DECLARATIONS_MAX = 256

_FIXED = re.compile(r"fixed\[([1-9][0-9]{0,4})\]")

# The keys beside `type`, by type.
_PARTS = {"struct": {"fields"}, "list": {"element"}, "map": {"key", "value"}}
_RENAMED_FROM = "renamedFrom"

NOTHING_DECLARED = StructType(())


class DeclarationMalformed(WriterError):
    """A declaration breaks a rule of the form: refuse it. The message has the path and the rule."""


def parse_declarations(document: Any, *, path: str) -> dict[str, StructType]:
    """Parse the declarations of several tables, by the name of the source's table.

    Raises: DeclarationMalformed.
    """
    tables = _object(document, path)
    return {table: parse_declaration(each, path=f"{path}.{table}") for table, each in tables.items()}


@lru_cache(maxsize=DECLARATIONS_MAX)
def declaration_from_text(text: str) -> StructType:
    """Parse one table's declaration from a record of the log, where only valid ones are stored."""
    return parse_declaration(msgspec.json.decode(text), path="declared")


def parse_declaration(document: Any, *, path: str = "") -> StructType:
    """Parse one table's declaration; `path` is its place in the document, for messages.

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
    keys, known = parts.get("identifier", []), {field.name for field in fields}
    is_right = isinstance(keys, list) and all(isinstance(name, str) and name in known for name in keys)
    _check(is_right, _below(path, "identifier"), "expected a list of names of declared columns")
    return StructType(tuple(as_key(field) if field.name in keys else field for field in fields))


def _below(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


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
            _check(right, path, f"expected at most {DECIMAL_MAX_PRECISION} digits, and a scale no larger than that")
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


def without_nanoseconds(fields: Sequence[Field]) -> tuple[Field, ...]:
    """Return a declaration with microseconds in place of nanoseconds, for tables whose format has no nanoseconds."""

    def in_microseconds(field: Field) -> Field:
        if isinstance(field.type, str):
            return replace(field, type=field.type.removesuffix("_ns"))
        return replace(field, type=map_type(field.type, in_microseconds))

    return tuple(map(in_microseconds, fields))


def declare_columns(update: SchemaUpdate, declared: StructType, *, nanoseconds: bool) -> None:
    """Change a table's columns for a declaration; `nanoseconds` is whether the table's format has them."""
    fields = declared.fields if nanoseconds else without_nanoseconds(declared.fields)
    update.set_own(rename_fields(own_fields(update.columns), fields, update))
    update.set_own(declare_fields(own_fields(update.columns), fields, update))


def declare_fields(
    fields: Sequence[Field], declared: Iterable[Field], update: SchemaUpdate, path: Path = ()
) -> tuple[Field, ...]:
    """Return fields with everything that is declared beyond them."""
    wanted = {each.name: each for each in declared}
    result = []
    for each in fields:
        name = name_in(each, wanted)
        result.append(each if name is None else _declare_field(each, wanted.pop(name), update, (*path, each.name)))
    for each in wanted.values():
        if (added := update.add((*path, each.name), each)) is not None:
            result.append(added)
        else:
            reason = "is not added: its name is another column's, or there are too many columns"
            update.refuse((*path, each.name), reason)
    return tuple(result)


def _declare_field(each: Field, declared: Field, update: SchemaUpdate, path: Path) -> Field:
    if is_json(each.doc) or is_json(declared.doc):
        type_ = each.type
        if is_json(each.doc) != is_json(declared.doc):
            _refuse_type(describe(each.type, each.doc), describe(declared.type, declared.doc), update, path)
    else:
        type_ = _declare_type(each.type, declared.type, update, path)
    if type_ != each.type:
        each = replace(each, type=type_)
    if is_key(declared) and not is_key(each):
        update.note(path, "key")
        each = as_key(each)
    return each


def _declare_type(type_: Type, declared: Type, update: SchemaUpdate, path: Path) -> Type:
    match type_, declared:
        case StructType(fields), StructType(members):
            return StructType(declare_fields(fields, members, update, path))
        case ListType(element=element), ListType(element=new):
            return replace(type_, element=_declare_type(element, new, update, (*path, ELEMENT)))
        case MapType(value=value), MapType(value=new):
            return replace(type_, value=_declare_type(value, new, update, (*path, VALUE)))
        case str(), str():
            return _widen(type_, declared, update, path)
    _refuse_type(describe(type_), describe(declared), update, path)
    return type_


def _widen(type_: str, declared: str, update: SchemaUpdate, path: Path) -> str:
    """Return the type after a declaration. What it does not hold even then is refused."""
    wider = type_
    mine, other = decimal_parts(type_), decimal_parts(declared)
    if mine is not None and other is not None:
        (precision, scale), (other_precision, other_scale) = mine, other
        digits_before_point = other_precision - other_scale
        needed = min(digits_before_point + scale, DECIMAL_MAX_PRECISION)
        if needed > precision:
            precision, wider = needed, f"decimal({needed}, {scale})"
        holds_all = scale >= other_scale and precision - scale >= digits_before_point
    else:
        wider = declared if promotes(type_, declared) else type_
        holds_all = wider == declared or promotes(declared, wider)
    if wider != type_:
        update.note(path, f"{type_} -> {wider}")
    if not holds_all:
        _refuse_type(type_, declared, update, path)
    return wider


def _refuse_type(type_: str, declared: str, update: SchemaUpdate, path: Path) -> None:
    update.refuse(path, f"stays {type_}: declared as {declared}")


def rename_fields(fields: Sequence[Field], declared: Iterable[Field], update: SchemaUpdate) -> tuple[Field, ...]:
    """Rename the fields, at any depth, whose name a declaration lists as a former one."""
    renamed = _rename_fields(fields, declared, update, ())
    names = list(full_names(renamed))
    if len(set(names)) == len(names):
        return renamed
    update.refuse((), "renames are not followed: a name would be another column's path")
    return tuple(fields)


def _rename_fields(
    fields: Sequence[Field], declared: Iterable[Field], update: SchemaUpdate, path: Path
) -> tuple[Field, ...]:
    by_name = {each.name: each for each in declared}
    present = {each.name for each in fields}
    new_names = {
        former: each.name for each in by_name.values() if each.name not in present for former in former_names(each)
    }
    renamed = []
    for each in fields:
        if each.name in new_names:
            name = new_names[each.name]
            if fold(name) in {fold(other) for other in present - {each.name}}:
                update.refuse((*path, each.name), f"is not renamed: another column is called {name}")
            else:
                update.note((*path, name), f"renamed from {each.name}")
                each = with_former_names(replace(each, name=name), (each.name,))  # noqa: PLW2901 - the same field
        if (wanted := by_name.get(each.name)) is not None:
            # Rows may still use a former name that no column has.
            known = (*present, *former_names(each))
            if former := tuple(name for name in former_names(wanted) if name not in known):
                each = with_former_names(each, former)  # noqa: PLW2901
            each = replace(each, type=_rename_below(each.type, wanted.type, update, (*path, each.name)))  # noqa: PLW2901
        renamed.append(each)
    return tuple(renamed)


def _rename_below(type_: Type, declared: Type, update: SchemaUpdate, path: Path) -> Type:
    match type_, declared:
        case StructType(fields), StructType(members):
            return StructType(_rename_fields(fields, members, update, path))
        case ListType(element=element), ListType(element=new):
            return replace(type_, element=_rename_below(element, new, update, (*path, ELEMENT)))
        case MapType(value=value), MapType(value=new):
            return replace(type_, value=_rename_below(value, new, update, (*path, VALUE)))
    return type_
