"""The statements that change a mirror. Owns their text; running them belongs to merging.py.

The guard makes a repeated merge harmless: a row is changed by newer changes only, and so is each of its values that
its last change did not send. Bounds of the batch's keys stand in the condition as literals, so that files outside of
them are not read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from pipeline.mirrors.cells import NO_NAMES, cell, entries, entry_of, is_newer, no_entries, overtaken, unknown_names
from pipeline.mirrors.layout import CARRIED, UNKNOWN, Layout
from pipeline.mirrors.positions import Truncate, newer, truncated
from pipeline.mirrors.sql_text import quoted, text_literal
from pipeline.mirrors.transforms import IS_DELETED, sent_at_column

# A longer text is no help in a plan, and Iceberg's bounds of text are shorter than that anyway.
_BOUND_MAX_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class Bounds:
    """The lowest and highest value of a key column in a batch, as text that casts back to its type."""

    column: str
    type_name: str
    lowest: str
    highest: str


def within(bounds: Sequence[Bounds], alias: str) -> str:
    """Tell whether a row can have a key of the batch."""
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
    bounds: Sequence[Bounds] = (),
    unchanged: Collection[str] = (),
    truncates: Sequence[Truncate] = (),
    fills: Collection[str] = (),
) -> str:
    """Merge folded changes into the current rows. `unchanged` are columns that some of them did not send.

    Of columns in `fills` rows of the mirror may lack values, or have older ones than a row that comes late.
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
    if fills:
        has_gaps = f"(t.{UNKNOWN} IS NOT NULL OR t.{CARRIED} IS NOT NULL)"
        filled = overtaken("s", "t", layout, among=fills)
        updates = _fillings(layout, filled, fills)
        clauses.append(f"WHEN MATCHED AND {has_gaps} AND size({filled}) > 0 THEN UPDATE SET {updates}")
    names = ", ".join(map(quoted, stored))
    values = ", ".join(f"s.{quoted(name)}" for name in stored)
    clauses.append(f"WHEN NOT MATCHED AND NOT s.{IS_DELETED} THEN INSERT ({names}) VALUES ({values})")
    if truncates:
        clauses.append(f"WHEN NOT MATCHED BY SOURCE AND {gone} THEN DELETE")
    return "\n".join(clauses)


def _updates(layout: Layout, unchanged: Collection[str], gone: str) -> str:
    unsent = [name for name in layout.own_columns if name in unchanged]
    keeps = {name: f"NOT {gone} AND {_stays(name, layout)}" for name in unsent}
    values = {
        name: f"CASE WHEN {keeps[name]} THEN t.{quoted(name)} ELSE s.{quoted(name)} END"
        if name in keeps
        else f"s.{quoted(name)}"
        for name in layout.columns
    }
    still_unknown = f"nullif(array_intersect(s.{UNKNOWN}, {unknown_names('t', layout)}), {NO_NAMES})"
    values[UNKNOWN] = f"CASE WHEN {gone} THEN s.{UNKNOWN} ELSE {still_unknown} END"
    values[CARRIED] = _carried(layout, keeps)
    return _assignments(values)


def _stays(name: str, layout: Layout) -> str:
    """Tell whether a value that the last change did not send stays: no change of the batch has sent a newer one."""
    sent_at, stored = f"s.{quoted(sent_at_column(name))}", cell("t", text_literal(name), layout)
    return f"({stored}) IS NOT NULL AND NOT {is_newer(sent_at, stored)}"


def _carried(layout: Layout, keeps: Mapping[str, str]) -> str:
    if not keeps:
        return "NULL"
    found = (
        f"CASE WHEN {kept} THEN {cell('t', text_literal(name), layout)} "
        f"ELSE {entry_of('s', text_literal(name), layout)} END"
        for name, kept in keeps.items()
    )
    return f"nullif(array_compact(array({', '.join(found)})), {no_entries(layout)})"


def _fillings(layout: Layout, filled: str, fills: Collection[str]) -> str:
    values = {
        name: f"CASE WHEN array_contains({filled}, {text_literal(name)}) THEN "
        f"CASE WHEN NOT s.{IS_DELETED} THEN s.{quoted(name)} END ELSE t.{quoted(name)} END"
        for name in layout.own_columns
        if name in fills
    }
    values[UNKNOWN] = f"nullif(array_except({unknown_names('t', layout)}, {filled}), {NO_NAMES})"
    kept = f"filter({entries('t', layout)}, _cdc_kept -> NOT array_contains({filled}, _cdc_kept.name))"
    brought = f"transform({filled}, _cdc_brought -> {cell('s', '_cdc_brought', layout)})"
    values[CARRIED] = f"nullif(concat({kept}, {brought}), {no_entries(layout)})"
    return _assignments(values)


def _assignments(values: Mapping[str, str]) -> str:
    return ", ".join(f"{quoted(name)} = {value}" for name, value in values.items())
