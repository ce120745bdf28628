"""Mirrors of real change tables: what a service has committed is, row by row, what its mirror shows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from pipeline.mirrors.commands import run_mirrors
from pipeline.mirrors.settings import MirrorConfig, MirrorMode, TableMirror
from tests.mirror_events import Pusher
from tests.service_process import ServiceProcess, service_process
from tests.spark.conftest import OpenSpark

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    with service_process(tmp_path_factory.mktemp("service"), {"writer.keep_before": "true"}) as running:
        running.start()
        yield running


@pytest.fixture
def spark(service: ServiceProcess, open_spark: OpenSpark, request: pytest.FixtureRequest) -> SparkSession:
    return open_spark(uri=service.http_url, name=request.node.originalname[:40])


@pytest.fixture
def config(tmp_path: Path) -> MirrorConfig:
    return MirrorConfig(checkpoints=str(tmp_path / "checkpoints"))


def mirrored(spark: SparkSession, table: str, *columns: str) -> list[tuple[Any, ...]]:
    return sorted(tuple(row) for row in spark.table(table).select(*columns).collect())


def keyed(config: MirrorConfig, table: str, **settings: Any) -> MirrorConfig:
    return dataclasses.replace(config, tables={table: TableMirror(key=("id",), **settings)})


@pytest.mark.parametrize("mode", [MirrorMode.COPY_ON_WRITE, MirrorMode.MERGE_ON_READ, MirrorMode.DELETION_VECTORS])
def test_a_mirror_shows_the_last_state_of_each_row(
    service: ServiceProcess, spark: SparkSession, config: MirrorConfig, mode: MirrorMode
) -> None:
    name = f"users_{mode.name.lower()}"
    push = Pusher(service, f"shop-{name}", name)
    push.insert(1, name="Ada").insert(2, name="Grace").insert(3, name="Edsger").commit()
    settings = keyed(config, f"default.{name}", mode=mode)
    assert run_mirrors(spark, [name], settings, once=True) == {}
    push.update(2, name="Hopper").delete(1).insert(4, name="Alan", age=41).commit()
    assert run_mirrors(spark, [name], settings, once=True) == {}
    rows = mirrored(spark, f"default.{name}_current", "id", "name", "age", "_cdc_sequence")
    assert rows == [(2, "Hopper", None, 4), (3, "Edsger", None, 3), (4, "Alan", 41, 6)]
    assert run_mirrors(spark, [name], settings, once=True) == {}
    assert rows == mirrored(spark, f"default.{name}_current", "id", "name", "age", "_cdc_sequence")
