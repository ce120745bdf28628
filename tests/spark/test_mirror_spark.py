"""Mirrors of real change tables: what a service has committed is, row by row, what its mirror shows."""

from __future__ import annotations

import dataclasses
import json
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from pyspark.sql import DataFrame, SparkSession

from lakefeed.ingest.cli.main import main
from lakefeed.pipeline.consumers.registry import load_history
from lakefeed.pipeline.mirrors.commands import run_mirrors
from lakefeed.pipeline.mirrors.marker import Marker, load_lineage
from lakefeed.pipeline.mirrors.merge import MergeResult, merge_changes
from lakefeed.pipeline.mirrors.runner import MirrorRun, load_status
from lakefeed.pipeline.mirrors.settings import MirrorConfig, MirrorMode
from lakefeed.pipeline.spark.tables import TableIdentifier, catalog_of
from tests.mirror_events import Pusher
from tests.service_process import ServiceProcess
from tests.spark.mirror_runs import keyed, mirrored, run_once


def test_a_mirror_shows_the_last_state_of_each_row_and_is_a_consumer_of_its_table(
    service: ServiceProcess, spark: SparkSession, config: MirrorConfig
) -> None:
    push = Pusher(service, "shop", "users")
    push.insert(1, name="Ada").insert(2, name="Grace").insert(3, name="Edsger").commit()
    settings = keyed(config, "default.users", mode=MirrorMode.MERGE_ON_READ, buckets=2)
    run_once(spark, "users", settings)
    push.update(2, name="Hopper").delete(1).insert(4, name="Alan", age=41).commit()
    [behind] = load_status(spark, catalog_of(spark), [TableIdentifier.parse("users")], settings)
    assert (behind.snapshots_behind, behind.rows_behind) == (1, 3)
    run_once(spark, "users", settings)
    rows = mirrored(spark, "default.users_current", "id", "name", "age", "_cdc_sequence")
    assert rows == [(2, "Hopper", None, 4), (3, "Edsger", None, 3), (4, "Alan", 41, 6)]
    [status] = load_status(spark, catalog_of(spark), [TableIdentifier.parse("users")], settings)
    assert (status.snapshots_behind, status.seconds_behind) == (0, 0.0)
    [consumer] = load_history(spark, "default.users").consumers()
    assert (consumer.name, consumer.snapshot_id) == ("mirror_users_current", status.snapshot)
    deletes = spark.sql("SELECT count(*) FROM default.users_current.delete_files").collect()[0][0]
    assert deletes > 0, "merge-on-read writes delete files"


def test_a_mirror_resumes_at_its_marker_when_its_checkpoint_is_lost_or_wrong(
    service: ServiceProcess, spark: SparkSession, config: MirrorConfig
) -> None:
    push = Pusher(service, "stock", "stock")
    push.insert(1, n=1).insert(2, n=1).commit()
    settings = keyed(config, "default.stock")
    run_once(spark, "stock", settings)
    push.update(1, n=2).commit()
    run_once(spark, "stock", settings)
    catalog = catalog_of(spark)
    first, *_ = (version.snapshot_id for version in reversed(load_lineage(spark, "default.stock_current")))

    shutil.rmtree(config.checkpoints)  # lost
    push.insert(3, n=3).delete(2).commit()
    run_once(spark, "stock", settings)
    assert mirrored(spark, "default.stock_current", "id", "n") == [(1, 2), (3, 3)]

    # Ahead of a mirror that was rolled back: the batches in between come again.
    spark.sql(f"CALL {catalog}.system.rollback_to_snapshot('default.stock_current', {first})")
    push.insert(4, n=4).commit()
    run_once(spark, "stock", settings)
    assert mirrored(spark, "default.stock_current", "id", "n") == [(1, 2), (3, 3), (4, 4)]

    # At a snapshot that has expired: the table is read as a whole, and what was deleted meanwhile goes.
    push.delete(1).commit()
    push.insert(5, n=5).commit()
    for name in [row[0] for row in spark.sql("SELECT name FROM default.stock.refs WHERE type = 'TAG'").collect()]:
        spark.sql(f"ALTER TABLE default.stock DROP TAG `{name}`")
    now = "TIMESTAMP '2100-01-01 00:00:00'"
    spark.sql(
        f"CALL {catalog}.system.expire_snapshots(table => 'default.stock', older_than => {now}, retain_last => 1)"
    )
    run_once(spark, "stock", settings)
    assert mirrored(spark, "default.stock_current", "id", "n") == [(3, 3), (4, 4), (5, 5)]


def test_keys_and_columns_may_look_like_variables_and_like_columns_of_a_history(
    service: ServiceProcess, spark: SparkSession, config: MirrorConfig
) -> None:
    spark.conf.set("spark.sql.variable.substitute", "true")  # as on a session that is not ours
    push = Pusher(service, "odd", "odd")
    keys = ("a${b}", "a${c}")
    for number, key in enumerate(keys):
        push.change("INSERT", key, after={"code": key, "n": number, "valid_from": "monday"})
    push.commit()
    settings = dataclasses.replace(config, tables={"default.odd": {"key": ("code",)}})
    run_once(spark, "odd", settings)
    push.change("UPDATE", keys[0], after={"code": keys[0], "n": 7, "valid_from": "friday"}).commit()
    run_once(spark, "odd", settings)
    found = mirrored(spark, "default.odd_current", "code", "n", "valid_from")
    assert found == [("a${b}", 7, "friday"), ("a${c}", 1, "monday")]


def test_a_mirror_is_a_consumer_while_it_reads_the_whole_table_and_does_not_become_a_history(
    service: ServiceProcess, spark: SparkSession, config: MirrorConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    Pusher(service, "whole", "whole").insert(1, n=1).commit()
    seen: list[list[tuple[str, int]]] = []

    def check_consumer_and_merge(changes: DataFrame, *, marker: Marker, **options: Any) -> MergeResult:
        found = load_history(changes.sparkSession, "default.whole").consumers()
        seen.append([(each.name, each.snapshot_id) for each in found])
        assert seen[-1] == [("mirror_whole_current", marker.snapshot)]
        return merge_changes(changes, marker=marker, **options)

    monkeypatch.setattr("lakefeed.pipeline.mirrors.follower.merge_changes", check_consumer_and_merge)
    run_once(spark, "whole", keyed(config, "default.whole"))
    assert seen
    as_history = keyed(config, "default.whole", mode=MirrorMode.HISTORY, target="{table}_current")
    failures = run_mirrors(spark, ["whole"], as_history, once=True)
    assert "set another target" in failures["default.whole"]


def test_rows_that_were_read_late_fill_what_was_never_sent_and_bring_back_nothing(
    service: ServiceProcess, spark: SparkSession, config: MirrorConfig
) -> None:
    push = Pusher(service, "late", "late")
    push.insert(3, n=3, big="y").truncate().update(1, n=10, unchanged=["big"])
    push.insert(2, n=2, big="x").delete(2).insert(4, n=4, big="z").commit()
    settings = keyed(config, "default.late")
    run_once(spark, "late", settings)
    push.update(1, n=11, unchanged=["big"]).commit()
    run_once(spark, "late", settings)
    names = spark.table("default.late").columns
    rows = {"id": "id", "n": "n", "big": "'read'", "_cdc_operation": "'READ'", "_cdc_source": "'late'"}
    position = {"_cdc_sequence": "position", "_cdc_row_id": "CAST(id AS string)", "_cdc_timestamp": "now()"}
    values = rows | position | {"_cdc_ingested_at": "now()"}
    late = "VALUES (CAST(1 AS bigint), CAST(9 AS bigint), 3), (2, 9, 4), (3, 9, 1), (5, 9, 2) AS late(id, n, position)"
    spark.sql(f"INSERT INTO default.late SELECT {', '.join(values.get(n, 'NULL') for n in names)} FROM {late}")
    run_once(spark, "late", settings)
    found = mirrored(spark, "default.late_current", "id", "n", "big", "_cdc_sequence")
    # The truncate stands at 2: what was read there was read behind it.
    assert found == [(1, 11, "read", 7), (4, 4, "z", 6), (5, 9, "read", 2)]


def test_a_table_that_cannot_be_mirrored_stops_alone_and_says_why(
    service: ServiceProcess, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Pusher(service, "good", "good").insert(1, n=1).commit()
    Pusher(service, "keyless", "keyless").change("INSERT", "", after={"n": 1}).commit()
    Pusher(service, "taken", "taken").insert(1, n=1).commit()
    spark.sql("CREATE TABLE default.taken_current (n bigint) USING iceberg")

    asked: list[str] = []

    @contextmanager
    def this_session(options: dict[str, Any], **_: object) -> Iterator[SparkSession]:
        asked.extend(options["conf"])
        yield spark

    monkeypatch.setattr("lakefeed.pipeline.mirrors.commands.opened_session", this_session)
    monkeypatch.setattr("lakefeed.pipeline.mirrors.commands.set_up_logging", lambda _level: None)
    monkeypatch.chdir(tmp_path)
    # Spark does not follow to another directory.
    monkeypatch.setenv("LAKEFEED_PIPELINE_MIRROR_CHECKPOINTS", str(tmp_path / "checkpoints"))
    failed = CliRunner().invoke(main, ["mirror", "run", "good", "keyless", "taken", "--once"])
    assert failed.exit_code == 1
    assert asked == ["spark.scheduler.mode=FAIR"], "pools share by turns only then"
    assert "default.keyless: changes have no key" in failed.stderr
    assert "default.taken: a table with the mirror's name exists and is not a mirror" in failed.stderr
    assert mirrored(spark, "default.good_current", "id", "n") == [(1, 1)]
    monkeypatch.setenv("LAKEFEED_PIPELINE_MIRROR_ROWS_WITHOUT_KEY", "skip")
    assert CliRunner().invoke(main, ["mirror", "run", "keyless", "--once"]).exit_code == 0
    assert mirrored(spark, "default.keyless_current", "n") == []
    shown = CliRunner().invoke(main, ["mirror", "status", "good", "taken", "--json"])
    assert [(each["mirror"], each["snapshots_behind"]) for each in json.loads(shown.stdout)] == [
        ("default.good_current", 0),
        ("default.taken_current", None),
    ]
    refused = CliRunner().invoke(main, ["mirror", "run", "good_current", "--once"])
    assert (refused.exit_code, "only change tables can be mirrored" in refused.output) == (1, True)


def test_of_two_applications_on_one_mirror_one_stops(
    service: ServiceProcess, spark: SparkSession, config: MirrorConfig
) -> None:
    push = Pusher(service, "pair", "pair")
    push.insert(1, n=1).commit()
    settings = dataclasses.replace(keyed(config, "default.pair"), interval_s=0.2)
    run_once(spark, "pair", settings)
    merged = threading.Event()
    run = MirrorRun(
        spark, catalog_of(spark), [TableIdentifier.parse("pair")], settings, on_merge=lambda *_: merged.set()
    )
    thread = threading.Thread(target=run.run, kwargs={"once": False})
    thread.start()
    try:
        push.insert(2, n=2).commit()
        assert merged.wait(120)
        other = dataclasses.replace(settings, checkpoints=f"{settings.checkpoints}-other")
        failures: list[str] = []
        deadline = time.monotonic() + 240
        while not any("another application" in reason for reason in failures):
            assert time.monotonic() < deadline
            push.insert(push.sequence + 1, n=3).commit()
            failures = list(run_mirrors(spark, ["pair"], other, once=True).values())  # whichever of them noticed
            failures += run.failures.values()
    finally:
        run.stop()
        thread.join(120)
    run_once(spark, "pair", settings)
    assert mirrored(spark, "default.pair_current", "id") == [(key,) for key in range(1, push.sequence + 1)]
