"""The catalog as Spark uses it: every statement below is several REST calls that the catalog has to answer rightly."""

from __future__ import annotations

import pytest
from py4j.protocol import Py4JJavaError
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import SparkSession

from tests.clients import open_duckdb, open_pyiceberg


@pytest.fixture
def spark(open_spark, catalog_url: str) -> SparkSession:
    session = open_spark(uri=catalog_url)
    session.sql("CREATE NAMESPACE shop")
    return session


def rows(spark: SparkSession, query: str) -> list[tuple]:
    return [tuple(row) for row in spark.sql(query).collect()]


@pytest.fixture
def orders(spark: SparkSession) -> str:
    spark.sql(
        "CREATE TABLE shop.orders (id BIGINT NOT NULL, item STRING, placed TIMESTAMP) USING iceberg "
        "PARTITIONED BY (days(placed)) TBLPROPERTIES ('write.merge.mode' = 'merge-on-read')"
    )
    spark.sql(
        "INSERT INTO shop.orders VALUES (1, 'pen', TIMESTAMP '2026-01-01 23:30:00'), "
        "(2, 'ink', TIMESTAMP '2026-01-02 00:30:00')"
    )
    return "shop.orders"


def test_rows_inserted_are_the_rows_selected(spark, orders):
    assert rows(spark, "SELECT id, item FROM lake.shop.orders ORDER BY id") == [(1, "pen"), (2, "ink")]
    assert rows(spark, "SELECT count(*) FROM shop.orders.partitions") == [(2,)]


def test_namespaces_and_tables_are_listed_and_described(spark, orders):
    spark.sql("ALTER NAMESPACE shop SET PROPERTIES ('team' = 'sales')")

    assert rows(spark, "SHOW NAMESPACES IN lake") == [("shop",)]
    assert [row[1] for row in rows(spark, "SHOW TABLES IN lake.shop")] == ["orders"]
    assert "(team,sales)" in str(rows(spark, "DESCRIBE NAMESPACE EXTENDED shop"))


def test_merge_updates_deletes_and_inserts_in_one_snapshot(spark, orders):
    spark.sql(
        "MERGE INTO shop.orders t USING (SELECT * FROM VALUES (1, 'pencil'), (2, NULL), (3, 'cup') AS s(id, item)) s "
        "ON t.id = s.id WHEN MATCHED AND s.item IS NULL THEN DELETE WHEN MATCHED THEN UPDATE SET t.item = s.item "
        "WHEN NOT MATCHED THEN INSERT (id, item) VALUES (s.id, s.item)"
    )

    assert rows(spark, "SELECT id, item FROM shop.orders ORDER BY id") == [(1, "pencil"), (3, "cup")]
    assert rows(spark, "SELECT operation FROM shop.orders.snapshots ORDER BY committed_at") == [
        ("append",),
        ("overwrite",),
    ]


def test_merge_into_a_version_3_table_writes_deletion_vectors(spark):
    spark.sql(
        "CREATE TABLE shop.stock USING iceberg TBLPROPERTIES ('format-version' = '3', 'write.delete.mode' = "
        "'merge-on-read') AS SELECT id FROM range(10)"
    )

    spark.sql("DELETE FROM shop.stock WHERE id % 2 = 0")

    assert rows(spark, "SELECT id FROM shop.stock ORDER BY id") == [(1,), (3,), (5,), (7,), (9,)]
    assert rows(spark, "SELECT DISTINCT file_format FROM shop.stock.delete_files") == [("PUFFIN",)]


def test_columns_are_added_renamed_and_widened_without_touching_rows(spark, orders):
    spark.sql("ALTER TABLE shop.orders ADD COLUMN pieces INT AFTER item")
    spark.sql("INSERT INTO shop.orders VALUES (3, 'cup', 7, NULL)")
    spark.sql("ALTER TABLE shop.orders RENAME COLUMN item TO article")
    spark.sql("ALTER TABLE shop.orders ALTER COLUMN pieces TYPE BIGINT")

    assert spark.table("shop.orders").dtypes == [
        ("id", "bigint"),
        ("article", "string"),
        ("pieces", "bigint"),
        ("placed", "timestamp"),
    ]
    assert rows(spark, "SELECT id, article, pieces FROM shop.orders ORDER BY id") == [
        (1, "pen", None),
        (2, "ink", None),
        (3, "cup", 7),
    ]


def test_partitioning_evolves(spark, orders):
    spark.sql("ALTER TABLE shop.orders ADD PARTITION FIELD bucket(4, id)")
    spark.sql("INSERT INTO shop.orders VALUES (3, 'cup', TIMESTAMP '2026-01-02 10:00:00')")

    assert rows(spark, "SELECT count(*), max(spec_id) FROM shop.orders.files") == [(3, 1)]
    assert rows(spark, "SELECT id FROM shop.orders WHERE placed >= '2026-01-02' ORDER BY id") == [(2,), (3,)]


def test_table_created_from_a_query_appears_with_its_rows_at_once(spark, orders):
    spark.sql("CREATE TABLE shop.items USING iceberg AS SELECT item FROM shop.orders")

    assert rows(spark, "SELECT item FROM shop.items ORDER BY item") == [("ink",), ("pen",)]
    assert rows(spark, "SELECT count(*) FROM shop.items.snapshots") == [(1,)]


def test_query_that_fails_leaves_no_table_behind(spark, orders):
    with pytest.raises((Py4JJavaError, PySparkException)):  # the latter since Spark 4
        spark.sql(
            "CREATE TABLE shop.broken USING iceberg AS SELECT CAST(raise_error('no') AS STRING) AS x FROM shop.orders"
        )

    assert [row[1] for row in rows(spark, "SHOW TABLES IN lake.shop")] == ["orders"]


def test_replaced_table_keeps_its_history(spark, orders):
    before = rows(spark, "SELECT snapshot_id FROM shop.orders.snapshots")[0][0]

    spark.sql("CREATE OR REPLACE TABLE shop.orders USING iceberg AS SELECT 9 AS id")

    assert rows(spark, "SELECT * FROM shop.orders") == [(9,)]
    assert rows(spark, f"SELECT id, item FROM shop.orders VERSION AS OF {before} ORDER BY id") == [
        (1, "pen"),
        (2, "ink"),
    ]


def test_past_versions_are_read_by_snapshot_time_and_tag(spark, orders):
    snapshot_id, committed_at = rows(spark, "SELECT snapshot_id, committed_at FROM shop.orders.snapshots")[0]
    spark.sql("ALTER TABLE shop.orders CREATE TAG before_delete")
    spark.sql("DELETE FROM shop.orders WHERE id = 1")

    assert rows(spark, "SELECT id FROM shop.orders") == [(2,)]
    for version in (
        f"VERSION AS OF {snapshot_id}",
        f"TIMESTAMP AS OF '{committed_at}'",
        "VERSION AS OF 'before_delete'",
    ):
        assert rows(spark, f"SELECT id FROM shop.orders {version} ORDER BY id") == [(1,), (2,)]


def test_branch_is_written_apart_and_then_becomes_main(spark, orders):
    spark.sql("ALTER TABLE shop.orders CREATE BRANCH audit")
    spark.sql("INSERT INTO shop.orders.branch_audit VALUES (3, 'cup', NULL)")
    assert rows(spark, "SELECT count(*) FROM shop.orders") == [(2,)]

    spark.sql("CALL lake.system.fast_forward('shop.orders', 'main', 'audit')")

    assert rows(spark, "SELECT count(*) FROM shop.orders") == [(3,)]


def test_stream_reads_each_append_once(spark, orders, tmp_path):
    def read_what_is_new() -> None:
        stream = spark.readStream.format("iceberg").load("lake.shop.orders").select("id", "item").writeStream
        query = stream.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True)
        query.toTable("lake.shop.copies").awaitTermination()

    read_what_is_new()
    spark.sql("INSERT INTO shop.orders VALUES (3, 'cup', NULL)")
    read_what_is_new()
    read_what_is_new()

    assert rows(spark, "SELECT id, item FROM shop.copies ORDER BY id") == [(1, "pen"), (2, "ink"), (3, "cup")]


def test_small_files_are_compacted_and_old_snapshots_expired(spark, orders):
    spark.sql("INSERT INTO shop.orders VALUES (3, 'cup', TIMESTAMP '2026-01-02 10:00:00')")

    spark.sql("CALL lake.system.rewrite_data_files(table => 'shop.orders', options => map('rewrite-all', 'true'))")
    spark.sql(
        "CALL lake.system.expire_snapshots(table => 'shop.orders', older_than => TIMESTAMP '2100-01-01 00:00:00')"
    )

    assert rows(spark, "SELECT operation FROM shop.orders.snapshots") == [("replace",)]
    assert rows(spark, "SELECT count(*) FROM shop.orders.files") == [(2,)]
    assert rows(spark, "SELECT id FROM shop.orders ORDER BY id") == [(1,), (2,), (3,)]


def test_table_is_renamed_and_dropped(spark, orders):
    spark.sql("ALTER TABLE lake.shop.orders RENAME TO shop.sales")
    assert rows(spark, "SELECT count(*) FROM shop.sales") == [(2,)]

    spark.sql("DROP TABLE shop.sales PURGE")
    spark.sql("DROP NAMESPACE shop")

    assert rows(spark, "SHOW NAMESPACES IN lake") == []


def test_namespace_with_tables_is_not_dropped(spark, orders):
    with pytest.raises(Exception, match="not empty"):
        spark.sql("DROP NAMESPACE shop")

    assert rows(spark, "SELECT count(*) FROM shop.orders") == [(2,)]


def test_missing_table_is_reported_as_missing(spark):
    with pytest.raises(AnalysisException, match="TABLE_OR_VIEW_NOT_FOUND"):
        spark.sql("SELECT * FROM shop.absent")


def test_commit_of_another_client_is_seen_by_the_next_query(spark, orders, open_spark, catalog_url):
    assert rows(spark, "SELECT count(*) FROM shop.orders") == [(2,)]

    open_spark(uri=catalog_url).sql("INSERT INTO shop.orders VALUES (3, 'cup', NULL)")

    assert rows(spark, "SELECT count(*) FROM shop.orders") == [(3,)]


def test_names_with_blanks_and_pluses_are_reached_by_every_engine(spark, catalog_url):
    spark.sql("CREATE NAMESPACE lake.`two words`")
    for number, name in enumerate(("x y", "x+y")):
        spark.sql(f"CREATE TABLE lake.`two words`.`{name}` (id bigint) USING iceberg")
        spark.sql(f"INSERT INTO lake.`two words`.`{name}` VALUES ({number})")
    with open_pyiceberg(catalog_url) as catalog, open_duckdb(catalog_url) as duckdb:
        for number, name in enumerate(("x y", "x+y")):
            assert spark.sql(f"SELECT * FROM lake.`two words`.`{name}`").collect() == [(number,)]
            assert catalog.load_table(("two words", name)).scan().to_arrow()["id"].to_pylist() == [number]
            assert duckdb.sql(f'SELECT * FROM lake."two words"."{name}"').fetchall() == [(number,)]


def test_other_engines_read_what_spark_wrote(spark, orders, catalog_url):
    spark.sql("DELETE FROM shop.orders WHERE id = 1")

    with open_duckdb(catalog_url) as duckdb:
        assert duckdb.execute("SELECT id, item FROM lake.shop.orders").fetchall() == [(2, "ink")]
    with open_pyiceberg(catalog_url) as catalog:
        table = catalog.load_table("shop.orders").scan(selected_fields=("id", "item")).to_arrow()
        assert table.to_pylist() == [{"id": 2, "item": "ink"}]
