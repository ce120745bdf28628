"""Offers to the log, and the verdicts on them.

Offer --intake--> Durable    the log is synced; some changes may have been accepted before
              --> Duplicate  every change was durable before; nothing was written
              --> Refused    nothing was accepted; `retry` says whether sending it again can help
"""

from __future__ import annotations

import bisect
import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from lakefeed.contract.changes import Position, SourceId
from lakefeed.writer.wal.payload import Encoding

# Below every sequence, so that a new source's first change is above its mark.
BEFORE_ALL = -1


class NackReason(enum.Enum):
    """Why a message is refused. The values are the wire protocol's."""

    BUFFER_FULL = "buffer_full"
    INVALID_FORMAT = "invalid_format"
    INVALID_SEQUENCE = "invalid_sequence"
    MISSING_CHANGES = "missing_changes"
    EVENT_TOO_LARGE = "event_too_large"
    PAYLOAD_TOO_LARGE = "payload_too_large"
    RATE_LIMITED = "rate_limited"
    LOAD_SHEDDING = "load_shedding"
    CONNECTION_LIMIT = "connection_limit"
    SHUTTING_DOWN = "shutting_down"
    INTERNAL_ERROR = "internal_error"


@dataclass(slots=True, eq=False)
class SourceLease:
    """A connection's right to send for its source, revoked when the source connects on another connection.

    A batch in flight on the old connection may have a refused batch before it, and would overtake that batch.
    """

    is_revoked: bool = False


@dataclass(frozen=True, slots=True)
class Offer:
    """One checked batch on its way to the log. `sequences` rise; `tables` are named as the source names them.

    `previous_sequence` is the change before the batch, if its source names it; `committed_sequence` is up to where all
    tables had the epoch when they were last asked.
    `adapter_state` is what the source's adapter has to find again once the batch is durable; an offer without changes
    only records that. `expanded_bytes` is what the body may take once decoded, where that is more. `declared` holds
    declarations of the batch's tables that are not durable yet. `open_transaction` is the source transaction that
    continues after the batch, if transactions are tracked. `lease` is that of the connection; a request has none.
    """

    source: SourceId
    epoch: int
    sequences: Sequence[int]
    received_at_us: int
    encoding: Encoding
    body: bytes
    adapter_state: str = ""
    expanded_bytes: int = 0
    declared: str = ""
    open_transaction: str = ""
    tables: frozenset[str] = frozenset()
    previous_sequence: int | None = None
    committed_sequence: int = BEFORE_ALL
    lease: SourceLease | None = field(default=None, compare=False)

    @property
    def is_revoked(self) -> bool:
        """Return whether the offer came on a connection that its source has left."""
        return self.lease is not None and self.lease.is_revoked

    @property
    def first_sequence(self) -> int:
        """Return the sequence of the first change."""
        return self.sequences[0]

    @property
    def last_sequence(self) -> int:
        """Return the sequence of the last change."""
        return self.sequences[-1]

    def changes_after(self, sequence: int) -> int:
        """Count the changes above a sequence."""
        return len(self.sequences) - bisect.bisect_right(self.sequences, sequence)

    def first_after(self, sequence: int) -> int | None:
        """Return the first sequence above another one, None if there is none."""
        index = bisect.bisect_right(self.sequences, sequence)
        return self.sequences[index] if index < len(self.sequences) else None


@dataclass(frozen=True, slots=True)
class Durable:
    """The log holds the batch. `changes` were new; the others had been accepted before and are skipped."""

    offset: int
    changes: int


@dataclass(frozen=True, slots=True)
class Duplicate:
    """All changes of the batch were durable before, up to `mark_sequence`."""

    mark_sequence: int


@dataclass(frozen=True, slots=True)
class Refused:
    """Nothing of the batch was accepted. `max_size` and `actual_size` are bytes, where a size was the reason.

    `last_durable_sequence` is where the source resumes, if changes before the batch are missing.
    """

    reason: NackReason
    message: str
    retry: bool
    retry_delay_ms: int | None = None
    max_size: int | None = None
    actual_size: int | None = None
    last_durable_sequence: int | None = None


Verdict: TypeAlias = Durable | Duplicate | Refused


@dataclass(frozen=True, slots=True)
class Fresh:
    """An offer to be logged. Only its changes above `after_sequence` are new."""

    offer: Offer
    after_sequence: int

    @property
    def changes(self) -> int:
        """Return how many changes are new."""
        return self.offer.changes_after(self.after_sequence)

    @property
    def position(self) -> Position:
        """Return the source's high-water mark once the offer is durable."""
        return Position(self.offer.epoch, self.offer.last_sequence if self.offer.sequences else self.after_sequence)
