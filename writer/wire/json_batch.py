"""JSON batch: the fields of a batch and its changes, their ranges and defaults. Rows stay undecoded.

Both sides of the log decode with these types: admission to check and number changes, the writer to read them. Rows are
`msgspec.Raw`; rows/json_strict.py decodes them.

    {"type": "cdc_batch", "sourceDoId": "shop-1", "sequenceNumber": 7, "events": [
        {"sequence": 41, "timestamp": 1763251200000, "operation": "UPDATE", "table": "users", "rowId": "9",
         "before": {"id": 9, ...}, "after": {"id": 9, ...}, "unchanged": ["photo"]}, ...]}

Decoding guarantees that a raw row is one JSON value with correct syntax, without NaN or Infinity, and that its
surrogate escapes are paired. It does not guarantee that its bytes are UTF-8, that its keys are unique, or that its
numbers fit any type. Such rows are admitted, and values that no column can hold go to `_cdc_rescued`.

The interpreter's recursion limit bounds nesting, and it depends on the depth of the caller's stack. Admission decodes
on a deeper stack on purpose (`decode_deeper`), so that the writer can decode whatever was admitted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal, TypeVar

import msgspec

from lakefeed.contract.changes import INT64_MAX, TIMESTAMP_MAX_MS, TIMESTAMP_MIN_MS
from lakefeed.contract.errors import WriterError

T = TypeVar("T")

# Stack frames that admission keeps free for the writer, whose own stack is about ten frames deep.
ADMISSION_HEADROOM_FRAMES = 100

Sequence = Annotated[int, msgspec.Meta(ge=0, le=INT64_MAX)]
TimestampMs = Annotated[int, msgspec.Meta(ge=TIMESTAMP_MIN_MS, le=TIMESTAMP_MAX_MS)]
OperationName = Literal["INSERT", "UPDATE", "DELETE", "READ", "TRUNCATE", "MESSAGE"]
NonEmpty = Annotated[str, msgspec.Meta(min_length=1)]


class BatchMalformed(WriterError):
    """The body is not a batch: refuse it. The message has the field and the rule."""


class EventHead(msgspec.Struct, rename="camel", gc=False):
    """One change without its row, for admission. Without a timestamp, its time is the time of receipt."""

    sequence: Sequence
    operation: OperationName
    table: NonEmpty
    row_id: str = ""
    timestamp: TimestampMs | None = None
    unchanged: list[str] | None = None


class Event(EventHead, rename="camel", gc=False):
    """One change with its row, which stays undecoded; `before` and `after` are empty when absent."""

    before: msgspec.Raw = msgspec.Raw()
    after: msgspec.Raw = msgspec.Raw()
    metadata: msgspec.Raw = msgspec.Raw()


class BatchHead(msgspec.Struct, rename="camel", tag_field="type", tag="cdc_batch"):
    """One message of changes without their rows, whose syntax is checked while they are skipped.

    Only the events are required: the connection supplies the rest.
    """

    events: list[EventHead]
    source_do_id: str = ""
    source_shard_name: str | None = None
    sequence_number: Sequence | None = None
    first_event_sequence: Sequence | None = None
    last_event_sequence: Sequence | None = None
    previous_sequence: Sequence | None = None
    timestamp: TimestampMs = 0
    correlation_id: str | None = None
    size_bytes: int = 0
    is_retry: bool = False
    retry_count: int = 0


class Batch(msgspec.Struct, rename="camel", tag_field="type", tag="cdc_batch"):
    """The changes of an admitted message, with their rows."""

    events: list[Event]


_decode = msgspec.json.Decoder(Batch).decode


def decode_batch(body: bytes) -> Batch:
    """Decode a batch whose rows stay raw, or raise BatchMalformed."""
    try:
        return _decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BatchMalformed(f"batch is malformed: {error}") from error
    except RecursionError:
        # A traceback of a thousand frames has no more information.
        raise BatchMalformed("batch is malformed: a value is nested too deeply") from None


def decode_deeper(decode: Callable[[bytes], T], body: bytes, *, frames: int = ADMISSION_HEADROOM_FRAMES) -> T:
    """Decode with a stricter limit on nesting than `decode_batch`, so that what is admitted can be decoded again."""
    return decode_deeper(decode, body, frames=frames - 1) if frames else decode(body)
