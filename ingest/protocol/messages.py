"""Messages of the wire protocol, version 1: their fields, decoding, and error texts for malformed ones.

A frame is a JSON object whose `type` names the message, or a batch as an Arrow stream, recognised by its first bytes.
Error texts name the path and the rule, never a value.
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

# Replies repeat it, and many replies may wait for a client that does not read them.
CORRELATION_ID_MAX_CHARS = 255

# An Arrow frame may expand to this many of the largest frames as JSON. That leaves room for compressed and narrow
# columns, and bounds what they become in memory.
ARROW_EXPANSION_MAX_FRAMES = 4

# The last ` - at ` is written by the decoder; those before it are part of a value.
_PLACE = re.compile(r"(.*) - at `\$\.?(.*?)`", re.DOTALL)

FlushReason: TypeAlias = Literal["manual", "shutdown", "buffer_full", "time_threshold"]

# When a batch is acked: once it is durable, with a receipt after the commit, or by that receipt alone.
AckLevel: TypeAlias = Literal["durable", "committed"]


class Connect(msgspec.Struct, rename="camel", tag_field="type", tag="connect"):
    """Binds the connection to a source and asks where to resume."""

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
    """Events as Debezium writes them; `headers` are those of the sink's request."""

    events: list[msgspec.Raw]
    source_do_id: str = ""
    sequence_number: Sequence | None = None
    headers: dict[str, str] = {}
    timestamp: TimestampMs = 0
    correlation_id: str | None = None


class Heartbeat(msgspec.Struct, rename="camel", tag_field="type", tag="heartbeat"):
    """Asks for a pong."""

    timestamp: TimestampMs = 0
    source_do_id: str = ""
    last_ack_sequence: int = 0
    pending_events: int = 0
    correlation_id: str | None = None


class FlushRequest(msgspec.Struct, rename="camel", tag_field="type", tag="flush_request"):
    """Asks that everything durable be committed."""

    timestamp: TimestampMs = 0
    source_do_id: str = ""
    reason: FlushReason = "manual"
    correlation_id: str | None = None


class Disconnect(msgspec.Struct, rename="camel", tag_field="type", tag="disconnect"):
    """Ends the session; the server closes the connection."""

    timestamp: TimestampMs = 0
    source_do_id: str | None = None
    reason: str | None = None
    correlation_id: str | None = None


ClientMessage: TypeAlias = Connect | BatchHead | DebeziumBatch | Heartbeat | FlushRequest | Disconnect

# Allowed values of fields with a choice, by the last part of their path.
_CHOICES: Mapping[str, Iterable[str]] = {
    "type": [str(kind.__struct_config__.tag) for kind in get_args(ClientMessage)],
    "operation": [operation.value for operation in Operation],
    "reason": get_args(FlushReason),
    "ackLevel": get_args(AckLevel),
}
_GOT = re.compile(r"got `(\w+)`")


class Limits(msgspec.Struct, rename="camel"):
    """Size limits, sent at connect so that a client does not learn them from nacks."""

    max_message_size: int
    max_event_size: int


class BufferStats(msgspec.Struct, rename="camel", omit_defaults=True):
    """How full the log is, and how much of it is not committed; times in ms since 1970."""

    total_size_bytes: int
    utilization: float
    batch_count: int
    event_count: int
    oldest_batch_time: int | None = None
    newest_batch_time: int | None = None


class Status(msgspec.Struct, rename="camel", tag_field="type", tag="status", omit_defaults=True):
    """Reply to connect: the resume position of the source, and the state of the service."""

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
    """Details of an ack. `duplicates` are changes of this batch that had been accepted before; times in ms.

    The tokens are those of the limit on messages, where there is one. The circuit breaker is `open` while commits to
    some table fail. `message` explains a duplicate that the source may not have meant to be one.
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
    """The message was refused and changed nothing. Sizes in bytes, where one was the reason; both names are in use.

    `epoch` is that of the source, where the reason is that the message has an earlier one. `last_durable_sequence` is
    where to resume, where changes before the batch are missing.
    """

    timestamp: int
    sequence_number: int
    reason: str
    error_message: str
    should_retry: bool
    retry_delay_ms: int | None = None
    max_size: int | None = None
    actual_size: int | None = None
    received_size: int | None = None
    epoch: int | None = None
    last_durable_sequence: int | None = None
    correlation_id: str | None = None
    rate_limit: RateLimit | None = None


class Pong(msgspec.Struct, rename="camel", tag_field="type", tag="pong", omit_defaults=True):
    """Reply to a heartbeat; `timestamp` echoes the client's."""

    timestamp: int
    server_time: int
    correlation_id: str | None = None


class FlushResponse(msgspec.Struct, rename="camel", tag_field="type", tag="flush_response", omit_defaults=True):
    """Result of a flush; sent after the commits."""

    timestamp: int
    result: Mapping[str, Any]
    correlation_id: str | None = None


ServerMessage: TypeAlias = Status | Ack | Nack | Pong | FlushResponse


class _Head(msgspec.Struct, rename="camel"):
    """The fields that a nack repeats, read from a message that does not decode as a whole."""

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
    """Decode JSON that is nested no deeper than the writer can decode.

    Raises: ProtocolError.
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
    """Read the head of an Arrow frame; `Session.on_batch` checks its rows.

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
    """Add to an error which message it is about, unless those fields are malformed themselves."""
    try:
        head = _decode_head(frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return error
    error.sequence_number = head.sequence_number
    error.correlation_id = head.correlation_id
    return error


def _describe(message: str) -> str:
    """Return the decoder's message as `path: rule`, without any value."""
    match = _PLACE.fullmatch(message)
    rule, path = match.groups() if match else (message, "")
    return f"{path}: {_rule(path, rule)}" if path else _rule(path, rule)


def _rule(path: str, rule: str) -> str:
    text = _without_values(rule)
    choices = _CHOICES.get(path.rpartition(".")[2])
    if choices is None or "| null" in text:  # `disconnect` may have any reason
        text = text.replace("`", "")
        return text[:1].lower() + text[1:]
    got = _GOT.search(text)
    kind = got.group(1) if got else "str" if text.startswith("Invalid") else ""
    return f"expected one of {', '.join(choices)}" + (f", got {kind}" if kind else "")


def _without_values(text: str) -> str:
    return re.sub(r" '.*'", "", text, flags=re.DOTALL)
