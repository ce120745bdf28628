"""Types and defaults of settings and messages as text, without the names of classes, which users never see."""

from __future__ import annotations

import dataclasses
import enum
import json
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

_BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<", "min_length": "length >=", "max_length": "length <="}
_PLAIN = {
    str: "text",
    Path: "path",
    dict: "map",
    list: "list",
    type(None): "null",
    Any: "any",
    msgspec.Raw: "raw JSON",
}


def type_text(kind: Any) -> str:
    """Return a readable text of a type; nested records are shown as `object`."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return " ".join([type_text(args[0]), *(_bounds(each) for each in args[1:])])
    if origin is typing.Literal:
        return "|".join(map(str, args))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(type_text, args))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return f"map of {type_text(args[1])}"
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return f"list of {type_text(args[0])}"
    if kind in _PLAIN:
        return _PLAIN[kind]
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return "|".join(str(member.value) for member in kind)
    if record_in(kind) is not None:
        return "object"
    return str(kind.__name__)


def record_in(kind: Any) -> type | None:
    """Return the dataclass or struct that a type is, holds, lists or maps to, if any."""
    if isinstance(kind, type) and (dataclasses.is_dataclass(kind) or issubclass(kind, msgspec.Struct)):
        return kind
    return next((found for each in typing.get_args(kind) if (found := record_in(each)) is not None), None)


def path_text(name: str, kind: Any) -> str:
    """Return a field's name with what follows it in a path: `events[]`, `tables.<name>`."""
    origin = typing.get_origin(kind)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return f"{name}.<name>"
    return f"{name}[]" if isinstance(origin, type) and issubclass(origin, Sequence) else name


def value_text(value: Any) -> str:
    """Return a default as JSON."""
    return json.dumps(value, default=_plain, sort_keys=True)


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return dict(value) if isinstance(value, Mapping) else str(value)


def _bounds(meta: Any) -> str:
    shown = ((name, getattr(meta, name, None)) for name in _BOUNDS)
    return " ".join(f"{_BOUNDS[name]} {bound}" for name, bound in shown if bound is not None)
