"""Counts rows as ledgers do, in Spark. Owns the aggregation, and how its groups become facts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pyspark.sql import Column, DataFrame, Row
from pyspark.sql import functions as sql

from pipeline.verification.row_hash import row_hash
from writer import columns as cdc
from writer.changes import SourceId
from writer.verification.ledger import RowFacts, join_facts

SOURCE, OPERATION, ROWS, FIRST = "source", "operation", "rows", "first"
_LAST, _HIGH, _LOW, _HASH = "last", "high", "low", "hash"
_MODULUS = 1 << 64
_LOW_BITS = 32
_WIDE = "decimal(38, 0)"


def tally_rows(rows: DataFrame, fields: Sequence[Mapping[str, Any]], *, by: Sequence[str | Column] = ()) -> DataFrame:
    """Count rows by their source and operation, and by what else is asked for; fields are the table's.

    Hashes are summed in two halves, because a sum of whole ones would not fit a long.
    """
    slim = rows.select(
        *by,
        sql.col(cdc.SOURCE).alias(SOURCE),
        sql.col(cdc.OPERATION).alias(OPERATION),
        sql.col(cdc.SEQUENCE),
        row_hash(fields).alias(_HASH),
    )
    names = slim.columns[: len(by)]
    return slim.groupBy(*names, SOURCE, OPERATION).agg(
        sql.count(sql.lit(1)).alias(ROWS),
        sql.min(cdc.SEQUENCE).alias(FIRST),
        sql.max(cdc.SEQUENCE).alias(_LAST),
        sql.sum(sql.shiftright(_HASH, _LOW_BITS)).alias(_HIGH),
        sql.sum(sql.col(_HASH).bitwiseAND(sql.lit((1 << _LOW_BITS) - 1))).alias(_LOW),
    )


def add_tallies(tallies: DataFrame, *, by: Sequence[str]) -> DataFrame:
    """Add up tallies that were made by more than `by`; a file's sums fit a long, those of billions of rows may not."""
    return tallies.groupBy(*by, SOURCE, OPERATION).agg(
        sql.sum(ROWS).alias(ROWS),
        sql.min(FIRST).alias(FIRST),
        sql.max(_LAST).alias(_LAST),
        sql.sum(sql.col(_HIGH).cast(_WIDE)).alias(_HIGH),
        sql.sum(sql.col(_LOW).cast(_WIDE)).alias(_LOW),
    )


def facts_of(groups: Iterable[Row]) -> dict[SourceId, RowFacts]:
    """Make facts of the groups of a tally."""
    return join_facts({SourceId(group[SOURCE]): _facts(group)} for group in groups)


def _facts(group: Row) -> RowFacts:
    return RowFacts(
        rows=group[ROWS],
        first=group[FIRST],
        last=group[_LAST],
        operations={group[OPERATION]: group[ROWS]},
        checksum=((int(group[_HIGH]) << _LOW_BITS) + int(group[_LOW])) % _MODULUS,
    )
