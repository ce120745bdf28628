"""Consumers as Spark sets them and the service tells of them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
from click.testing import CliRunner
from pyspark.sql import SparkSession

from lakefeed.contract.errors import ConsumerError
from lakefeed.ingest.cli.main import main
from lakefeed.pipeline.consumers.registry import drop, hold, load_history, register
from lakefeed.pipeline.spark.tables import snapshots
from tests import pushed_changes
from tests.service_process import ServiceProcess, service_process
from tests.spark.conftest import OpenSpark

USERS = "`read`.`default`.`users`"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    with service_process(tmp_path_factory.mktemp("service")) as running:
        running.start()
        pushed_changes.push_changes(running)
        yield running
        assert running.stop() == 0


@pytest.fixture
def spark(service: ServiceProcess, open_spark: OpenSpark) -> SparkSession:
    return open_spark(uri=service.http_url, name="read")


def places(spark: SparkSession) -> dict[str, int]:
    return {each.name: each.snapshot_id for each in load_history(spark, USERS).consumers()}


def test_a_consumer_moves_forward_and_back_only_on_request(spark: SparkSession) -> None:
    first, second = (snapshot.snapshot_id for snapshot in snapshots(spark, USERS)[:2])
    assert register(spark, USERS, "forward", first)
    assert not register(spark, USERS, "forward", first), "nothing has changed, so nothing is set"
    assert register(spark, USERS, "forward", second)
    assert not register(spark, USERS, "forward", first)
    assert places(spark)["forward"] == second
    assert register(spark, USERS, "forward", first, may_go_back=True)
    assert places(spark)["forward"] == first
    assert drop(spark, USERS, "forward")
    assert not drop(spark, USERS, "forward")
    assert "forward" not in places(spark)


def test_a_consumer_is_kept_for_its_age_from_its_registration_and_renewed_when_that_runs_out(
    spark: SparkSession,
) -> None:
    [first, *_] = snapshots(spark, USERS)
    register(spark, USERS, "kept", first.snapshot_id, max_age=timedelta(hours=2))
    [kept] = [each for each in load_history(spark, USERS).consumers() if each.name == "kept"]
    assert 7_200_000 <= kept.kept_until_ms - time.time() * 1000 + 30_000 <= 7_320_000
    assert not register(spark, USERS, "kept", first.snapshot_id, max_age=timedelta(hours=2))
    assert register(spark, USERS, "kept", first.snapshot_id, max_age=timedelta(hours=3)), (
        "less than three quarters left"
    )
    assert drop(spark, USERS, "kept")


def test_a_snapshot_that_is_gone_cannot_be_registered(spark: SparkSession) -> None:
    with pytest.raises(ConsumerError, match=r"no such snapshot, it may have expired: .* snapshot=12"):
        register(spark, USERS, "late", 12)
    assert "late" not in places(spark)


def test_a_consumer_that_is_new_is_held_at_the_oldest_snapshot(spark: SparkSession) -> None:
    oldest, newest = (snapshots(spark, USERS)[end].snapshot_id for end in (0, -1))
    assert hold(spark, USERS, "fresh")
    assert places(spark)["fresh"] == oldest
    register(spark, USERS, "fresh", newest)
    assert not hold(spark, USERS, "fresh")
    assert places(spark)["fresh"] == newest
    assert drop(spark, USERS, "fresh")


def test_status_and_the_command_line_tell_of_consumers_with_their_lag(
    service: ServiceProcess, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def this_session(*_: object, **__: object) -> Iterator[SparkSession]:
        yield spark

    monkeypatch.setattr("lakefeed.pipeline.consumers.commands.opened_session", this_session)
    [first, *later] = snapshots(spark, USERS)
    register(spark, USERS, "dashboard", first.snapshot_id)
    listed = CliRunner().invoke(main, ["consumers", "list", "--json"])
    assert listed.exit_code == 0, listed.output
    [told] = json.loads(listed.stdout)["consumers"]
    deadline = time.monotonic() + 30
    while not (status := service.get("/status")["consumers"]):  # it is looked for every ten seconds
        assert time.monotonic() < deadline
        time.sleep(0.2)
    facts = ("table", "name", "snapshotId", "snapshotsBehind", "secondsBehind", "isExpired")
    assert [{key: each[key] for key in facts} for each in status] == [{key: told[key] for key in facts}]
    assert (told["table"], told["name"], told["snapshotId"]) == ("default.users", "dashboard", first.snapshot_id)
    assert told["snapshotsBehind"] == len(later) > 0
    assert told["secondsBehind"] > 0
    shown = CliRunner().invoke(main, ["consumers", "list", "default.users"])
    assert "dashboard" in shown.stdout
    dropped = CliRunner().invoke(main, ["consumers", "drop", "default.users", "dashboard"])
    assert (dropped.exit_code, dropped.stdout) == (0, "dropped dashboard of default.users\n")
    again = CliRunner().invoke(main, ["consumers", "drop", "default.users", "dashboard"])
    assert (again.exit_code, "no such consumer" in again.output) == (1, True)
