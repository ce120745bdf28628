"""The examples of docs/spark-jobs.md run as they stand, one after the other, and do what the page says."""

from __future__ import annotations

import asyncio
import io
import json
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from pyspark.sql import SparkSession
from websockets.sync.client import connect

from lakefeed.ingest.cli.push import PushRequest, push_file
from lakefeed.pipeline.backfill.inputs import FileInput, parse_position
from lakefeed.pipeline.backfill.runner import Backfill, BackfillRequest
from lakefeed.pipeline.backfill.target import TargetTable
from lakefeed.pipeline.consumers.registry import load_history
from lakefeed.pipeline.spark.session import SessionConfig
from lakefeed.pipeline.spark.tables import TableIdentifier
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
        asyncio.run(push_file(request, io.BytesIO(b"".join(lines[:count])), lambda _changes, _bytes: None))


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
        assert config.url == DOCUMENTED_URL
        return spark

    monkeypatch.setattr("lakefeed.build_session", build_here)
    page = (DOCS / "spark-jobs.md").read_text(encoding="utf-8").replace(DOCUMENTED_DIRECTORY, str(tmp_path))
    blocks = _BLOCK.findall(page)
    (changes,) = [text for language, text in blocks if language == "json"]
    _push_one_by_one(service, changes)

    names: dict[str, Any] = {}
    for language, text in blocks:
        if language == "python":
            exec(compile(text, "spark-jobs.md", "exec"), names)
        if language == "sh" and "push" not in text:
            mirror = [*shlex.split(text)[1:], "--url", service.http_url]
            done = run_lakefeed(*mirror)
            assert done.exit_code == 0, done.output

    printed = capsys.readouterr().out
    assert "1 changes at" in printed
    assert "4 since" in printed
    shown = "SELECT _cdc_operation, id FROM audit.seen ORDER BY _cdc_epoch, _cdc_ingested_at, _cdc_sequence, id"
    live = [("INSERT", 1), ("INSERT", 2), ("INSERT", 3), ("UPDATE", 3), ("DELETE", 1)]
    assert [tuple(row) for row in spark.sql(shown).collect()] == live
    assert {each.name for each in load_history(spark, "lake.default.users").consumers()} >= {"audit"}
    assert [tuple(row) for row in spark.table("gold.users_by_country").collect()] == [("US", 2)]
    assert _cards(spark) == [(2, "Grace from US"), (3, "Edsger from US")]

    # The stream: rows of a backfill, which share a position, and a source that starts over are changes like others.
    _backfill(spark, tmp_path, [{"id": 7, "name": "Alan"}, {"id": 8, "name": "Kurt"}])
    _start_over(service, [{"id": 2, "name": "Grace", "country": "UK"}, {"id": 9, "name": "Barbara", "country": "US"}])
    (stream,) = [text for _, text in blocks if "readStream" in text]
    exec(compile(stream, "spark-jobs.md", "exec"), names)
    came = [*live, ("READ", 7), ("READ", 8), ("UPDATE", 2), ("UPDATE", 9)]
    assert [tuple(row) for row in spark.sql(shown).collect()] == came
    # A batch that comes again.
    names["keep"](spark.table("lake.default.users"), 0)
    assert [tuple(row) for row in spark.sql(shown).collect()] == came

    # The cards: what the mirror does not have yet is left for the next time.
    begin, refresh = names["begin_next_time_at"], names["refresh_cards"]
    assert refresh(begin) == begin
    assert _cards(spark) == [(2, "Grace from US"), (3, "Edsger from US")]
    assert run_lakefeed(*mirror).exit_code == 0
    assert refresh(begin) != begin
    assert _cards(spark) == [(2, "Grace from UK"), (3, "Edsger from US"), (9, "Barbara from US")]


def _cards(spark: SparkSession) -> list[tuple[int, str]]:
    return [tuple(row) for row in spark.sql("SELECT id, label FROM gold.user_cards ORDER BY id").collect()]


def _backfill(spark: SparkSession, directory: Path, rows: list[dict[str, Any]]) -> None:
    path = directory / "old.json"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    wanted = BackfillRequest(source="shop", key=("id",), position=parse_position("mark"))
    work = Backfill(
        TargetTable(spark, "lake", TableIdentifier.parse("users")), FileInput(format="jsonl", path=str(path)), wanted
    )
    assert work.run(work.prepare()).rows == len(rows)


def _start_over(service: ServiceProcess, rows: list[dict[str, Any]]) -> None:
    """Push updates of a source that numbers its changes anew."""
    events = [
        {"sequence": at, "operation": "UPDATE", "table": "users", "rowId": str(row["id"]), "after": row}
        for at, row in enumerate(rows, 1)
    ]
    with connect(service.ws_url) as socket:
        socket.send(json.dumps({"type": "connect", "sourceDoId": "shop", "epoch": 1}))
        assert json.loads(socket.recv(timeout=240))["type"] == "status"
        socket.send(json.dumps({"type": "cdc_batch", "sourceDoId": "shop", "sequenceNumber": 0, "events": events}))
        assert json.loads(socket.recv(timeout=240))["status"] == "ok"
    assert service.flush()["success"]


def test_every_setting_of_spark_is_documented_with_its_default_and_reason() -> None:
    page = (DOCS / "spark.md").read_text(encoding="utf-8").splitlines()
    rows = [line.split("|")[2:5] for line in page if line.startswith("| ") and line.count("|") == 5]
    shown = {name.strip(" `"): (default.strip(" `"), why.strip()) for name, default, why in rows}

    settings = {item.name: item for item in fields(SessionConfig)}
    assert {name: shown.get(name) for name in settings} == {
        name: (repr(item.default if name != "conf" else {}), item.metadata["help"]) for name, item in settings.items()
    }
