"""Who is served at a time: so many in all, so many of one address. Owns the places and the line in front of them.

A visitor gets a place at once, or when one becomes free for it, in the order of coming; one whose address has its share
does not keep those behind it waiting. The line is bounded by the connections: each has one request at a time. A limit
of 0 is no limit.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol

from ingest.addresses import Address, is_private


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
