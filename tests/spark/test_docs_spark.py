"""The examples of docs/spark-jobs.md run as they stand, one after the other, and do what the page says."""

from __future__ import annotations

import asyncio
import io
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from pyspark.sql import SparkSession

from ingest.push import PushRequest, push
from pipeline import session
from pipeline.config import SessionConfig, SparkSettings
from pipeline.consumers import consumers
from tests.service_process import ServiceProcess, service_process
from tests.spark.conftest import OpenSpark

DOCS = Path(__file__).parents[2] / "docs"
DOCUMENTED_URL = "http://127.0.0.1:8181"
DOCUMENTED_DIRECTORY = "/var/lib/lakefeed"

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[ServiceProcess]:
    with service_process(tmp_path) as running:
        running.start()
        yield running
        assert running.stop() == 0


def _push_one_by_one(service: ServiceProcess, changes: str) -> None:
    """Push the page's rows; each is committed by itself, so that there is a first snapshot and what came since."""
    request = PushRequest(source="shop", table="users", key="id", url=service.ws_url)
    lines = changes.encode().splitlines(keepends=True)
    for count in range(1, len(lines) + 1):
        asyncio.run(push(request, io.BytesIO(b"".join(lines[:count])), lambda _changes, _bytes: None))


def test_examples_for_jobs_of_users_run_as_they_stand(
    service: ServiceProcess,
    open_spark: OpenSpark,
    run_lakefeed: Callable[..., Result],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    spark = open_spark(uri=service.http_url)

    def build_here(config: SessionConfig) -> SparkSession:
        assert config.catalog.uri == DOCUMENTED_URL
        return spark

    monkeypatch.setattr(session, "build_session", build_here)
    page = (DOCS / "spark-jobs.md").read_text(encoding="utf-8").replace(DOCUMENTED_DIRECTORY, str(tmp_path))
    blocks = _BLOCK.findall(page)
    (changes,) = [text for language, text in blocks if language == "json"]
    _push_one_by_one(service, changes)

    names: dict[str, Any] = {}
    for language, text in blocks:
        if language == "python":
            exec(compile(text, "spark-jobs.md", "exec"), names)
        if language == "sh" and "push" not in text:
            done = run_lakefeed(*shlex.split(text)[1:], "--url", service.http_url)
            assert done.exit_code == 0, done.output

    printed = capsys.readouterr().out
    assert "1 changes at" in printed
    assert "4 since" in printed
    seen = spark.sql("SELECT _cdc_sequence, _cdc_operation, id FROM audit.seen ORDER BY 1").collect()
    assert [tuple(row) for row in seen] == [
        *((1, "INSERT", 1), (2, "INSERT", 2), (3, "INSERT", 3), (4, "UPDATE", 3), (5, "DELETE", 1)),
    ]
    assert {each.name for each in consumers(spark, "lake.default.users")} >= {"audit"}
    assert [tuple(row) for row in spark.table("gold.users_by_country").collect()] == [("US", 2)]
    cards = spark.sql("SELECT id, label FROM gold.user_cards ORDER BY id").collect()
    assert [tuple(row) for row in cards] == [(2, "Grace from US"), (3, "Edsger from US")]


def test_every_setting_of_spark_is_documented_with_its_default_and_reason() -> None:
    page = (DOCS / "spark.md").read_text(encoding="utf-8").splitlines()
    rows = [line.split("|")[2:5] for line in page if line.startswith("| ") and line.count("|") == 5]
    shown = {name.strip(" `"): (default.strip(" `"), why.strip()) for name, default, why in rows}

    settings = {item.name: item for item in fields(SparkSettings)}
    assert {name: shown.get(name) for name in settings} == {
        name: (repr(item.default if name != "conf" else {}), item.metadata["why"]) for name, item in settings.items()
    }
