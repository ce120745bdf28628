"""A group sifted: the rows that can be decoded, and those that make decoding fail, whatever the reason. Slow and exact.

Owns finding the culprits. A group that fails is cut in two, and each half again, until what fails is one row: so one
bad row costs a few more tries, and its neighbours are decoded together. Columns evolve from part to part, in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pyarrow as pa

from writer.decoding import Expected, decode_or_fit
from writer.errors import WriterError
from writer.quarantine.names import Refusal
from writer.quarantine.rows import Reason
from writer.rows.groups import Group


@dataclass(frozen=True, slots=True)
class Sifted:
    """What became of a group: parts of it with their rows, parts that were refused, and the columns after that.

    `refusals` are of what sources declared about the columns, and concern no row.
    """

    kept: Sequence[tuple[Group, pa.Table]]
    refused: Sequence[tuple[Group, Reason]]
    expected: Expected
    last_field_id: int
    changes: Sequence[str]
    refusals: Sequence[str]


@dataclass(slots=True)
class _Refused:
    start: int
    stop: int
    reason: Reason


@dataclass(slots=True)
class _Sieve:
    group: Group
    expected: Expected
    last_field_id: int
    kept: list[tuple[Group, pa.Table]] = field(default_factory=list)
    refused: list[_Refused] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)
    refusals: dict[str, None] = field(default_factory=dict)

    def sift(self, start: int, stop: int) -> None:
        part = self.group if stop - start == len(self.group) else self.group.between(start, stop)
        try:
            fitted = decode_or_fit(part, self.expected, last_field_id=self.last_field_id)
        except MemoryError:
            raise  # says nothing of the rows
        except Exception as error:  # noqa: BLE001 - the boundary of a decode thread; it is told with the row
            if stop - start == 1:
                self._refuse(start, reason_of(error))
                return
        else:
            self.kept.append((part, fitted.table))
            self.expected = replace(self.expected, columns=fitted.columns, vacant=fitted.vacant)
            self.last_field_id = fitted.last_field_id
            self.changes.extend(fitted.added)
            self.refusals |= dict.fromkeys(fitted.refused)  # each part says the same
            return
        middle = (start + stop) // 2
        self.sift(start, middle)
        self.sift(middle, stop)

    def _refuse(self, row: int, reason: Reason) -> None:
        last = self.refused[-1] if self.refused else None
        if last is not None and (last.stop, last.reason) == (row, reason):
            last.stop += 1
        else:
            self.refused.append(_Refused(row, row + 1, reason))


def reason_of(error: Exception) -> Reason:
    """Name the error. Only our own messages are known to hold no values."""
    text = f"{type(error).__name__}: {error}" if isinstance(error, WriterError) else type(error).__name__
    return Reason(Refusal.UNDECODABLE, text)


def sift_group(group: Group, expected: Expected, *, last_field_id: int) -> Sifted:
    """Decode what can be decoded of a group, and tell the rest apart."""
    sieve = _Sieve(group, expected, last_field_id)
    sieve.sift(0, len(group))
    refused = [(group.between(each.start, each.stop), each.reason) for each in sieve.refused]
    return Sifted(sieve.kept, refused, sieve.expected, sieve.last_field_id, sieve.changes, list(sieve.refusals))
