"""What one record of the log holds: a frame as it was received, and what admission decided about it.

Owns the payload's layout; the record around it belongs to wal/record.py.

    kind: u8 | header_length: u32 | header: JSON bytes[header_length] | body: bytes (the frame, untouched)

The header repeats what the body says of itself where a reader would otherwise have to decode the body.
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
    """One admitted batch. Changes at or below `after_sequence` were taken before: readers drop them.

    `origin` is ingest's: what it has to remember of the source's own positions along with these changes.
    `expanded_bytes` is what the body may take once decoded, where that is more than its own size. `declared` is what
    the source declared of tables in this batch, {table: declaration} as JSON (rows/declared.py), if it has not before.
    `open_transaction` names the source's transaction that goes on behind the batch, where that is heeded.
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
    source: str
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
    """Lay out a frame as the parts of one log payload."""
    header = _encode_header(
        _Header(
            frame.source,
            frame.epoch,
            frame.after_sequence,
            frame.last_sequence,
            frame.received_at_us,
            frame.origin,
            frame.expanded_bytes,
            frame.declared,
            frame.open_transaction,
        )
    )
    return (_PREFIX.pack(frame.encoding, len(header)) + header, frame.body)


def decode_frame(payload: bytes) -> Frame:
    """Read a frame back from a payload that the log has already checked."""
    kind, header, body_start = _read_header(payload)
    return Frame(
        source=SourceId(header.source),
        epoch=header.epoch,
        after_sequence=header.after_sequence,
        last_sequence=header.last_sequence,
        received_at_us=header.received_at_us,
        encoding=Encoding(kind),
        body=payload[body_start:],
        origin=header.origin,
        expanded_bytes=header.expanded_bytes,
        declared=header.declared,
        open_transaction=header.open_transaction,
    )


@dataclass(frozen=True, slots=True)
class PayloadFacts:
    """What its header tells of a payload: what it may take once decoded, and whether something is declared in it."""

    decoded_max_bytes: int
    declares: bool


def payload_facts(payload: bytes) -> PayloadFacts:
    """Look at a payload without decoding its body."""
    header = _read_header(payload)[1]
    return PayloadFacts(max(len(payload), header.expanded_bytes), bool(header.declared))


def open_transaction_of(payload: bytes) -> tuple[SourceId, str]:
    """Tell which transaction of which source goes on behind a payload; an empty name if none does."""
    header = _read_header(payload)[1]
    return SourceId(header.source), header.open_transaction


def _read_header(payload: bytes) -> tuple[int, _Header, int]:
    kind, header_length = _PREFIX.unpack_from(payload)
    body_start = _PREFIX.size + header_length
    return kind, _decode_header(payload[_PREFIX.size : body_start]), body_start
