"""Schema evolution: how a table's columns change so that they hold rows which do not fit yet.

    new field                                       its type is inferred, if its name is usable and the table has
                                                    fewer than FIELDS_MAX fields
    int -> long, float -> double,
    decimal(p, s) -> decimal(p', s)                 if a value needs it
    required -> optional                            if a value is missing

Ids of existing fields never change, nothing is dropped, and no other type changes: Iceberg allows no more. A tree of
observers, shaped like the columns, sees every parsed value once and then returns the evolved columns. Values under a
field's former name (comments.py) belong to that field.

Types of new fields are general, never special: text that looks like a time stays text.

    true, false          boolean             objects            struct
    integers             long                lists of one type  list
    other numbers        double              null, {}, []       no type yet: no column
    text                 string              any mixture        JSON text
    __bigint__:123       long                numbers too long   JSON text

An object becomes JSON text as a whole if its fields change type from row to row, if it has so many fields that its
names are data, if no column can have one of its names, or if it is nested too deeply. So does a list of such objects.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

import pyarrow as pa

from lakefeed.contract import changes as names
from lakefeed.iceberg.types import (
    DECIMAL_MAX_PRECISION,
    UNNUMBERED,
    Field,
    ListType,
    MapType,
    StructType,
    Type,
    children,
    decimal_parts,
    map_type,
    type_name,
    written_fields,
)
from lakefeed.writer.rows.comments import JSON_DOC, KEY, Path, former_names, is_json
from lakefeed.writer.rows.values import (
    as_double,
    as_integer,
    bigint_of,
    decimal_precision,
    exact_decimal,
    is_integer_text,
    number_text,
)

# An object with more fields than this in its first rows uses its names as data.
STRUCT_MAX_FIELDS = 200


class FittedRows(NamedTuple):
    """Rows as the arrays of `own_fields`, and per row the values that no column takes, as JSON for `_cdc_rescued`."""

    own: Sequence[pa.ChunkedArray]
    rescued: Sequence[str | None] | None


def initial_columns(*, keep_before: bool) -> StructType:
    """Return the columns of a table without rows: Lakefeed's own."""
    left_out = {names.BEFORE} if not keep_before else set()
    wanted = [name for name in names.ALL if name not in left_out]
    types: dict[str, Type] = {
        names.SEQUENCE: "long",
        names.TIMESTAMP: "timestamptz",
        names.INGESTED_AT: "timestamptz",
        names.UNCHANGED: ListType(len(wanted) + 1, "string"),
        names.EPOCH: "long",
    }
    optional = (names.BEFORE, names.UNCHANGED, names.METADATA, names.RESCUED, names.EPOCH)
    return StructType(
        tuple(
            Field(field_id, name, types.get(name, "string"), required=name not in optional)
            for field_id, name in enumerate(wanted, start=1)
        )
    )


def own_fields(columns: StructType) -> tuple[Field, ...]:
    """Return the columns that come from the rows themselves and that can be written."""
    return tuple(each for each in written_fields(columns) if not each.name.startswith(names.RESERVED_PREFIX))


class FieldIds:
    """Field ids that the table has never used."""

    def __init__(self, last: int) -> None:
        self.last = last

    def number(self, new: Field) -> Field:
        """Return a field with new ids, at every depth."""
        self.last += 1
        return replace(new, id=self.last, type=map_type(new.type, self.number))


class SchemaUpdate:
    """A table's columns while they change: hands out ids and names, and records what changed and what was refused."""

    def __init__(self, columns: StructType, last_field_id: int) -> None:
        self.columns = columns
        self.changes: list[str] = []
        self.refusals: list[str] = []
        self._ids = FieldIds(last_field_id)
        self._taken: set[str] | None = None

    @property
    def last_field_id(self) -> int:
        """The highest field id that was ever used."""
        return self._ids.last

    def set_own(self, own: Sequence[Field]) -> None:
        """Put changed columns in the places of the old ones, and new ones at the end."""
        by_id = {each.id: each for each in own}
        kept = [by_id.pop(each.id, each) for each in self.columns.fields]
        self.columns = StructType((*kept, *by_id.values()))
        self._taken = None

    def add(self, path: Path, new: Field) -> Field | None:
        """Return a new field with its ids, None if the table cannot take it."""
        if self._taken is None:
            self._taken = set(full_names(self.columns.fields))
        added = list(full_names((new,), path[:-1]))
        usable = names.is_usable_column(path[0]) if len(path) == 1 else names.is_usable(path[-1])
        if not usable or len(set(added)) < len(added) or not self._taken.isdisjoint(added):
            return None
        if len(self._taken) + len(added) > names.FIELDS_MAX:
            return None
        self._taken.update(added)
        self.note(path, describe(new.type, new.doc))
        return self._ids.number(new)

    def note(self, path: Path, change: str) -> None:
        """Record a change, for the service's log."""
        self.changes.append(f"{'.'.join(path)} {change}")

    def refuse(self, path: Path, refusal: str) -> None:
        """Record a declaration that is not followed, for the service's log."""
        self.refusals.append(f"{'.'.join(path)} {refusal}")


def describe(type_: Type, doc: str | None = None) -> str:
    """Return a type in one word."""
    return JSON_DOC if is_json(doc) else type_ if isinstance(type_, str) else type_name(type_)


def full_names(fields: Iterable[Field], parent: Path = ()) -> Iterator[str]:
    """Yield the paths of fields and of all below them, with former names: no other field can have those."""
    for each in fields:
        # A former name may differ by case only, and is then the same name.
        for name in dict.fromkeys(map(names.fold, (each.name, *former_names(each)))):
            yield ".".join((*map(names.fold, parent), name))
        yield from full_names(children(each.type), (*parent, each.name))


class JsonText(enum.Enum):
    """Why values become JSON text."""

    MIXED = "values of several types"
    DOCUMENT = "a shape that columns do not have"


# What is inferred from values; fields of a type have no ids yet.
Inferred: TypeAlias = Type | JsonText


def _field_of(name: str, inferred: Inferred) -> Field:
    if isinstance(inferred, JsonText):
        return Field(UNNUMBERED, name, "string", doc=JSON_DOC)
    return Field(UNNUMBERED, name, inferred)


@dataclass(slots=True)
class Inference:
    """The values of one new field, from which its type is inferred."""

    depth: int = 1
    kinds: set[str] = field(default_factory=set)
    fields: dict[str, Inference] = field(default_factory=dict)
    element: Inference | None = None

    def add(self, value: Any) -> None:
        """Take one more value into account."""
        if value is None:
            return
        self.kinds.add(_kind_of(value))
        if self.depth >= names.NESTING_MAX_DEPTH:
            return
        if isinstance(value, dict):
            for name, member in value.items():
                # One more than allowed is enough to know that there are too many.
                if name in self.fields or len(self.fields) <= STRUCT_MAX_FIELDS:
                    self.fields.setdefault(name, Inference(self.depth + 1)).add(member)
        elif isinstance(value, list):
            self.element = self.element or Inference(self.depth + 1)
            for each in value:
                self.element.add(each)

    def infer(self) -> Inferred | None:
        """Return the type, None if no value has one."""
        if not self.kinds:
            return None
        if self.kinds == {"long", "double"}:
            return "double"
        if len(self.kinds) > 1:
            return JsonText.MIXED
        (kind,) = self.kinds
        match kind:
            case "object":
                return self._infer_object()
            case "list":
                element = JsonText.DOCUMENT if self.element is None else self.element.infer()
                if element is None:
                    return None
                return JsonText.DOCUMENT if isinstance(element, JsonText) else ListType(UNNUMBERED, element)
            case "long number":
                return JsonText.DOCUMENT
        return kind

    def _infer_object(self) -> Inferred | None:
        if self.depth >= names.NESTING_MAX_DEPTH or len(self.fields) > STRUCT_MAX_FIELDS:
            return JsonText.DOCUMENT
        fields = {name: inferred for name, each in self.fields.items() if (inferred := each.infer()) is not None}
        if JsonText.MIXED in fields.values() or not names.are_usable_together(fields):
            return JsonText.DOCUMENT
        return StructType(tuple(_field_of(name, inferred) for name, inferred in fields.items())) if fields else None


# Kinds of parsed JSON by Python class. Values of other classes have to be looked at.
_KIND_BY_CLASS = {bool: "boolean", dict: "object", list: "list", int: "long"}


def _kind_of(value: Any) -> str:
    if (kind := _KIND_BY_CLASS.get(type(value))) is not None:
        return kind
    if isinstance(value, str) and bigint_of(value) is None:
        return "string"
    if is_integer_text(number_text(value) or ""):
        return "long number" if as_integer(value, "long") is None else "long"
    return "long number" if as_double(value) is None else "double"


# What sees the values of one column or field, and returns the type that they need.
Observer: TypeAlias = "StructObserver | _ElementObserver | _PrimitiveObserver"


@dataclass(slots=True)
class StructObserver:
    """Sees the members of objects."""

    type: StructType
    depth: int = 0
    unknown: dict[str, Inference] = field(default_factory=dict)
    known: dict[str, Observer | None] = field(default_factory=dict)
    former: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.known = {each.name: _observer(each, self.depth + 1) for each in self.type.fields}
        self.former = {former: each.name for each in self.type.fields for former in former_names(each)}

    def add(self, value: Any) -> None:
        """Take an object's members into account."""
        if not isinstance(value, dict):
            return
        for given, member in value.items():
            name = given if given in self.known else str(self.former.get(given, given))
            if name != given and name in value:
                name = given  # the row uses both names, so the former one means another field
            if name not in self.known:
                # The names are bounded: beyond the limit no field could be added anyway.
                if name in self.unknown or len(self.unknown) < names.FIELDS_MAX:
                    self.unknown.setdefault(name, Inference(self.depth + 1)).add(member)
            elif member is not None and (observer := self.known[name]) is not None:
                observer.add(member)

    def evolved(self, update: SchemaUpdate, path: Path) -> StructType:
        """Return the struct with wider fields, and new fields at its end."""
        kept = []
        for each in self.type.fields:
            observer = self.known[each.name]
            type_ = each.type if observer is None else observer.evolved(update, (*path, each.name))
            kept.append(each if type_ == each.type else replace(each, type=type_))
        new = [
            added
            for name, inference in self.unknown.items()
            if (inferred := inference.infer()) is not None
            and (added := update.add((*path, name), _field_of(name, inferred))) is not None
        ]
        return StructType((*kept, *new))


@dataclass(slots=True)
class _ElementObserver:
    """Sees the elements of lists, or the values of maps."""

    type: ListType | MapType
    observer: Observer

    def add(self, value: Any) -> None:
        if isinstance(value, list if isinstance(self.type, ListType) else dict):
            for each in value if isinstance(value, list) else value.values():
                if each is not None:
                    self.observer.add(each)

    def evolved(self, update: SchemaUpdate, path: Path) -> Type:
        def evolve(child: Field) -> Field:
            if isinstance(self.type, MapType) and child.name == KEY:
                return child
            return replace(child, type=self.observer.evolved(update, (*path, child.name)))

        return map_type(self.type, evolve)


@dataclass(slots=True)
class _PrimitiveObserver:
    type: str
    widest: str

    def add(self, value: Any) -> None:
        if self.type == "int":
            if as_integer(value, "int") is None and as_integer(value, "long") is not None:
                self.widest = "long"
        elif self.type == "float":
            if as_double(value, single=True) is None and as_double(value) is not None:
                self.widest = "double"
        elif parts := decimal_parts(self.widest):
            precision, scale = parts
            exact = exact_decimal(value)
            needed = None if exact is None else decimal_precision(exact, scale)
            if needed is not None and precision < needed <= DECIMAL_MAX_PRECISION:
                self.widest = f"decimal({needed}, {scale})"

    def evolved(self, update: SchemaUpdate, path: Path) -> str:
        if self.widest != self.type:
            update.note(path, f"{self.type} -> {self.widest}")
        return self.widest


def _observer(each: Field, depth: int) -> Observer | None:
    """Return what sees a field's values, None if no value could change its type."""
    if is_json(each.doc):
        return None
    match each.type:
        case StructType():
            return StructObserver(each.type, depth)
        case ListType() | MapType():
            observer = _observer(children(each.type)[-1], depth + 1)
            return None if observer is None else _ElementObserver(each.type, observer)
        case str() as type_:
            widens = type_ in ("int", "float") or decimal_parts(type_) is not None
            return _PrimitiveObserver(type_, type_) if widens else None


def relax_fields(
    fields: Sequence[Field], columns: Sequence[Sequence[pa.Array]], update: SchemaUpdate
) -> tuple[Field, ...]:
    """Make those fields optional, at any depth, that have a null in their arrays."""
    return tuple(_relax(each, arrays, update, (each.name,)) for each, arrays in zip(fields, columns, strict=True))


def _relax(each: Field, arrays: Sequence[pa.Array], update: SchemaUpdate, path: Path) -> Field:
    if each.required and any(array.null_count for array in arrays):
        update.note(path, "required -> optional")
        each = replace(each, required=False)
    if not has_required(each.type):
        return each
    below = iter(_children_arrays(each.type, arrays))
    type_ = map_type(each.type, lambda child: _relax(child, next(below), update, (*path, child.name)))
    return each if type_ == each.type else replace(each, type=type_)


def _children_arrays(type_: Type, arrays: Sequence[pa.Array]) -> list[list[pa.Array]]:
    """Return the arrays of each child, without those below nulls: there nothing is missing."""
    if isinstance(type_, ListType):
        return [[array.flatten() for array in arrays]]
    present = [array.filter(array.is_valid()) for array in arrays]
    if isinstance(type_, MapType):
        # Keys are never null. A filtered array is no slice, so its items are exactly those of its maps.
        return [[], [maps.items for maps in present]]
    structs = [array.flatten() for array in present]
    return [[columns[index] for columns in structs] for index in range(len(children(type_)))]


def has_required(type_: Type) -> bool:
    """Return whether anything below a type is required; keys of maps always are, and do not count."""
    below = children(type_)[1:] if isinstance(type_, MapType) else children(type_)
    return any(child.required or has_required(child.type) for child in below)
