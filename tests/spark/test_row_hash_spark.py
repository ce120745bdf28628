"""Spark's expression gives rows the hash that docs/verification.md defines, at the edges of texts and decimals too."""

from __future__ import annotations

import random
from decimal import Decimal
from typing import Any

import pytest
from pyspark.sql import SparkSession

from lakefeed.iceberg.types import Field, ListType, MapType, StructType
from lakefeed.pipeline.verification.scan import row_hash
from tests.writer.files import reference

FIELDS = (
    Field(1, "words", "string"),
    Field(2, "bytes", "binary"),
    Field(3, "id", "uuid"),
    Field(4, "money", "decimal(9,2)"),
    Field(5, "vast", "decimal(38,4)"),
    Field(6, "tiny", "decimal(38,20)"),
    Field(7, "line", StructType((Field(8, "sku", "string"), Field(9, "count", "int")))),
    Field(10, "tags", ListType(11, "string")),
    Field(12, "rates", MapType(13, "string", 14, "double")),
)
TYPES = (
    "words string, bytes binary, id string, money decimal(9,2), vast decimal(38,4), tiny decimal(38,20),"
    " line struct<sku: string, count: int>, tags array<string>, rates map<string, double>"
)
ICEBERG: list[dict[str, Any]] = [
    *({"id": field.id, "name": field.name, "type": field.type} for field in FIELDS[:6]),
    {
        "id": 7,
        "name": "line",
        "type": {
            "type": "struct",
            "fields": [{"id": 8, "name": "sku", "type": "string"}, {"id": 9, "name": "count", "type": "int"}],
        },
    },
    {"id": 10, "name": "tags", "type": {"type": "list", "element-id": 11, "element": "string"}},
    {
        "id": 12,
        "name": "rates",
        "type": {"type": "map", "key-id": 13, "key": "string", "value-id": 14, "value": "double"},
    },
]
LENGTHS = [*range(34), 63, 64, 65, 255, 256, 257, 512, 513, 600]
# Where a long ends and bytes begin.
UNSCALED = [edge + step for edge in (0, 10**18, -(10**18), 2**63, -(2**63), 2**64) for step in (-1, 0, 1)]


def made_rows() -> list[dict[str, Any]]:
    chance = random.Random(5)
    return [
        {
            "words": "".join(chance.choice("aZ09 \0") for _ in range(length)),
            "bytes": chance.randbytes(length),
            "id": f"{chance.getrandbits(128):032x}",
            "money": Decimal(f"{UNSCALED[number % 3]}e-2"),
            "vast": Decimal(f"{UNSCALED[number % len(UNSCALED)]}e-4"),
            "tiny": Decimal(f"{UNSCALED[-1 - number % len(UNSCALED)]}e-20"),
            "line": {"sku": "s" * (length % 9), "count": None},
            "tags": ["t" * length, None, ""],
            "rates": {"EUR": 1.5, "": None},
        }
        for number, length in enumerate(LENGTHS)
    ] + [{field.name: None for field in FIELDS}]


def as_defined(row: dict[str, Any]) -> int:
    plain = {**row, "rates": None if row["rates"] is None else list(row["rates"].items())}
    plain["id"] = None if row["id"] is None else bytes.fromhex(row["id"])
    return reference.row_hash(FIELDS, plain)


@pytest.mark.parametrize("ansi", ["false", "true"])
def test_rows_hash_in_spark_as_defined(running_spark: SparkSession, ansi: str) -> None:
    session = running_spark.newSession()
    session.conf.set("spark.sql.ansi.enabled", ansi)
    session.conf.set("spark.sql.defaultCatalog", "spark_catalog")  # no catalog of ours is asked for anything
    rows = made_rows()
    found = session.createDataFrame([tuple(row.values()) for row in rows], TYPES).select(row_hash(ICEBERG))
    assert [hashed % 2**64 for (hashed,) in found.collect()] == [as_defined(row) for row in rows]
