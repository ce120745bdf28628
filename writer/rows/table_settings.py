"""Per-table settings: how sections `[tables."pattern"]` of the configuration are matched to tables and merged.

    [tables."sales.*"]           flush_max_age_s = 60
    [tables."sales.orders"]      partition = "bucket[16](customer_id)"

All sections whose pattern matches a table apply to it. If several set the same key, the most specific one wins: a
plain name before any pattern, then the pattern with more letters beside its `*`, then the later one. Keys that no
section sets come from [writer]. Patterns do not match quarantine tables, which lack the columns of others; their plain
names do.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lakefeed.contract.properties import TABLE as QUARANTINE_TABLE
from lakefeed.iceberg.types import StructType
from lakefeed.settings import check, per_table_types
from lakefeed.writer.config import WriterConfig
from lakefeed.writer.rows.declaration import NOTHING_DECLARED, DeclarationMalformed, parse_declaration

PROPERTIES = "properties"
COLUMNS = "columns"
IDENTIFIER = "identifier"

# Keys that are not settings of the writer.
_OTHERS = (PROPERTIES, COLUMNS, IDENTIFIER)

# Properties that the writer sets itself; a section must not set them.
OWN_PROPERTIES = (
    *("format-version", "lakefeed.append-only", "lakefeed.progress"),
    *("lakefeed.partition", "lakefeed.sort"),
)

_NOTHING: Mapping[str, Any] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSettings:
    """The settings of one table: writer settings, table properties, declared columns, and the keys that were set."""

    config: WriterConfig = field(default_factory=WriterConfig)
    properties: Mapping[str, str] = field(default_factory=dict)
    declared: StructType = NOTHING_DECLARED
    given: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class TableSections:
    """The sections `[tables."pattern"]`: pattern -> key -> value, in the order of the file."""

    sections: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def check(self, config: WriterConfig) -> None:
        """Raise ValueError, which names the section, unless each section is valid on top of `config`."""
        for pattern, values in self.sections.items():
            try:
                check(bool(pattern.strip()), "pattern must not be empty")
                for name, value in values.get(PROPERTIES, _NOTHING).items():
                    check(isinstance(value, str), f"properties must be texts: property={name}")
                    is_own = name in OWN_PROPERTIES
                    check(not is_own, f"properties must not set what lakefeed sets itself: property={name}")
                _declared(values.get(COLUMNS, _NOTHING), values.get(IDENTIFIER, []))
                _laid_over(config, values)
            except (ValueError, DeclarationMalformed) as error:
                raise ValueError(f'tables."{pattern}": {error}') from error

    def settings_for(self, table: str, config: WriterConfig) -> TableSettings:
        """Return the settings of a table, by its full name: `sales.orders`."""
        values: dict[str, Any] = {}
        properties: dict[str, str] = {}
        columns: dict[str, Any] = {}
        # Plain names last, longer patterns later. Sorting is stable, so that later sections come later.
        for pattern in sorted(self.sections, key=lambda each: ("*" not in each, len(each.replace("*", "")))):
            if _matches(pattern, table):
                section = self.sections[pattern]
                values |= section
                properties |= section.get(PROPERTIES, _NOTHING)
                columns |= section.get(COLUMNS, _NOTHING)
        return TableSettings(
            config=_laid_over(config, values),
            properties=properties,
            declared=_declared(columns, values.get(IDENTIFIER, [])),
            given=frozenset(values),
        )


def per_table_keys() -> dict[str, type]:
    """Map every key of a section to the type of its value; properties are a mapping of texts."""
    return {**per_table_types(WriterConfig), PROPERTIES: dict, COLUMNS: dict, IDENTIFIER: list}


def _laid_over(config: WriterConfig, values: Mapping[str, Any]) -> WriterConfig:
    own = {key: value for key, value in values.items() if key not in _OTHERS}
    return replace(config, **own) if own else config


def _declared(columns: Mapping[str, Any], identifier: Any) -> StructType:
    return parse_declaration({COLUMNS: columns, IDENTIFIER: identifier})


def _matches(pattern: str, table: str) -> bool:
    if "*" in pattern and table.rpartition(".")[2] == QUARANTINE_TABLE:
        return False
    parts = (re.escape(part) for part in pattern.split("*"))
    return re.fullmatch(".*".join(parts), table, re.DOTALL) is not None
