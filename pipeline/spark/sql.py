"""SQL text: identifiers, literals, types and property lists. The only place of the pipeline that quotes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql.types import DataType


def quoted(identifier: str) -> str:
    """Quote one part of a name."""
    return f"`{identifier.replace('`', '``')}`"


def text_literal(text: str) -> str:
    """Write a text as a literal. Spark would replace `${name}` by a variable's value, so `$` is escaped too."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'").replace("$", "\\u0024")
    return f"'{escaped}'"


def property_pairs(table_properties: Mapping[str, str]) -> str:
    """Write properties as TBLPROPERTIES takes them between its brackets."""
    return ", ".join(f"{text_literal(key)} = {text_literal(value)}" for key, value in table_properties.items())


def type_sql(type_: DataType) -> str:
    """Write a type, with the names inside it quoted."""
    from pyspark.sql import types  # noqa: PLC0415 - optional and slow to import, as all of Spark

    match type_:
        case types.ArrayType():
            return f"ARRAY<{type_sql(type_.elementType)}>"
        case types.MapType():
            return f"MAP<{type_sql(type_.keyType)}, {type_sql(type_.valueType)}>"
        case types.StructType():
            return f"STRUCT<{', '.join(f'{quoted(each.name)}: {type_sql(each.dataType)}' for each in type_.fields)}>"
    return type_.simpleString()
