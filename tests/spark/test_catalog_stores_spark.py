"""Spark SQL from the first table to the last, against a catalog on each kind of database."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import web
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession

from lakefeed.catalog.app import build_catalog
from lakefeed.catalog.config import CatalogConfig, Warehouse
from lakefeed.storage.config import StorageConfig
from tests.serving import serve_in_thread


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest) -> str:
    return request.getfixturevalue("make_postgres")() if request.param == "postgres" else ""


@pytest.fixture
def spark(open_spark, database: str, tmp_path: Path) -> Iterator[SparkSession]:
    app = web.Application()
    warehouse = Warehouse(StorageConfig(warehouse=(tmp_path / "warehouse").as_uri()))
    app.add_subapp("/v1", build_catalog(CatalogConfig(database=database), warehouse, tmp_path / "catalog.db"))
    with serve_in_thread(app) as url:
        yield open_spark(uri=url)


def rows(spark: SparkSession, query: str) -> list[tuple]:
    return [tuple(row) for row in spark.sql(query).collect()]


def test_everything_that_spark_does_with_a_catalog(spark: SparkSession, tmp_path: Path):
    make_and_fill(spark)
    change_rows(spark)
    change_the_table(spark)
    branch_tag_and_travel(spark)
    call_procedures(spark)
    make_views(spark)
    rename_and_drop(spark, tmp_path / "warehouse")


def make_and_fill(spark: SparkSession) -> None:
    spark.sql("CREATE NAMESPACE shop")
    spark.sql("CREATE TABLE shop.orders (id BIGINT, item STRING) USING iceberg PARTITIONED BY (bucket(2, id))")
    spark.sql("INSERT INTO shop.orders VALUES (1, 'pen'), (2, 'ink')")
    spark.sql("CREATE TABLE shop.copy USING iceberg AS SELECT * FROM shop.orders")
    assert rows(spark, "SELECT id, item FROM shop.copy ORDER BY id") == [(1, "pen"), (2, "ink")]


def change_rows(spark: SparkSession) -> None:
    spark.sql(
        "MERGE INTO shop.orders t USING (SELECT * FROM VALUES (1, 'pencil'), (3, 'cup') AS s(id, item)) s "
        "ON t.id = s.id WHEN MATCHED THEN UPDATE SET t.item = s.item WHEN NOT MATCHED THEN INSERT *"
    )
    spark.sql("UPDATE shop.orders SET item = 'blue ink' WHERE id = 2")
    spark.sql("DELETE FROM shop.orders WHERE id = 3")
    assert rows(spark, "SELECT id, item FROM shop.orders ORDER BY id") == [(1, "pencil"), (2, "blue ink")]


def change_the_table(spark: SparkSession) -> None:
    spark.sql("ALTER TABLE shop.orders ADD COLUMN pieces INT")
    spark.sql("ALTER TABLE shop.orders RENAME COLUMN item TO article")
    spark.sql("ALTER TABLE shop.orders ALTER COLUMN pieces TYPE BIGINT")
    spark.sql("ALTER TABLE shop.orders ADD PARTITION FIELD truncate(2, article)")
    spark.sql("ALTER TABLE shop.orders WRITE ORDERED BY id")
    spark.sql("ALTER TABLE shop.orders SET TBLPROPERTIES ('team' = 'sales')")
    spark.sql("INSERT INTO shop.orders VALUES (4, 'box', 7)")
    assert rows(spark, "SELECT article, pieces FROM shop.orders WHERE id = 4") == [("box", 7)]
    assert ("team", "sales") in rows(spark, "SHOW TBLPROPERTIES shop.orders")


def branch_tag_and_travel(spark: SparkSession) -> None:
    snapshot_id = rows(spark, "SELECT snapshot_id FROM shop.orders.refs WHERE name = 'main'")[0][0]
    spark.sql("ALTER TABLE shop.orders CREATE TAG before")
    spark.sql("ALTER TABLE shop.orders CREATE BRANCH audit")
    spark.sql("INSERT INTO shop.orders.branch_audit VALUES (5, 'cap', 1)")
    spark.sql("DELETE FROM shop.orders WHERE id = 4")
    counts = {
        "": 2,
        "VERSION AS OF 'before'": 3,
        f"VERSION AS OF {snapshot_id}": 3,
        "VERSION AS OF 'audit'": 4,
        f"TIMESTAMP AS OF {time_of(spark, snapshot_id)}": 3,
        "TIMESTAMP AS OF now()": 2,
    }
    assert {at: rows(spark, f"SELECT count(*) FROM shop.orders {at}")[0][0] for at in counts} == counts
    first = rows(spark, "SELECT snapshot_id FROM shop.orders.snapshots ORDER BY committed_at")[0][0]
    at_first = f"shop.orders TIMESTAMP AS OF {time_of(spark, first)}"
    # With the columns of that time.
    assert rows(spark, f"SELECT id, item FROM {at_first} ORDER BY id") == [(1, "pen"), (2, "ink")]
    with pytest.raises(Exception, match="Cannot find a snapshot older than"):
        spark.sql(f"SELECT * FROM {at_first} - INTERVAL 1 MILLISECOND").collect()
    spark.sql("ALTER TABLE shop.orders DROP TAG before")
    spark.sql("ALTER TABLE shop.orders DROP BRANCH audit")


def time_of(spark: SparkSession, snapshot_id: int) -> str:
    """Write, as SQL, the time at which a snapshot became the table's state."""
    millis = rows(
        spark, f"SELECT unix_millis(made_current_at) FROM shop.orders.history WHERE snapshot_id = {snapshot_id}"
    )
    return f"timestamp_millis({millis[0][0]})"


def call_procedures(spark: SparkSession) -> None:
    before = rows(spark, "SELECT id, article FROM shop.orders ORDER BY id")
    first = rows(spark, "SELECT snapshot_id FROM shop.orders.snapshots ORDER BY committed_at")[0][0]
    last = rows(spark, "SELECT snapshot_id FROM shop.orders.refs WHERE name = 'main'")[0][0]
    spark.sql(f"CALL lake.system.rollback_to_snapshot('shop.orders', {first})")
    assert rows(spark, "SELECT count(*) FROM shop.orders") == [(2,)]
    spark.sql(f"CALL lake.system.set_current_snapshot('shop.orders', {last})")
    spark.sql("CALL lake.system.rewrite_data_files(table => 'shop.orders', options => map('rewrite-all', 'true'))")
    spark.sql("CALL lake.system.rewrite_manifests('shop.orders')")
    spark.sql("CALL lake.system.compute_table_stats('shop.orders')")
    spark.sql(
        "CALL lake.system.expire_snapshots(table => 'shop.orders', older_than => TIMESTAMP '2100-01-01 00:00:00')"
    )
    assert rows(spark, "SELECT count(*) FROM shop.orders.snapshots") == [(1,)]
    assert rows(spark, "SELECT id, article FROM shop.orders ORDER BY id") == before


def make_views(spark: SparkSession) -> None:
    spark.sql("CREATE VIEW shop.names (name COMMENT 'what') AS SELECT article FROM shop.orders")
    spark.sql("CREATE OR REPLACE VIEW shop.names AS SELECT upper(article) AS name FROM shop.orders WHERE id = 1")
    spark.sql("ALTER VIEW shop.names SET TBLPROPERTIES ('team' = 'sales')")
    assert rows(spark, "SELECT name FROM shop.names") == [("PENCIL",)]
    assert [row[1] for row in rows(spark, "SHOW VIEWS IN lake.shop")] == ["names"]
    spark.sql("ALTER VIEW lake.shop.names RENAME TO shop.titles")
    assert rows(spark, "SELECT name FROM shop.titles") == [("PENCIL",)]
    with pytest.raises(AnalysisException):
        spark.sql("CREATE TABLE shop.titles (id BIGINT) USING iceberg")
    spark.sql("DROP VIEW shop.titles")


def rename_and_drop(spark: SparkSession, warehouse: Path) -> None:
    spark.sql("ALTER TABLE lake.shop.orders RENAME TO shop.sales")
    assert rows(spark, "SELECT count(*) FROM shop.sales") == [(2,)]
    spark.sql("DROP TABLE shop.sales PURGE")
    spark.sql("DROP TABLE shop.copy PURGE")
    # Views keep their files, and Hadoop's file system its checksums beside the tables' own.
    tables = [path for name in ("orders", "copy") for path in warehouse.glob(f"shop/{name}-*/**/*") if path.is_file()]
    assert [path for path in tables if path.suffix != ".crc"] == []
    spark.sql("DROP NAMESPACE shop")
    assert rows(spark, "SHOW NAMESPACES IN lake") == []
