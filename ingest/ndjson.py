"""Rows without an envelope, one JSON object a line, read as inserts. Owns the lines and their row ids.

{"id": 1, "name": "Ada"}
{"id": 2, "name": "Grace"}
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from ingest.errors import ProtocolError
from ingest.offers import NackReason

_NULL = msgspec.Raw(b"null")
_QUOTE = b'"'

_decode_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_text = msgspec.json.Decoder(str).decode
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Row:
    """A row as it came, and the text of its key: empty if it has none."""

    json: msgspec.Raw
    row_id: str


def read_rows(body: bytes, *, key: str, row_max_bytes: int) -> list[Row]:
    """Read the rows of a request, leaving out blank lines.

    Raises: ProtocolError.
    """
    return [_read_row(line, number, key=key, row_max_bytes=row_max_bytes) for number, line in _lines(body)]


def batch_of(rows: Sequence[Row], *, table: str, first_sequence: int) -> bytes:
    """Wrap rows as a batch of inserts, numbered from `first_sequence`."""
    events = [
        {"sequence": sequence, "operation": "INSERT", "table": table, "rowId": row.row_id, "after": row.json}
        for sequence, row in enumerate(rows, start=first_sequence)
    ]
    return _encode({"type": "cdc_batch", "events": events})


def _lines(body: bytes) -> Iterator[tuple[int, bytes]]:
    return ((number, line) for number, line in enumerate(body.splitlines(), start=1) if line.strip())


def _read_row(line: bytes, number: int, *, key: str, row_max_bytes: int) -> Row:
    if len(line) > row_max_bytes:
        raise ProtocolError(
            NackReason.EVENT_TOO_LARGE.value, f"line {number}: expected at most {row_max_bytes} bytes, got {len(line)}"
        )
    try:
        line.decode()
        return Row(msgspec.Raw(line), _text_of(_decode_object(line).get(key, _NULL)))
    except UnicodeDecodeError:
        raise _invalid(f"line {number}: expected UTF-8") from None
    except RecursionError:
        raise _invalid(f"line {number}: a value is nested too deeply") from None
    except msgspec.MsgspecError:
        raise _invalid(f"line {number}: expected a JSON object") from None


def _text_of(value: msgspec.Raw) -> str:
    text = bytes(value)
    if text.startswith(_QUOTE):
        return _decode_text(text)
    return "" if value == _NULL else text.decode()


def _invalid(message: str) -> ProtocolError:
    return ProtocolError(NackReason.INVALID_FORMAT.value, message)
