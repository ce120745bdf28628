"""The newest accepted sequences of each source: they tell a resend from other changes with old numbers. Pure.

A batch is a stretch of its source's changes, so a resend has exactly the changes that were accepted before, however it
is divided. A batch with other numbers at or below the source's mark is none: its changes were never accepted, and
skipping them would lose them.

    accepted  1 3 5 7       2 4 6    contradicts: 2 was not accepted
                            3 5 7 9  agrees, and 9 is new
                            5 9      contradicts: 7 is missing

Consecutive numbers are kept as a range, which needs no memory whatever its length; others take eight bytes each. What
is kept is bounded per source and in total. Of a source that is not kept, or after a restart, only the mark is known.
"""

from __future__ import annotations

import operator
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from lakefeed.contract.changes import SourceId
from lakefeed.ingest.protocol.offers import BEFORE_ALL

# Per source: more than the changes that a connection usually has in flight.
NUMBERS_MAX_PER_SOURCE = 65_536

# Of all sources: 16 MiB.
NUMBERS_MAX = 2 * 1024 * 1024

# A range is worth its overhead from this length on; shorter ones join their neighbours.
_RANGE_MIN_LENGTH = 32

# Neighbouring stretches become one up to this length: few to walk through, and little to copy.
_JOINED_MAX_LENGTH = 4_096

# What a stretch takes besides its numbers, in numbers.
_STRETCH_OVERHEAD = 16

# Rising numbers, cut into stretches: ranges and arrays.
Stretches: TypeAlias = tuple[Sequence[int], ...]


def first_contradiction(offered: Sequence[int], accepted: Stretches) -> int | None:
    """Return the first sequence that only one of both has, from the first accepted one to where either ends."""
    first, last = offered[0], offered[-1]
    at = bisect_left(offered, accepted[0][0])
    for stretch in accepted:
        own = stretch[bisect_left(stretch, first) : bisect_right(stretch, last)]
        found = offered[at : at + len(own)]
        if not all(map(operator.eq, found, own)):
            return next(min(pair) for pair in zip(found, own, strict=False) if pair[0] != pair[1])
        at += len(own)
    return offered[at] if at < bisect_right(offered, accepted[-1][-1]) else None


def up_to(mark: int, kept: Stretches) -> Stretches:
    """Return what is known up to a source's mark: at least the mark, which is a change, unless nothing was accepted.

    What is kept ends at another number if it is of an earlier epoch.
    """
    if kept and kept[-1][-1] == mark:
        return kept
    return (range(mark, mark + 1),) if mark > BEFORE_ALL else ()


def extended(accepted: Stretches, new: Sequence[int]) -> Stretches:
    """Add new sequences behind accepted ones, and forget the oldest of too many."""
    is_dense = new[-1] - new[0] + 1 == len(new)
    last = accepted[-1] if accepted else ()
    if is_dense and isinstance(last, range) and last[-1] + 1 == new[0]:
        return (*accepted[:-1], range(last[0], new[-1] + 1))
    if is_dense and (len(new) >= _RANGE_MIN_LENGTH or not accepted):
        return _bounded((*accepted, range(new[0], new[-1] + 1)))
    newest = array("q", new[-NUMBERS_MAX_PER_SOURCE:])
    if isinstance(last, array) and len(last) + len(newest) <= _JOINED_MAX_LENGTH:
        return (*accepted[:-1], last + newest)
    return _bounded((*accepted, newest))


def _bounded(accepted: Stretches) -> Stretches:
    while len(accepted) > 1 and _size_of(accepted) > NUMBERS_MAX_PER_SOURCE:
        accepted = accepted[1:]
    return accepted


def _size_of(accepted: Stretches) -> int:
    return sum(_STRETCH_OVERHEAD + (len(each) if isinstance(each, array) else 0) for each in accepted)


@dataclass(slots=True)
class AcceptedSequences:
    """The newest accepted sequences of the sources that sent last, in their current epochs."""

    max_numbers: int = NUMBERS_MAX
    _kept: dict[SourceId, Stretches] = field(default_factory=dict)
    _numbers: int = 0

    def of(self, source: SourceId) -> Stretches:
        """Return what is kept of a source."""
        return self._kept.get(source, ())

    def record(self, source: SourceId, accepted: Stretches) -> None:
        """Keep a source's sequences; forget those of the sources that have not sent for the longest time."""
        self._numbers += _size_of(accepted) - _size_of(self._kept.pop(source, ()))
        self._kept[source] = accepted
        while self._numbers > self.max_numbers and len(self._kept) > 1:
            self._numbers -= _size_of(self._kept.pop(next(iter(self._kept))))
