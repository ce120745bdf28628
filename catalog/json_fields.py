"""Typed reads from JSON objects that clients sent: the checks and their messages.

Each reader takes an object and a key. It returns a value of the named type, or raises BadRequest with the field and
the rule. The `maybe_` readers accept a field that is absent or null, because Java clients send explicit nulls.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn, TypeAlias

import orjson

from lakefeed.catalog.errors import BadRequest

JsonObject: TypeAlias = dict[str, Any]

# Snapshot ids, timestamps and counts have 64 bits in Iceberg. Ids of fields, schemas, specs and orders have 32 bits; a
# larger one makes the table unreadable for Java.
_INT64_MAX = 2**63 - 1
_INT32_MAX = 2**31 - 1
_INT32_DIGITS = len(str(_INT32_MAX))


def parse_object(body: bytes) -> JsonObject:
    """Parse a request body or metadata file that must be one JSON object."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"Malformed JSON: {error}") from error
    return as_object(value, "body")


def as_object(value: Any, what: str) -> JsonObject:
    """Check that a value is a JSON object."""
    if not isinstance(value, dict):
        _refuse(what, "an object", value)
    return value


def as_text(value: Any, what: str) -> str:
    """Check that a value is a string."""
    if not isinstance(value, str):
        _refuse(what, "a string", value)
    return value


def as_int(value: Any, what: str) -> int:
    """Check that a value is a 64-bit integer; JSON booleans are not."""
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) > _INT64_MAX:
        _refuse(what, "a 64-bit integer", value)
    return value


def as_id(value: Any, what: str) -> int:
    """Check that a value is a 32-bit integer."""
    number = as_int(value, what)
    if abs(number) > _INT32_MAX:
        _refuse(what, "a 32-bit integer", value)
    return number


def as_list(value: Any, what: str) -> list[Any]:
    """Check that a value is a list."""
    if not isinstance(value, list):
        _refuse(what, "a list", value)
    return value


def parse_count(text: str) -> int | None:
    """Read a number from text: ASCII digits, at most 32 bits; None for anything else.

    The digits are counted first, because int() raises an error of its own beyond 4,300 of them.
    """
    if len(text) > _INT32_DIGITS or not text.isascii() or not text.isdecimal():
        return None
    return number if (number := int(text)) <= _INT32_MAX else None


def read_text(document: Mapping[str, Any], key: str) -> str:
    """Read a required string."""
    return as_text(document.get(key), key)


def read_int(document: Mapping[str, Any], key: str) -> int:
    """Read a required integer."""
    return as_int(document.get(key), key)


def read_id(document: Mapping[str, Any], key: str) -> int:
    """Read a required 32-bit integer."""
    return as_id(document.get(key), key)


def read_object(document: Mapping[str, Any], key: str) -> JsonObject:
    """Read a required object."""
    return as_object(document.get(key), key)


def read_list(document: Mapping[str, Any], key: str) -> list[Any]:
    """Read a required list."""
    return as_list(document.get(key), key)


def read_objects(document: Mapping[str, Any], key: str) -> list[JsonObject]:
    """Read a required list of objects."""
    return [as_object(item, f"item of {key}") for item in read_list(document, key)]


def read_ints(document: Mapping[str, Any], key: str) -> list[int]:
    """Read a required list of integers."""
    return [as_int(item, f"item of {key}") for item in read_list(document, key)]


def read_texts(document: Mapping[str, Any], key: str) -> list[str]:
    """Read a required list of strings."""
    return [as_text(item, f"item of {key}") for item in read_list(document, key)]


def read_text_map(document: Mapping[str, Any], key: str) -> dict[str, str]:
    """Read a required object whose values are strings."""
    return {name: as_text(value, f"{key}.{name}") for name, value in read_object(document, key).items()}


def maybe_text(document: Mapping[str, Any], key: str) -> str | None:
    """Read an optional string."""
    return None if document.get(key) is None else read_text(document, key)


def maybe_int(document: Mapping[str, Any], key: str) -> int | None:
    """Read an optional integer."""
    return None if document.get(key) is None else read_int(document, key)


def maybe_id(document: Mapping[str, Any], key: str) -> int | None:
    """Read an optional 32-bit integer."""
    return None if document.get(key) is None else read_id(document, key)


def maybe_object(document: Mapping[str, Any], key: str) -> JsonObject | None:
    """Read an optional object."""
    return None if document.get(key) is None else read_object(document, key)


def maybe_texts(document: Mapping[str, Any], key: str) -> list[str]:
    """Read an optional list of strings; absent means none."""
    return [] if document.get(key) is None else read_texts(document, key)


def maybe_text_map(document: Mapping[str, Any], key: str) -> dict[str, str]:
    """Read an optional map of strings; absent means empty."""
    return {} if document.get(key) is None else read_text_map(document, key)


def read_bool(document: Mapping[str, Any], key: str) -> bool:
    """Read a required boolean."""
    value = document.get(key)
    if not isinstance(value, bool):
        _refuse(key, "a boolean", value)
    return value


def maybe_bool(document: Mapping[str, Any], key: str) -> bool:
    """Read an optional boolean; absent means false."""
    return False if document.get(key) is None else read_bool(document, key)


_JSON_KINDS = {
    dict: "an object",
    list: "a list",
    str: "a string",
    bool: "a boolean",
    int: "an integer",
    float: "a number",
}


def _refuse(what: str, expected: str, value: Any) -> NoReturn:
    found = "nothing" if value is None else _JSON_KINDS.get(type(value), "something else")
    raise BadRequest(f"Cannot parse {what}: expected {expected}, found {found}")
