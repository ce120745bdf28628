"""A small database that changes at random, and what mirrors of it have to show. No Spark, no service: only the rules.

Two sources share a table and have rows of their own. They insert, update (now and then without one column), delete,
change keys, empty the table of their rows, start over with a new epoch, and add and widen columns as they go.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

KEYS_PER_SOURCE = 24
START_MS = 1_794_787_200_000

# The columns that are compared, and from which round on rows have them. `label` was `name` before.
COLUMNS = ("label", "big", "small", "extra", "city", "zip")
EXTRA_FROM = 1
WIDE_FROM = 2
RENAMED_FROM = 3

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Change:
    """One change as its source sends it; `row` has its values, without those in `unchanged`."""

    source: int
    epoch: int
    sequence: int
    time_ms: int
    operation: str
    key: int | None = None
    old_key: int | None = None
    row: Row = field(default_factory=dict)
    unchanged: tuple[str, ...] = ()

    @property
    def order(self) -> tuple[int, int, bool, int]:
        return (self.epoch, self.sequence, self.operation != "READ", self.time_ms)


@dataclass
class _Source:
    number: int
    epoch: int = 0
    sequence: int = 0
    rows: dict[int, Row] = field(default_factory=dict)


class Database:
    """The sources, and everything that they have ever said."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._sources = [_Source(0), _Source(1)]
        self._time_ms = START_MS
        self.round = 0
        self.changes: list[Change] = []

    def play_round(self) -> list[list[Change]]:
        """Let each source change some rows; its changes in order."""
        played = [self._play(source) for source in self._sources]
        self.round += 1
        self.changes += [change for changes in played for change in changes]
        return played

    def _play(self, source: _Source) -> list[Change]:
        if self._random.random() < 0.15:
            source.epoch, source.sequence = source.epoch + 1, 0
        return [self._change(source) for _ in range(self._random.randint(5, 30))]

    def _change(self, source: _Source) -> Change:
        self._time_ms += 1
        source.sequence += self._random.randint(1, 3)
        facts = {"source": source.number, "epoch": source.epoch, "sequence": source.sequence, "time_ms": self._time_ms}
        absent = [key for key in self._keys_of(source) if key not in source.rows]
        kind = self._random.choices(
            ["insert", "update", "partial", "delete", "move", "truncate"], [30, 30, 15, 15, 8, 1]
        )[0]
        if kind == "truncate":
            source.rows.clear()
            return Change(operation="TRUNCATE", **facts)
        if not source.rows or (kind == "insert" and absent):
            key = self._random.choice(absent)
            source.rows[key] = self._values()
            return Change(operation="INSERT", key=key, row=source.rows[key], **facts)
        key = self._random.choice(sorted(source.rows))
        if kind == "delete":
            del source.rows[key]
            return Change(operation="DELETE", key=key, **facts)
        if kind == "move" and absent:
            new_key = self._random.choice(absent)
            source.rows[new_key] = self._values()
            del source.rows[key]
            return Change(operation="UPDATE", key=new_key, old_key=key, row=source.rows[new_key], **facts)
        values = self._values()
        if kind == "partial":
            old_big = source.rows[key]["big"]
            source.rows[key] = values | {"big": old_big}
            sent = {name: value for name, value in values.items() if name != "big"}
            return Change(operation="UPDATE", key=key, row=sent, unchanged=("big",), **facts)
        source.rows[key] = values
        return Change(operation="UPDATE", key=key, row=values, **facts)

    def _keys_of(self, source: _Source) -> range:
        return range(source.number, 2 * KEYS_PER_SOURCE, 2)

    def _values(self) -> Row:
        number = self._random.randrange(1_000_000)
        values: Row = {"label": f"n{number}", "big": f"b{number}" if number % 5 else None, "small": number, "city": "c"}
        if self.round >= EXTRA_FROM:
            values |= {"extra": number, "zip": number % 100_000}
        if self.round >= WIDE_FROM and number % 3 == 0:
            values["small"] = number + 2**40
        return values

    def read_now(self) -> list[Change]:
        """Read some rows as they are, at the position that their source has reached: what a backfill would do."""
        self._time_ms += 1
        return [
            Change(
                source=source.number,
                epoch=source.epoch,
                sequence=source.sequence,
                time_ms=self._time_ms,
                operation="READ",
                key=key,
                row=row,
            )
            for source in self._sources
            for key, row in sorted(source.rows.items())
            if self._random.random() < 0.5
        ]


def expected_rows(changes: list[Change]) -> dict[int, tuple[Any, ...]]:
    """Compute what a mirror shows: key -> values of COLUMNS."""
    return {key: versions[-1][1] for key, versions in _all_versions(changes).items() if versions[-1][2] is None}


def expected_history(changes: list[Change]) -> list[tuple[Any, ...]]:
    """Compute what a history shows: key, position of the start, position of the end, values."""
    return [
        (key, start, end or (), values)
        for key, versions in _all_versions(changes).items()
        for start, values, end in versions
    ]


Version = tuple[tuple[Any, ...], tuple[Any, ...], tuple[int, int] | None]


def _all_versions(changes: list[Change]) -> dict[int, list[Version]]:
    by_key: dict[int, list[Change]] = {}
    for change in _with_moves(set_of(changes)):
        if change.key is not None:
            by_key.setdefault(change.key, []).append(change)
    truncates = [change for change in changes if change.operation == "TRUNCATE"]
    found = {key: _versions(sorted(events, key=lambda each: each.order), truncates) for key, events in by_key.items()}
    return {key: versions for key, versions in found.items() if versions}


def set_of(changes: list[Change]) -> list[Change]:
    """Leave out what comes again."""
    return list({(change.source, change.key, *change.order): change for change in changes}.values())


def _with_moves(changes: list[Change]) -> Iterator[Change]:
    for change in changes:
        yield change
        if change.old_key is not None:
            yield replace(change, operation="DELETE", key=change.old_key, old_key=None, row={}, unchanged=())


def _versions(events: list[Change], truncates: list[Change]) -> list[Version]:
    versions: list[Version] = []
    row: Row = {}
    for number, event in enumerate(events):
        if number:
            before = events[number - 1]
            if before.operation == "DELETE" or _emptied_between(before, event, truncates):
                row = {}
        if event.operation == "DELETE":
            continue
        row = dict(event.row) | {name: row.get(name) for name in event.unchanged}
        following = events[number + 1].order[:2] if number + 1 < len(events) else None
        ends = [end for end in (following, _next_truncate(event, truncates)) if end is not None]
        start = (*event.order[:2], event.operation == "READ")
        versions.append((start, tuple(row.get(name) for name in COLUMNS), min(ends, default=None)))
    return versions


def _next_truncate(event: Change, truncates: list[Change]) -> tuple[int, int] | None:
    behind = [each.order[:2] for each in truncates if each.source == event.source and each.order[:2] > event.order[:2]]
    return min(behind, default=None)


def _emptied_between(one: Change, other: Change, truncates: list[Change]) -> bool:
    emptied = _next_truncate(one, truncates)
    return emptied is not None and emptied <= other.order[:2]
