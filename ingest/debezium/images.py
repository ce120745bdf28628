"""Rows as Debezium sends them, made fit to be stored. Owns placeholders, trusted columns and row ids.

Three things happen to a row, and a row that needs none of them keeps its very bytes:

    1. columns that cannot be trusted are dropped (before-images only, see config.TableKeys)
    2. columns whose value is the placeholder for an unchanged TOAST value are dropped and named in `unchanged`
    3. values are converted by the schema that came with the row, if one did (values.py)

The placeholder takes the shape of its column: text and json hold it as it is, bytea its base64, text[] a list of it,
integer and float arrays its character codes, hstore maps an entry of it. A value of the row that happens to equal the
placeholder cannot be told apart from it.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgspec

from ingest.debezium.errors import DebeziumMalformed
from ingest.debezium.events import NO_IMAGE, NULL
from ingest.debezium.values import Converter, read_fields

# Placeholders are a setting, of which a service has few.
PLACEHOLDERS_MAX = 16
# White space and decimals that a sender may put between character codes.
_CODE_MAX_BYTES = 8

_encode = msgspec.json.Encoder().encode
_decode_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_text = msgspec.json.Decoder(str).decode
_decode_any = msgspec.json.Decoder().decode


@dataclass(frozen=True, slots=True)
class Image:
    """A row as it may be stored. `columns` are its values one by one, for keys."""

    json: msgspec.Raw
    columns: dict[str, msgspec.Raw]
    unchanged: tuple[str, ...]
    irregular: tuple[str, ...]


NONE = Image(NO_IMAGE, {}, (), ())


def read_image(
    row: msgspec.Raw,
    *,
    place: str,
    unavailable_value: str,
    converters: dict[str, Converter],
    trusted: Collection[str] | None = None,
) -> Image:
    """Read a row; `trusted` limits it to those columns.

    Raises: DebeziumMalformed.
    """
    if row in (NO_IMAGE, NULL):
        return NONE
    columns = decode_object(row, place)
    sent = len(columns)
    if trusted is not None:
        columns = {name: value for name, value in columns.items() if name in trusted}
    unchanged = _drop_unchanged(columns, row, placeholder_of(unavailable_value))
    irregular = read_fields(columns, converters)
    as_sent = len(columns) == sent and not converters
    json = row if as_sent else msgspec.Raw(_encode(columns))
    return Image(json, columns, tuple(unchanged), tuple(irregular))


def decode_object(json: bytes | msgspec.Raw, place: str) -> dict[str, msgspec.Raw]:
    """Decode one level of a JSON object.

    Raises: DebeziumMalformed.
    """
    try:
        return _decode_object(json)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise DebeziumMalformed(place, "expected an object") from None


def _drop_unchanged(columns: dict[str, msgspec.Raw], row: msgspec.Raw, placeholder: Placeholder) -> list[str]:
    if not placeholder.may_be_in(row):
        return []
    unchanged = [name for name, value in columns.items() if placeholder.is_value(value)]
    for name in unchanged:
        del columns[name]
    return unchanged


class Placeholder:
    """What stands for a value that the source did not send, in all its shapes."""

    def __init__(self, text: str) -> None:
        utf8 = text.encode()
        in_base64 = base64.b64encode(utf8).decode()
        codes = [rf"{code}(?:\.0+)?" for code in utf8]
        # Text that JSON can write in several ways is looked for value by value.
        self._is_plain = text.isascii() and text.isprintable() and not {*text} & {*'"\\/'}
        self._texts = (utf8, in_base64.encode())
        self._codes = re.compile(r"\s*,\s*".join(codes).encode())
        self._shapes: tuple[Any, ...] = (text, in_base64, [text], [in_base64], list(utf8), {text: text})
        self._max_bytes = max(len(utf8) * _CODE_MAX_BYTES, 4 * len(in_base64)) + _CODE_MAX_BYTES

    def may_be_in(self, row: msgspec.Raw | bytes) -> bool:
        """Tell, fast, whether a row can hold the placeholder at all."""
        json = bytes(row)
        return not self._is_plain or any(text in json for text in self._texts) or self._codes.search(json) is not None

    def is_value(self, value: msgspec.Raw | bytes) -> bool:
        """Tell whether a value is the placeholder."""
        if len(value) > self._max_bytes:
            return False
        try:
            return _decode_any(value) in self._shapes
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return False


placeholder_of = lru_cache(maxsize=PLACEHOLDERS_MAX)(Placeholder)


def row_id_of(columns: dict[str, msgspec.Raw], keys: Sequence[str]) -> str:
    """Name a row by its key: one column's text, or several columns as a JSON list; empty if any of them is missing."""
    values = [columns.get(name, NULL) for name in keys]
    if not values or NULL in values:
        return ""
    if len(values) > 1:
        return _encode(values).decode()
    text = bytes(values[0]).decode()
    return _decode_text(text) if text.startswith('"') else text
