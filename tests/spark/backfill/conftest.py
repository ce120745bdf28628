"""One service and catalog for the backfills of a module; pauses are short."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from lakefeed.pipeline.backfill import runner
from tests.service_process import ServiceProcess, service_process
from tests.spark.backfill.feeding import CATALOG, Pusher
from tests.spark.conftest import OpenSpark


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    with service_process(tmp_path_factory.mktemp("service")) as running:
        running.start()
        yield running
        assert running.stop() == 0


@pytest.fixture(scope="module")
def pusher(service: ServiceProcess) -> Pusher:
    return Pusher(service)


@pytest.fixture
def spark(service: ServiceProcess, open_spark: OpenSpark) -> SparkSession:
    return open_spark(uri=service.http_url, name=CATALOG)


@pytest.fixture(autouse=True)
def _without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "RETRY_DELAY_S", 0.05)
