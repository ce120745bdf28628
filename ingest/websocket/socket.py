"""A WebSocket connection that reads only what the memory budget allows.

The socket is paused while any of these holds:

    queue     enough messages wait for the reader task (websockets' own rule)
    budget    too much of all connections is read and not yet durable
    replies   the client does not read what it is sent, pongs included, so it need not send more

asyncio asks for the buffer before it reads, so nothing is read without room: a connection without a grant reads one
byte and stops. A connection that holds nothing may still send something short, so heartbeats are answered however busy
the others are. That is not so with permessage-deflate: a short message may inflate to a thousand times its size, so
little is read at a time, and nothing without room.
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

from lakefeed.ingest.admission.auth import ANONYMOUS, Principal, Unauthenticated
from lakefeed.ingest.admission.budget import ALLOWANCE_BYTES, RESERVED_READ_BYTES, ReadBudget
from lakefeed.ingest.admission.limits import ConnectionSlot, Liveness
from lakefeed.ingest.config import FRAME_OVERHEAD_BYTES

logger = logging.getLogger(__name__)

# Sockets before their handshake; websockets closes each after ten seconds.
OPENING_MAX = 256

# Files besides connections: segments, data files, SQLite, storage and catalog clients.
OTHER_OPEN_FILES = 512

# What a connection that holds nothing may read beyond the budget: a heartbeat, a connect, a small batch.
SPARE_BYTES = 4096

# The size of one read where messages may be compressed. Deflate expands at most 1,032 times, so what is read before it
# is counted is about one message of the default size.
COMPRESSED_READ_BYTES = 4096

# Why a socket is paused: bits, because several reasons can hold at once.
_QUEUE, _BUDGET, _REPLIES = 1, 2, 4

# One buffer for all connections: its content is copied out before the event loop turns to the next connection.
_BUFFER = memoryview(bytearray(RESERVED_READ_BYTES))


class BudgetedConnection(ServerConnection, asyncio.BufferedProtocol):
    """The socket of one client."""

    def __init__(
        self, *args: Any, budget: ReadBudget, sockets_max: int, is_compressed: bool = False, **options: Any
    ) -> None:
        super().__init__(*args, **options)
        self.slot: ConnectionSlot | None = None
        self.principal: Principal | Unauthenticated = ANONYMOUS
        self.on_lost: Callable[[], None] | None = None
        self._is_compressed = is_compressed
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

    def liveness(self) -> Liveness:
        """Return since when the client is silent, by the event loop's time. While the socket is paused it is not."""
        is_paused = self._pauses != 0
        return Liveness(
            silent_since=None if is_paused else self._heard_at,
            arriving_since=None if is_paused else self._arriving_since,
            unread_since=self._unread_since,
        )

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Route websockets' own pausing through ours, and abort if too many sockets are before their handshake."""
        super().connection_made(transport)
        self.recv_messages.pause = functools.partial(self._pause, _QUEUE)
        self.recv_messages.resume = functools.partial(self._resume, _QUEUE)
        if len(self.server.handler_tasks) > self._sockets_max:
            self.transport.abort()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return a buffer as large as what may be read now."""
        del sizehint
        if self._is_compressed and (self._reserved or self._budget.is_open()):
            return _BUFFER[:COMPRESSED_READ_BYTES]
        if self._reserved:
            return _BUFFER
        if self._budget.is_open():
            return _BUFFER[: ALLOWANCE_BYTES - self._arriving_bytes]
        if not self._is_compressed and not self._held_bytes and self._arriving_bytes < SPARE_BYTES:
            return _BUFFER[: SPARE_BYTES - self._arriving_bytes]
        self._budget.wait(self)
        self._pause(_BUDGET)
        return _BUFFER[:1]

    def buffer_updated(self, nbytes: int) -> None:
        """Parse what was read, and reserve memory if the message turns out to be large."""
        self._heard_at = self.loop.time()
        # The parser copies it into a buffer of its own, so our view is enough; a copy here would cost a tenth.
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
        """Charge whole messages. Messages that arrive after the reader has stopped are dropped."""
        if isinstance(event, Frame) and event.opcode in DATA_OPCODES:
            if self._discards:
                self._fragments_bytes = 0
                self._release_reservation()
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
        self._release_reservation()

    def _release_reservation(self) -> None:
        if self._reserved:
            self._reserved = False
            self._budget.release(self._budget.reservation_bytes)

    def take_charge(self) -> int:
        """Return the charge of the message that `recv` has just returned; the caller releases it."""
        return self._charges.popleft()

    def release(self, charged_bytes: int) -> None:
        """Release a charge: the message is durable, refused or answered."""
        self._held_bytes -= charged_bytes
        self._budget.release(charged_bytes)

    def discard_unread(self) -> None:
        """Release all messages that will not be read any more."""
        self._discards = True
        charged_bytes, self._charges = sum(self._charges), deque()
        self.release(charged_bytes)
        self._resume(_QUEUE)  # the client's close frame is behind what was not read

    def on_granted(self, *, reserved: bool) -> None:
        """Continue to read: the budget has room."""
        self._reserved = reserved
        self._resume(_BUDGET)

    def pause_writing(self) -> None:
        """Stop reading from a client that does not read its replies."""
        super().pause_writing()
        self._unread_since = self.loop.time()
        self._pause(_REPLIES)

    def resume_writing(self) -> None:
        """Continue to read from a client that reads its replies again."""
        super().resume_writing()
        self._unread_since = None
        self._resume(_REPLIES)

    def connection_lost(self, exc: Exception | None) -> None:
        """Release what only this connection could have finished."""
        self._budget.forget(self)
        self._release_reservation()
        if self.on_lost is not None:
            self.on_lost()
        super().connection_lost(exc)

    def _pause(self, reason: int) -> None:
        if not self._pauses:
            self.transport.pause_reading()
        self._pauses |= reason

    def _resume(self, reason: int) -> None:
        if self._pauses == reason:
            self._heard_at = self.loop.time()  # the client was not silent: we did not read
            if self._arriving_since is not None:
                self._arriving_since = self._heard_at
            self.transport.resume_reading()
        self._pauses &= ~reason


def connection_factory(budget: ReadBudget, *, connections_max: int, is_compressed: bool) -> type[ServerConnection]:
    """Return what websockets creates its connections with."""
    make = functools.partial(
        BudgetedConnection, budget=budget, sockets_max=connections_max + OPENING_MAX, is_compressed=is_compressed
    )
    # websockets only calls it, as it would call the class of its annotation.
    return cast("type[ServerConnection]", make)


def raise_open_files_limit(connections: int) -> None:
    """Raise the process's limit of open files to what the connections and other files may need."""
    needed = connections + OPENING_MAX + OTHER_OPEN_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < needed:
        logger.warning("open_files_limited", extra={"allowed": allowed, "needed": needed})
