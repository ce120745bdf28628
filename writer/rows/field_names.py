"""Names that a column can have. Owns which fields of a row are rescued for their name alone.

A row's names come from a database that may allow what the readers of the table do not. Refused are

- the empty name, control characters (some catalogs cannot store them) and names longer than any database's,
- names that start with `_cdc_`, and the names of Iceberg's metadata columns: Spark refuses a table that has one,
- names that differ from another only by case: Spark, DuckDB and Trino take them for one column and refuse the table.
  The first one that came keeps its column,
- names with dots that spell another column's path: Iceberg finds nested columns by such names.
"""

from __future__ import annotations

from collections.abc import Collection

from writer.columns import RESERVED_PREFIX

NAME_MAX_CHARS = 255

_FIRST_PRINTABLE = " "

# Iceberg specification, "Reserved Field IDs".
_ICEBERG_NAMES = frozenset(
    (
        "_file",
        "_pos",
        "_deleted",
        "_spec_id",
        "_partition",
        "_row_id",
        "_last_updated_sequence_number",
        "_change_type",
        "_change_ordinal",
        "_commit_snapshot_id",
    )
)


def is_usable(name: str) -> bool:
    """Tell whether a name can be a field's name at any depth."""
    return 0 < len(name) <= NAME_MAX_CHARS and min(name) >= _FIRST_PRINTABLE


def is_usable_column(name: str) -> bool:
    """Tell whether a name can be a column's name."""
    folded = fold(name)
    return is_usable(name) and not folded.startswith(RESERVED_PREFIX) and folded not in _ICEBERG_NAMES


def are_usable_together(names: Collection[str]) -> bool:
    """Tell whether names can be the fields of one struct."""
    return all(map(is_usable, names)) and len({fold(name) for name in names}) == len(names)


def fold(name: str) -> str:
    """Make names alike that differ only by case."""
    return name.lower()
