"""A small database that changes at random, and what mirrors of it have to show. No Spark, no service: only the rules.

Four sources share a table. Two have rows of their own and empty the table of them now and then; the other two change
the same rows, by clocks that agree. All insert, update (now and then without one column), delete, change keys, start
over with a new epoch, and add and widen columns as they go. Some changes are kept back, as in a quarantine.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

KEYS_PER_SOURCE = 40
KEPT_BACK = 0.15
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
    is_sharing: bool = False


class Database:
    """The sources, and everything that they have ever said."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        shared: dict[int, Row] = {}
        self._sources = [_Source(0), _Source(1)]
        self._sources += [_Source(number, rows=shared, is_sharing=True) for number in (2, 3)]
        self._time_ms = START_MS
        self.round = 0
        self.changes: list[Change] = []

    def play_round(self) -> list[list[Change]]:
        """Let each source change some rows, in turns; its changes in order, of sources in any."""
        turns = []
        for source in self._sources:
            if self._random.random() < 0.15:
                source.epoch, source.sequence = source.epoch + 1, 0
            turns += [source] * self._random.randint(5, 20)
        self._random.shuffle(turns)
        played: list[list[Change]] = [[] for _ in self._sources]
        for source in turns:
            played[source.number].append(self._change(source))
        self.round += 1
        self.changes += [change for changes in played for change in changes]
        self._random.shuffle(played)
        return played

    def keep_back(self, changes: list[Change]) -> tuple[list[Change], list[Change]]:
        """Part changes into those that are sent and those that a quarantine would keep: single rows, now and then."""
        kept = [change for change in changes if change.key is not None and self._random.random() < KEPT_BACK]
        return [change for change in changes if change not in kept], kept

    def _change(self, source: _Source) -> Change:
        self._time_ms += 1
        source.sequence += self._random.randint(1, 3)
        facts = {"source": source.number, "epoch": source.epoch, "sequence": source.sequence, "time_ms": self._time_ms}
        absent = [key for key in self._keys_of(source) if key not in source.rows]
        kind = self._random.choices(
            ["insert", "update", "partial", "delete", "move", "truncate"],
            [25, 15, 50, 12, 8, 0 if source.is_sharing else 1.5],
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
            sends_all = self._random.random() < 0.5
            return self._update(source, new_key, facts | {"old_key": key}, sends_all=sends_all)
        return self._update(source, key, facts, sends_all=kind != "partial")

    def _update(self, source: _Source, key: int, facts: dict[str, Any], *, sends_all: bool) -> Change:
        old = source.rows.pop(facts.get("old_key", key))
        values = self._values()
        source.rows[key] = values if sends_all else values | {"big": old["big"]}
        if sends_all:
            return Change(operation="UPDATE", key=key, row=values, **facts)
        sent = {name: value for name, value in values.items() if name != "big"}
        return Change(operation="UPDATE", key=key, row=sent, unchanged=("big",), **facts)

    def _keys_of(self, source: _Source) -> range:
        return range(min(source.number, 2), 3 * KEYS_PER_SOURCE, 3)

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
            if not source.is_sharing  # a read has the time of the reading, which may be later than changes behind it
            for key, row in sorted(source.rows.items())
            if self._random.random() < 0.5
        ]


def expected_rows(changes: list[Change], columns: tuple[str, ...] = COLUMNS) -> dict[int, tuple[Any, ...]]:
    """Compute what a mirror shows: key -> values of the columns."""
    found = _all_versions(changes, columns)
    return {key: versions[-1][1] for key, versions in found.items() if versions[-1][2] is None}


def expected_history(changes: list[Change], columns: tuple[str, ...] = COLUMNS) -> list[tuple[Any, ...]]:
    """Compute what a history shows: key, position of the start, position of the end, values."""
    return [
        (key, start, end or (), values)
        for key, versions in _all_versions(changes, columns).items()
        for start, values, end in versions
    ]


Version = tuple[tuple[Any, ...], tuple[Any, ...], tuple[int, int] | None]


def _all_versions(changes: list[Change], columns: tuple[str, ...]) -> dict[int, list[Version]]:
    by_key: dict[int, list[Change]] = {}
    for change in _with_moves(set_of(changes)):
        if change.key is not None:
            by_key.setdefault(change.key, []).append(change)
    truncates = [change for change in changes if change.operation == "TRUNCATE"]
    found = {key: _versions(_in_order(events), truncates, columns) for key, events in by_key.items()}
    return {key: versions for key, versions in found.items() if versions}


def _in_order(events: list[Change]) -> list[Change]:
    """Put the changes of a row in order: by position, or by time where several sources tell of it."""
    if len({event.source for event in events}) == 1:
        return sorted(events, key=lambda each: each.order)
    return sorted(events, key=lambda each: each.time_ms)


def set_of(changes: list[Change]) -> list[Change]:
    """Leave out what comes again."""
    return list({(change.source, change.key, *change.order): change for change in changes}.values())


def _with_moves(changes: list[Change]) -> Iterator[Change]:
    for change in changes:
        yield change
        if change.old_key is not None:
            yield replace(change, operation="DELETE", key=change.old_key, old_key=None, row={}, unchanged=())


def _versions(events: list[Change], truncates: list[Change], columns: tuple[str, ...]) -> list[Version]:
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
        versions.append((start, tuple(row.get(name) for name in columns), min(ends, default=None)))
    return versions


def _next_truncate(event: Change, truncates: list[Change]) -> tuple[int, int] | None:
    behind = [each.order[:2] for each in truncates if each.source == event.source and each.order[:2] > event.order[:2]]
    return min(behind, default=None)


def _emptied_between(one: Change, other: Change, truncates: list[Change]) -> bool:
    emptied = _next_truncate(one, truncates)
    return emptied is not None and emptied <= other.order[:2]
