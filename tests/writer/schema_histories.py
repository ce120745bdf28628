"""Histories of one table, drawn at random: batches that may declare columns again, and rows that fit or do not.

Columns are a tree that changes from batch to batch as declared: at every depth fields come, get wider types and other
names. What a row must look like in the end is worked out beside it, by the fields' places, so that nothing is compared
with our own reading of it.
"""

from __future__ import annotations

import base64
import datetime as dt
import json
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, NamedTuple

import msgspec
from hypothesis import strategies as st

NAMES = ("a", "b", "c", "D d", "ß")
DEPTH_MAX = 2
# Fits no primitive type.
MISFIT = {"no": ["number"]}
NOTHING: Any = object()


def _twice(values: st.SearchStrategy) -> st.SearchStrategy:
    return values.map(lambda value: (value, value))


def _decimals(precision: int, scale: int) -> st.SearchStrategy:
    numbers = st.integers(-(10**precision) + 1, 10**precision - 1).map(lambda n: Decimal(f"{n}e{-scale}"))
    texts = numbers.map(lambda number: (f"{number:f}", number))
    return st.one_of(texts, texts.map(lambda pair: (msgspec.Raw(pair[0]), pair[1])))


def _moments(**options: Any) -> st.SearchStrategy:
    return st.datetimes(dt.datetime(2, 1, 1), dt.datetime(9998, 12, 31), **options)


def _zoned(pair: tuple[dt.datetime, int]) -> tuple[str, dt.datetime]:
    moment, hours = pair
    zone = dt.timezone(dt.timedelta(hours=hours))
    return moment.replace(tzinfo=dt.UTC).astimezone(zone).isoformat(), moment.replace(tzinfo=dt.UTC)


def _floats(width: int) -> st.SearchStrategy:
    return _twice(st.floats(allow_nan=False, allow_infinity=False, width=width))


def _bytes(**options: Any) -> st.SearchStrategy:
    return st.binary(**options).map(lambda value: (base64.b64encode(value).decode(), value))


LONGS = st.integers(-(2**63), 2**63 - 1)
TEXTS = _twice(st.text(st.characters(codec="utf-8"), max_size=6))
# Pairs of what JSON says and what engines show.
KEYS = {
    "string": TEXTS,
    "int": st.integers(-(2**31), 2**31 - 1).map(lambda n: (str(n), n)),
    "long": LONGS.map(lambda n: (str(n), n)),
    "date": st.dates().map(lambda day: (day.isoformat(), day)),
    "uuid": st.uuids().map(lambda value: (str(value), value)),
    "decimal(9, 3)": _decimals(9, 3).map(lambda pair: (f"{pair[1]:f}", pair[1])),
}
PRIMITIVES = {
    "boolean": _twice(st.booleans()),
    "int": _twice(st.integers(-(2**31), 2**31 - 1)),
    "long": st.one_of(_twice(LONGS), LONGS.map(lambda n: (f"__bigint__:{n}", n))),
    "float": _floats(32),
    "double": _floats(64),
    "decimal(9, 3)": _decimals(9, 3),
    "decimal(38, 10)": _decimals(38, 10),
    "string": TEXTS,
    "binary": _bytes(max_size=5),
    "fixed[3]": _bytes(min_size=3, max_size=3),
    "date": KEYS["date"],
    "time": st.times().map(lambda time: (time.isoformat(), time)),
    "timestamp": _moments().map(lambda moment: (moment.isoformat(), moment)),
    "timestamptz": st.tuples(_moments(), st.integers(-14, 14)).map(_zoned),
    "uuid": KEYS["uuid"],
}
VALUES = PRIMITIVES | {"decimal(20, 3)": _decimals(20, 3)}
WIDER = {"int": "long", "float": "double", "decimal(9, 3)": "decimal(20, 3)"}


# -- columns


@dataclass
class Leaf:
    """A primitive type."""

    type: str


@dataclass
class Elements:
    """A list."""

    element: Node


@dataclass
class Entries:
    """A map."""

    key: str
    value: Node


@dataclass
class Member:
    """A field by the name that it has now, and the one that it had when it was last declared, if that was another."""

    name: str
    node: Node
    former: str | None = None


@dataclass
class Members:
    """A struct; the columns of a table are one too."""

    members: list[Member] = field(default_factory=list)


Node = Leaf | Elements | Entries | Members


def declare(node: Node) -> Any:
    """Write a type as declarations do."""
    match node:
        case Leaf(type_):
            return type_
        case Elements(element):
            return {"type": "list", "element": declare(element)}
        case Entries(key, value):
            return {"type": "map", "key": key, "value": declare(value)}
        case Members():
            return {"type": "struct", "fields": declare_members(node)}


def declare_members(node: Members) -> dict[str, Any]:
    return {member.name: _renamed(declare(member.node), member.former) for member in node.members}


def _renamed(declared: Any, former: str | None) -> Any:
    if former is None:
        return declared
    return ({"type": declared} if isinstance(declared, str) else declared) | {"renamedFrom": former}


def _draw_node(draw: st.DrawFn, depth: int) -> Node:
    kind = draw(st.sampled_from(["leaf", "leaf", "struct", "list", "map"])) if depth < DEPTH_MAX else "leaf"
    match kind:
        case "struct":
            node = Members()
            for _ in range(draw(st.integers(1, 2))):
                _add_member(draw, node, depth + 1)
            return node
        case "list":
            return Elements(_draw_node(draw, depth + 1))
        case "map":
            return Entries(draw(st.sampled_from(list(KEYS))), _draw_node(draw, depth + 1))
    return Leaf(draw(st.sampled_from(list(PRIMITIVES))))


def _add_member(draw: st.DrawFn, node: Members, depth: int) -> None:
    number = len(node.members)
    node.members.append(Member(f"{NAMES[number % len(NAMES)]}{number}", _draw_node(draw, depth)))


def _evolve(draw: st.DrawFn, node: Node, depth: int) -> None:
    """Change a type at any depth as a declaration may."""
    match node:
        case Leaf(type_) if type_ in WIDER and draw(st.booleans()):
            node.type = WIDER[type_]
        case Elements(element):
            _evolve(draw, element, depth + 1)
        case Entries(_, value):
            _evolve(draw, value, depth + 1)
        case Members(members):
            for member in members:
                member.former = None
                _evolve(draw, member.node, depth + 1)
                if draw(st.integers(0, 3)) == 0:
                    member.former, member.name = member.name, f"{member.name}'"
            for _ in range(draw(st.integers(0, 1 if depth else 2))):
                _add_member(draw, node, depth + 1)


# -- values


class Drawn(NamedTuple):
    """A value as it is sent, as it is shown (of structs the members by their places), and what of it is rescued."""

    sent: Any
    shown: Any
    rescued: Any = NOTHING


def _draw_value(draw: st.DrawFn, node: Node) -> Drawn:
    match node:
        case Leaf(type_):
            if draw(st.integers(0, 11)) == 0:
                return Drawn(MISFIT, None, MISFIT)
            return Drawn(*draw(VALUES[type_]))
        case Elements(element):
            elements = [_maybe_null(draw, element) for _ in range(draw(st.integers(0, 3)))]
            return _all_or_none([each.sent for each in elements], [each.shown for each in elements], elements)
        case Entries(key, value):
            keys = draw(st.lists(KEYS[key], max_size=3, unique_by=lambda pair: pair[1]))
            values = [_draw_value(draw, value) for _ in keys]
            sent = {name: each.sent for (name, _), each in zip(keys, values, strict=True)}
            return _all_or_none(sent, {name: each.shown for (_, name), each in zip(keys, values, strict=True)}, values)
        case Members():
            return draw_members(draw, node)


def _maybe_null(draw: st.DrawFn, node: Node) -> Drawn:
    return Drawn(None, None) if draw(st.integers(0, 4)) == 0 else _draw_value(draw, node)


def _all_or_none(sent: Any, shown: Any, parts: list[Drawn]) -> Drawn:
    """Lists and maps are rescued whole."""
    fits = all(part.rescued is NOTHING for part in parts)
    return Drawn(sent, shown) if fits else Drawn(sent, None, sent)


def draw_members(draw: st.DrawFn, node: Members) -> Drawn:
    """Draw an object; of one that has misfits the other members stay."""
    sent: dict[str, Any] = {}
    shown: dict[int, Any] = {}
    rescued: dict[str, Any] = {}
    for place, member in enumerate(node.members):
        match draw(st.sampled_from(["value", "value", "value", "null", "absent"])):
            case "value":
                each = _draw_value(draw, member.node)
                sent[member.name], shown[place] = each.sent, each.shown
                if each.rescued is not NOTHING:
                    rescued[member.name] = each.rescued
            case "null":
                sent[member.name] = None
    return Drawn(sent, shown, rescued or NOTHING)


def name_shown(node: Node, shown: Any) -> Any:
    """Give a shown value with the names that fields have now, and null for those that came after it."""
    match node:
        case Elements(element) if shown is not None:
            return [name_shown(element, each) for each in shown]
        case Entries(_, value) if shown is not None:
            return {key: name_shown(value, each) for key, each in shown.items()}
        case Members(members) if shown is not None:
            return {member.name: name_shown(member.node, shown.get(place)) for place, member in enumerate(members)}
    return shown


# -- histories

# A column that is never declared: its type, and the fields that come later, are found from its values.
UNDECLARED = "found"
_UNDECLARED_VALUES = st.fixed_dictionaries(
    {"n": LONGS, "t": TEXTS.map(lambda pair: pair[0])}, optional={"more": st.booleans()}
)


@dataclass
class Batch:
    """Rows to send, and what is declared with them."""

    declared: dict[str, Any]
    rows: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class History:
    """Batches of one table, its columns in the end, and how each row must be shown: by column, and what is rescued."""

    batches: list[Batch]
    columns: list[str]
    shown: list[tuple[dict[str, Any], Any]]


@st.composite
def histories(draw: st.DrawFn) -> History:
    """Draw batches of one table."""
    table = Members()
    _add_member(draw, table, 0)
    batches: list[Batch] = []
    shown: list[Drawn] = []
    found: list[Any] = []
    before: dict[str, Any] = {}
    for number in range(draw(st.integers(1, 4))):
        if number:
            _evolve(draw, table, 0)
        declared = declare_members(table)
        batches.append(Batch({name: each for name, each in declared.items() if before.get(name) != each}))
        before = declared
        for _ in range(draw(st.integers(1, 3))):
            drawn = draw_members(draw, table)
            found.append(draw(st.one_of(st.none(), _UNDECLARED_VALUES)))
            batches[-1].rows.append(drawn.sent | ({UNDECLARED: found[-1]} if found[-1] is not None else {}))
            shown.append(drawn)
    names = {name: None for each in found for name in each or ()}
    rows = [
        (
            name_shown(table, each.shown) | ({UNDECLARED: other and names | other} if names else {}),
            None if each.rescued is NOTHING else json.loads(msgspec.json.encode(each.rescued)),
        )
        for each, other in zip(shown, found, strict=True)
    ]
    return History(batches, list(rows[0][0]), rows)
