"""A mirror that an earlier revision built goes on where it stopped, from its own checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from click.testing import Result
from pyspark.sql import SparkSession
from websockets.sync.client import connect

from tests.earlier_data_directory import read_rows, resume, sorted_rows, unpack
from tests.service_process import service_process
from tests.spark.conftest import OpenSpark

MIRROR = "default.users_current"


def test_an_earlier_mirror_continues(
    tmp_path: Path, run_lakefeed: Callable[..., Result], open_spark: OpenSpark
) -> None:
    expected = unpack(tmp_path)
    merged, continued = (expected["mirrors"][MIRROR][name] for name in ("merged", "continued"))
    checkpoints = tmp_path / "data" / "checkpoints"
    streams = sorted(checkpoints.glob("*/*"))
    with service_process(tmp_path) as service:
        service.start()
        assert service.flush()["success"]
        spark = open_spark(uri=service.http_url, name="earlier")
        assert read_rows(service, MIRROR) == sorted_rows(merged)

        def run_mirror() -> None:
            options = ("--once", "--url", service.http_url, "--checkpoints", str(checkpoints))
            done = run_lakefeed("mirror", "run", "users", *options, "--catalog-name", "earlier_run")
            assert done.exit_code == 0, done.output

        run_mirror()
        assert read_rows(service, MIRROR) == sorted_rows(continued)
        last = expected["sources"]["shop"]
        sequence = last["sequence"] + 1
        new = {"id": 100, "name": "user 100"}
        events = [
            {"sequence": sequence, "table": "users", "operation": "INSERT", "rowId": "shop-100", "after": new},
            {"sequence": sequence + 1, "table": "users", "operation": "DELETE", "rowId": "shop-9", "before": {"id": 9}},
        ]
        with connect(service.ws_url) as socket:
            resume(socket, "shop", epoch=last["epoch"])
            socket.send(json.dumps({"type": "cdc_batch", "sequenceNumber": 0, "events": events}))
            assert json.loads(socket.recv(timeout=240))["type"] == "ack"
        assert service.flush()["success"]
        run_mirror()
        rest = [row for row in continued if row[4] != "shop-9"]
        inserted = ["shop", last["epoch"], sequence, "INSERT", "shop-100", new]
        assert read_rows(service, MIRROR) == sorted_rows([*rest, inserted])
        assert count_rows(spark) == len(rest) + 1
        assert sorted(checkpoints.glob("*/*")) == streams, "the mirror began a new stream"


def count_rows(spark: SparkSession) -> int:
    return spark.table(f"earlier.{MIRROR}").count()
