"""Rows of an input as the changes of a table: READ, all at one position. Owns what the `_cdc_` columns hold.

Columns that the input lacks are named as unchanged, so that mirrors keep what they have there. Row ids: row_ids.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pyspark.sql import Column, DataFrame, types
from pyspark.sql import functions as sql

from pipeline.backfill.fitting import FittedColumn
from pipeline.backfill.row_ids import row_id
from pipeline.backfill.texts import read_text
from pipeline.errors import ConfigError
from pipeline.mirrors.sql_text import quoted
from writer import columns as cdc
from writer.changes import Operation, Position

_NESTED = (types.StructType, types.ArrayType, types.MapType)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How rows are read: from which source, by which key, as of which position, and when."""

    source: str
    key: Sequence[str]
    position: Position
    at_us: int


def as_changes(
    rows: DataFrame, columns: Sequence[FittedColumn], table: types.StructType, reading: Reading
) -> DataFrame:
    """Give rows of an input as rows of a table, with all columns that it has."""
    values = {column.name: _value(column) for column in columns}
    own = _own_columns(columns, table, reading)
    made = [
        (own[field.name] if field.name in own else values.get(field.name, sql.lit(None)))
        .cast(field.dataType)
        .alias(field.name)
        for field in table.fields
    ]
    return rows.select(*made)


def _own_columns(columns: Sequence[FittedColumn], table: types.StructType, reading: Reading) -> dict[str, Column]:
    moment = sql.timestamp_micros(sql.lit(reading.at_us).cast("long"))
    given = {column.name for column in columns}
    lacking = [name for name in table.names if name not in given and not name.startswith(cdc.RESERVED_PREFIX)]
    return {
        cdc.SEQUENCE: sql.lit(reading.position.sequence),
        cdc.TIMESTAMP: moment,
        cdc.OPERATION: sql.lit(Operation.READ.value),
        cdc.ROW_ID: row_id(key_columns(columns, reading.key)),
        cdc.SOURCE: sql.lit(reading.source),
        cdc.INGESTED_AT: moment,
        cdc.UNCHANGED: sql.array(*map(sql.lit, lacking)) if lacking else sql.lit(None),
        cdc.RESCUED: _rescued(columns),
        cdc.EPOCH: sql.lit(reading.position.epoch or None),
    }


def _value(column: FittedColumn) -> Column:
    if not column.is_text:
        value = sql.col(quoted(column.given))
        return value if column.convert is None else column.convert(value)
    return read_text(quoted(column.given), column.type)


def _rescued(columns: Sequence[FittedColumn]) -> Column:
    """Keep the text of values that are none of their column's type, as JSON."""
    texts = [column for column in columns if column.is_text]
    if not texts:
        return sql.lit(None)
    kept = [sql.when(_value(column).isNull(), sql.col(quoted(column.given))).alias(column.name) for column in texts]
    return sql.nullif(sql.to_json(sql.struct(*kept)), sql.lit("{}"))


def key_columns(columns: Sequence[FittedColumn], key: Sequence[str]) -> list[FittedColumn]:
    """Find the columns of the input that name a row.

    Raises: ConfigError.
    """
    by_name = {name.lower(): column for column in columns for name in (column.given, column.name)}
    missing = [name for name in key if name.lower() not in by_name]
    if missing:
        have = ", ".join(column.given for column in columns)
        raise ConfigError(f"the input has no such column: key={','.join(missing)} columns={have}")
    found = [by_name[name.lower()] for name in key]
    if nested := [column.given for column in found if isinstance(column.type, _NESTED)]:
        raise ConfigError(f"a key is made of single values: key={','.join(nested)}")
    return found
