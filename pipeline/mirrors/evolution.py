"""How a mirror follows its change table's columns. Owns which statements that takes; nothing is run here.

Columns are added and widened, inside structs, lists and maps too. A column whose comment says that it was formerly
another, which the mirror still has, is renamed, and takes its comment along; then another may come under its old name.
What a change table has lost stays in the mirror as it is.
"""

from __future__ import annotations

from collections.abc import Iterator

from pyspark.sql.types import (
    ArrayType,
    DataType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    StructField,
    StructType,
)

from pipeline.errors import PipelineError
from pipeline.mirrors.layout import comment_of, former_names
from pipeline.mirrors.sql_text import quoted, text_literal


class ColumnMismatch(PipelineError):
    """A column of the change table can no longer be mirrored: a person has to decide about the mirror's."""


def plan_evolution(target: str, *, has: StructType, needs: StructType) -> list[str]:
    """List the statements after which the mirror has all columns that it needs.

    Raises: ColumnMismatch.
    """
    return list(_struct_changes(target, has, needs, path=()))


def _struct_changes(target: str, has: StructType, needs: StructType, path: tuple[str, ...]) -> Iterator[str]:
    if not path:
        _check_no_swap(has, needs)
    old_names = _renames(has, needs)
    for new_name, old_name in old_names.items():
        yield f"ALTER TABLE {target} RENAME COLUMN {_sql((*path, old_name))} TO {quoted(new_name)}"
        yield f"ALTER TABLE {target} ALTER COLUMN {_sql((*path, new_name))}{_comment(needs[new_name])}"
    has_left = set(has.names) - set(old_names.values())
    for field in needs.fields:
        column = (*path, field.name)
        if field.name in old_names:
            yield from _type_changes(target, has[old_names[field.name]].dataType, field.dataType, column)
        elif field.name in has_left:
            yield from _type_changes(target, has[field.name].dataType, field.dataType, column)
        else:
            yield f"ALTER TABLE {target} ADD COLUMN {_sql(column)} {type_sql(field.dataType)}{_comment(field)}"


def _renames(has: StructType, needs: StructType) -> dict[str, str]:
    """Find the old names of columns by their new ones, in an order in which each new name is free.

    A column that takes its old name from another leaves that one to look for its own, or to be added.
    """
    renames: dict[str, str] = {}
    left, needed = set(has.names), set(needs.names)
    waiting = [field for field in needs.fields if field.name not in left]
    while waiting:
        field = waiting.pop(0)
        names = [name for name in former_names(field) if name in left]
        # One that nothing else needs is surely meant; the last name comes first.
        old_name = next((name for name in names if name not in needed), next(iter(names), None))
        if old_name is not None:
            renames[field.name] = old_name
            left.remove(old_name)
            waiting += [needs[old_name]] if old_name in needed else []
    return renames


def _check_no_swap(has: StructType, needs: StructType) -> None:
    """Refuse columns that have taken each other's names unless the mirror's own comments say that it has followed."""
    both = set(has.names) & set(needs.names)
    came_from = {name: (set(former_names(needs[name])) & both) - {*former_names(has[name])} for name in both}
    for name in sorted(both):
        reached, following = set[str](), came_from[name]
        while following:
            reached |= following
            following = set().union(*(came_from[each] for each in following)) - reached
        if name in reached:
            raise ColumnMismatch(
                "columns have taken each other's names, drop the mirror and it is built anew: "
                f"columns={', '.join(sorted({name, *came_from[name]}))}"
            )


def _type_changes(target: str, has: DataType, needs: DataType, path: tuple[str, ...]) -> Iterator[str]:
    if isinstance(has, StructType) and isinstance(needs, StructType):
        yield from _struct_changes(target, has, needs, path)
    elif isinstance(has, ArrayType) and isinstance(needs, ArrayType):
        yield from _type_changes(target, has.elementType, needs.elementType, (*path, "element"))
    elif isinstance(has, MapType) and isinstance(needs, MapType):
        yield from _type_changes(target, has.valueType, needs.valueType, (*path, "value"))
    elif _widens(has, needs):
        yield f"ALTER TABLE {target} ALTER COLUMN {_sql(path)} TYPE {type_sql(needs)}"
    elif has != needs and not _widens(needs, has):
        raise ColumnMismatch(
            "a column has another type in the mirror, drop the mirror or the column: "
            f"column={'.'.join(path)} mirror={has.simpleString()} table={needs.simpleString()}"
        )


def _widens(narrow: DataType, wide: DataType) -> bool:
    if isinstance(narrow, DecimalType) and isinstance(wide, DecimalType):
        return narrow.scale == wide.scale and narrow.precision < wide.precision
    pairs = ((IntegerType, LongType), (FloatType, DoubleType))
    return any(isinstance(narrow, one) and isinstance(wide, other) for one, other in pairs)


def columns_sql(schema: StructType) -> str:
    """Write a schema as the columns of a CREATE TABLE."""
    return ", ".join(f"{quoted(field.name)} {type_sql(field.dataType)}{_comment(field)}" for field in schema.fields)


def type_sql(kind: DataType) -> str:
    """Write a type for SQL, with the names inside it quoted."""
    if isinstance(kind, StructType):
        return f"STRUCT<{', '.join(f'{quoted(field.name)}: {type_sql(field.dataType)}' for field in kind.fields)}>"
    if isinstance(kind, ArrayType):
        return f"ARRAY<{type_sql(kind.elementType)}>"
    if isinstance(kind, MapType):
        return f"MAP<{type_sql(kind.keyType)}, {type_sql(kind.valueType)}>"
    return kind.simpleString()


def _sql(path: tuple[str, ...]) -> str:
    return ".".join(map(quoted, path))


def _comment(field: StructField) -> str:
    comment = comment_of(field)
    return f" COMMENT {text_literal(comment)}" if comment else ""
