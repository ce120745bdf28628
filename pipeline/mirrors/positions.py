"""Positions of changes: which of two changes to a row, or to one of its values, is newer. As expressions of Spark SQL.

    same source          epoch, then sequence; at the same position a streamed change is newer than a READ
    different sources    time of the change, then the name of the source

A READ has the last position that was known of its source when the row was read. A change streamed at this very position
may be newer than the row and is never older; a truncate at this position emptied the table before the row was read. The
order is total as long as the times of a source that shares rows with another one do not fall.

Which change a value of a row is from:

    UNKNOWN contains the column       no change has sent it yet
    CARRIED has an entry for it       the change that the entry names
    otherwise                         the row's own last change

A value is replaced only by one from a newer change, so the result does not depend on the order in which changes arrive.
Every frame here has passed `fold.prepare`, or is a mirror.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from lakefeed.contract import changes
from lakefeed.pipeline.mirrors.layout import CARRIED, POSITION_COLUMNS, UNKNOWN, Layout
from lakefeed.pipeline.spark.sql import text_literal

READ = "READ"

NO_NAMES = "CAST(array() AS array<string>)"

# Names of lambda variables: the prefix is reserved, so no column has such a name.
_ENTRY, _NAME, _ONE, _OTHER = "_cdc_entry", "_cdc_name", "_cdc_one", "_cdc_other"


@dataclass(frozen=True, slots=True)
class Truncate:
    """The position at which a source emptied the table; `time` is text that casts to a timestamp."""

    source: str
    epoch: int
    sequence: int
    time: str | None = None


# -- rows


def newer(one: str, other: str) -> str:
    """Return the condition that the change in alias `one` is newer than the one in alias `other`."""
    same = f"{one}.{changes.SOURCE} <=> {other}.{changes.SOURCE}"
    within = f"{_within_source(one)} > {_within_source(other)}"
    between = f"{_between_sources(one)} > {_between_sources(other)}"
    return f"(CASE WHEN {same} THEN {within} ELSE {between} END)"


def _within_source(alias: str) -> str:
    # The alias precedes each name, also where a struct has such a field: names with our prefix are unambiguous.
    is_live = f"coalesce({alias}.{changes.OPERATION}, '') <> '{READ}'"
    parts = (f"coalesce({alias}.{changes.EPOCH}, 0)", f"{alias}.{changes.SEQUENCE}", is_live)
    return f"struct({', '.join(parts)}, {alias}.{changes.TIMESTAMP})"


def _between_sources(alias: str) -> str:
    return f"struct({alias}.{changes.TIMESTAMP}, coalesce({alias}.{changes.SOURCE}, ''))"


def truncated(truncates: Iterable[Truncate], alias: str = "") -> str:
    """Return the condition that one of the truncates has deleted a row."""
    prefix = f"{alias}." if alias else ""
    epoch = f"coalesce({prefix}{changes.EPOCH}, 0)"
    conditions = [
        f"({prefix}{changes.SOURCE} <=> {text_literal(each.source)} AND "
        f"({epoch} < {each.epoch} OR ({epoch} = {each.epoch} AND {precedes(str(each.sequence), alias)})))"
        for each in truncates
    ]
    return f"({' OR '.join(conditions)})" if conditions else "false"


def precedes(sequence: str, alias: str = "") -> str:
    """Return the condition that a row comes before a truncate of its epoch; a READ at the same position comes after."""
    prefix = f"{alias}." if alias else ""
    is_read = f"coalesce({prefix}{changes.OPERATION}, '') = '{READ}'"
    return f"({sequence} > {prefix}{changes.SEQUENCE} OR ({sequence} = {prefix}{changes.SEQUENCE} AND NOT {is_read}))"


def latest_truncates(truncates: Iterable[Truncate]) -> tuple[Truncate, ...]:
    """Return the last truncate of each source, which covers those before it."""
    latest: dict[str, Truncate] = {}
    for each in truncates:
        known = latest.get(each.source)
        if known is None or (each.epoch, each.sequence) > (known.epoch, known.sequence):
            latest[each.source] = each
    return tuple(latest[source] for source in sorted(latest))


# -- values


def unknown_names(alias: str, layout: Layout) -> str:
    """Return the columns that no change of a row has sent, by their present names."""
    names = f"coalesce({alias}.{UNKNOWN}, {NO_NAMES})"
    return f"transform({names}, {_NAME} -> {_present_name(_NAME, layout)})" if layout.renamed else names


def entries(alias: str, layout: Layout) -> str:
    """Return the CARRIED entries of a row, with the present names of columns."""
    found = f"coalesce({alias}.{CARRIED}, {no_entries(layout)})"
    if not layout.renamed:
        return found
    parts = ", ".join(f"'{part}', {_ENTRY}.{part}" for part in POSITION_COLUMNS)
    name = _present_name(f"{_ENTRY}.name", layout)
    return f"transform({found}, {_ENTRY} -> named_struct('name', {name}, {parts}))"


def no_entries(layout: Layout) -> str:
    """Return an empty list of entries."""
    return f"CAST(array() AS {layout.schema[CARRIED].dataType.simpleString()})"


def entry_of(alias: str, name: str, layout: Layout) -> str:
    """Return a column's entry, or null. `name` is an expression."""
    return f"get(filter({entries(alias, layout)}, {_ENTRY} -> {_ENTRY}.name = {name}), 0)"


def value_position(alias: str, name: str, layout: Layout) -> str:
    """Return the position of the change that a value is from, as an entry; null if no change has sent it."""
    is_unknown = f"array_contains({unknown_names(alias, layout)}, {name})"
    parts = ", ".join(f"'{part}', {alias}.{part}" for part in POSITION_COLUMNS)
    own = f"array(named_struct('name', {name}, {parts}))"
    own_entry = f"CAST({own} AS {layout.schema[CARRIED].dataType.simpleString()})[0]"
    return f"CASE WHEN NOT {is_unknown} THEN coalesce({entry_of(alias, name, layout)}, {own_entry}) END"


def is_newer_entry(one: str, other: str) -> str:
    """Return the condition that one entry is from a newer change than another; null is older than any entry."""
    # Bound to variables, because a comparison repeats each of them many times.
    condition = f"{_ONE} IS NOT NULL AND ({_OTHER} IS NULL OR {newer(_ONE, _OTHER)})"
    return f"exists(array({one}), {_ONE} -> exists(array({other}), {_OTHER} -> {condition}))"


def newer_columns(older: str, row: str, layout: Layout, *, among: Collection[str]) -> str:
    """Return the columns for which a row with an older last change has a newer value than `row`."""
    named = f"transform({entries(row, layout)}, {_ENTRY} -> {_ENTRY}.name)"
    literals = ", ".join(text_literal(name) for name in layout.row_columns if name in among)
    candidates = f"array_intersect(concat({unknown_names(row, layout)}, {named}), array({literals}))"
    condition = is_newer_entry(value_position(older, _NAME, layout), value_position(row, _NAME, layout))
    return f"filter({candidates}, {_NAME} -> {condition})"


def _present_name(name: str, layout: Layout) -> str:
    cases = " ".join(f"WHEN {text_literal(old)} THEN {text_literal(new)}" for old, new in layout.renamed.items())
    return f"CASE {name} {cases} ELSE {name} END"
