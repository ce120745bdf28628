"""Which change each value of a row is from. Owns how that is read from a row, as expressions of Spark SQL.

    UNKNOWN names the column      no change has sent it yet
    CARRIED has an entry for it   the change that the entry names
    otherwise                     the row's own last change

A value is replaced by one from a newer change only, so in whatever order changes come, the same values stay.
"""

from __future__ import annotations

from collections.abc import Collection

from pipeline.mirrors.layout import CARRIED, POSITION_COLUMNS, UNKNOWN, Layout
from pipeline.mirrors.positions import newer
from pipeline.mirrors.sql_text import text_literal

NO_NAMES = "CAST(array() AS array<string>)"

# Names of lambda variables are ours alone, as all that begins so.
_ENTRY, _NAME, _ONE, _OTHER = "_cdc_entry", "_cdc_name", "_cdc_one", "_cdc_other"


def unknown_names(alias: str, layout: Layout) -> str:
    """Name the columns that a row lacks, as they are called now."""
    names = f"coalesce({alias}.{UNKNOWN}, {NO_NAMES})"
    return f"transform({names}, {_NAME} -> {_present(_NAME, layout)})" if layout.renamed else names


def entries(alias: str, layout: Layout) -> str:
    """Give the entries of a row, with columns named as they are called now."""
    found = f"coalesce({alias}.{CARRIED}, {no_entries(layout)})"
    if not layout.renamed:
        return found
    parts = ", ".join(f"'{part}', {_ENTRY}.{part}" for part in POSITION_COLUMNS)
    return f"transform({found}, {_ENTRY} -> named_struct('name', {_present(f'{_ENTRY}.name', layout)}, {parts}))"


def no_entries(layout: Layout) -> str:
    """Give a list without entries."""
    return f"CAST(array() AS {layout.schema[CARRIED].dataType.simpleString()})"


def entry_of(alias: str, name: str, layout: Layout) -> str:
    """Find a column's entry, or null; `name` is an expression."""
    return f"get(filter({entries(alias, layout)}, {_ENTRY} -> {_ENTRY}.name = {name}), 0)"


def cell(alias: str, name: str, layout: Layout) -> str:
    """Give the position of the change that a value is from, as an entry; null if none has sent it."""
    is_unknown = f"array_contains({unknown_names(alias, layout)}, {name})"
    parts = ", ".join(f"'{part}', {alias}.{part}" for part in POSITION_COLUMNS)
    own = f"array(named_struct('name', {name}, {parts}))"
    own_entry = f"CAST({own} AS {layout.schema[CARRIED].dataType.simpleString()})[0]"
    return f"CASE WHEN NOT {is_unknown} THEN coalesce({entry_of(alias, name, layout)}, {own_entry}) END"


def is_newer(one: str, other: str) -> str:
    """Tell whether one entry is of a later change than another; what is known is later than what is not."""
    # Bound to names, because each is written down many times in a comparison.
    later = f"{_ONE} IS NOT NULL AND ({_OTHER} IS NULL OR {newer(_ONE, _OTHER)})"
    return f"exists(array({one}), {_ONE} -> exists(array({other}), {_OTHER} -> {later}))"


def overtaken(older: str, row: str, layout: Layout, *, among: Collection[str]) -> str:
    """Name the columns of a row that another, whose last change is older, has a newer value of."""
    named = f"transform({entries(row, layout)}, {_ENTRY} -> {_ENTRY}.name)"
    literals = ", ".join(text_literal(name) for name in layout.own_columns if name in among)
    candidates = f"array_intersect(concat({unknown_names(row, layout)}, {named}), array({literals}))"
    later = is_newer(cell(older, _NAME, layout), cell(row, _NAME, layout))
    return f"filter({candidates}, {_NAME} -> {later})"


def _present(name: str, layout: Layout) -> str:
    cases = " ".join(f"WHEN {text_literal(old)} THEN {text_literal(new)}" for old, new in layout.renamed.items())
    return f"CASE {name} {cases} ELSE {name} END"
