"""Tables as Spark shows them, on a catalog with all that may be in one."""

from __future__ import annotations

import contextlib
import logging

import pytest
from pyiceberg.schema import Schema
from pyiceberg.types import NestedField, TimeType
from pyspark.sql import SparkSession

from lakefeed.pipeline.spark.tables import (
    TableIdentifier,
    change_tables,
    current_snapshot_id,
    exists,
    namespaces,
    properties,
    snapshots,
)
from tests.clients import open_pyiceberg

CHANGES = "TBLPROPERTIES ('lakefeed.append-only' = 'true')"


@pytest.fixture
def spark(open_spark, catalog_url: str) -> SparkSession:
    return open_spark(uri=catalog_url)


def test_change_tables_are_those_that_take_nothing_but_changes(spark):
    spark.sql("CREATE NAMESPACE lake.sales")
    spark.sql("CREATE NAMESPACE lake.sales.`west.coast`")
    for name, table_properties in {
        "sales.orders": CHANGES,
        "sales.orders_current": "",
        "sales.lakefeed_quarantine": CHANGES,
        "sales.`west.coast`.`odd``name`": CHANGES,
    }.items():
        spark.sql(f"CREATE TABLE lake.{name} (id bigint) USING iceberg {table_properties}")

    found = change_tables(spark, "lake")

    assert found == [TableIdentifier(("sales",), "orders"), TableIdentifier(("sales", "west.coast"), "odd`name")]
    assert all(exists(spark, table.sql("lake")) for table in found)
    assert sorted(namespaces(spark, "lake")) == [("sales",), ("sales", "west.coast")]


def test_table_that_spark_has_no_types_for_does_not_hide_the_others(spark, catalog_url, caplog):
    spark.sql("CREATE NAMESPACE lake.sales")
    spark.sql(f"CREATE TABLE lake.sales.orders (id bigint) USING iceberg {CHANGES}")
    with contextlib.closing(open_pyiceberg(catalog_url)) as catalog:
        schema = Schema(NestedField(1, "at", TimeType(), required=False))
        catalog.create_table("sales.hours", schema, properties={"lakefeed.append-only": "true"})

    with caplog.at_level(logging.WARNING):
        found = change_tables(spark, "lake")

    assert found == [TableIdentifier(("sales",), "orders")]
    assert "table_skipped" in caplog.text


def test_snapshots_come_oldest_first_and_the_current_one_is_that_of_main(spark):
    table = TableIdentifier.parse("sales.orders").sql("lake")
    spark.sql("CREATE NAMESPACE lake.sales")
    spark.sql(f"CREATE TABLE {table} (id bigint) USING iceberg TBLPROPERTIES ('a' = 'b')")
    assert current_snapshot_id(properties(spark, table)) is None
    for number in (1, 2):
        spark.sql(f"INSERT INTO {table} VALUES ({number})")
    spark.sql(f"ALTER TABLE {table} CREATE BRANCH audit")
    spark.sql(f"INSERT INTO {table}.branch_audit VALUES (3)")

    first, second, audit = snapshots(spark, table)

    assert first.parent_id is None
    assert second.parent_id == first.snapshot_id
    assert audit.parent_id == second.snapshot_id
    assert current_snapshot_id(properties(spark, table)) == second.snapshot_id
    assert second.operation == "append"
    assert second.summary["added-records"] == "1"
    assert first.committed_ms <= second.committed_ms
    assert properties(spark, table)["a"] == "b"
    assert not exists(spark, TableIdentifier.parse("sales.absent").sql("lake"))
