"""How a table's columns grow to hold rows that they do not hold yet. Owns which changes of a schema are made.

    new field       where its values have a type (inference.py), its name is usable (field_names.py) and there is room;
                    values under a field's former name (comments.py) are that field's
    int -> long, float -> double, decimal(p, s) -> decimal(p', s)     where values need it
    required -> optional                                              where values are missing

Ids of existing fields never change, nothing is dropped, and no other type changes: Iceberg allows no more. A tree of
watches, shaped like the columns, sees every value once; then it tells what the columns should be.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeAlias

from lakefeed.contract.changes import (
    FIELDS_MAX,
    NESTING_MAX_DEPTH,
    are_usable_together,
    fold,
    is_usable,
    is_usable_column,
)
from lakefeed.iceberg.types import (
    DECIMAL_MAX_PRECISION,
    UNNUMBERED,
    Field,
    ListType,
    MapType,
    StructType,
    Type,
    decimal_parts,
)
from lakefeed.writer.rows import values as numbers
from lakefeed.writer.rows.comments import ELEMENT, JSON_DOC, KEY, VALUE, Path, former_names, is_json
from lakefeed.writer.rows.values import as_double, as_integer, exact_decimal, plain_number

# --- writer.rows.inference --------------------------------------------------------------------------------------------
#
# The type of a column that nobody declared, from the values that came for it. Owns the rules.
#
# Values are added to a `Seen`, which settles on a general type that holds them all, never on a special one: text that
# looks like a time stays text.
#
#     true, false          boolean             objects            struct
#     integers             long                lists of one type  list
#     other numbers        double              null, {}, []       nothing yet
#     text                 string              any mixture        JSON text
#     __bigint__:123       long                numbers too long   JSON text
#
# An object whose fields change their type from row to row is JSON text as a whole, and so are a list of such objects,
# an
# object with very many fields (its names are data) or with names that no column can have, and what is nested too
# deeply.


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
_INFERENCE_KINDS = {bool: "boolean", dict: "object", list: "list", int: "long"}


def _kind_of(value: Any) -> str:
    if (kind := _INFERENCE_KINDS.get(type(value))) is not None:
        return kind
    if isinstance(value, str) and numbers.bigint_of(value) is None:
        return "string"
    if numbers.is_integer_text(plain_number(value) or ""):
        return "long number" if as_integer(value, numbers.INT64_MIN, numbers.INT64_MAX) is None else "long"
    return "long number" if as_double(value, single=False) is None else "double"


# --- writer.rows.evolution --------------------------------------------------------------------------------------------


class Room:
    """What a table's columns still have room for: ids, names and a number of fields."""

    def __init__(self, columns: StructType, next_field_id: int) -> None:
        self.last_field_id = next_field_id - 1
        self.changes: list[str] = []
        self.refusals: list[str] = []
        self._taken = set(full_names(columns.fields))

    def add(self, path: Path, new: Field) -> Field | None:
        """Give a new field its ids, None if the table cannot take it."""
        names = list(full_names((new,), path[:-1]))
        usable = is_usable_column(path[0]) if len(path) == 1 else is_usable(path[-1])
        if not usable or len(set(names)) < len(names) or not self._taken.isdisjoint(names):
            return None
        if len(self._taken) + len(names) > FIELDS_MAX:
            return None
        self._taken.update(names)
        self.note(path, describe(new))
        return self._numbered(new)

    def note(self, path: Path, change: str) -> None:
        """Remember a change for the log."""
        self.changes.append(f"{'.'.join(path)} {change}")

    def refuse(self, path: Path, refusal: str) -> None:
        """Remember, for the log, what was declared and is not followed."""
        self.refusals.append(f"{'.'.join(path)} {refusal}")

    def _numbered(self, new: Field) -> Field:
        return replace(new, id=self._new_id(), type=self._numbered_type(new.type))

    def _numbered_type(self, type_: Type) -> Type:
        match type_:
            case StructType(fields):
                return StructType(tuple(map(self._numbered, fields)))
            case ListType(_, element, required):
                return ListType(self._new_id(), self._numbered_type(element), required)
            case MapType(_, key, _, value, required):
                key_id, numbered_key = self._new_id(), self._numbered_type(key)
                return MapType(key_id, numbered_key, self._new_id(), self._numbered_type(value), required)
            case str():
                return type_

    def _new_id(self) -> int:
        self.last_field_id += 1
        return self.last_field_id


def describe(each: Field) -> str:
    """Name a field's type in a word."""
    if is_json(each.doc):
        return JSON_DOC
    return each.type if isinstance(each.type, str) else _KINDS[type(each.type)]


_KINDS = {StructType: "struct", ListType: "list", MapType: "map"}


def full_names(fields: Iterable[Field], parent: Path = ()) -> Iterator[str]:
    """Spell the paths of fields and of all below them, former names too: nobody else can have those."""
    for each in fields:
        # A former name may differ by case only, and is then no other.
        for name in dict.fromkeys(map(fold, (each.name, *former_names(each)))):
            yield ".".join((*map(fold, parent), name))
        yield from _names_below(each.type, (*parent, each.name))


def _names_below(type_: Type, path: Path) -> Iterator[str]:
    match type_:
        case StructType(fields):
            yield from full_names(fields, path)
        case ListType(element=element):
            yield ".".join(map(fold, (*path, ELEMENT)))
            yield from _names_below(element, (*path, ELEMENT))
        case MapType(value=value):
            yield from (".".join(map(fold, (*path, part))) for part in (KEY, VALUE))
            yield from _names_below(value, (*path, VALUE))


class Watch(Protocol):
    """Sees the values of one column or field."""

    def add(self, value: Any) -> None:
        """Take a value that is not null into account."""

    def evolved(self, room: Room, path: Path) -> Type:
        """Give the type that the values ask for."""

    def vacancies(self, path: Path) -> Iterator[Path]:
        """Give the paths at which only nulls have come for fields that do not exist."""


@dataclass(slots=True)
class StructWatch:
    """Sees the members of objects."""

    type: StructType
    depth: int = 0
    unknown: dict[str, Seen] = field(default_factory=dict)
    known: dict[str, Watch | None] = field(default_factory=dict)
    former: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.known = {each.name: _watch(each.type, each.doc, self.depth + 1) for each in self.type.fields}
        self.former = {former: each.name for each in self.type.fields for former in former_names(each)}

    def add(self, value: Any) -> None:
        """Take an object's members into account."""
        if not isinstance(value, dict):
            return
        for given, member in value.items():
            name = given if given in self.known else self._renamed(given, value)
            if name not in self.known:
                # Nobody's names grow without bound: beyond the limit no field could be added anyway.
                if name in self.unknown or len(self.unknown) < FIELDS_MAX:
                    self.unknown.setdefault(name, Seen(self.depth + 1)).add(member)
            elif member is not None and (watch := self.known[name]) is not None:
                watch.add(member)

    def _renamed(self, given: str, members: dict[str, Any]) -> str:
        name = self.former.get(given, given)
        return given if name in members else name

    def evolved(self, room: Room, path: Path) -> StructType:
        """Give the struct with wider fields and new ones at its end."""
        kept = [self._evolved_field(each, room, (*path, each.name)) for each in self.type.fields]
        new = [
            made
            for name, seen in self.unknown.items()
            if (settled := seen.settle()) is not None
            and (made := room.add((*path, name), field_of(name, settled))) is not None
        ]
        return StructType((*kept, *new))

    def _evolved_field(self, each: Field, room: Room, path: Path) -> Field:
        watch = self.known[each.name]
        type_ = each.type if watch is None else watch.evolved(room, path)
        return each if type_ == each.type else replace(each, type=type_)

    def vacancies(self, path: Path) -> Iterator[Path]:
        """Give the paths at which only nulls have come for fields that do not exist."""
        for name, seen in self.unknown.items():
            yield from seen.vacancies((*path, name))
        for name, watch in self.known.items():
            if watch is not None:
                yield from watch.vacancies((*path, name))


@dataclass(slots=True)
class _ListWatch:
    type: ListType
    element: Watch

    def add(self, value: Any) -> None:
        if isinstance(value, list):
            for each in value:
                if each is not None:
                    self.element.add(each)

    def evolved(self, room: Room, path: Path) -> ListType:
        return replace(self.type, element=self.element.evolved(room, (*path, ELEMENT)))

    def vacancies(self, path: Path) -> Iterator[Path]:
        return self.element.vacancies((*path, ELEMENT))


@dataclass(slots=True)
class _MapWatch:
    type: MapType
    value: Watch

    def add(self, value: Any) -> None:
        if isinstance(value, dict):
            for each in value.values():
                if each is not None:
                    self.value.add(each)

    def evolved(self, room: Room, path: Path) -> MapType:
        return replace(self.type, value=self.value.evolved(room, (*path, VALUE)))

    def vacancies(self, path: Path) -> Iterator[Path]:
        return iter(())


@dataclass(slots=True)
class _PrimitiveWatch:
    type: str
    widest: str

    def add(self, value: Any) -> None:
        if self.type == "int" and as_integer(value, numbers.INT32_MIN, numbers.INT32_MAX) is None:
            if as_integer(value, numbers.INT64_MIN, numbers.INT64_MAX) is not None:
                self.widest = "long"
        elif self.type == "float" and as_double(value, single=True) is None:
            if as_double(value, single=False) is not None:
                self.widest = "double"
        elif parts := decimal_parts(self.widest):
            self._add_decimal(value, *parts)

    def _add_decimal(self, value: Any, precision: int, scale: int) -> None:
        exact = exact_decimal(value)
        needed = None if exact is None else numbers.decimal_precision(exact, scale)
        if needed is not None and precision < needed <= DECIMAL_MAX_PRECISION:
            self.widest = f"decimal({needed}, {scale})"

    def evolved(self, room: Room, path: Path) -> str:
        if self.widest != self.type:
            room.note(path, f"{self.type} -> {self.widest}")
        return self.widest

    def vacancies(self, path: Path) -> Iterator[Path]:
        return iter(())


def _watch(type_: Type, doc: str | None, depth: int) -> Watch | None:
    """Build what sees a type's values, None where no value could change it."""
    if is_json(doc):
        return None
    match type_:
        case StructType():
            return StructWatch(type_, depth)
        case ListType(element=element):
            watch = _watch(element, None, depth + 1)
            return None if watch is None else _ListWatch(type_, watch)
        case MapType(value=value):
            watch = _watch(value, None, depth + 1)
            return None if watch is None else _MapWatch(type_, watch)
        case str():
            widens = type_ in ("int", "float") or decimal_parts(type_) is not None
            return _PrimitiveWatch(type_, type_) if widens else None


# --- writer.rows.relaxation -------------------------------------------------------------------------------------------
#
# Required fields that rows leave out become optional. Owns finding them, in rows as json_exact.py keeps them.


def relax_fields(fields: Sequence[Field], rows: Sequence[dict[str, Any]], room: Room, path: Path = ()) -> list[Field]:
    """Make those fields optional, at any depth, that some row has no value for."""
    return [
        _relax_field(each, [row.get(each.name) for row in rows], room, (*path, each.name))
        if _has_required(each)
        else each
        for each in fields
    ]


def _relax_field(each: Field, values: list[Any], room: Room, path: Path) -> Field:
    present, required = _present(values, room, path, required=each.required)
    return replace(each, required=required, type=_relax_type(each.type, present, room, path))


def _present(values: list[Any], room: Room, path: Path, *, required: bool) -> tuple[list[Any], bool]:
    """Leave out nulls, and tell whether the values can still be required."""
    present = [value for value in values if value is not None]
    return present, still_required(room, path, required=required, has_nulls=len(present) < len(values))


def still_required(room: Room, path: Path, *, required: bool, has_nulls: bool) -> bool:
    """Tell whether what is required can stay so; notes it where it cannot."""
    if required and has_nulls:
        room.note(path, "required -> optional")
    return required and not has_nulls


def _relax_type(type_: Type, values: list[Any], room: Room, path: Path) -> Type:
    match type_:
        case StructType(fields):
            return StructType(tuple(relax_fields(fields, values, room, path)))
        case ListType(element=element, element_required=required):
            below = (*path, ELEMENT)
            present, required = _present([each for value in values for each in value], room, below, required=required)
            return replace(type_, element=_relax_type(element, present, room, below), element_required=required)
        case MapType(value=value_type, value_required=required):
            below = (*path, VALUE)
            entries = [entry[VALUE] for value in values for entry in value]
            present, required = _present(entries, room, below, required=required)
            return replace(type_, value=_relax_type(value_type, present, room, below), value_required=required)
        case str():
            return type_


def _has_required(each: Field) -> bool:
    return each.required or (not is_json(each.doc) and type_has_required(each.type))


def type_has_required(type_: Type) -> bool:
    """Tell whether anything below a type is required."""
    match type_:
        case StructType(fields):
            return any(map(_has_required, fields))
        case ListType(element=element, element_required=required):
            return required or type_has_required(element)
        case MapType(value=value, value_required=required):
            return required or type_has_required(value)
        case str():
            return False
