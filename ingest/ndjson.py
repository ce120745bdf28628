"""Rows without an envelope, one JSON object a line, read as inserts. Owns the lines and their row ids.

{"id": 1, "name": "Ada"}
{"id": 2, "name": "Grace"}

Rows are wrapped one after the other and never kept as objects: many small ones would take many times their bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import msgspec

from ingest.batch_checks import invalid
from ingest.errors import ProtocolError
from ingest.offers import NackReason
from writer.envelope import decode_deeper

_BATCH_HEAD, _BATCH_END = b'{"type":"cdc_batch","events":[', b"]}"
_NULL = msgspec.Raw(b"null")
_QUOTE = b'"'

_LINE = re.compile(rb"[^\r\n]+")

_decode_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_text = msgspec.json.Decoder(str).decode
_read_over = msgspec.json.Decoder(msgspec.Raw).decode
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class WrappedRows:
    """Rows as a batch of inserts."""

    batch: bytes
    count: int


def has_rows(body: bytes) -> bool:
    """Tell whether there is anything but blank lines."""
    return bool(body) and not body.isspace()


def wrap_rows(
    body: bytes, *, key: str, table: str, first_sequence: int, row_max_bytes: int, rows_max: int | None = None
) -> WrappedRows:
    """Read the rows of a request, or the first `rows_max`, as a batch of inserts numbered from `first_sequence`.

    Raises: ProtocolError.
    """
    batch, sequence = bytearray(_BATCH_HEAD), first_sequence
    middle = b',"operation":"INSERT","table":%b,"rowId":' % _encode(table)
    for line in islice(_lines(body), rows_max):
        _check_size(line, row_max_bytes)
        batch += b'{"sequence":%d%b%b,"after":%b},' % (sequence, middle, _encode(_row_id_of(line, key)), line.group())
        sequence += 1
    batch[-1 if sequence > first_sequence else len(batch) :] = _BATCH_END
    wrapped = bytes(batch)
    _check_nesting(wrapped)
    return WrappedRows(wrapped, sequence - first_sequence)


def _lines(body: bytes) -> Iterator[re.Match[bytes]]:
    return (line for line in _LINE.finditer(body) if not line.group().isspace())


def _check_size(line: re.Match[bytes], max_bytes: int) -> None:
    size_bytes = line.end() - line.start()
    if size_bytes > max_bytes:
        rule = f"expected at most {max_bytes} bytes, got {size_bytes}"
        raise ProtocolError(NackReason.EVENT_TOO_LARGE.value, f"{_place_of(line)}: {rule}")


def _row_id_of(line: re.Match[bytes], key: str) -> str:
    """Check that a line is a row, and give its key's text: empty if it has none."""
    try:
        line.group().decode()
        return _text_of(_decode_object(line.group()).get(key, _NULL))
    except UnicodeDecodeError:
        raise invalid(f"{_place_of(line)}: expected UTF-8") from None
    except RecursionError:
        raise invalid(f"{_place_of(line)}: a value is nested too deeply") from None
    except msgspec.MsgspecError:
        raise invalid(f"{_place_of(line)}: expected a JSON object") from None


def _text_of(value: msgspec.Raw) -> str:
    text = bytes(value)
    if text.startswith(_QUOTE):
        return _decode_text(text)
    return "" if value == _NULL else text.decode()


def _place_of(line: re.Match[bytes]) -> str:
    return f"line {len(line.string[: line.start()].splitlines()) + 1}"


def _check_nesting(batch: bytes) -> None:
    """Refuse what the writer, which decodes the rows inside their batch, could not decode."""
    try:
        decode_deeper(_read_over, batch)
    except RecursionError:
        raise invalid("a value is nested too deeply") from None
