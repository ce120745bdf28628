"""What mirrors do beside merging: they know their table, keep their place, stay small and read little."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import pytest
from pyspark.sql import DataFrame, SparkSession

from lakefeed.pipeline.consumers.registry import register
from lakefeed.pipeline.mirrors.commands import run_mirrors
from lakefeed.pipeline.mirrors.merge import MergeResult, merge_changes
from lakefeed.pipeline.mirrors.runner import MirrorRun, load_status
from lakefeed.pipeline.mirrors.settings import MirrorConfig, MirrorMode, MirrorSettings
from lakefeed.pipeline.mirrors.table import columns_sql, plan_evolution, plan_layout
from lakefeed.pipeline.spark.tables import TableIdentifier, catalog_of, snapshots
from tests.mirror_events import START_MS, Pusher
from tests.service_process import ServiceProcess
from tests.spark.mirror_runs import keyed, mirrored, run_once, some

DEADLINE_S = 120


def create_changes(spark: SparkSession, name: str, *rows: str) -> None:
    """Make a change table, with a row `(id, n, sequence, operation)` for each change."""
    spark.sql(
        f"CREATE TABLE default.{name} (id bigint, n bigint, _cdc_source string, _cdc_sequence bigint, "
        "_cdc_operation string, _cdc_row_id string, _cdc_timestamp timestamp) USING iceberg "
        "TBLPROPERTIES ('lakefeed.append-only' = 'true')"
    )
    append_changes(spark, name, *rows)


def append_changes(spark: SparkSession, name: str, *rows: str) -> None:
    spark.sql(
        f"INSERT INTO default.{name} SELECT id, n, 's', sequence, operation, CAST(id AS string), now() "
        f"FROM VALUES {', '.join(rows)} AS change(id, n, sequence, operation)"
    )


def test_a_change_table_that_was_made_anew_does_not_go_into_the_old_mirror(
    spark: SparkSession, config: MirrorConfig
) -> None:
    create_changes(spark, "anew", "(1, 1, 7, 'INSERT')", "(2, 2, 8, 'INSERT')", "(2, 2, 9, 'DELETE')")
    settings = keyed(config, "default.anew")
    run_once(spark, "anew", settings)
    spark.sql(
        "ALTER TABLE default.anew_current UNSET TBLPROPERTIES ('lakefeed.mirror.of-uuid')"
    )  # as those from before
    append_changes(spark, "anew", "(3, 3, 10, 'INSERT')")
    run_once(spark, "anew", settings)

    spark.sql("DROP TABLE default.anew")
    create_changes(spark, "anew", "(1, 100, 1, 'INSERT')", "(2, 200, 2, 'INSERT')")
    for drop in ("default.anew_current", "default.anew_current_tombstones"):
        failures = run_mirrors(spark, ["anew"], settings, once=True)
        assert "recreated since its mirror was built, drop the mirror" in failures["default.anew"]
        [status] = load_status(spark, catalog_of(spark), [TableIdentifier.parse("anew")], settings)
        assert status.snapshots_behind is None
        spark.sql(f"DROP TABLE {drop}")
    run_once(spark, "anew", settings)
    assert mirrored(spark, "default.anew_current", "id", "n") == [(1, 100), (2, 200)]


def test_tombstones_are_not_stored_in_a_foreign_table(spark: SparkSession, config: MirrorConfig) -> None:
    create_changes(spark, "graves", "(1, 1, 1, 'INSERT')")
    spark.sql("CREATE TABLE default.graves_current_tombstones (id bigint) USING iceberg")
    failures = run_mirrors(spark, ["graves"], keyed(config, "default.graves"), once=True)
    assert "target=default.graves_current_tombstones mirror_of=None" in failures["default.graves"]
    assert spark.table("default.graves_current_tombstones").columns == ["id"]


@pytest.mark.parametrize("mode", some([MirrorMode.COPY_ON_WRITE, MirrorMode.HISTORY], briefly=[MirrorMode.HISTORY]))
def test_epochs_may_be_times_in_milliseconds(
    service: ServiceProcess, spark: SparkSession, config: MirrorConfig, mode: MirrorMode
) -> None:
    table = f"epochs_{mode.name.lower()}"
    settings = keyed(config, f"default.{table}", mode=mode, target="{table}_mirror")
    first = Pusher(service, table, table)
    first.insert(1, n=1).insert(2, n=2).insert(3, n=3).delete(3).commit()
    run_once(spark, table, settings)
    push = Pusher(service, table, table, epoch=START_MS)
    push.update(1, n=10).delete(2).insert(4, n=4).commit()
    run_once(spark, table, settings)
    push.truncate().insert(5, n=5).insert(6, n=6).delete(6).commit()
    run_once(spark, table, settings)
    rows = spark.table(f"default.{table}_mirror")
    current = rows.where("is_current") if mode is MirrorMode.HISTORY else rows
    assert [(row["id"], row["n"], row["_cdc_epoch"]) for row in current.collect()] == [(5, 5, START_MS)]
    stones = spark.table(f"default.{table}_mirror_tombstones").where("_cdc_operation = 'TRUNCATE'").collect()
    assert [row["_cdc_epoch"] for row in stones] == [START_MS]
    if mode is MirrorMode.HISTORY:
        ends = rows.where("NOT is_current").selectExpr("id", "n", "_cdc_ended_by.epoch", "_cdc_ended_by.operation")
        assert sorted(map(tuple, ends.collect())) == [
            (1, 1, START_MS, "UPDATE"),
            (1, 10, START_MS, "TRUNCATE"),
            (2, 2, START_MS, "DELETE"),
            (3, 3, 0, "DELETE"),
            (4, 4, START_MS, "TRUNCATE"),
            (6, 6, START_MS, "DELETE"),
        ]


def test_epochs_of_histories_that_were_int_are_widened(spark: SparkSession) -> None:
    create_changes(spark, "ints", "(1, 1, 1, 'INSERT')")
    wanted = plan_layout(spark.table("default.ints").schema, MirrorSettings(mode=MirrorMode.HISTORY)).schema
    as_before = (
        columns_sql(wanted)
        .replace("`epoch`: bigint", "`epoch`: int")
        .replace("`_cdc_epoch` bigint", "`_cdc_epoch` int")
    )
    spark.sql(f"CREATE TABLE default.ints_history ({as_before}) USING iceberg")
    before = spark.table("default.ints_history").schema
    for statement in plan_evolution("default.ints_history", has=before, needs=wanted):
        spark.sql(statement)
    after = spark.table("default.ints_history").schema
    assert before != after
    assert (after["_cdc_epoch"].dataType, after["_cdc_ended_by"].dataType) == (
        wanted["_cdc_epoch"].dataType,
        wanted["_cdc_ended_by"].dataType,
    )


def test_old_versions_of_a_mirror_go_by_themselves_with_their_files_but_not_its_place_nor_a_readers(
    service: ServiceProcess, spark: SparkSession, config: MirrorConfig
) -> None:
    push = Pusher(service, "small", "small")
    settings = keyed(config, "default.small", snapshot_age_s=0.001)
    push.insert(1, n=0).insert(2, n=0).delete(2).commit()
    for number in range(1, 3):
        run_once(spark, "small", settings)
        push.update(1, n=number).insert(2, n=number).delete(2).commit()
    run_once(spark, "small", settings)
    assert mirrored(spark, "default.small_current", "id", "n") == [(1, 2)]
    [status] = load_status(spark, catalog_of(spark), [TableIdentifier.parse("small")], settings)
    assert status.snapshots_behind == 0
    for table in ("small_current", "small_current_tombstones"):
        assert len(snapshots(spark, f"default.{table}")) == 2, table
    [newest] = data_files(spark, "default.small_current")
    assert len(list(newest.parent.glob("*.parquet"))) == 2, "one of each version"

    reader = snapshots(spark, "default.small_current")[-1].snapshot_id
    register(spark, "default.small_current", "dashboard", reader)
    for number in range(3, 5):
        push.update(1, n=number).commit()
        run_once(spark, "small", settings)
    kept_ids = [each.snapshot_id for each in snapshots(spark, "default.small_current")]
    assert (kept_ids[0], len(kept_ids)) == (reader, 3)


def test_old_versions_go_while_a_mirror_runs(
    service: ServiceProcess, spark: SparkSession, config: MirrorConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lakefeed.pipeline.mirrors.follower.REGISTER_EVERY_S", 0.1)
    monkeypatch.setattr("lakefeed.pipeline.mirrors.follower.cleanup_interval_s", lambda _settings: 0.1)
    push = Pusher(service, "running", "running")
    settings = dataclasses.replace(keyed(config, "default.running", snapshot_age_s=0.001), interval_s=0.2)
    merged: list[int] = []
    run = MirrorRun(
        spark,
        catalog_of(spark),
        [TableIdentifier.parse("running")],
        settings,
        on_merge=lambda _names, done: merged.append(done.rows),
    )
    push.insert(1, n=0).commit()
    thread = threading.Thread(target=run.run, kwargs={"once": False})
    thread.start()
    try:
        for number in range(1, 4):
            wait_until(lambda number=number: sum(merged) >= number)
            push.update(1, n=number).commit()
        wait_until(lambda: sum(merged) >= 4 and len(snapshots(spark, "default.running_current")) <= 2)
    finally:
        run.stop()
        thread.join(DEADLINE_S)
    assert len(merged) > 2, "more merges than versions that are left"
    assert mirrored(spark, "default.running_current", "id", "n") == [(1, 3)]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_a_registration_is_renewed_while_a_table_is_read_and_a_reread_after_expiry_is_logged(
    service: ServiceProcess,
    spark: SparkSession,
    config: MirrorConfig,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    push = Pusher(service, "again", "again")
    push.insert(1, n=1).commit()
    registered: list[int] = []
    has_expired, turn = threading.Event(), threading.Lock()

    def counting(session: SparkSession, table: str, name: str, snapshot: int) -> bool:
        with turn:
            registered.append(snapshot)
            return has_expired.is_set() or register(session, table, name, snapshot)

    def slow(changes: DataFrame, **options: Any) -> MergeResult:
        first = not has_expired.is_set()
        wait_until(lambda: len(registered) >= 4)
        merged = merge_changes(changes, **options)
        if first:
            with turn:
                has_expired.set()
            push.insert(2, n=2).commit()
            pass_over(spark, "default.again")
        return merged

    monkeypatch.setattr("lakefeed.pipeline.mirrors.follower.REGISTER_EVERY_S", 0.05)
    monkeypatch.setattr("lakefeed.pipeline.mirrors.follower.register", counting)
    monkeypatch.setattr("lakefeed.pipeline.mirrors.follower.merge_changes", slow)
    with caplog.at_level(logging.WARNING):
        run_once(spark, "again", keyed(config, "default.again"))
    assert mirrored(spark, "default.again_current", "id", "n") == [(1, 1), (2, 2)]
    told = [record for record in caplog.records if record.getMessage() == "mirror_full_read_repeated"]
    assert [record.snapshot for record in told] == [registered[0]]
    assert "lakefeed.consumer-snapshots-max" in told[0].reason


def pass_over(spark: SparkSession, table: str) -> None:
    """Expire all but the newest snapshot, whoever reads."""
    for [name] in spark.sql(f"SELECT name FROM {table}.refs WHERE type = 'TAG'").collect():
        spark.sql(f"ALTER TABLE {table} DROP TAG `{name}`")
    limits = "older_than => TIMESTAMP '2100-01-01 00:00:00', retain_last => 1"
    spark.sql(f"CALL {catalog_of(spark)}.system.expire_snapshots(table => '{table}', {limits})")


def test_a_merge_does_not_read_files_whose_keys_lie_outside_of_its_own(
    service: ServiceProcess, spark: SparkSession, config: MirrorConfig
) -> None:
    push = Pusher(service, "apart", "apart")
    settings = keyed(config, "default.apart")
    push.insert(1, n=1).insert(2, n=2).commit()
    run_once(spark, "apart", settings)
    low = data_files(spark, "default.apart_current")
    push.insert(1001, n=1).insert(1002, n=2).commit()
    run_once(spark, "apart", settings)
    assert data_files(spark, "default.apart_current") > low

    for path in low:
        path.rename(path.with_suffix(".away"))  # whoever reads it now, fails
    push.update(1001, n=10).delete(1002).insert(1003, n=3).commit()
    run_once(spark, "apart", settings)
    for path in low:
        path.with_suffix(".away").rename(path)
    assert mirrored(spark, "default.apart_current", "id", "n") == [(1, 1), (2, 2), (1001, 10), (1003, 3)]


def data_files(spark: SparkSession, table: str) -> set[Path]:
    return {Path(urlparse(row[0]).path) for row in spark.sql(f"SELECT file_path FROM {table}.files").collect()}


def test_each_mirror_has_a_pool_of_its_own_for_all_that_it_does(
    service: ServiceProcess, spark: SparkSession, config: MirrorConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools: list[tuple[str, int, str | None]] = []

    def record_pool_and_merge(changes: DataFrame, **options: Any) -> MergeResult:
        pool = changes.sparkSession.sparkContext.getLocalProperty("spark.scheduler.pool")
        pools.append((str(options["names"].table), options["marker"].batch, pool))
        return merge_changes(changes, **options)

    monkeypatch.setattr("lakefeed.pipeline.mirrors.follower.merge_changes", record_pool_and_merge)
    pushers = [Pusher(service, name, name) for name in ("left", "right")]
    both = {f"default.{name}": {"key": ("id",)} for name in ("left", "right")}
    for key in (1, 2):
        for push in pushers:
            push.insert(key, n=key).commit()
        assert run_mirrors(spark, ["left", "right"], dataclasses.replace(config, tables=both), once=True) == {}
    # Of the whole table, and of the stream's batches.
    assert {(table, batch < 0) for table, batch, _ in pools} == {
        (f"default.{name}", whole) for name in ("left", "right") for whole in (True, False)
    }
    assert all(pool == f"{table}_current" for table, _, pool in pools)
