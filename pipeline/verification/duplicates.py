"""Looks for changes that are in a table more than once, in Spark. Owns the query.

The rules are those of writer/verification/duplicates.py: a sequence is there once of a source that never started over,
once at any moment of receipt of others; rows that were only READ are there once at any moment.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from pyspark.sql import functions as sql

from writer import columns as cdc
from writer.changes import Operation
from writer.verification.findings import Finding, Kind

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

# Sequences that a report names of each source; all are counted.
EXAMPLES_MAX = 10

_READ_ROW, _COUNT, _MOMENTS, _AGAIN, _HASH = "read_row", "count", "moments", "again", "hash"
_KEY = (cdc.SOURCE, cdc.SEQUENCE, _READ_ROW)


def find_duplicates(rows: DataFrame, one_epoch: Collection[str]) -> Iterator[Finding]:
    """Find changes that are there again; `one_epoch` names the sources that never started over."""
    suspects = _suspects(rows).cache()
    doubled = _doubled(suspects, one_epoch).cache()
    try:
        if suspects.isEmpty():
            return
        counts = doubled.groupBy(cdc.SOURCE).agg(sql.sum(_AGAIN).alias(_AGAIN)).orderBy(cdc.SOURCE).collect()
        for row in counts:
            own = doubled.where(sql.col(cdc.SOURCE) == row[cdc.SOURCE]).select(cdc.SEQUENCE).distinct()
            shown = ", ".join(str(each[0]) for each in own.orderBy(cdc.SEQUENCE).limit(EXAMPLES_MAX).collect())
            text = f"{row[_AGAIN]:,} rows are there again, such as sequences {shown}"
            yield Finding(Kind.DUPLICATE, text, source=row[cdc.SOURCE])
    finally:
        doubled.unpersist()
        suspects.unpersist()


def _suspects(rows: DataFrame) -> DataFrame:
    """Leave out the rows whose key is there once, which are nearly all: by a hash, so that little is moved about."""
    was_read = sql.col(cdc.OPERATION) == Operation.READ.value
    keys = rows.where(sql.col(cdc.SEQUENCE).isNotNull()).select(
        cdc.SOURCE, cdc.SEQUENCE, cdc.INGESTED_AT, sql.when(was_read, sql.col(cdc.ROW_ID)).alias(_READ_ROW)
    )
    hashed = keys.withColumn(_HASH, sql.xxhash64(*_KEY))
    again = hashed.groupBy(_HASH).agg(sql.count(sql.lit(1)).alias(_COUNT)).where(sql.col(_COUNT) > 1)
    return hashed.join(again.select(_HASH), on=_HASH, how="left_semi").drop(_HASH)


def _doubled(keys: DataFrame, one_epoch: Collection[str]) -> DataFrame:
    moments = keys.groupBy(*_KEY, cdc.INGESTED_AT).agg(sql.count(sql.lit(1)).alias(_COUNT))
    counted = moments.groupBy(*_KEY).agg(sql.sum(_COUNT).alias(_COUNT), sql.count(sql.lit(1)).alias(_MOMENTS))
    is_once = sql.col(_READ_ROW).isNull() & (sql.col(cdc.SOURCE).isin(*one_epoch) if one_epoch else sql.lit(False))
    again = sql.col(_COUNT) - sql.when(is_once, 1).otherwise(sql.col(_MOMENTS))
    return counted.withColumn(_AGAIN, again).where(sql.col(_AGAIN) > 0)
