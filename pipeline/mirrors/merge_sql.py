"""The statements that change a mirror. Owns their text; running them belongs to merging.py.

The guard makes a repeated merge harmless: a row is changed by newer changes only. Bounds of the batch's keys stand in
the condition as literals, so that files outside of them are not read.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from pipeline.mirrors.layout import UNKNOWN, Layout
from pipeline.mirrors.positions import Truncate, newer, truncated
from pipeline.mirrors.sql_text import quoted, text_literal
from pipeline.mirrors.transforms import IS_DELETED, sent_at_column

# A longer text is no help in a plan, and Iceberg's bounds of text are shorter than that anyway.
_BOUND_MAX_CHARACTERS = 200
_NO_NAMES = "CAST(array() AS array<string>)"


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
    fills: bool = False,
) -> str:
    """Merge folded changes into the current rows. `unchanged` are columns that some of them did not send.

    With `fills`, older rows bring what newer ones have never sent.
    """
    same_key = " AND ".join(f"t.{quoted(name)} = s.{quoted(name)}" for name in layout.key)
    gone = truncated(truncates, "t")
    applies = f"({newer('s', 't')} OR {gone})" if truncates else newer("s", "t")
    stored = (*layout.columns, UNKNOWN)
    clauses = [
        f"MERGE INTO {target} t USING {view} s ON {same_key} AND {within(bounds, 't')}",
        f"WHEN MATCHED AND s.{IS_DELETED} AND {applies} THEN DELETE",
        f"WHEN MATCHED AND NOT s.{IS_DELETED} AND {applies} THEN UPDATE SET {_updates(layout, unchanged, gone)}",
    ]
    if fills:
        has_gaps = f"NOT s.{IS_DELETED} AND t.{UNKNOWN} IS NOT NULL"
        clauses.append(f"WHEN MATCHED AND {has_gaps} THEN UPDATE SET {_fillings(layout)}")
    names = ", ".join(map(quoted, stored))
    values = ", ".join(f"s.{quoted(name)}" for name in stored)
    clauses.append(f"WHEN NOT MATCHED AND NOT s.{IS_DELETED} THEN INSERT ({names}) VALUES ({values})")
    if truncates:
        clauses.append(f"WHEN NOT MATCHED BY SOURCE AND {gone} THEN DELETE")
    return "\n".join(clauses)


def _updates(layout: Layout, unchanged: Collection[str], gone: str) -> str:
    still_unknown = f"nullif(array_intersect(s.{UNKNOWN}, {_stored_names(layout)}), {_NO_NAMES})"
    values = {name: _value(name, layout, unchanged, gone) for name in layout.columns}
    values[UNKNOWN] = f"CASE WHEN {gone} THEN s.{UNKNOWN} ELSE {still_unknown} END"
    return ", ".join(f"{quoted(name)} = {value}" for name, value in values.items())


def _value(name: str, layout: Layout, unchanged: Collection[str], gone: str) -> str:
    if name not in unchanged:
        return f"s.{quoted(name)}"
    sent_at = f"s.{quoted(sent_at_column(name))}"
    is_older = f"({sent_at} IS NULL OR NOT {newer(sent_at, 't')})"
    is_known = f"NOT array_contains({_stored_names(layout)}, {text_literal(name)})"
    return f"CASE WHEN {is_older} AND {is_known} AND NOT {gone} THEN t.{quoted(name)} ELSE s.{quoted(name)} END"


def _fillings(layout: Layout) -> str:
    values, stored = {}, _stored_names(layout)
    for name in layout.own_columns:
        literal = text_literal(name)
        fills = f"array_contains({stored}, {literal}) AND NOT array_contains({_names_in('s')}, {literal})"
        values[name] = f"CASE WHEN {fills} THEN s.{quoted(name)} ELSE t.{quoted(name)} END"
    values[UNKNOWN] = f"nullif(array_intersect({stored}, {_names_in('s')}), {_NO_NAMES})"
    return ", ".join(f"{quoted(name)} = {value}" for name, value in values.items())


def _stored_names(layout: Layout) -> str:
    """Name the columns that a stored row lacks, as they are called now."""
    cases = " ".join(f"WHEN {text_literal(old)} THEN {text_literal(new)}" for old, new in layout.renamed.items())
    stored = _names_in("t")
    return f"transform({stored}, _cdc_name -> CASE _cdc_name {cases} ELSE _cdc_name END)" if cases else stored


def _names_in(alias: str) -> str:
    return f"coalesce({alias}.{UNKNOWN}, {_NO_NAMES})"
