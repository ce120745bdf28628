"""What a session offers to the log, and the verdicts it can get back. Plain values, no behaviour.

Offer --intake--> Durable    the log is synced; some changes may have been taken before
              --> Duplicate  every change was durable before; nothing was written
              --> Refused    nothing of it was taken; `retry` says whether sending it again can help
"""

from __future__ import annotations

import bisect
import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from lakefeed.contract.changes import Position, SourceId
from lakefeed.writer.wal.payload import Encoding

# --- ingest.offers ----------------------------------------------------------------------------------------------------


class NackReason(enum.Enum):
    """Why a message is refused. The values are the wire protocol's."""

    BUFFER_FULL = "buffer_full"
    INVALID_FORMAT = "invalid_format"
    INVALID_SEQUENCE = "invalid_sequence"
    EVENT_TOO_LARGE = "event_too_large"
    PAYLOAD_TOO_LARGE = "payload_too_large"
    RATE_LIMITED = "rate_limited"
    LOAD_SHEDDING = "load_shedding"
    CONNECTION_LIMIT = "connection_limit"
    SHUTTING_DOWN = "shutting_down"
    INTERNAL_ERROR = "internal_error"


@dataclass(slots=True, eq=False)
class Line:
    """A connection, for those who only have to know whether it still counts.

    It is cut once its source has connected on another, and resumes there: what was under way on this one may have a
    refused batch before it, and would pass over that.
    """

    is_cut: bool = False


@dataclass(frozen=True, slots=True)
class Offer:
    """One batch that passed its own checks, on its way to the log. `sequences` rise.

    `origin` is what the source's adapter has to remember once the batch is durable (origins.py); an offer without
    changes is only about that. `expanded_bytes` is what the body may take once decoded, where that is more.
    `declared` is what the source declared of the batch's tables and is not durable yet (batch.py).
    `open_transaction` is the one that goes on behind it, where that is heeded (batch.py). `line` is the
    connection it came on, where that outlives it. `tables` are those of its changes, as the source calls them.
    """

    source: SourceId
    epoch: int
    sequences: Sequence[int]
    received_at_us: int
    encoding: Encoding
    body: bytes
    origin: str = ""
    expanded_bytes: int = 0
    declared: str = ""
    open_transaction: str = ""
    tables: frozenset[str] = frozenset()
    line: Line | None = field(default=None, compare=False)

    @property
    def first_sequence(self) -> int:
        """Where the batch begins."""
        return self.sequences[0]

    @property
    def last_sequence(self) -> int:
        """Where the batch ends."""
        return self.sequences[-1]

    def changes_after(self, sequence: int) -> int:
        """Count the changes above a sequence."""
        return len(self.sequences) - bisect.bisect_right(self.sequences, sequence)

    def first_after(self, sequence: int) -> int | None:
        """Find the first change above a sequence, None if there is none."""
        index = bisect.bisect_right(self.sequences, sequence)
        return self.sequences[index] if index < len(self.sequences) else None


@dataclass(frozen=True, slots=True)
class Durable:
    """The log holds the batch, of which `changes` were new; the others had been taken before and are left out."""

    offset: int
    changes: int


@dataclass(frozen=True, slots=True)
class Duplicate:
    """All changes of the batch were durable before, up to `mark_sequence`."""

    mark_sequence: int


@dataclass(frozen=True, slots=True)
class Refused:
    """Nothing of the batch was taken; the sizes, in bytes, are what there is room for and what it would have taken."""

    reason: NackReason
    message: str
    retry: bool
    retry_delay_ms: int | None = None
    max_size: int | None = None
    actual_size: int | None = None


Verdict: TypeAlias = Durable | Duplicate | Refused


@dataclass(frozen=True, slots=True)
class Fresh:
    """An offer to be logged: only its changes above `after_sequence` are new."""

    offer: Offer
    after_sequence: int

    @property
    def changes(self) -> int:
        """Count what is new."""
        return self.offer.changes_after(self.after_sequence)

    @property
    def position(self) -> Position:
        """Where the source stands once the offer is durable."""
        return Position(self.offer.epoch, self.offer.last_sequence if self.offer.sequences else self.after_sequence)


# Below every sequence, so that a new source's first change is above its mark.
BEFORE_ALL = -1
