"""The messages of the wire protocol, version 1. Owns their fields and the words in which wrong ones are refused.

Frames are JSON objects told apart by `type`, or batches as Arrow streams (writer/arrow/frames.py), told from JSON by
their first bytes. What one connection may say when is session.py's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, get_args

import msgspec

from lakefeed.contract.changes import Operation
from lakefeed.ingest.errors import ProtocolError
from lakefeed.ingest.protocol.batch import invalid
from lakefeed.writer.wire.arrow_frame import ArrowFrame
from lakefeed.writer.wire.json_batch import BatchHead, BatchMalformed, NonEmpty, Sequence, TimestampMs, decode_deeper

T = TypeVar("T")

PROTOCOL_VERSION = 1

# Answers repeat it, and many answers may wait for a client that does not read them.
CORRELATION_ID_MAX_CHARS = 255

# An Arrow frame may stand for as much JSON as this many of the largest frames: compressed and narrow columns have room
# then, and what they become in memory is still bounded.
ARROW_EXPANSION_MAX_FRAMES = 4

# The last ` - at ` is the decoder's own; those before it are part of a value.
_PLACE = re.compile(r"(.*) - at `\$\.?(.*?)`", re.DOTALL)

FlushReason: TypeAlias = Literal["manual", "shutdown", "buffer_full", "time_threshold"]

# When a batch is answered: once it is durable, with a receipt later, or by that receipt alone.
AckLevel: TypeAlias = Literal["durable", "committed"]


class Connect(msgspec.Struct, rename="camel", tag_field="type", tag="connect"):
    """Bind the connection to a source and ask where to resume."""

    source_do_id: NonEmpty
    timestamp: TimestampMs = 0
    source_shard_name: str | None = None
    last_ack_sequence: int = 0
    protocol_version: int = PROTOCOL_VERSION
    epoch: Sequence = 0
    ack_level: AckLevel = "durable"
    capabilities: dict[str, Any] = {}
    tables: msgspec.Raw = msgspec.Raw()
    correlation_id: str | None = None


class DebeziumBatch(msgspec.Struct, rename="camel", tag_field="type", tag="debezium_batch"):
    """Events as Debezium writes them, each as it came; `headers` are those of the sink's request."""

    events: list[msgspec.Raw]
    source_do_id: str = ""
    sequence_number: Sequence | None = None
    headers: dict[str, str] = {}
    timestamp: TimestampMs = 0
    correlation_id: str | None = None


class Heartbeat(msgspec.Struct, rename="camel", tag_field="type", tag="heartbeat"):
    """Ask for a pong."""

    timestamp: TimestampMs = 0
    source_do_id: str = ""
    last_ack_sequence: int = 0
    pending_events: int = 0
    correlation_id: str | None = None


class FlushRequest(msgspec.Struct, rename="camel", tag_field="type", tag="flush_request"):
    """Ask that everything durable be committed."""

    timestamp: TimestampMs = 0
    source_do_id: str = ""
    reason: FlushReason = "manual"
    correlation_id: str | None = None


class Disconnect(msgspec.Struct, rename="camel", tag_field="type", tag="disconnect"):
    """Say goodbye; the server closes."""

    timestamp: TimestampMs = 0
    source_do_id: str | None = None
    reason: str | None = None
    correlation_id: str | None = None


ClientMessage: TypeAlias = Connect | BatchHead | DebeziumBatch | Heartbeat | FlushRequest | Disconnect

# What a field may say, where that is a choice, by the last part of its path.
_CHOICES: Mapping[str, Iterable[str]] = {
    "type": [str(kind.__struct_config__.tag) for kind in get_args(ClientMessage)],
    "operation": [operation.value for operation in Operation],
    "reason": get_args(FlushReason),
    "ackLevel": get_args(AckLevel),
}
_GOT = re.compile(r"got `(\w+)`")


class Limits(msgspec.Struct, rename="camel"):
    """What the server takes, told at connect so that a client need not find out by being refused."""

    max_message_size: int
    max_event_size: int


class BufferStats(msgspec.Struct, rename="camel", omit_defaults=True):
    """How full the log is, and what of it is not committed; times in ms since 1970."""

    total_size_bytes: int
    utilization: float
    batch_count: int
    event_count: int
    oldest_batch_time: int | None = None
    newest_batch_time: int | None = None


class Status(msgspec.Struct, rename="camel", tag_field="type", tag="status", omit_defaults=True):
    """Answer to connect: the resume point of the source, and the state of the service."""

    timestamp: int
    state: str
    buffer: BufferStats
    connected_sources: int
    limits: Limits
    encodings: list[str]
    epoch: int
    last_durable_sequence: int | None = None
    last_committed_sequence: int | None = None
    last_flush_time: int | None = None
    next_flush_time: int | None = None
    correlation_id: str | None = None


class AckDetails(msgspec.Struct, rename="camel", omit_defaults=True):
    """Numbers beside an ack. `duplicates` are changes of this batch that had been taken before; times in ms.

    The tokens are those of the limit on messages, where there is one. The circuit breaker is `open` while commits to
    some table fail. `message` says why a batch is a duplicate that its sender may not have meant to be one.
    """

    events_processed: int
    buffer_utilization: float
    time_until_flush: int | None = None
    duplicates: int | None = None
    remaining_tokens: int | None = None
    bucket_capacity: int | None = None
    suggested_delay_ms: int | None = None
    circuit_breaker_state: str | None = None
    message: str | None = None


class RateLimit(msgspec.Struct, rename="camel"):
    """What is left of the limit on messages, where there is one; `reset_at` in seconds since 1970."""

    limit: int
    remaining: int
    reset_at: int


class Ack(msgspec.Struct, rename="camel", tag_field="type", tag="ack", omit_defaults=True):
    """The batch is durable (`ok`, `buffered`), or was before (`duplicate`); later, it is committed (`persisted`).

    `persisted` speaks for all batches up to its number; `tables` has the snapshot of each table that holds them.
    """

    timestamp: int
    sequence_number: int
    status: str
    batch_id: str | None = None
    correlation_id: str | None = None
    last_durable_sequence: int | None = None
    last_committed_sequence: int | None = None
    tables: Mapping[str, int] | None = None
    details: AckDetails | None = None
    rate_limit: RateLimit | None = None


class Nack(msgspec.Struct, rename="camel", tag_field="type", tag="nack", omit_defaults=True):
    """The message was refused and changed nothing. Sizes in bytes, where one was the reason; both names are known."""

    timestamp: int
    sequence_number: int
    reason: str
    error_message: str
    should_retry: bool
    retry_delay_ms: int | None = None
    max_size: int | None = None
    actual_size: int | None = None
    received_size: int | None = None
    correlation_id: str | None = None
    rate_limit: RateLimit | None = None


class Pong(msgspec.Struct, rename="camel", tag_field="type", tag="pong", omit_defaults=True):
    """Answer to a heartbeat; `timestamp` echoes the client's."""

    timestamp: int
    server_time: int
    correlation_id: str | None = None


class FlushResponse(msgspec.Struct, rename="camel", tag_field="type", tag="flush_response", omit_defaults=True):
    """What a flush committed; sent after the commits."""

    timestamp: int
    result: Mapping[str, Any]
    correlation_id: str | None = None


ServerMessage: TypeAlias = Status | Ack | Nack | Pong | FlushResponse


class _Head(msgspec.Struct, rename="camel"):
    """What a refusal repeats of a message that does not decode as a whole."""

    sequence_number: Sequence | None = None
    correlation_id: Annotated[str, msgspec.Meta(max_length=CORRELATION_ID_MAX_CHARS)] | None = None


_decode = msgspec.json.Decoder(ClientMessage).decode
_decode_head = msgspec.json.Decoder(_Head).decode
encode_message = msgspec.json.Encoder().encode


def decode_message(frame: bytes) -> ClientMessage:
    """Decode one frame.

    Raises: ProtocolError.
    """
    try:
        message: ClientMessage = decode_checked(_decode, frame)
    except ProtocolError as error:
        raise _with_head(error, frame) from None
    _check_correlation_id(message.correlation_id, "correlationId")
    return message


def decode_checked(decode: Callable[[bytes], T], body: bytes) -> T:
    """Decode JSON as deep as the writer can, too.

    Raises: ProtocolError; the message names the place and the rule, never a value.
    """
    try:
        return decode_deeper(decode, body)
    except msgspec.ValidationError as error:
        raise invalid(_describe(str(error))) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(f"not valid JSON: {_without_values(str(error))}") from None
    except RecursionError:
        raise invalid("a value is nested too deeply") from None


def open_arrow_frame(frame: bytes, *, frame_max_bytes: int) -> ArrowFrame:
    """Read the head of an Arrow frame, whose rows `Session.on_batch` checks.

    Raises: ProtocolError.
    """
    try:
        opened = ArrowFrame.open(frame, expanded_max_bytes=ARROW_EXPANSION_MAX_FRAMES * frame_max_bytes)
    except BatchMalformed as error:
        raise invalid(str(error)) from None
    _check_correlation_id(opened.head.correlation_id, "lakefeed.correlation-id")
    return opened


def _check_correlation_id(correlation_id: str | None, name: str) -> None:
    if correlation_id is not None and len(correlation_id) > CORRELATION_ID_MAX_CHARS:
        raise invalid(f"{name}: expected at most {CORRELATION_ID_MAX_CHARS} characters")


def _with_head(error: ProtocolError, frame: bytes) -> ProtocolError:
    """Say which message is refused, so that a client with many in flight knows; unless that is the fault itself."""
    try:
        head = _decode_head(frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return error
    error.sequence_number = head.sequence_number
    error.correlation_id = head.correlation_id
    return error


def _describe(message: str) -> str:
    """Turn the decoder's message into `path: rule`, without any value in it."""
    match = _PLACE.fullmatch(message)
    rule, path = match.groups() if match else (message, "")
    return f"{path}: {_rule(path, rule)}" if path else _rule(path, rule)


def _rule(path: str, rule: str) -> str:
    text = _without_values(rule)
    choices = _CHOICES.get(path.rpartition(".")[2])
    if choices is None or "| null" in text:  # a goodbye may have any reason
        text = text.replace("`", "")
        return text[:1].lower() + text[1:]
    got = _GOT.search(text)
    kind = got.group(1) if got else "str" if text.startswith("Invalid") else ""
    return f"expected one of {', '.join(choices)}" + (f", got {kind}" if kind else "")


def _without_values(text: str) -> str:
    return re.sub(r" '.*'", "", text, flags=re.DOTALL)
