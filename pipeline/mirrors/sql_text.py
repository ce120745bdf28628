"""Names and texts as SQL writes them. Owns their quoting."""

from __future__ import annotations

from collections.abc import Mapping


def quoted(identifier: str) -> str:
    """Quote one part of a name."""
    return f"`{identifier.replace('`', '``')}`"


def text_literal(text: str) -> str:
    """Write text so that it ends where it should. Spark would put a variable's value where it finds `${name}`."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'").replace("$", "\\u0024")
    return f"'{escaped}'"


def property_pairs(table_properties: Mapping[str, str]) -> str:
    """Write properties as TBLPROPERTIES has them between its brackets."""
    return ", ".join(f"{text_literal(key)} = {text_literal(value)}" for key, value in table_properties.items())
