"""Maintenance of a catalog with tables that it cannot read, that go meanwhile, or whose history it could not hold."""

from __future__ import annotations

import contextlib

import pytest
from pyiceberg.schema import Schema
from pyiceberg.types import NestedField, TimeType
from pyspark.sql import SparkSession

from lakefeed.pipeline.maintenance.plan import MaintenanceConfig, Step
from lakefeed.pipeline.maintenance.runner import Maintenance, TableReport
from lakefeed.pipeline.spark.tables import TableIdentifier, snapshots
from tests.clients import open_pyiceberg
from tests.spark.conftest import OpenSpark

A, B, C = (TableIdentifier(("sales",), name) for name in "abc")


@pytest.fixture
def spark(open_spark: OpenSpark, catalog_url: str) -> SparkSession:
    spark = open_spark(uri=catalog_url)
    spark.sql("CREATE NAMESPACE lake.sales")
    for name in (A, B, C):
        spark.sql(f"CREATE TABLE {name.sql('lake')} (id bigint) USING iceberg TBLPROPERTIES ('lakefeed.made' = 'here')")
        spark.sql(f"INSERT INTO {name.sql('lake')} VALUES (1)")
    return spark


def steps_done(report: TableReport) -> list[Step]:
    return [result.step for result in report.results if result.problem is None]


def test_orphans_stay_while_there_is_a_table_that_spark_cannot_read(spark: SparkSession, catalog_url: str) -> None:
    maintenance = Maintenance(spark, "lake", MaintenanceConfig(), only=frozenset([Step.ORPHANS]))
    with contextlib.closing(open_pyiceberg(catalog_url)) as catalog:
        catalog.create_table("sales.hours", Schema(NestedField(1, "at", TimeType(), required=False)))
        [before] = maintenance.run([A])
        catalog.drop_table("sales.hours")
    [after] = maintenance.run([A])
    reason = "orphans: not removed, the location of some tables is unknown: tables=sales.hours"
    assert (before.problems, steps_done(before)) == ([reason], [])
    assert (after.problems, steps_done(after)) == ([], [Step.ORPHANS])


def test_a_table_that_goes_while_others_are_maintained_stops_only_itself(spark: SparkSession) -> None:
    maintenance = Maintenance(spark, "lake", MaintenanceConfig(), only=frozenset([Step.ORPHANS]))
    names = maintenance.choose_tables()
    assert names == [A, B, C]

    def drop_another(name: TableIdentifier, _: Step) -> None:
        if name == A:
            spark.sql(f"DROP TABLE {B.sql('lake')}")

    reports = maintenance.run(names, on_step=drop_another)
    assert [steps_done(report) for report in reports] == [[Step.ORPHANS], [], [Step.ORPHANS]]
    assert [bool(report.problems) for report in reports] == [False, True, False]


def test_snapshots_stay_where_main_has_an_age_of_its_own(spark: SparkSession) -> None:
    table = A.sql("lake")
    spark.sql(f"INSERT INTO {table} VALUES (2)")
    config = MaintenanceConfig(history_s=0.001)
    head = snapshots(spark, table)[-1].snapshot_id
    spark.sql(f"ALTER TABLE {table} REPLACE BRANCH main AS OF VERSION {head} WITH SNAPSHOT RETENTION 9 DAYS")
    [report] = Maintenance(spark, "lake", config, only=frozenset([Step.EXPIRE])).run([A])
    assert (report.problems, steps_done(report)) == ([], [])
    assert report.plan is not None
    assert list(report.plan.skipped or ()) == [Step.EXPIRE]
    assert len(snapshots(spark, table)) == 2
    [other] = Maintenance(spark, "lake", config, only=frozenset([Step.EXPIRE])).run([B])
    assert other.plan is not None
    assert not other.plan.skipped
