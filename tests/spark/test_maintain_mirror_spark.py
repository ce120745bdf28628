"""Maintenance of tables that are merged into: deletes, order, what stays of their history, and the command itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from click.testing import CliRunner
from pyspark.sql import SparkSession

from lakefeed.ingest.cli.main import main
from lakefeed.pipeline.maintenance.plan import MaintenanceConfig, Step
from lakefeed.pipeline.maintenance.runner import Maintenance
from lakefeed.pipeline.spark.tables import TableIdentifier, snapshots
from tests.spark.conftest import OpenSpark

NAME = TableIdentifier(("default",), "users_current")
EAGER = MaintenanceConfig(min_input_files=2, min_manifests=2)
AS_SHORT_AS_CAN_BE = "'history.expire.max-snapshot-age-ms' = '1', 'history.expire.min-snapshots-to-keep' = '1'"


def create(spark: SparkSession, catalog: str, *, format_version: int) -> str:
    """Make a table by some merges on read, the last one of which says in its summary how far it has come."""
    table = NAME.sql(catalog)
    spark.sql(f"CREATE NAMESPACE IF NOT EXISTS {catalog}.default")
    spark.sql(
        f"CREATE TABLE {table} (id bigint, name string) USING iceberg TBLPROPERTIES ('format-version' = "
        f"'{format_version}', 'write.delete.mode' = 'merge-on-read', 'lakefeed.mirror.of' = 'default.users', "
        f"'write.delete.granularity' = 'partition', {AS_SHORT_AS_CAN_BE})"
    )
    for number in range(4):
        rows = spark.range(number * 10, number * 10 + 10).selectExpr("id", "concat('n', id % 7) AS name")
        rows.coalesce(1).writeTo(table).append()
    for digit in range(3):
        spark.sql(f"DELETE FROM {table} WHERE id % 10 = {digit}")
    last = spark.range(100, 110).selectExpr("id", "'last' AS name").coalesce(1)
    last.writeTo(table).option("snapshot-property.lakefeed.mirror.position", "7").append()
    return table


def rows(spark: SparkSession, table: str) -> list[tuple[int, str]]:
    return sorted(tuple(row) for row in spark.table(table).collect())


@pytest.mark.parametrize("format_version", [2, 3])
def test_a_mirror_keeps_its_rows_and_its_position_while_files_and_deletes_are_joined(
    catalog_url: str, open_spark: OpenSpark, format_version: int
) -> None:
    catalog = f"mirrored{format_version}"
    spark = open_spark(uri=catalog_url, name=catalog)
    table = create(spark, catalog, format_version=format_version)
    before = rows(spark, table)
    maintenance = Maintenance(spark, catalog, EAGER)
    assert maintenance.choose_tables() == [NAME]
    for _ in range(2):  # the second has rewrites behind it, and still must not pass the last merge
        [report] = maintenance.run([NAME])
        assert report.problems == []
    assert rows(spark, table) == before
    [done] = [each for each in snapshots(spark, table) if "lakefeed.mirror.position" in each.summary]
    assert done.operation == "append"
    assert (report.after.data_files, report.after.delete_files) == (1, 0)
    assert report.after.snapshots <= 4


def test_deletes_are_joined_where_data_files_stay(catalog_url: str, open_spark: OpenSpark) -> None:
    spark = open_spark(uri=catalog_url, name="deletes")
    table = create(spark, "deletes", format_version=2)
    before = rows(spark, table)
    [report] = Maintenance(spark, "deletes", EAGER, only=frozenset([Step.DELETES])).run([NAME])
    assert report.problems == []
    assert report.before.delete_files > report.after.delete_files == 1
    assert report.before.data_files == report.after.data_files == 5
    assert rows(spark, table) == before


def compact(spark: SparkSession, catalog: str, config: MaintenanceConfig) -> tuple[int, ...]:
    """Compact the table; return how many files were rewritten and added."""
    [report] = Maintenance(spark, catalog, config, only=frozenset([Step.COMPACT])).run([NAME])
    assert report.problems == []
    return tuple(result.counts[name] for result in report.results for name in ("files_rewritten", "files_added"))


def test_rows_are_rewritten_in_the_order_that_is_set_between_two_merges(
    catalog_url: str, open_spark: OpenSpark
) -> None:
    spark = open_spark(uri=catalog_url, name="sorted")
    table = create(spark, "sorted", format_version=2)
    config = MaintenanceConfig(min_input_files=2, sort="name desc, id")
    before = rows(spark, table)
    assert compact(spark, "sorted", config) == (5, 1)
    stored = [tuple(row) for row in spark.sql(f"SELECT name, -id FROM {table}").collect()]
    assert stored == sorted(stored, reverse=True)
    assert rows(spark, table) == before
    assert compact(spark, "sorted", config) == (0, 0), "one file is left"
    spark.range(200, 210).selectExpr("id", "'more' AS name").coalesce(1).writeTo(table).append()
    assert compact(spark, "sorted", replace(config, sort="", zorder=("id", "name"))) == (2, 1)
    assert len(rows(spark, table)) == len(before) + 10


def test_the_command_shows_a_plan_executes_it_and_fails_with_an_exit_code(
    catalog_url: str, open_spark: OpenSpark, monkeypatch: pytest.MonkeyPatch
) -> None:
    spark = open_spark(uri=catalog_url, name="commanded")
    table = create(spark, "commanded", format_version=2)
    spark.sql(f"ALTER TABLE {table} SET TBLPROPERTIES ('gc.enabled' = 'false')")

    @contextmanager
    def this_session(*_: object, **__: object) -> Iterator[SparkSession]:
        yield spark

    monkeypatch.setattr("lakefeed.pipeline.maintenance.commands.opened_session", this_session)
    count = len(snapshots(spark, table))
    planned = CliRunner().invoke(main, ["maintain", "--dry-run", "--json"])
    assert planned.exit_code == 0, planned.output
    [told] = json.loads(planned.stdout)["tables"]
    assert told["plan"]["compact"] | {"bytes": 0} == {"files": 5, "bytes": 0, "files_after": 1}
    assert set(told["plan"]["skipped"]) == {"expire", "orphans"}
    assert (told["before"], told["steps"], len(snapshots(spark, table))) == (told["after"], {}, count)
    done = CliRunner().invoke(main, ["maintain", "default.users_current", "--only", "compact"])
    assert (done.exit_code, "5 -> 1" in done.stdout) == (0, True), done.output
    monkeypatch.setenv("LAKEFEED_PIPELINE_MAINTENANCE_SORT", "nobody")
    monkeypatch.setenv("LAKEFEED_PIPELINE_MAINTENANCE_MIN_INPUT_FILES", "2")
    spark.range(5).selectExpr("id", "'more' AS name").coalesce(1).writeTo(table).append()
    failed = CliRunner().invoke(main, ["maintain", "--only", "compact", "--json"])
    assert failed.exit_code == 1
    assert "nobody" in json.loads(failed.stdout)["tables"][0]["steps"]["compact"]["problem"]
    unknown = CliRunner().invoke(main, ["maintain", "default.nobody"])
    assert (unknown.exit_code, "no such table: default.nobody" in unknown.output) == (2, True)
