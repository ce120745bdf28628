"""Filters: parsed from JSON, in the current form and the older one, to a tree bound to the columns of a schema.

    PREDICATE: true | false | {"type": "not", "child": PREDICATE}
        | {"type": "and" | "or", "left": PREDICATE, "right": PREDICATE}
        | {"type": "is-null" | ..., "child": EXPR}                     older: "term": TERM for "child"
        | {"type": "lt" | ... | "starts-with" | ..., "left": EXPR, "right": EXPR}
                                                                       older: "term": TERM, "value": LITERAL
        | {"type": "in" | "not-in", "child": EXPR, "values": [LITERAL, ...]}
                                                                       older: "term": TERM for "child"
    EXPR: LITERAL | {"type": "reference", "name" | "id": ...}
        | {"type": "apply", "function": ..., "arguments": [EXPR, ...]}
    TERM: NAME | {"type": "reference", "term": NAME} | {"type": "transform", "transform": NAME, "term": TERM}

Every node keeps its JSON, so that a residual goes back to the client in the form that it sent. A valid predicate that
statistics cannot evaluate, such as an unknown function, becomes Opaque: it keeps every file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

from lakefeed.catalog.errors import BadRequest, ValidationFailed
from lakefeed.catalog.json_fields import JsonObject, as_int, as_list, as_object, as_text, read_list, read_text
from lakefeed.iceberg.terms import IDENTITY, Transform, parse_transform
from lakefeed.iceberg.transforms import result_type
from lakefeed.iceberg.types import StructType, type_from_json, type_name, walk
from lakefeed.iceberg.values import is_comparable, parse_literal

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
    """The columns of one schema, by id and by full name, with or without regard to case."""

    def __init__(self, schema: Mapping[str, Any], *, case_sensitive: bool) -> None:
        self._case_sensitive = case_sensitive
        self._by_id: dict[int, Column] = {}
        self._by_name: dict[str, list[Column]] = {}
        for column in _columns_of(schema):
            self._by_id[column.field_id] = column
            self._by_name.setdefault(self._key(column.name), []).append(column)

    def by_id(self, field_id: int) -> Column | None:
        """Return a column by its field id, or None."""
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


def _columns_of(schema: Mapping[str, Any]) -> Iterator[Column]:
    """Yield the fields of a schema at any depth. A field is nullable if it or a field around it may be null."""
    for path in walk(type_from_json({"type": "struct", "fields": schema["fields"]})):
        field, around = path[-1], path[:-1]
        in_collection = not all(isinstance(outer.type, StructType) for outer in around)
        yield Column(
            field.id,
            ".".join(outer.name for outer in path),
            type_name(field.type),
            nullable=in_collection or not all(outer.required for outer in path),
            nested=bool(around),
            in_collection=in_collection,
        )


# The tree is walked by recursion, and orjson writes at most 254 levels. A chain of and/or becomes a balanced tree.
FILTER_MAX_DEPTH = 100


class PredicateKind(Enum):
    """What a predicate asks of one value. Negation is a field of the predicate."""

    IS_NULL = "is-null"
    IS_NAN = "is-nan"
    LT = "lt"
    LT_EQ = "lt-eq"
    GT = "gt"
    GT_EQ = "gt-eq"
    EQ = "eq"
    STARTS_WITH = "starts-with"
    IN = "in"


@dataclass(frozen=True, slots=True)
class Constant:
    """Always or never."""

    value: bool
    json: bool


@dataclass(frozen=True, slots=True)
class Opaque:
    """A predicate that statistics cannot evaluate."""

    json: JsonObject


@dataclass(frozen=True, slots=True)
class Predicate:
    """A question about a column, or about a transform of it, whose values are then of `type_`."""

    operation: PredicateKind
    negated: bool
    column: Column
    transform: Transform
    type_: str
    literals: tuple[Any, ...]
    json: JsonObject


@dataclass(frozen=True, slots=True)
class Not:
    """The opposite of another expression."""

    child: Expression
    json: JsonObject


@dataclass(frozen=True, slots=True)
class Junction:
    """All of several expressions (`and`), or any of them (`or`)."""

    kind: str
    children: tuple[Expression, ...]
    json: JsonObject


Expression: TypeAlias = Constant | Opaque | Predicate | Not | Junction

ALWAYS_TRUE = Constant(True, True)

_NEGATIONS = {
    "not-null": PredicateKind.IS_NULL,
    "not-nan": PredicateKind.IS_NAN,
    "not-eq": PredicateKind.EQ,
    "not-starts-with": PredicateKind.STARTS_WITH,
    "not-in": PredicateKind.IN,
}
_OPERATIONS = {operation.value: (operation, False) for operation in PredicateKind} | {
    name: (operation, True) for name, operation in _NEGATIONS.items()
}
_UNARY = (PredicateKind.IS_NULL, PredicateKind.IS_NAN)
# What a comparison becomes if its sides are swapped.
_MIRRORED = {
    PredicateKind.LT: PredicateKind.GT,
    PredicateKind.LT_EQ: PredicateKind.GT_EQ,
    PredicateKind.GT: PredicateKind.LT,
    PredicateKind.GT_EQ: PredicateKind.LT_EQ,
    PredicateKind.EQ: PredicateKind.EQ,
}
_CONSTANTS = {"true": True, "false": False}
_OWN_FUNCTIONS = (None, "iceberg_functions")
_PARAMETERISED_ARGUMENTS = 2


@dataclass(frozen=True, slots=True)
class _Term:
    """A column or a transform of one."""

    column: Column
    transform: Transform


@dataclass(frozen=True, slots=True)
class _Literal:
    value: Any


class _NotEvaluable(Exception):
    """The predicate is valid, but statistics cannot evaluate it."""


def parse_filter(document: Any, columns: Columns) -> Expression:
    """Parse a filter and bind it to columns.

    Raises: BadRequest, ValidationFailed.
    """
    parsed = _parse(document, columns, depth=0)
    if _depth(parsed.json) > FILTER_MAX_DEPTH:
        raise _too_deep()
    return parsed


def join(kind: str, parts: Sequence[Any]) -> Any:
    """Return the JSON of one or more expressions as a balanced tree, which is shallow however many there are."""
    if len(parts) == 1:
        return parts[0]
    middle = len(parts) // 2
    return {"type": kind, "left": join(kind, parts[:middle]), "right": join(kind, parts[middle:])}


def referenced_columns(expression: Expression) -> dict[int, Column]:
    """Return the columns whose statistics are needed, by field id."""
    match expression:
        case Predicate():
            return {expression.column.field_id: expression.column}
        case Not():
            return referenced_columns(expression.child)
        case Junction():
            found: dict[int, Column] = {}
            for child in expression.children:
                found |= referenced_columns(child)
            return found
    return {}


def _parse(document: Any, columns: Columns, depth: int) -> Expression:
    if isinstance(document, bool):
        return Constant(document, document)
    if depth > FILTER_MAX_DEPTH:
        raise _too_deep()
    node = as_object(document, "filter")
    kind = read_text(node, "type").lower()
    if kind in _CONSTANTS:
        return Constant(_CONSTANTS[kind], _CONSTANTS[kind])
    if kind == "literal" and isinstance(node.get("value"), bool):
        return Constant(node["value"], node["value"])
    if kind == "not":
        child = _parse(node.get("child"), columns, depth + 1)
        return Not(child, {"type": "not", "child": child.json})
    if kind in ("and", "or"):
        children = tuple(_parse(part, columns, depth + 1) for part in _chain(node, kind))
        return Junction(kind, children, join(kind, [child.json for child in children]))
    if kind not in _OPERATIONS:
        raise BadRequest(f"Cannot parse filter: unknown type {kind!r:.100}")
    return _parse_predicate(node, kind, columns)


def _chain(node: JsonObject, kind: str) -> list[Any]:
    """Return the operands of a chain of one kind, however it is nested: clients send hundreds in a row."""
    operands: list[Any] = []
    waiting: list[Any] = [node]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict) and isinstance(part.get("type"), str) and part["type"].lower() == kind:
            waiting += (part.get("right"), part.get("left"))
        else:
            operands.append(part)
    return operands


def _parse_predicate(node: JsonObject, kind: str, columns: Columns) -> Expression:
    operation, negated = _OPERATIONS[kind]
    try:
        if operation in _UNARY:
            term, literals = _operand(node, "child", columns), []
        elif operation is PredicateKind.IN:
            term, literals = _operand(node, "child", columns), _set_literals(node.get("values"))
        else:
            operation, term, value = _comparison(node, operation, columns)
            literals = [value]
    except _NotEvaluable:
        return Opaque(node)
    if isinstance(term, _Literal):
        return Opaque(node)
    type_ = _checked_type(operation, term)
    if None in literals:
        raise ValidationFailed("Cannot compare with null, use is-null or not-null")
    values = tuple(parse_literal(type_, value) for value in literals)
    return Predicate(operation, negated, term.column, term.transform, type_, values, node)


def _operand(node: JsonObject, key: str, columns: Columns) -> _Term | _Literal:
    if "term" in node:
        return _read_term(node["term"], columns)
    return _read_expression(node.get(key), columns)


def _comparison(
    node: JsonObject, operation: PredicateKind, columns: Columns
) -> tuple[PredicateKind, _Term | _Literal, Any]:
    """Read both sides and put the literal on the right."""
    if "term" in node:
        return operation, _read_term(node["term"], columns), _bare(node.get("value"))
    left, right = (_read_expression(node.get(side), columns) for side in ("left", "right"))
    if isinstance(left, _Term) and isinstance(right, _Literal):
        return operation, left, right.value
    if isinstance(left, _Literal) and isinstance(right, _Term) and operation in _MIRRORED:
        return _MIRRORED[operation], right, left.value
    raise _NotEvaluable


def _read_term(term: Any, columns: Columns) -> _Term:
    if isinstance(term, str):
        return _Term(_comparable_column(columns.named(term)), IDENTITY)
    node = as_object(term, "term")
    kind = read_text(node, "type")
    if kind == "reference":
        return _read_reference(node, columns)
    if kind != "transform":
        raise BadRequest(f"Cannot parse term: unknown type {kind!r:.100}")
    return _with_transform(_read_term(node.get("term"), columns), read_text(node, "transform"))


def _read_expression(value: Any, columns: Columns) -> _Term | _Literal:
    if not isinstance(value, dict):
        return _Literal(value)
    kind = read_text(value, "type")
    if kind == "literal":
        return _Literal(value.get("value"))
    if kind == "reference":
        return _read_reference(value, columns)
    if kind != "apply":
        raise BadRequest(f"Cannot parse expression: unknown type {kind!r:.100}")
    return _read_apply(value, columns)


def _read_reference(node: JsonObject, columns: Columns) -> _Term:
    if node.get("id") is not None:
        column = columns.by_id(as_int(node["id"], "id"))
        if column is None:
            raise ValidationFailed(f"Cannot find field {node['id']} in the schema")
    else:
        column = columns.named(as_text(node.get("name", node.get("term")), "name"))
    return _Term(_comparable_column(column), IDENTITY)


def _read_apply(node: JsonObject, columns: Columns) -> _Term:
    """Read a transform that is called as a function: day(x), bucket(16, x)."""
    name = _own_function(node.get("function"))
    arguments = read_list(node, "arguments")
    if name in ("bucket", "truncate") and len(arguments) == _PARAMETERISED_ARGUMENTS:
        width = _bare(arguments[0])
        name = f"{name}[{width}]" if isinstance(width, int) else None
    elif len(arguments) != 1:
        name = None
    if name is None:
        raise _NotEvaluable
    source = _read_expression(arguments[-1], columns)
    if isinstance(source, _Literal):
        raise _NotEvaluable
    return _with_transform(source, name)


def _own_function(function: Any) -> str | None:
    """Return the name of a function of the specification; None for any other."""
    if isinstance(function, dict):
        if function.get("catalog") not in _OWN_FUNCTIONS:
            return None
        function = function.get("identifier")
    if isinstance(function, list) and len(function) == 1:
        function = function[0]
    return function if isinstance(function, str) else None


def _with_transform(term: _Term, name: str) -> _Term:
    transform = parse_transform(name)
    if transform is None or transform.is_void or not term.transform.is_identity:
        raise _NotEvaluable
    return _Term(term.column, transform)


def _comparable_column(column: Column) -> Column:
    if column.in_collection:
        raise ValidationFailed(f"Cannot filter by a field inside a list or map: {column.name}")
    return column


def _checked_type(operation: PredicateKind, term: _Term) -> str:
    """Return the type of a predicate's literals; check that the operation supports it."""
    type_ = result_type(term.transform, term.column.type_)
    if type_ is None:
        raise ValidationFailed(f"Cannot apply {term.transform.kind} to {term.column.name} of type {term.column.type_}")
    if operation is PredicateKind.IS_NULL:
        return type_
    if operation is PredicateKind.IS_NAN and type_ not in FLOATS:
        raise ValidationFailed(f"IsNaN cannot be used with a non-floating-point column: {term.column.name}")
    if operation is PredicateKind.STARTS_WITH and type_ != "string":
        raise ValidationFailed(f"StartsWith cannot be used with a column that is not a string: {term.column.name}")
    if not is_comparable(type_):
        raise ValidationFailed(f"Cannot compare {term.column.name} of type {type_}")
    return type_


def _set_literals(values: Any) -> list[Any]:
    if isinstance(values, dict):
        values = values.get("values")
    return [_bare(value) for value in as_list(values, "values")]


def _bare(literal: Any) -> Any:
    return literal.get("value") if isinstance(literal, dict) and literal.get("type") == "literal" else literal


def _depth(document: Any) -> int:
    """Return how deep JSON is nested."""
    depth, level = 0, [document]
    while level:
        depth += 1
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    return depth


def _too_deep() -> BadRequest:
    return BadRequest(f"Invalid filter: nested deeper than {FILTER_MAX_DEPTH} levels")
