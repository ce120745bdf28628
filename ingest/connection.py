"""One client's connection: its session, what is counted of it and the answers that it waits for. Plain values.

What happens on it is server.py's; /status shows it.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from ingest.gatekeeper import Gate
from ingest.offers import Verdict
from ingest.protocol import ServerMessage
from ingest.receipts import Receipts
from ingest.regressions import Course
from ingest.session import Session
from writer.changes import Position


@dataclass(frozen=True, slots=True)
class PendingAck:
    """A batch that waits for its verdict; its rows do not wait with it."""

    number: int
    changes: int
    correlation_id: str | None
    received_at: float
    verdict: asyncio.Future[Verdict] | None
    position: Position | None = None


@dataclass(slots=True, eq=False)
class Connection:
    """One client, as /status shows it. `pending_events` is what it says to have still to send.

    It `owes_receipt` where a commit may have been told before the client's batch was acked, or while it had no room
    for another answer.
    """

    session: Session
    gate: Gate
    connected_at: float
    last_activity_at: float
    batches: int = 0
    changes: int = 0
    pending_events: int = 0
    charged_bytes: int = 0
    newest_verdict: asyncio.Future[Verdict] | None = None
    course: Course | None = None
    flushes: set[asyncio.Task[None]] = field(default_factory=set)
    receipts: Receipts = field(default_factory=Receipts)
    owes_receipt: bool = False
    answers: asyncio.Queue[PendingAck | ServerMessage | None] = field(default_factory=asyncio.Queue)

    @property
    def remote(self) -> str:
        """The client's address."""
        return str(self.gate.slot.address or "")
