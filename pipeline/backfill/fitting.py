"""Columns of an input in the columns of a table. Owns which type fits into which, and what the table has to change.

    same type, or one that the table's holds exactly      goes in as it is
    one that Iceberg can widen the table's to             the column is widened first: int to long, float to double,
                                                          decimal to more digits
    text, where the table has numbers, dates ...          each value exactly (texts.py), or it is rescued
    no column of this name, now or formerly               it is added
    anything else                                         an error that names the column, before anything is written

Names are matched as Spark does: by case if nothing else. A name that a column had before is meant for that column, as
it is in live rows, unless another has it now. Columns that the input lacks are unchanged by it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from pyspark.sql import types

from pipeline.backfill.texts import can_be_text
from pipeline.backfill.type_fits import PATH, Convert, columns_by_name, fit_type, stored_type, type_sql, type_text
from pipeline.mirrors.sql_text import quoted
from writer.columns import RESERVED_PREFIX

# As the writer has it: Iceberg's metadata columns, which Spark refuses as names.
_ICEBERG_NAMES = frozenset(
    (
        *("_file", "_pos", "_deleted", "_spec_id", "_partition", "_row_id", "_last_updated_sequence_number"),
        *("_change_type", "_change_ordinal", "_commit_snapshot_id"),
    )
)
_NAME_MAX_CHARS = 255

# How Spark's JDBC reader notes that a timestamp is a time of day, of which it has lost the fraction.
_SPARK_TIME = "logical_time_type"


@dataclass(frozen=True, slots=True)
class FittedColumn:
    """A column of the input: its name there, its name and type in the table, and how values get from one to the other.

    Text that is to become something else is marked: not every value may fit.
    """

    given: str
    name: str
    type: types.DataType
    given_type: types.DataType
    convert: Convert | None = None
    is_text: bool = False


@dataclass(slots=True)
class Fitting:
    """All columns of an input; what the table has to change first, as SQL behind ALTER TABLE; what does not fit."""

    columns: list[FittedColumn] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def fit_columns(
    given: types.StructType,
    known: types.StructType,
    *,
    uuids: Collection[str] = (),
    declared: types.StructType | None = None,
) -> Fitting:
    """Fit an input into a table's columns, or into none.

    `uuids` are columns of the table that only look like text; `declared` are types for columns of text that are new.
    """
    wanted = {each.name.lower(): each.dataType for each in declared or ()}
    fitting = Fitting()
    by_name = columns_by_name(known)
    seen: set[str] = set()
    meant: dict[str, str] = {}
    for each in given.fields:
        folded = each.name.lower()
        if (problem := _name_problem(each.name) or _time_problem(each)) or folded in seen:
            fitting.problems.append(problem or f"two columns have one name: column={each.name}")
            continue
        seen.add(folded)
        column = by_name.get(folded)
        if column is None:
            _add(fitting, each, wanted.get(folded))
        elif (other := meant.setdefault(column.name, each.name)) != each.name:
            facts = f"columns={other},{each.name} table_column={column.name}"
            fitting.problems.append(f"two columns are meant for one, by its name and by a former one: {facts}")
        elif isinstance(each.dataType, types.StringType) and (column.name in uuids or can_be_text(column.dataType)):
            fitting.columns.append(_fitted(each, column.name, column.dataType, is_text=True))
        else:
            _match(fitting, each, column)
    return fitting


def _fitted(
    given: types.StructField,
    name: str,
    stored: types.DataType,
    convert: Convert | None = None,
    *,
    is_text: bool = False,
) -> FittedColumn:
    return FittedColumn(given.name, name, stored, given.dataType, convert, is_text=is_text)


def _add(fitting: Fitting, given: types.StructField, declared: types.DataType | None) -> None:
    stored = stored_type(declared or given.dataType)
    if stored is None:
        shown = type_text(declared or given.dataType)
        fitting.problems.append(f"no column can have this type: column={given.name} type={shown}")
        return
    fitting.changes.append(f"ADD COLUMN {quoted(given.name)} {type_sql(stored)}")
    is_text = isinstance(given.dataType, types.StringType) and can_be_text(stored)
    convert = None if is_text else fit_type(given.dataType, stored).convert
    fitting.columns.append(_fitted(given, given.name, stored, convert, is_text=is_text))


def _match(fitting: Fitting, given: types.StructField, known: types.StructField) -> None:
    fit = fit_type(given.dataType, known.dataType)
    if fit.problems:
        facts = f"type={type_text(given.dataType)} table_type={type_text(known.dataType)}"
        inner = "; ".join(fit.problems)
        fitting.problems.append(f"type does not fit the table's: column={given.name} {facts}: {inner}")
        return
    path = quoted(known.name)
    fitting.changes += [change.replace(PATH, path + inner) for inner, change in fit.changes]
    fitting.columns.append(_fitted(given, known.name, fit.stored, fit.convert))


def _time_problem(given: types.StructField) -> str | None:
    if not (given.metadata or {}).get(_SPARK_TIME):
        return None
    return (
        f"a time of day would lose its fraction and become a timestamp, read it as text by a query: column={given.name}"
    )


def _name_problem(name: str) -> str | None:
    folded = name.lower()
    if not 0 < len(name) <= _NAME_MAX_CHARS or min(name) < " ":
        return f"no column can have this name, rename it: column={name!r}"
    if folded.startswith(RESERVED_PREFIX) or folded in _ICEBERG_NAMES:
        return f"name is not free, rename it: column={name}"
    return None
