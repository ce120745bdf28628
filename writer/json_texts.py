"""JSON texts that tables keep in properties and snapshot summaries. Owns how they are written, and strict reading.

Standard library only: the Spark pipeline reads these texts on clusters where nothing else of the project is installed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def encode(document: Mapping[str, Any]) -> str:
    """Render a document: compact, its names in order, so that equal documents are equal texts."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def decode_object(text: str) -> dict[str, Any]:
    """Read a document.

    Raises: ValueError.
    """
    try:
        return as_object(json.loads(text))
    except RecursionError as error:
        raise ValueError("too deep") from error


def as_object(value: Any) -> dict[str, Any]:
    """Take a value as an object.

    Raises: ValueError.
    """
    if not isinstance(value, dict):
        raise ValueError(f"expected an object: got={type(value).__name__}")  # noqa: TRY004 - as json.loads has it
    return value


def as_number(value: Any) -> int:
    """Take a value as a whole number.

    Raises: ValueError.
    """
    if type(value) is not int:
        raise ValueError(f"expected a whole number: got={type(value).__name__}")
    return value


def as_numbers(value: Any) -> dict[str, int]:
    """Take a value as an object of whole numbers.

    Raises: ValueError.
    """
    return {name: as_number(each) for name, each in as_object(value).items()}


def as_hex(value: Any) -> int:
    """Take a value as a number in hexadecimal digits.

    Raises: ValueError.
    """
    if not isinstance(value, str):
        raise ValueError(f"expected hexadecimal digits: got={type(value).__name__}")  # noqa: TRY004
    return int(value, 16)


def member(document: Mapping[str, Any], name: str) -> Any:
    """Take a member that has to be there.

    Raises: ValueError.
    """
    if name not in document:
        raise ValueError(f"lacks a member: name={name}")
    return document[name]
