"""A merge that is not alone: somebody else commits to the mirror just before it, or its answer is lost."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from lakefeed.pipeline.maintenance.plan import MaintenanceConfig, Step
from lakefeed.pipeline.maintenance.runner import Maintenance, TableReport
from lakefeed.pipeline.mirrors.commands import run_mirrors
from lakefeed.pipeline.mirrors.merge import commit_marked
from lakefeed.pipeline.mirrors.runner import MirrorRun
from lakefeed.pipeline.mirrors.settings import MirrorConfig, MirrorMode
from lakefeed.pipeline.spark.tables import TableIdentifier, commit_with_properties, snapshots
from tests.fault_proxy import CutResponse, Fault, FaultProxy, Meanwhile, Rule, fault_proxy
from tests.mirror_events import Pusher
from tests.service_process import ServiceProcess
from tests.spark.conftest import OpenSpark
from tests.spark.mirror_runs import some

EAGER = MaintenanceConfig(min_input_files=2)


@pytest.fixture
def proxy(service: ServiceProcess) -> Iterator[FaultProxy]:
    with fault_proxy(service.http_url) as running:
        yield running


def mirror_of(table: str, mode: MirrorMode) -> str:
    return f"{table}_{'history' if mode is MirrorMode.HISTORY else 'current'}"


def current_rows(rows: DataFrame, mode: MirrorMode) -> list[tuple[int, int]]:
    current = rows.where("is_current") if mode is MirrorMode.HISTORY else rows
    return sorted((row["id"], row["n"]) for row in current.collect())


def config_of(tmp_path: Path, table: str, mode: MirrorMode) -> MirrorConfig:
    tables = {f"default.{table}": {"key": ("id",), "mode": mode}}
    return MirrorConfig(checkpoints=str(tmp_path / "checkpoints"), tables=tables)


def build_mirror(service: ServiceProcess, spark: SparkSession, table: str, config: MirrorConfig) -> Pusher:
    """Leave a mirror of several files behind."""
    push = Pusher(service, table, table)
    for first in (1, 4):
        for key in range(first, first + 3):
            push.insert(key, n=key)
        push.commit()
        assert run_mirrors(spark, [table], config, once=True) == {}
    return push


def spoil_first_merge(monkeypatch: pytest.MonkeyPatch, proxy: FaultProxy, fault: Fault, mirror: str) -> list[Rule]:
    """Spoil the commit of the next merge, and nothing that is asked for before it."""
    rules: list[Rule] = []

    def commit(*arguments: Any) -> Any:
        if not rules:
            rules.append(proxy.spoil(fault, method="POST", path=f"/tables/{mirror}$", times=1))
        return commit_with_properties(*arguments)

    monkeypatch.setattr("lakefeed.pipeline.mirrors.merge.commit_with_properties", commit)
    return rules


def repeats(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.what for record in caplog.records if record.getMessage() == "conflict_retried"]


@pytest.mark.parametrize(
    "mode",
    some(
        [MirrorMode.COPY_ON_WRITE, MirrorMode.DELETION_VECTORS, MirrorMode.HISTORY],
        briefly=[MirrorMode.DELETION_VECTORS, MirrorMode.HISTORY],
    ),
)
def test_a_merge_that_meets_a_compaction_is_repeated_and_both_are_kept(
    service: ServiceProcess,
    proxy: FaultProxy,
    open_spark: OpenSpark,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    mode: MirrorMode,
) -> None:
    table = f"met_{mode.name.lower()}"
    mirror = mirror_of(table, mode)
    config = config_of(tmp_path, table, mode)
    compacting = open_spark(uri=service.http_url, name=f"direct_{table}")
    merging = open_spark(uri=proxy.url, name=f"proxied_{table}")
    push = build_mirror(service, merging, table, config)
    push.update(1, n=10).delete(2).insert(7, n=7).update(6, n=60).commit()
    maintenance = Maintenance(compacting, f"direct_{table}", EAGER, only=frozenset([Step.COMPACT]))
    compacted: list[TableReport] = []
    others = Meanwhile(lambda: compacted.extend(maintenance.run([TableIdentifier(("default",), mirror)])))
    rules = spoil_first_merge(monkeypatch, proxy, others, mirror)
    with caplog.at_level(logging.WARNING):
        assert run_mirrors(merging, [table], config, once=True) == {}
    assert [rule.met for rule in rules] == [1]
    assert [result.counts["files_added"] for report in compacted for result in report.results] == [1]
    assert len([what for what in repeats(caplog) if what.startswith("merge into")]) == 1
    rows = merging.table(f"default.{mirror}")
    found = current_rows(rows, mode)
    assert found == [(1, 10), (3, 3), (4, 4), (5, 5), (6, 60), (7, 7)]
    if mode is MirrorMode.HISTORY:
        assert rows.count() == len(found) + 3, "what two updates and a delete ended"
    assert "replace" in [each.operation for each in snapshots(merging, f"proxied_{table}.default.{mirror}")]


@pytest.mark.parametrize(
    ("mode", "has_begun"),
    some(
        [
            (MirrorMode.COPY_ON_WRITE, False),
            (MirrorMode.HISTORY, False),
            (MirrorMode.COPY_ON_WRITE, True),
            (MirrorMode.DELETION_VECTORS, True),
        ],
        briefly=[(MirrorMode.HISTORY, False), (MirrorMode.COPY_ON_WRITE, True)],
    ),
)
def test_a_merge_that_another_application_overtook_is_abandoned_and_restores_no_row(
    service: ServiceProcess,
    proxy: FaultProxy,
    open_spark: OpenSpark,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mode: MirrorMode,
    has_begun: bool,
) -> None:
    table = f"pair_{mode.name.lower()}_{has_begun}".lower()
    mirror = mirror_of(table, mode)
    config = config_of(tmp_path, table, mode)
    other_spark = open_spark(uri=service.http_url, name=f"other_{table}")
    other_config = config_of(tmp_path / "other", table, mode)
    other = MirrorRun(other_spark, f"other_{table}", [TableIdentifier.parse(table)], other_config)
    spark = open_spark(uri=proxy.url, name=f"one_{table}")
    push = build_mirror(service, spark, table, config)
    push.update(2, n=20).commit()
    failures: list[Mapping[str, str]] = []

    def let_other_delete() -> None:
        push.delete(2).commit()
        failures.append(other.run(once=True))

    def commit_second(*arguments: Any, **options: Any) -> None:
        monkeypatch.setattr("lakefeed.pipeline.mirrors.merge.commit_marked", commit_marked)
        let_other_delete()
        commit_marked(*arguments, **options)

    if has_begun:  # and has read the mirror: Iceberg refuses it, and the next attempt finds the other
        spoil_first_merge(monkeypatch, proxy, Meanwhile(let_other_delete), mirror)
    else:
        monkeypatch.setattr("lakefeed.pipeline.mirrors.merge.commit_marked", commit_second)
    given_up = run_mirrors(spark, [table], config, once=True)
    assert failures == [{}]
    rows = other_spark.table(f"default.{mirror}")
    found = rows.where("id = 2" + (" AND is_current" if mode is MirrorMode.HISTORY else "")).collect()
    assert [row["n"] for row in found] == [], "deleted by the other application"
    assert "another application merges into this mirror" in given_up.get(f"default.{table}", "")


@pytest.mark.parametrize(
    "mode", some([MirrorMode.COPY_ON_WRITE, MirrorMode.HISTORY], briefly=[MirrorMode.COPY_ON_WRITE])
)
def test_a_merge_whose_answer_is_lost_is_merged_once(
    service: ServiceProcess,
    proxy: FaultProxy,
    open_spark: OpenSpark,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mode: MirrorMode,
) -> None:
    table = f"lost_{mode.name.lower()}"
    mirror = mirror_of(table, mode)
    config = config_of(tmp_path, table, mode)
    spark = open_spark(uri=proxy.url, name=table)
    push = build_mirror(service, spark, table, config)
    push.update(1, n=10).delete(2).insert(7, n=7).commit()
    rules = spoil_first_merge(monkeypatch, proxy, CutResponse(), mirror)
    assert run_mirrors(spark, [table], config, once=True) == {}
    assert [rule.met for rule in rules] == [1]
    rows = spark.table(f"default.{mirror}")
    found = current_rows(rows, mode)
    assert found == [(1, 10), (3, 3), (4, 4), (5, 5), (6, 6), (7, 7)]
    assert rows.count() == len(found) + (2 if mode is MirrorMode.HISTORY else 0)
