"""The wire protocol, version 1. Owns the messages, their checks and what one connection may say when.

Frames are JSON objects told apart by `type`, or batches as Arrow streams (writer/arrow/frames.py), told from JSON by
their first bytes. A session goes through

    OPEN --connect | first cdc_batch--> BOUND (to one source) --disconnect--> ENDED

and in every state but ENDED takes heartbeats and flush requests. Wrong messages raise ProtocolError and change nothing.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeAlias, get_args

import msgspec

from ingest.batch_checks import AnyBatch, check_changes, head_of, invalid
from ingest.declarations import Declarations, read_declarations
from ingest.errors import ProtocolError
from ingest.offers import Line, NackReason, Offer
from writer.arrow.frames import ArrowFrame, ArrowHead
from writer.changes import Operation, SourceId
from writer.envelope import (
    BatchHead,
    BatchMalformed,
    NonEmpty,
    Sequence,
    TimestampMs,
    decode_deeper,
)

PROTOCOL_VERSION = 1

SOURCE_ID_MAX_CHARS = 255

# Answers repeat it, and many answers may wait for a client that does not read them.
CORRELATION_ID_MAX_CHARS = 255

# An Arrow frame may stand for as much JSON as this many of the largest frames: compressed and narrow columns have room
# then, and what they become in memory is still bounded.
ARROW_EXPANSION_MAX_FRAMES = 4

# The last ` - at ` is the decoder's own; those before it are part of a value.
_PLACE = re.compile(r"(.*) - at `\$\.?(.*?)`", re.DOTALL)

# A header can bring bytes that are no text: they arrive as lone surrogates, which nothing can store.
_SOURCE_ID = re.compile(rf"[^\x00-\x1f\x7f\ud800-\udfff]{{1,{SOURCE_ID_MAX_CHARS}}}")


FlushReason: TypeAlias = Literal["manual", "shutdown", "buffer_full", "time_threshold"]
FLUSH_REASONS = get_args(FlushReason)


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

    `message` says why a batch is a duplicate that its sender may not have meant to be one.
    """

    events_processed: int
    buffer_utilization: float
    time_until_flush: int | None = None
    duplicates: int | None = None
    suggested_delay_ms: int | None = None
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
    """The message was refused and changed nothing."""

    timestamp: int
    sequence_number: int
    reason: str
    error_message: str
    should_retry: bool
    retry_delay_ms: int | None = None
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
        message: ClientMessage = decode_deeper(_decode, frame)
    except msgspec.ValidationError as error:
        raise _with_head(invalid(describe_invalid(str(error))), frame) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(f"not valid JSON: {_without_values(str(error))}") from None
    except RecursionError:
        raise invalid("a value is nested too deeply") from None
    _check_correlation_id(message.correlation_id, "correlationId")
    return message


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


def describe_invalid(message: str) -> str:
    """Turn the decoder's message into `path: rule`, without any value in it."""
    match = _PLACE.fullmatch(message)
    rule, path = match.groups() if match else (message, "")
    return f"{path}: {_rule(path, rule)}" if path else _rule(path, rule)


def _rule(path: str, rule: str) -> str:
    if path == "type":
        return "expected one of connect, cdc_batch, debezium_batch, heartbeat, flush_request, disconnect"
    if path.endswith(".operation"):
        return f"expected one of {', '.join(operation.value for operation in Operation)}"
    if path == "reason" and "enum" in rule:
        return f"expected one of {', '.join(FLUSH_REASONS)}"
    text = _without_values(rule).replace("`", "")
    return text[:1].lower() + text[1:]


def _without_values(text: str) -> str:
    return re.sub(r" '.*'", "", text, flags=re.DOTALL)


class State(enum.Enum):
    """Where a session stands."""

    OPEN = "open"
    BOUND = "bound"
    ENDED = "ended"


@dataclass(slots=True)
class Session:
    """One connection's side of the conversation: which source it speaks for, and which batch number is next."""

    event_max_bytes: int
    default_source: str = ""
    state: State = State.OPEN
    source: SourceId | None = None
    epoch: int = 0
    ack_level: AckLevel | None = None
    expected_number: int | None = None
    line: Line = field(default_factory=Line)
    declarations: Declarations = field(default_factory=Declarations)

    def on_connect(self, message: Connect) -> SourceId:
        """Bind to the source.

        Raises: ProtocolError.
        """
        self._check_open()
        if message.protocol_version != PROTOCOL_VERSION:
            raise invalid(f"protocolVersion: expected {PROTOCOL_VERSION}")
        declarations = read_declarations(message.tables)
        self.bind(message.source_do_id)
        self.declarations = declarations
        self.epoch = message.epoch
        self.ack_level = message.ack_level
        self.expected_number = None
        assert self.source is not None
        return self.source

    def on_batch(self, batch: AnyBatch, body: bytes, *, received_at_us: int) -> Offer | None:
        """Check a batch and turn it into an offer; None if it holds no change.

        Raises: ProtocolError.
        """
        head = head_of(batch)
        number = self._check_number(head)
        try:
            checked = check_changes(batch, body, event_max_bytes=self.event_max_bytes)
            self.bind(head.source_do_id)
        except ProtocolError as error:
            error.sequence_number = number
            self.on_malformed(number)
            raise
        # A batch that was sent again does not take back the answers to those behind it.
        self.expected_number = max(number + 1, self.expected_number or 0)
        assert self.source is not None
        if not checked.sequences:
            return None
        return Offer(
            source=self.source,
            epoch=self.epoch,
            sequences=checked.sequences,
            received_at_us=received_at_us,
            encoding=checked.encoding,
            body=body,
            expanded_bytes=checked.expanded_bytes,
            declared=self.declarations.of_batch(batch),
            line=self.line,
        )

    def on_debezium(self, batch: DebeziumBatch) -> int:
        """Check a batch of Debezium's events, whose content is its adapter's; its number.

        Raises: ProtocolError.
        """
        number = self._check_number(batch)
        self.bind(batch.source_do_id)
        self.expected_number = max(number + 1, self.expected_number or 0)
        return number

    def number_of(self, head: BatchHead | ArrowHead | DebeziumBatch) -> int:
        """Tell a batch's number: its own, or the next one of this connection."""
        if head.sequence_number is not None:
            return head.sequence_number
        return self.expected_number if self.expected_number is not None else 0

    def on_refused(self, number: int) -> None:
        """Expect a refused batch again, so that those sent behind it are told to wait for it."""
        if self.expected_number is not None:
            self.expected_number = min(self.expected_number, number)

    def on_malformed(self, number: int) -> None:
        """Expect a batch again that broke the protocol, also if it was the first: none may overtake it."""
        if self.expected_number is None:
            self.expected_number = number

    def end(self) -> None:
        """Take nothing more."""
        self.state = State.ENDED

    def _check_open(self) -> None:
        if self.state is State.ENDED:
            raise invalid("the session has ended")

    def _check_number(self, head: BatchHead | ArrowHead | DebeziumBatch) -> int:
        self._check_open()
        number = self.number_of(head)
        if self.expected_number is not None and number > self.expected_number:
            raise ProtocolError(
                NackReason.INVALID_SEQUENCE.value,
                f"sequenceNumber: a batch is missing: expected={self.expected_number} received={number}",
                sequence_number=number,
                retry=True,
            )
        return number

    def bind(self, source: str) -> None:
        """Speak for a source from now on; an empty name leaves it at the default.

        Raises: ProtocolError.
        """
        if self.source is not None and source not in ("", self.source):
            raise invalid("sourceDoId: this connection is bound to another source; open one connection per source")
        if self.source is None:
            source = source or self.default_source
            if not source:
                raise invalid("sourceDoId: expected a non-empty string, here, in connect or in the X-Client-ID header")
            if not _SOURCE_ID.fullmatch(source):
                raise invalid(
                    f"sourceDoId: expected at most {SOURCE_ID_MAX_CHARS} characters, none of them control characters"
                )
            self.source = SourceId(source)
        self.state = State.BOUND
