"""How much may be read from sockets before it is durable. Owns the count and the queue of readers.

    charged   whole messages, from their last byte until their verdict is known
    reserved  messages that arrive and have outgrown their connection's allowance: each counts as large as it may still
              become, so that whatever was begun can be finished and nobody waits for a half-read neighbour for ever

Those who read are sockets.py (WebSocket) and http_bodies.py (HTTP). Below the limit everybody reads. At the limit
readers queue, whoever comes later behind them, and go on in that order as bytes are given back. So whatever clients
send, what is read and not yet durable takes at most

    max_bytes + connections x RESERVED_READ_BYTES
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol

from lakefeed.ingest.admission.addresses import Address, is_private

# --- ingest.read_budget -----------------------------------------------------------------------------------------------


# What a connection may have of a message before it has to reserve, and what it reads at once. Most messages are
# smaller; reading less at a time costs more calls per byte, measurably so below 64 KiB.
ALLOWANCE_BYTES = 64 * 1024

# What a connection that has reserved reads at once. Each read lets other threads run and then waits for them, so larger
# ones cost less: 7 % of a large frame's processor time. What comes of the next message is not reserved, so not more.
RESERVED_READ_BYTES = 128 * 1024

# What a frame takes beside its bytes: the objects around it, so that a flood of empty frames is counted too.
FRAME_OVERHEAD_BYTES = 256

# Fragments of one message, which websockets limits to 4,096, take at most this beside their bytes.
FRAGMENTS_OVERHEAD_BYTES = 4096 * FRAME_OVERHEAD_BYTES


class Reader(Protocol):
    """A connection, or a request, that can be told to go on."""

    def on_turn(self, *, reserved: bool) -> None:
        """Read on; `reserved` says that a whole message may now be taken."""


@dataclass(slots=True)
class ReadBudget:
    """The bytes of all connections, and the readers that wait for some of them."""

    max_bytes: int
    message_max_bytes: int
    used_bytes: int = 0
    _waiting: dict[Reader, int] = field(default_factory=dict)  # in the order of waiting: what to reserve, or 0

    def __post_init__(self) -> None:
        assert self.max_bytes >= 2 * self.reservation_bytes, "half of the budget must hold a message"

    @property
    def reservation_bytes(self) -> int:
        """What a message that arrives counts as, unless its size is known."""
        return self.message_max_bytes + FRAGMENTS_OVERHEAD_BYTES

    @property
    def waiting_readers(self) -> int:
        """How many connections are not read because of the others."""
        return len(self._waiting)

    def is_open(self) -> bool:
        """Tell whether another allowance may be read."""
        return self.used_bytes < self.max_bytes and not self._waiting

    def wait(self, reader: Reader) -> None:
        """Let a reader wait for its turn to read another allowance."""
        self._waiting[reader] = 0

    def reserve(self, reader: Reader, size_bytes: int | None = None) -> bool:
        """Reserve a whole message for a reader, or let it wait for its turn."""
        need_bytes = self.reservation_bytes if size_bytes is None else size_bytes
        assert 0 < need_bytes <= self.reservation_bytes, "larger than any message"
        if not self._waiting and self.used_bytes + need_bytes <= self.max_bytes:
            self.used_bytes += need_bytes
            return True
        self._waiting[reader] = need_bytes
        return False

    def charge(self, size_bytes: int) -> None:
        """Count what was read."""
        self.used_bytes += size_bytes

    def give_back(self, size_bytes: int) -> None:
        """Return what is no longer held, and let as many readers go on as now have room, in the order they came."""
        self.used_bytes -= size_bytes
        # A reader that gets its turn may turn out to have nothing to read. Those behind it must not wait for that, so
        # allowances are not reserved, and with half of the budget free all that wait for one go on.
        room_bytes = self.max_bytes - self.used_bytes
        while self._waiting:
            reader, reserve_bytes = next(iter(self._waiting.items()))
            need_bytes = reserve_bytes or ALLOWANCE_BYTES
            half_is_free = self.used_bytes <= self.max_bytes // 2
            if room_bytes < need_bytes and (reserve_bytes or not half_is_free):
                return
            room_bytes -= need_bytes
            self.used_bytes += reserve_bytes
            del self._waiting[reader]
            reader.on_turn(reserved=reserve_bytes > 0)

    def forget(self, reader: Reader) -> None:
        """Take a reader out of the queue; those behind it may have room that it had not."""
        if self._waiting.pop(reader, None) is not None:
            self.give_back(0)


# --- ingest.places ----------------------------------------------------------------------------------------------------
#
# Who is served at a time: so many in all, so many of one address. Owns the places and the line in front of them.
#
# A visitor gets a place at once, or when one becomes free for it, in the order of coming; one whose address has its
# share
# does not keep those behind it waiting. The line is bounded by the connections: each has one request at a time. A limit
# of 0 is no limit.


class Visitor(Protocol):
    """Someone who can be told to come in."""

    @property
    def address(self) -> Address | None:
        """Where it comes from, if that is known."""

    def on_place(self) -> None:
        """Come in: the place is taken."""


@dataclass(slots=True)
class Places:
    """The places that are taken, and the line."""

    total: int
    per_address: int = 0
    private_addresses_count: bool = False
    taken: int = 0
    _per_address: Counter[Address] = field(default_factory=Counter)
    _waiting: dict[Visitor, None] = field(default_factory=dict)

    @property
    def waiting(self) -> int:
        """How many stand in line."""
        return len(self._waiting)

    def enter(self, visitor: Visitor) -> bool:
        """Give a visitor a place, or let it stand in line. Nobody in line could have had the place."""
        if self._has_place(visitor):
            self._count(visitor, 1)
            return True
        self._waiting[visitor] = None
        return False

    def leave(self, visitor: Visitor) -> None:
        """Free a visitor's place for whoever in line may have it."""
        self._count(visitor, -1)
        for other in list(self._waiting):
            if self._is_full():
                return
            if self._has_place(other):
                del self._waiting[other]
                self._count(other, 1)
                other.on_place()

    def forget(self, visitor: Visitor) -> None:
        """Take a visitor out of the line."""
        self._waiting.pop(visitor, None)

    def _has_place(self, visitor: Visitor) -> bool:
        if self._is_full():
            return False
        address = visitor.address
        if not self.per_address or address is None or not self._counts(address):
            return True
        return self._per_address[address] < self.per_address

    def _is_full(self) -> bool:
        return bool(self.total) and self.taken >= self.total

    def _counts(self, address: Address) -> bool:
        return self.private_addresses_count or not is_private(address)

    def _count(self, visitor: Visitor, by: int) -> None:
        self.taken += by
        address = visitor.address
        if address is not None:
            self._per_address[address] += by
            if not self._per_address[address]:
                del self._per_address[address]
