"""The MERGE statement of a mirror of current rows. Text only; merge.py runs it.

The conditions make a repeated merge harmless: a row is changed only by newer changes, and so is each of its values that
its last change did not send. Bounds of the batch's keys are literals in the condition, so that Iceberg skips files
outside of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from lakefeed.pipeline.mirrors.fold import IS_DELETED, sent_at_column
from lakefeed.pipeline.mirrors.layout import CARRIED, UNKNOWN, Layout
from lakefeed.pipeline.mirrors.positions import (
    NO_NAMES,
    Truncate,
    entries,
    entry_of,
    is_newer_entry,
    newer,
    newer_columns,
    no_entries,
    truncated,
    unknown_names,
    value_position,
)
from lakefeed.pipeline.spark.sql import quoted, text_literal

# Iceberg truncates its bounds of texts to fewer characters, so longer literals prune no more files.
_BOUND_MAX_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class KeyBounds:
    """The lowest and highest value of a key column in a batch, as text that casts back to its type."""

    column: str
    type_name: str
    lowest: str
    highest: str


def within(bounds: Sequence[KeyBounds], alias: str) -> str:
    """Return the condition that a row can have a key of the batch."""
    useful = [each for each in bounds if max(len(each.lowest), len(each.highest)) <= _BOUND_MAX_CHARACTERS]
    conditions = [
        f"{alias}.{quoted(each.column)} {sign} CAST({text_literal(value)} AS {each.type_name})"
        for each in useful
        for sign, value in ((">=", each.lowest), ("<=", each.highest))
    ]
    return " AND ".join(conditions) or "true"


def merge_current(
    layout: Layout,
    *,
    target: str,
    view: str,
    bounds: Sequence[KeyBounds] = (),
    unchanged: Collection[str] = (),
    truncates: Sequence[Truncate] = (),
    gaps: Collection[str] = (),
) -> str:
    """Write the statement. `unchanged` are the columns that some change of the batch did not send.

    `gaps` are the columns for which rows of the mirror may lack a value, or have an older one than a change that comes
    late.
    """
    same_key = " AND ".join(f"t.{quoted(name)} = s.{quoted(name)}" for name in layout.key)
    gone = truncated(truncates, "t")
    applies = f"({newer('s', 't')} OR {gone})" if truncates else newer("s", "t")
    stored = (*layout.columns, UNKNOWN, CARRIED)
    clauses = [
        f"MERGE INTO {target} t USING {view} s ON {same_key} AND {within(bounds, 't')}",
        f"WHEN MATCHED AND s.{IS_DELETED} AND {applies} THEN DELETE",
        f"WHEN MATCHED AND NOT s.{IS_DELETED} AND {applies} THEN UPDATE SET {_updates(layout, unchanged, gone)}",
    ]
    if gaps:
        has_gaps = f"(t.{UNKNOWN} IS NOT NULL OR t.{CARRIED} IS NOT NULL)"
        filled = newer_columns("s", "t", layout, among=gaps)
        fills = _fills(layout, filled, gaps)
        clauses.append(f"WHEN MATCHED AND {has_gaps} AND size({filled}) > 0 THEN UPDATE SET {fills}")
    names = ", ".join(map(quoted, stored))
    values = ", ".join(f"s.{quoted(name)}" for name in stored)
    clauses.append(f"WHEN NOT MATCHED AND NOT s.{IS_DELETED} THEN INSERT ({names}) VALUES ({values})")
    if truncates:
        clauses.append(f"WHEN NOT MATCHED BY SOURCE AND {gone} THEN DELETE")
    return "\n".join(clauses)


def _updates(layout: Layout, unchanged: Collection[str], gone: str) -> str:
    """Assign the newer change, except values that it did not send and the mirror has newer ones of."""
    unsent = [name for name in layout.row_columns if name in unchanged]
    keeps = {name: f"NOT {gone} AND {_stays(name, layout)}" for name in unsent}
    values = {
        name: f"CASE WHEN {keeps[name]} THEN t.{quoted(name)} ELSE s.{quoted(name)} END"
        if name in keeps
        else f"s.{quoted(name)}"
        for name in layout.columns
    }
    still_unknown = f"nullif(array_intersect(s.{UNKNOWN}, {unknown_names('t', layout)}), {NO_NAMES})"
    values[UNKNOWN] = f"CASE WHEN {gone} THEN s.{UNKNOWN} ELSE {still_unknown} END"
    found = [
        f"CASE WHEN {kept} THEN {value_position('t', text_literal(name), layout)} "
        f"ELSE {entry_of('s', text_literal(name), layout)} END"
        for name, kept in keeps.items()
    ]
    values[CARRIED] = f"nullif(array_compact(array({', '.join(found)})), {no_entries(layout)})" if found else "NULL"
    return _assignments(values)


def _stays(name: str, layout: Layout) -> str:
    """Return the condition that the mirror's value stays: it has one, and no change of the batch sent a newer one."""
    sent_at, stored = f"s.{quoted(sent_at_column(name))}", value_position("t", text_literal(name), layout)
    return f"({stored}) IS NOT NULL AND NOT {is_newer_entry(sent_at, stored)}"


def _fills(layout: Layout, filled: str, gaps: Collection[str]) -> str:
    """Assign only the values of an older change that the mirror lacks, or has older ones of."""
    values = {
        name: f"CASE WHEN array_contains({filled}, {text_literal(name)}) THEN "
        f"CASE WHEN NOT s.{IS_DELETED} THEN s.{quoted(name)} END ELSE t.{quoted(name)} END"
        for name in layout.row_columns
        if name in gaps
    }
    values[UNKNOWN] = f"nullif(array_except({unknown_names('t', layout)}, {filled}), {NO_NAMES})"
    kept = f"filter({entries('t', layout)}, _cdc_kept -> NOT array_contains({filled}, _cdc_kept.name))"
    added = f"transform({filled}, _cdc_added -> {value_position('s', '_cdc_added', layout)})"
    values[CARRIED] = f"nullif(concat({kept}, {added}), {no_entries(layout)})"
    return _assignments(values)


def _assignments(values: Mapping[str, str]) -> str:
    return ", ".join(f"{quoted(name)} = {value}" for name, value in values.items())
