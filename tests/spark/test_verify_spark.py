"""What Spark does to tables leaves their rows as recorded; and Spark verifies tables as well as we do without it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from pipeline.verification.commands import Selection, verify_all
from tests import every_type, pushed_changes
from tests.service_process import LAKEFEED, ServiceProcess, service_process
from tests.spark.conftest import OpenSpark
from writer.verification.report_texts import report_document

COMMAND_TIMEOUT_S = 120

Change = Callable[[pa.Table], pa.Table]


def report(service: ServiceProcess, table: str) -> dict[str, Any]:
    command = [LAKEFEED, "verify", table, "--json", "--url", service.http_url]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False, cwd=service.directory
    )
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


def spark_report(spark: SparkSession, table: str, **selection: int) -> dict[str, Any]:
    [found] = verify_all(spark, Selection(tables=[table], **selection), {})
    return json.loads(json.dumps(report_document(found)))


def states(found: dict[str, Any]) -> list[str]:
    return [snapshot["state"] for snapshot in found["snapshots"]]


def kinds(found: dict[str, Any]) -> set[str]:
    return {finding["kind"] for finding in found["findings"]}


def later_changes(number: int) -> list[dict[str, Any]]:
    return [{**event, "sequence": event["sequence"] + 100 * number} for event in pushed_changes.EVENTS]


def test_tables_that_spark_compacts_and_expires_stay_as_recorded(tmp_path: Path, open_spark: OpenSpark) -> None:
    with service_process(tmp_path, {"writer.ledger": "true"}) as service:
        service.start()
        spark = open_spark(uri=service.http_url, name="verified")
        every_type.push_every_type(service)
        pushed_changes.push_changes(service)
        for table in ("every_type", "users"):
            assert spark_report(spark, table) == report(service, table)
            rewrite = f"table => 'default.{table}', options => map('min-input-files', '1', 'rewrite-all', 'true')"
            spark.sql(f"CALL verified.system.rewrite_data_files({rewrite})").collect()
            found = report(service, table)
            assert found["findings"] == []
            assert (found["totalsCompared"], states(found)[-1]) == (True, "rewrite")
            assert states(found).count("rewritten") == 2
            assert spark_report(spark, table) == found
        pushed_changes.push_changes(service, later_changes(1))
        first = found["snapshotId"]
        part = spark_report(spark, "users", after_id=first)
        assert (part["rows"], states(part), part["findings"]) == (6, ["verified", "verified"], [])
        expiry = "table => 'default.users', older_than => TIMESTAMP '2099-01-01', retain_last => 1"
        spark.sql(f"CALL verified.system.expire_snapshots({expiry})").collect()
        found = report(service, "users")
        assert (found["findings"], found["rows"], states(found)) == ([], 12, ["verified"])
        assert spark_report(spark, "users") == found
        assert service.stop() == 0
