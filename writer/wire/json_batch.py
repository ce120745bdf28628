"""The JSON batch as it travels: who sent it, and for each change everything but the row itself.

Owns the fields, their ranges and their defaults. Both sides of the log decode with these types: admission to check
and to number, the writer to read. Rows stay undecoded (`msgspec.Raw`): their columns belong to rows/json_strict.py.

    {"type": "cdc_batch", "sourceDoId": "shop-1", "sequenceNumber": 7, "events": [
        {"sequence": 41, "timestamp": 1763251200000, "operation": "UPDATE", "table": "users", "rowId": "9",
         "before": {"id": 9, ...}, "after": {"id": 9, ...}, "unchanged": ["photo"]}, ...]}

What decoding guarantees of a raw row: it is one JSON value, syntactically right to its last token, without NaN or
Infinity, and its surrogate escapes pair up. What it does not: that its bytes are UTF-8, that its keys are unique, that
its numbers fit anything. Those rows are admitted and end in `_cdc_rescued` where no column can hold them.

Nesting is bounded by the interpreter's recursion limit, which depends on how deep the caller already stands. Admission
therefore stands deeper on purpose (`decode_deeper`), so that what it took, the writer can always decode.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal, TypeVar

import msgspec

from lakefeed.contract.changes import INT64_MAX, TIMESTAMP_MAX_MS, TIMESTAMP_MIN_MS
from lakefeed.contract.errors import WriterError

T = TypeVar("T")

# Stack frames that admission keeps free for the writer. The writer's own stack is about ten frames high.
ADMISSION_HEADROOM_FRAMES = 100

Sequence = Annotated[int, msgspec.Meta(ge=0, le=INT64_MAX)]
TimestampMs = Annotated[int, msgspec.Meta(ge=TIMESTAMP_MIN_MS, le=TIMESTAMP_MAX_MS)]
OperationName = Literal["INSERT", "UPDATE", "DELETE", "READ", "TRUNCATE", "MESSAGE"]
NonEmpty = Annotated[str, msgspec.Meta(min_length=1)]


class BatchMalformed(WriterError):
    """The body is not a batch: refuse it. The message names the field and the rule."""


class EventHead(msgspec.Struct, rename="camel", gc=False):
    """One change without its row, as admission looks at it. A timestamp of 0 stands for the time of receipt."""

    sequence: Sequence
    operation: OperationName
    table: NonEmpty
    row_id: str = ""
    timestamp: TimestampMs = 0
    unchanged: list[str] | None = None


class Event(EventHead, rename="camel", gc=False):
    """One change with its row, which stays undecoded; `before` and `after` are empty when absent."""

    before: msgspec.Raw = msgspec.Raw()
    after: msgspec.Raw = msgspec.Raw()
    metadata: msgspec.Raw = msgspec.Raw()


class BatchHead(msgspec.Struct, rename="camel", tag_field="type", tag="cdc_batch"):
    """One message of changes, without their rows, whose syntax is checked all the same while they are skipped.

    Only the events are needed: the rest may be left to the connection that carries them.
    """

    events: list[EventHead]
    source_do_id: str = ""
    source_shard_name: str | None = None
    sequence_number: Sequence | None = None
    first_event_sequence: Sequence | None = None
    last_event_sequence: Sequence | None = None
    timestamp: TimestampMs = 0
    correlation_id: str | None = None
    size_bytes: int = 0
    is_retry: bool = False
    retry_count: int = 0


class Batch(msgspec.Struct, rename="camel", tag_field="type", tag="cdc_batch"):
    """The changes of a message that was admitted, with their rows."""

    events: list[Event]


_decode = msgspec.json.Decoder(Batch).decode


def decode_batch(body: bytes) -> Batch:
    """Decode a batch whose rows stay raw.

    Raises: BatchMalformed.
    """
    try:
        return _decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BatchMalformed(f"batch is malformed: {error}") from error
    except RecursionError:
        # The traceback of a thousand frames says nothing more.
        raise BatchMalformed("batch is malformed: a value is nested too deeply") from None


def decode_deeper(decode: Callable[[bytes], T], body: bytes, *, frames: int = ADMISSION_HEADROOM_FRAMES) -> T:
    """Decode under a stricter limit on nesting than `decode_batch`, so that what is admitted can be decoded again."""
    return decode_deeper(decode, body, frames=frames - 1) if frames else decode(body)
