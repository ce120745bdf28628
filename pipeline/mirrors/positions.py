"""Which of two changes to a row is the later one. Owns that order, as expressions of Spark SQL.

    same source          epoch, then sequence; at one position a change that was streamed is later than a READ
    different sources    time of the change, then the source's name

A READ stands at the position up to which its source was known when the row was read, so what was streamed at that very
position may be newer than the row and is never older; a truncate there took what was in the table before the row was
read. The order is one of all changes as long as the times of a source
that shares rows with another do not fall. Every frame read here has passed transforms.prepare, or is a mirror.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pipeline.mirrors.sql_text import text_literal
from writer import columns

READ = "READ"


@dataclass(frozen=True, slots=True)
class Truncate:
    """A moment at which a source emptied the table; `time` is the change's own, as text that casts to a timestamp."""

    source: str
    epoch: int
    sequence: int
    time: str | None = None


def newer(one: str, other: str) -> str:
    """Tell whether the change in alias `one` is later than that in alias `other`."""
    same = f"{one}.{columns.SOURCE} <=> {other}.{columns.SOURCE}"
    within = f"{_within_source(one)} > {_within_source(other)}"
    between = f"{_between_sources(one)} > {_between_sources(other)}"
    return f"(CASE WHEN {same} THEN {within} ELSE {between} END)"


def _within_source(alias: str) -> str:
    # An alias stands before each name, also where a struct has such a field: the names are ours alone.
    is_live = f"coalesce({alias}.{columns.OPERATION}, '') <> '{READ}'"
    parts = (f"coalesce({alias}.{columns.EPOCH}, 0)", f"{alias}.{columns.SEQUENCE}", is_live)
    return f"struct({', '.join(parts)}, {alias}.{columns.TIMESTAMP})"


def _between_sources(alias: str) -> str:
    return f"struct({alias}.{columns.TIMESTAMP}, coalesce({alias}.{columns.SOURCE}, ''))"


def truncated(truncates: Iterable[Truncate], alias: str = "") -> str:
    """Tell whether a row is gone with one of the truncates."""
    prefix = f"{alias}." if alias else ""
    epoch = f"coalesce({prefix}{columns.EPOCH}, 0)"
    conditions = [
        f"({prefix}{columns.SOURCE} <=> {text_literal(each.source)} AND "
        f"({epoch} < {each.epoch} OR ({epoch} = {each.epoch} AND {taken_with(str(each.sequence), alias)})))"
        for each in truncates
    ]
    return f"({' OR '.join(conditions)})" if conditions else "false"


def taken_with(sequence: str, alias: str = "") -> str:
    """Tell whether a truncate at a sequence takes a row of the same epoch: one that was read there came behind it."""
    prefix = f"{alias}." if alias else ""
    is_read = f"coalesce({prefix}{columns.OPERATION}, '') = '{READ}'"
    return f"({sequence} > {prefix}{columns.SEQUENCE} OR ({sequence} = {prefix}{columns.SEQUENCE} AND NOT {is_read}))"


def latest_truncates(truncates: Iterable[Truncate]) -> tuple[Truncate, ...]:
    """Keep the last truncate of each source: it covers those before it."""
    latest: dict[str, Truncate] = {}
    for each in truncates:
        known = latest.get(each.source)
        if known is None or (each.epoch, each.sequence) > (known.epoch, known.sequence):
            latest[each.source] = each
    return tuple(latest[source] for source in sorted(latest))
