"""A WebSocket connection that reads only what the budget allows. Owns pausing the socket and its signs of life.

What messages mean is server.py's, how much may be read read_budget.py's. A socket is paused while any of these holds:

    queue    enough messages wait for the reader task (websockets' own rule)
    budget   too much of all connections is read and not yet durable
    answers  the client does not read what it is sent, pongs included, so it need not send more

asyncio asks for the buffer before it reads, so nothing is read that has no room: a connection without a turn reads one
byte and stops. One that holds nothing may still say something short: heartbeats are answered however busy others are.
Not so where messages may be packed (permessage-deflate): what is short may unpack to a thousand times its size, so only
a little is read at a time, and nothing without room.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import resource
from collections import deque
from collections.abc import Callable
from typing import Any, cast

from websockets.asyncio.server import ServerConnection
from websockets.frames import DATA_OPCODES, Frame
from websockets.http11 import Request

from lakefeed.ingest.admission.auth import Refusal
from lakefeed.ingest.admission.budget import ALLOWANCE_BYTES, FRAME_OVERHEAD_BYTES, RESERVED_READ_BYTES, ReadBudget
from lakefeed.ingest.admission.limits import SignsOfLife, Slot

logger = logging.getLogger(__name__)

# Sockets that have not asked for anything yet; each has websockets' ten seconds to do so.
OPENING_MAX = 256

# Files beside connections: segments, data files, SQLite, storage and catalog clients.
OTHER_OPEN_FILES = 512

# What a connection that holds nothing may read beyond the budget: a heartbeat, a question, a small batch.
SPARE_BYTES = 4096

# What is read at once where messages may be packed. Deflate unpacks to at most 1,032 times the size, so that what is
# read before it is counted is about one message of the default size.
PACKED_READ_BYTES = 4096

# Why a socket is paused: bits, because several reasons can hold at once.
_QUEUE, _BUDGET, _ANSWERS = 1, 2, 4

# One buffer for all connections: what is read is taken out before the event loop turns to the next one.
_BUFFER = memoryview(bytearray(RESERVED_READ_BYTES))


class BudgetedConnection(ServerConnection, asyncio.BufferedProtocol):
    """One client's socket."""

    def __init__(
        self, *args: Any, budget: ReadBudget, sockets_max: int, may_be_packed: bool = False, **options: Any
    ) -> None:
        super().__init__(*args, **options)
        self._may_be_packed = may_be_packed
        self.slot: Slot | None = None
        self.refusal: Refusal | None = None
        self.on_lost: Callable[[], None] | None = None
        self._sockets_max = sockets_max
        self._heard_at = self.loop.time()
        self._arriving_since: float | None = None
        self._unread_since: float | None = None
        self._budget = budget
        self._pauses = 0
        self._reserved = False
        self._fragments_bytes = 0
        self._arriving_bytes = 0
        self._charges: deque[int] = deque()
        self._held_bytes = 0
        self._discards = False

    def signs_of_life(self) -> SignsOfLife:
        """Tell since when the client keeps us waiting; while we do not read, its silence says nothing."""
        is_paused = self._pauses != 0
        return SignsOfLife(
            silent_since=None if is_paused else self._heard_at,
            arriving_since=None if is_paused else self._arriving_since,
            unread_since=self._unread_since,
        )

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Route websockets' own pausing through ours, and hang up where too many are about to ask."""
        super().connection_made(transport)
        self.recv_messages.pause = functools.partial(self._pause, _QUEUE)
        self.recv_messages.resume = functools.partial(self._resume, _QUEUE)
        if len(self.server.handler_tasks) > self._sockets_max:
            self.transport.abort()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Say how much may be read now."""
        del sizehint
        if self._may_be_packed and (self._reserved or self._budget.is_open()):
            return _BUFFER[:PACKED_READ_BYTES]
        if self._reserved:
            return _BUFFER
        if self._budget.is_open():
            return _BUFFER[: ALLOWANCE_BYTES - self._arriving_bytes]
        if not self._may_be_packed and not self._held_bytes and self._arriving_bytes < SPARE_BYTES:
            return _BUFFER[: SPARE_BYTES - self._arriving_bytes]
        self._budget.wait(self)
        self._pause(_BUDGET)
        return _BUFFER[:1]

    def buffer_updated(self, nbytes: int) -> None:
        """Take what was read, and reserve if the message turns out to be a large one."""
        self._heard_at = self.loop.time()
        # It is appended to the parser's own buffer and not kept, so a view of ours does; a copy would cost a tenth.
        self.data_received(cast("bytes", _BUFFER[:nbytes]))
        self._arriving_bytes = arriving = len(self.protocol.reader.buffer) + self._fragments_bytes
        if not arriving:
            self._arriving_since = None
        elif self._arriving_since is None:
            self._arriving_since = self._heard_at
        if arriving >= ALLOWANCE_BYTES and not self._reserved:
            self._reserved = self._budget.reserve(self)
            if not self._reserved:
                self._pause(_BUDGET)

    def process_event(self, event: Request | Frame | Any) -> None:
        """Charge whole messages. What comes when nobody reads any more is nobody's."""
        if isinstance(event, Frame) and event.opcode in DATA_OPCODES:
            if self._discards:
                self._fragments_bytes = 0
                self._give_back_reservation()
                return
            self._fragments_bytes += len(event.data) + FRAME_OVERHEAD_BYTES
            if event.fin:
                self._charge_message()
        super().process_event(event)

    def _charge_message(self) -> None:
        self._arriving_since = None
        self._charges.append(self._fragments_bytes)
        self._budget.charge(self._fragments_bytes)
        self._held_bytes += self._fragments_bytes
        self._fragments_bytes = 0
        self._give_back_reservation()

    def _give_back_reservation(self) -> None:
        if self._reserved:
            self._reserved = False
            self._budget.give_back(self._budget.reservation_bytes)

    def take_charge(self) -> int:
        """Hand over the charge of the message that `recv` has just returned; whoever is done with it gives it back."""
        return self._charges.popleft()

    def give_back(self, charged_bytes: int) -> None:
        """Return a charge: the message is durable, refused or answered."""
        self._held_bytes -= charged_bytes
        self._budget.give_back(charged_bytes)

    def discard_unread(self) -> None:
        """Give back all that will not be read any more."""
        self._discards = True
        charged_bytes, self._charges = sum(self._charges), deque()
        self.give_back(charged_bytes)
        self._resume(_QUEUE)  # the client's goodbye is behind what was not read

    def on_turn(self, *, reserved: bool) -> None:
        """Read on: the budget has room."""
        self._reserved = reserved
        self._resume(_BUDGET)

    def pause_writing(self) -> None:
        """Stop reading a client that does not read."""
        super().pause_writing()
        self._unread_since = self.loop.time()
        self._pause(_ANSWERS)

    def resume_writing(self) -> None:
        """Read on: the client does too."""
        super().resume_writing()
        self._unread_since = None
        self._resume(_ANSWERS)

    def connection_lost(self, exc: Exception | None) -> None:
        """Give back what only this connection could have finished."""
        self._budget.forget(self)
        self._give_back_reservation()
        if self.on_lost is not None:
            self.on_lost()
        super().connection_lost(exc)

    def _pause(self, why: int) -> None:
        if not self._pauses:
            self.transport.pause_reading()
        self._pauses |= why

    def _resume(self, why: int) -> None:
        if self._pauses == why:
            self._heard_at = self.loop.time()  # what we did not read is not the client's silence
            if self._arriving_since is not None:
                self._arriving_since = self._heard_at
            self.transport.resume_reading()
        self._pauses &= ~why


def connections_with(budget: ReadBudget, *, connections_max: int, may_be_packed: bool) -> type[ServerConnection]:
    """Give what websockets makes its connections with."""
    make = functools.partial(
        BudgetedConnection, budget=budget, sockets_max=connections_max + OPENING_MAX, may_be_packed=may_be_packed
    )
    # It is only ever called, like the class that its annotation asks for.
    return cast("type[ServerConnection]", make)


def raise_open_files_limit(connections: int) -> None:
    """Ask the system for as many open files as the connections and the rest may need."""
    needed = connections + OPENING_MAX + OTHER_OPEN_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < needed:
        logger.warning("open_files_limited", extra={"allowed": allowed, "needed": needed})
