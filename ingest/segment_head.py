"""What every segment of the log begins with: where all sources stood when it was begun. Owns the layout.

    {"marks": {source: [epoch, sequence]}, "origins": {source: text}}

So a start reads the newest segment alone, and trimming the older ones forgets nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from writer.changes import Position, SourceId


class _Document(msgspec.Struct):
    marks: dict[str, tuple[int, int]] = {}
    origins: dict[str, str] = {}


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(_Document).decode


def encode_head(marks: Mapping[SourceId, Position], origins: Mapping[SourceId, str]) -> bytes:
    """Lay out the head of a segment."""
    positions = {str(source): (mark.epoch, mark.sequence) for source, mark in marks.items()}
    return _encode(_Document(positions, {str(source): text for source, text in origins.items()}))


def decode_head(head: bytes) -> tuple[dict[SourceId, Position], dict[SourceId, str]]:
    """Read the head of a segment: marks, origins."""
    document = _decode(head)
    marks = {SourceId(source): Position(*mark) for source, mark in document.marks.items()}
    return marks, {SourceId(source): text for source, text in document.origins.items()}
