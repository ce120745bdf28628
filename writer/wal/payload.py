"""Payload of a log record: a frame as it was received, and what admission decided about it.

    kind: u8 | header_length: u32 | header: JSON bytes[header_length] | body: bytes (the frame, unchanged)

The header repeats facts of the body, so that readers need not decode the body to get them.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from lakefeed.contract.changes import SourceId

# Parts that are written one after the other, so that a large body is never copied into a larger buffer.
Payload: TypeAlias = tuple[bytes, ...]

_PREFIX = struct.Struct("<BI")


class Encoding(enum.IntEnum):
    """How the body is encoded. The number is stored: never reuse one."""

    JSON_BATCH = 1
    ARROW_STREAM = 2


@dataclass(frozen=True, slots=True)
class Frame:
    """One admitted batch. Changes at or below `after_sequence` were admitted before: readers drop them.

    `origin` has the source's own positions with these changes; only ingest reads it. `expanded_bytes` is the maximum
    size of the decoded body, if that is more than the body's size. `declared` has the declarations of tables that the
    source sent with this batch for the first time, as JSON {table: declaration} (rows/declaration.py).
    `open_transaction` names the source's transaction that continues after the batch, if transactions are tracked.
    """

    source: SourceId
    epoch: int
    after_sequence: int
    last_sequence: int
    received_at_us: int
    encoding: Encoding
    body: bytes
    origin: str = ""
    expanded_bytes: int = 0
    declared: str = ""
    open_transaction: str = ""


class _Header(msgspec.Struct, array_like=True):
    """The fields of a frame that its header stores, in their order."""

    source: SourceId
    epoch: int
    after_sequence: int
    last_sequence: int
    received_at_us: int
    origin: str = ""
    expanded_bytes: int = 0
    declared: str = ""
    open_transaction: str = ""


_encode_header = msgspec.json.Encoder().encode
_decode_header = msgspec.json.Decoder(_Header).decode


def encode_frame(frame: Frame) -> Payload:
    """Encode a frame as the parts of one log payload."""
    header = _encode_header([getattr(frame, name) for name in _Header.__struct_fields__])
    return (_PREFIX.pack(frame.encoding, len(header)) + header, frame.body)


def decode_frame(payload: bytes) -> Frame:
    """Decode a frame from a payload that the log has already checked."""
    kind, header, body_start = _read_header(payload)
    return Frame(encoding=Encoding(kind), body=payload[body_start:], **msgspec.structs.asdict(header))


@dataclass(frozen=True, slots=True)
class PayloadFacts:
    """The maximum size of a payload once decoded, and whether it declares columns."""

    decoded_max_bytes: int
    declares: bool


def payload_facts(payload: bytes) -> PayloadFacts:
    """Read a payload's header without decoding its body."""
    header = _read_header(payload)[1]
    return PayloadFacts(max(len(payload), header.expanded_bytes), bool(header.declared))


def open_transaction_of(payload: bytes) -> tuple[SourceId, str]:
    """Return which transaction of which source continues after a payload; an empty name if none does."""
    header = _read_header(payload)[1]
    return header.source, header.open_transaction


def _read_header(payload: bytes) -> tuple[int, _Header, int]:
    kind, header_length = _PREFIX.unpack_from(payload)
    body_start = _PREFIX.size + header_length
    return kind, _decode_header(payload[_PREFIX.size : body_start]), body_start
