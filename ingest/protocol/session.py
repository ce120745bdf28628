"""The session of one connection: its state, its source and its batch numbers.

    OPEN --connect | first batch--> BOUND (to one source) --disconnect--> ENDED

Heartbeats and flush requests are allowed in every state but ENDED. A wrong message raises ProtocolError and changes
nothing, except that a malformed batch is expected again.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass, field

from lakefeed.contract.changes import SourceId
from lakefeed.ingest.errors import ProtocolError
from lakefeed.ingest.protocol.batch import AnyBatch, Declarations, check_changes, head_of, invalid, read_declarations
from lakefeed.ingest.protocol.messages import PROTOCOL_VERSION, AckLevel, Connect, DebeziumBatch
from lakefeed.ingest.protocol.offers import NackReason, Offer, SourceLease
from lakefeed.writer.wire.arrow_frame import ArrowHead
from lakefeed.writer.wire.json_batch import BatchHead

SOURCE_ID_MAX_CHARS = 255

# Header bytes that are not text arrive as lone surrogates, which nothing can store.
_SOURCE_ID = re.compile(rf"[^\x00-\x1f\x7f\ud800-\udfff]{{1,{SOURCE_ID_MAX_CHARS}}}")


class State(enum.Enum):
    """The state of a session."""

    OPEN = "open"
    BOUND = "bound"
    ENDED = "ended"


@dataclass(slots=True)
class Session:
    """Which source a connection sends for, and which batch number is next."""

    event_max_bytes: int
    default_source: str = ""
    state: State = State.OPEN
    source: SourceId | None = None
    epoch: int = 0
    ack_level: AckLevel | None = None
    expected_number: int | None = None
    lease: SourceLease = field(default_factory=SourceLease)
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
        """Check a batch and return its offer; None if it holds no change.

        Raises: ProtocolError.
        """
        head = head_of(batch)
        number = self._check_number(head)
        try:
            checked = check_changes(batch, body, event_max_bytes=self.event_max_bytes)
            previous = head.previous_sequence
            if previous is not None and checked.sequences and previous >= checked.sequences[0]:
                name = "lakefeed.previous-sequence" if isinstance(head, ArrowHead) else "previousSequence"
                raise invalid(f"{name}: expected less than the sequence of the batch's first change")
            self.bind(head.source_do_id)
        except ProtocolError as error:
            error.sequence_number = number
            self.on_malformed(number)
            raise
        # A batch that was sent again must not lower the number: those behind it may be answered already.
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
            declared=self.declarations.of_tables(checked.tables),
            tables=checked.tables,
            previous_sequence=previous,
            lease=self.lease,
        )

    def on_debezium(self, batch: DebeziumBatch) -> int:
        """Check the number of a Debezium batch and return it; the adapter checks the content.

        Raises: ProtocolError.
        """
        number = self._check_number(batch)
        self.bind(batch.source_do_id)
        self.expected_number = max(number + 1, self.expected_number or 0)
        return number

    def number_of(self, head: BatchHead | ArrowHead | DebeziumBatch) -> int:
        """Return a batch's number: its own, or the next one of this connection."""
        if head.sequence_number is not None:
            return head.sequence_number
        return self.expected_number if self.expected_number is not None else 0

    def on_refused(self, number: int) -> None:
        """Expect a refused batch again, so that the batches sent behind it are refused until it came."""
        if self.expected_number is not None:
            self.expected_number = min(self.expected_number, number)

    def on_malformed(self, number: int) -> None:
        """Expect a malformed batch again, also if it was the first: no other batch may overtake it."""
        if self.expected_number is None:
            self.expected_number = number

    def end(self) -> None:
        """End the session; it accepts no further message."""
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
        """Bind the session to a source; an empty name means the default source.

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
