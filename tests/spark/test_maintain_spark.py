"""Maintenance beside a writer that commits and streams that read: every change is seen once, nothing live goes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from pipeline.consumers import consumers, follow
from pipeline.maintenance.runner import Maintenance, TableReport
from pipeline.maintenance.settings import MaintenanceConfig, Step
from pipeline.tables import TableName, properties
from tests.s3_server import S3Server, run_s3_server
from tests.service_process import LAKEFEED, ServiceProcess, service_process
from tests.spark.conftest import OpenSpark
from tests.spark.live_changes import live_changes, wait_for

USERS = TableName(("default",), "users")
# Commits often, so that rewrites meet them, and the writer looks for old snapshots of its own.
BUSY = {"writer.flush_max_age_s": 0.2, "writer.flush_check_interval_s": 0.02, "writer.ledger": "true"}
# As little history as there can be: what stays, stays for a reader.
SHORT = (
    "'history.expire.max-snapshot-age-ms' = '1', 'history.expire.min-snapshots-to-keep' = '1', "
    "'lakefeed.snapshots-max' = '10'"
)
EAGER = MaintenanceConfig(min_input_files=2, min_manifests=2)
LONG_AGO = time.time() - 30 * 86_400


class Reader:
    """A stream that notes the sequences of each batch; a batch that is repeated counts once."""

    def __init__(self, spark: SparkSession, table: str, checkpoint: Path) -> None:
        self.spark = spark
        self.table = table
        self.checkpoint = checkpoint
        self.batches: dict[int, list[int]] = {}

    @property
    def seen(self) -> list[int]:
        return [sequence for batch in self.batches.values() for sequence in batch]

    @contextlib.contextmanager
    def running(self, name: str) -> Iterator[Any]:
        def note(batch: DataFrame, number: int) -> None:
            self.batches[number] = [row[0] for row in batch.select("_cdc_sequence").collect()]

        stream = self.spark.readStream.format("iceberg").load(self.table)
        query = (
            stream.writeStream.foreachBatch(note)
            .option("checkpointLocation", str(self.checkpoint))
            .trigger(processingTime="200 milliseconds")
            .start()
        )
        try:
            with follow(query, spark=self.spark, table=self.table, name=name, every_s=0.5):
                yield query
        finally:
            query.stop()


def check(reports: list[TableReport]) -> None:
    assert [problem for report in reports for problem in report.problems] == []


def told(reports: list[TableReport], step: Step, name: str) -> int:
    return sum(result.told[name] for report in reports for result in report.results if result.step is step)


def verify(service: ServiceProcess, settings: dict[str, Any]) -> None:
    own = {f"LAKEFEED_{key.replace('.', '_').upper()}": str(value) for key, value in settings.items()}
    done = subprocess.run(
        [LAKEFEED, "verify", "default.users", "--url", service.http_url],
        capture_output=True,
        text=True,
        cwd=service.directory,
        env=os.environ | own,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def maintain_beside_everything(
    service: ServiceProcess, spark: SparkSession, catalog: str, directory: Path
) -> list[TableReport]:
    """Maintain a table while it is written and read; ends with nobody writing, and everything seen once."""
    table = USERS.sql(catalog)
    maintenance = Maintenance(spark, catalog, EAGER)
    sleeper, steady = (Reader(spark, table, directory / name) for name in ("sleeper", "steady"))
    with live_changes(service) as changes:
        wait_for(lambda: bool(service.get("/status")["tables"]), "a table")
        wait_for(lambda: service.get("/status")["tables"][0]["commits"] > 3, "commits")
        with sleeper.running("sleeper"):
            wait_for(lambda: bool(sleeper.batches), "a first batch")
        spark.sql(f"ALTER TABLE {table} SET TBLPROPERTIES ({SHORT})")
        with steady.running("steady") as steady_query:
            wait_for(lambda: '"snapshots_expired"' in service.log_text(), "expiry by the writer itself")
            reports = [report for _ in range(2) for report in maintenance.run([USERS])]
            [held] = [each for each in consumers(spark, table) if each.name == "sleeper"]
            assert held.snapshots_behind is not None, "no snapshot between the sleeper's and the newest has gone"
            assert held.snapshots_behind > 20
            with sleeper.running("sleeper") as sleeper_query:
                reports += maintenance.run([USERS])
                everything = list(range(1, changes.stop() + 1))
                wait_for(lambda: len(sleeper.seen) >= len(everything), f"sleeper: {sleeper_query.exception()}")
                wait_for(lambda: len(steady.seen) >= len(everything), f"steady: {steady_query.exception()}")
                assert (sleeper_query.exception(), steady_query.exception()) == (None, None)
    assert sorted(sleeper.seen) == everything
    assert sorted(steady.seen) == everything
    reports += maintenance.run([USERS])
    check(reports)
    assert sorted(row[0] for row in spark.sql(f"SELECT _cdc_sequence FROM {table}").collect()) == everything
    assert '"shop":[0,' in properties(spark, table)["lakefeed.progress"]
    return reports


def test_streams_see_every_change_once_while_their_table_is_written_and_maintained(
    tmp_path: Path, open_spark: OpenSpark
) -> None:
    with service_process(tmp_path, BUSY) as service:
        service.start()
        spark = open_spark(uri=service.http_url, name="maintained")
        reports = maintain_beside_everything(service, spark, "maintained", tmp_path)
        assert told(reports, Step.COMPACT, "files_rewritten") > 50
        assert told(reports, Step.MANIFESTS, "manifests_rewritten") > 1
        assert told(reports[-1:], Step.EXPIRE, "data_files_deleted") > 50
        assert reports[-1].after.snapshots < 20 < reports[-1].before.snapshots
        verify(service, {})
        assert service.stop() == 0
