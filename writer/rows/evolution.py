"""How a table's columns grow to hold rows that they do not hold yet. Owns which changes of a schema are made.

    new field       where its values have a type (inference.py), its name is usable (field_names.py) and there is room;
                    values under a field's former name (column_notes.py) are that field's
    int -> long, float -> double, decimal(p, s) -> decimal(p', s)     where values need it
    required -> optional                                              where values are missing

Ids of existing fields never change, nothing is dropped, and no other type changes: Iceberg allows no more. A tree of
watches, shaped like the columns, sees every value once; then it tells what the columns should be.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from writer.rows import exact_numbers as numbers
from writer.rows.column_notes import JSON_DOC, former_names, is_json
from writer.rows.field_names import fold, is_usable, is_usable_column
from writer.rows.inference import Seen, field_of
from writer.rows.misfits import as_double, as_integer, exact_decimal
from writer.rows.parse_types import ELEMENT, KEY, VALUE, Path
from writer.types import Field, ListType, MapType, StructType, Type

# Fields of one table at all depths. More make every reader slow; a source that goes on has names that are data.
FIELDS_MAX = 2000


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
        elif parts := numbers.decimal_parts(self.widest):
            self._add_decimal(value, *parts)

    def _add_decimal(self, value: Any, precision: int, scale: int) -> None:
        exact = exact_decimal(value)
        needed = None if exact is None else numbers.decimal_precision(exact, scale)
        if needed is not None and precision < needed <= numbers.DECIMAL_MAX_PRECISION:
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
            widens = type_ in ("int", "float") or numbers.decimal_parts(type_) is not None
            return _PrimitiveWatch(type_, type_) if widens else None
