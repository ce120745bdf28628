"""Budgets of memory and of request slots, each with a FIFO queue of waiters.

`ReadBudget` bounds what is read from sockets and not yet durable, for WebSocket and HTTP together:

    charged   whole messages, from their last byte until their verdict is known
    reserved  arriving messages that exceed the allowance of their connection. Each counts as the largest size that it
              may reach, so a message that was begun can always be finished and no reader waits for a half-read one

Below the limit every connection reads. At the limit readers queue and continue in that order as bytes are released.
Whatever clients send, unsynced data takes at most

    max_bytes + connections x RESERVED_READ_BYTES

`RequestSlots` bounds the HTTP ingest requests that are served at a time, in total and per client address.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol

from lakefeed.ingest.admission.addresses import Address, is_private
from lakefeed.ingest.config import FRAGMENTS_OVERHEAD_BYTES, IngestConfig

# What a connection may hold of a message before it has to reserve, and the size of one read. Most messages are
# smaller; smaller reads cost more calls per byte, measurably so below 64 KiB.
ALLOWANCE_BYTES = 64 * 1024

# The size of one read after a reservation. Each read lets other threads run and then waits for them, so larger reads
# save 7 % of a large frame's CPU time. Bytes of the next message are not reserved, so it is not larger still.
RESERVED_READ_BYTES = 128 * 1024


class Reader(Protocol):
    """A connection or a request that waits for memory."""

    def on_granted(self, *, reserved: bool) -> None:
        """Continue to read; `reserved` says that a whole message is reserved."""


@dataclass(slots=True)
class ReadBudget:
    """The bytes of all connections, and the readers that wait for some of them."""

    max_bytes: int
    message_max_bytes: int
    used_bytes: int = 0
    _waiting: dict[Reader, int] = field(default_factory=dict)  # in queue order: the bytes to reserve, or 0

    def __post_init__(self) -> None:
        assert self.max_bytes >= 2 * self.reservation_bytes, "half of the budget must hold a message"

    @property
    def reservation_bytes(self) -> int:
        """Return what an arriving message of unknown size counts as."""
        return self.message_max_bytes + FRAGMENTS_OVERHEAD_BYTES

    @property
    def waiting_readers(self) -> int:
        """Return how many readers wait for memory."""
        return len(self._waiting)

    def is_open(self) -> bool:
        """Return whether another allowance may be read."""
        return self.used_bytes < self.max_bytes and not self._waiting

    def wait(self, reader: Reader) -> None:
        """Queue a reader for another allowance."""
        self._waiting[reader] = 0

    def reserve(self, reader: Reader, size_bytes: int | None = None) -> bool:
        """Reserve a whole message for a reader and return True, or queue the reader."""
        need_bytes = self.reservation_bytes if size_bytes is None else size_bytes
        assert 0 < need_bytes <= self.reservation_bytes, "larger than any message"
        if not self._waiting and self.used_bytes + need_bytes <= self.max_bytes:
            self.used_bytes += need_bytes
            return True
        self._waiting[reader] = need_bytes
        return False

    def charge(self, size_bytes: int) -> None:
        """Count bytes that were read."""
        self.used_bytes += size_bytes

    def release(self, size_bytes: int) -> None:
        """Release bytes, and let the first readers of the queue continue as far as there is room."""
        self.used_bytes -= size_bytes
        # A reader that continues may find nothing to read. Those behind it must not wait for that, so allowances are
        # not reserved, and with half of the budget free all that wait for one continue.
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
            reader.on_granted(reserved=reserve_bytes > 0)

    def forget(self, reader: Reader) -> None:
        """Remove a reader from the queue; readers behind it may have room that it did not have."""
        if self._waiting.pop(reader, None) is not None:
            self.release(0)


class SlotWaiter(Protocol):
    """A request that waits for a slot."""

    @property
    def address(self) -> Address | None:
        """Return the client's address, if known."""

    def on_slot(self) -> None:
        """Continue: the slot is taken for this request."""


@dataclass(slots=True)
class RequestSlots:
    """The slots in use, and the requests that wait for one.

    Slots are granted in order of arrival. A request whose address is at its limit does not block those behind it. The
    queue is bounded by the number of connections: each has one request at a time.
    """

    config: IngestConfig
    used: int = 0
    _per_address: Counter[Address] = field(default_factory=Counter)
    _waiting: dict[SlotWaiter, None] = field(default_factory=dict)

    @property
    def waiting(self) -> int:
        """Return how many requests wait."""
        return len(self._waiting)

    def acquire(self, request: SlotWaiter) -> bool:
        """Take a slot and return True, or queue the request. No queued request could have used the slot."""
        if self._may_have_slot(request):
            self._count(request, 1)
            return True
        self._waiting[request] = None
        return False

    def release(self, request: SlotWaiter) -> None:
        """Free the slot of a request, and grant it to the first waiting request that may have it."""
        self._count(request, -1)
        for other in list(self._waiting):
            if self.used >= self.config.http_requests_max:
                return
            if self._may_have_slot(other):
                del self._waiting[other]
                self._count(other, 1)
                other.on_slot()

    def forget(self, request: SlotWaiter) -> None:
        """Remove a request from the queue."""
        self._waiting.pop(request, None)

    def _may_have_slot(self, request: SlotWaiter) -> bool:
        config, address = self.config, request.address
        if self.used >= config.http_requests_max:
            return False
        if address is None or (is_private(address) and not config.limit_private_ips):
            return True
        return not 0 < config.http_requests_per_ip_max <= self._per_address[address]

    def _count(self, request: SlotWaiter, by: int) -> None:
        self.used += by
        address = request.address
        if address is not None:
            self._per_address[address] += by
            if not self._per_address[address]:
                del self._per_address[address]
