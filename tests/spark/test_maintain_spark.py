"""Maintenance beside a committing writer and reading streams: every change is seen once, no live file is removed."""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from click.testing import Result
from pyspark.sql import DataFrame, SparkSession

from lakefeed.pipeline.consumers.registry import finished_snapshot, follow, hold, load_history
from lakefeed.pipeline.maintenance.plan import MaintenanceConfig, Step
from lakefeed.pipeline.maintenance.runner import Maintenance, TableReport
from lakefeed.pipeline.spark.session import SessionConfig, s3_conf
from lakefeed.pipeline.spark.tables import TableIdentifier, properties
from lakefeed.storage.local import local_path
from tests.lakefeed_process import run_lakefeed
from tests.s3_server import S3Server
from tests.service_process import ServiceProcess, service_process
from tests.spark.conftest import OpenSpark
from tests.spark.live_changes import live_changes, wait_for

USERS = TableIdentifier(("default",), "users")
# Commits often, so that rewrites meet them, and the writer looks for old snapshots of its own.
BUSY = {"writer.flush_max_age_s": 0.1, "writer.flush_check_interval_s": 0.02}
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
        self.query: Any = None

    @property
    def seen(self) -> list[int]:
        return [sequence for batch in self.batches.values() for sequence in batch]

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        def note(batch: DataFrame, number: int) -> None:
            self.batches[number] = [row[0] for row in batch.select("_cdc_sequence").collect()]

        hold(self.spark, self.table, self.checkpoint.name)
        stream = self.spark.readStream.format("iceberg").load(self.table)
        self.query = (
            stream.writeStream.foreachBatch(note)
            .option("checkpointLocation", str(self.checkpoint))
            .trigger(processingTime="500 milliseconds")
            .start()
        )
        try:
            with follow(self.query, spark=self.spark, table=self.table, name=self.checkpoint.name, every_s=1.0):
                yield
        finally:
            self.query.stop()

    def wait_for(self, count: int) -> None:
        """Wait until so many changes were seen, in batches that are finished and in the checkpoint."""
        wait_for(
            lambda: (len(self.seen) >= count and self._has_finished()) or self.query.exception() is not None,
            f"{count} changes in a stream",
        )
        assert self.query.exception() is None

    def wait_until_registered(self) -> None:
        """Wait until the table knows what the stream has finished: nothing older is kept for it."""
        name = self.checkpoint.name
        wait_for(
            lambda: (
                (name, finished_snapshot(self.query.lastProgress))
                in [(each.name, each.snapshot_id) for each in load_history(self.spark, self.table).consumers()]
            ),
            f"the registration of {name}",
        )

    def _has_finished(self) -> bool:
        progress = self.query.lastProgress
        return progress is not None and progress["batchId"] >= max(self.batches)


def commits(service: ServiceProcess) -> int:
    return sum(table["commits"] for table in service.get("/status")["tables"])


def problems(reports: list[TableReport]) -> list[str]:
    return [problem for report in reports for problem in report.problems]


def told(reports: list[TableReport], step: Step, name: str) -> int:
    return sum(result.counts[name] for report in reports for result in report.results if result.step is step)


def sequences(spark: SparkSession, table: str) -> list[int]:
    return sorted(row[0] for row in spark.sql(f"SELECT _cdc_sequence FROM {table}").collect())


def data_files(service: ServiceProcess) -> set[str]:
    """Name the data files that lie in the warehouse."""
    return {path.name for path in (local_path(service.data_dir.as_uri()) / "warehouse").rglob("*.parquet")}


def plant_orphans(service: ServiceProcess, live: set[str]) -> list[Path]:
    """Put old files that nothing names beside a table's own, and make what is committed as old as they are.

    What a flush has stored and not yet named stays young: it is its age by which it is known.
    """
    warehouse = local_path(service.data_dir.as_uri()) / "warehouse"
    committed = [path for path in warehouse.rglob("*.parquet") if path.name in live]
    assert len(committed) == len(live)
    [data] = {path.parent for path in committed}
    [metadata] = {path.parent for path in warehouse.rglob("*.metadata.json")}
    orphans = [data / "left-behind.parquet", metadata / "left-behind-m0.avro"]
    for path in orphans:
        path.write_text("nobody names me")
    for path in (*orphans, *committed):
        os.utime(path, (LONG_AGO, LONG_AGO))
    return orphans


def named_data_files(spark: SparkSession, table: str) -> set[str]:
    """Name the data files of all snapshots that a table has."""
    paths = spark.sql(f"SELECT DISTINCT file_path FROM {table}.all_data_files").collect()
    return {path.rpartition("/")[2] for (path,) in paths}


def environment(settings: Mapping[str, Any]) -> dict[str, str]:
    """Write settings as variables of the environment."""
    return {f"LAKEFEED_{key.replace('.', '_').upper()}": str(value) for key, value in settings.items()}


def verify(service: ServiceProcess, settings: Mapping[str, Any]) -> None:
    done = run_lakefeed("verify", "default.users", "--url", service.http_url, settings=settings)
    assert done.returncode == 0, done.stdout + done.stderr


def test_streams_see_every_change_once_while_their_table_is_written_and_maintained(
    tmp_path: Path, open_spark: OpenSpark
) -> None:
    with service_process(tmp_path, BUSY) as service:
        service.start()
        spark = open_spark(uri=service.http_url, name="maintained")
        table = USERS.sql("maintained")
        maintenance = Maintenance(spark, "maintained", EAGER)
        sleeper, steady = (Reader(spark, table, tmp_path / name) for name in ("sleeper", "steady"))
        with live_changes(service) as changes:
            changes.push_at_most(30)
            wait_for(lambda: commits(service) > 3, "commits")
            with sleeper.running():
                sleeper.wait_for(1)
            slept_at = commits(service)
            with steady.running():
                steady.wait_for(1)
                changes.push_at_most(math.inf)
                spark.sql(f"ALTER TABLE {table} SET TBLPROPERTIES ({SHORT})")
                wait_for(lambda: '"snapshots_expired"' in service.log_text(), "expiry by the writer itself")
                wait_for(lambda: commits(service) > slept_at + 40, "commits that the sleeper has not read")
                changes.push_at_most(20)
                early = named_data_files(spark, table)
                orphans = plant_orphans(service, early)
                reports = maintenance.run([USERS])
                assert told(reports, Step.ORPHANS, "orphans") >= len(orphans)
                assert not any(path.exists() for path in orphans), "they are old, and nothing names them"
                [asleep] = [each for each in load_history(spark, table).consumers() if each.name == "sleeper"]
                assert asleep.snapshots_behind is not None, "no snapshot after the one of the sleeper has gone"
                assert asleep.snapshots_behind > 20
                changes.push_at_most(20)
                with sleeper.running():
                    reports += maintenance.run([USERS])
                    everything = list(range(1, changes.stop() + 1))
                    sleeper.wait_for(len(everything))
                    steady.wait_for(len(everything))
                    sleeper.wait_until_registered()
                    steady.wait_until_registered()
        assert sorted(sleeper.seen) == everything
        assert sorted(steady.seen) == everything
        reports += maintenance.run([USERS])
        assert problems(reports) == []
        assert told(reports, Step.COMPACT, "files_rewritten") > 30
        assert told(reports, Step.MANIFESTS, "manifests_rewritten") > 1
        assert reports[-1].after.snapshots < 20
        # Where the writer's expiry takes a list away that ours was about to read, ours has removed the snapshots
        # already: beginning again it finds none, and their data files are left to the removal of orphans.
        remove_orphans_of_any_age(spark, "maintained", by_prefix=False)
        assert len(early) > 30
        assert data_files(service).isdisjoint(early), "they were rewritten, and no reader needs them any more"
        assert data_files(service) == named_data_files(spark, table)
        assert sequences(spark, table) == everything
        assert f'"shop":[0,{len(everything)}]' in properties(spark, table)["lakefeed.progress"]
        verify(service, {})
        assert service.stop() == 0


def test_the_command_maintains_tables_on_s3_beside_a_writer_and_a_stream(
    tmp_path: Path, open_spark: OpenSpark, run_lakefeed: Callable[..., Result], s3_server: S3Server
) -> None:
    warehouse = s3_server.new_warehouse()
    bucket = warehouse["storage.warehouse"].split("/")[2]
    s3 = {key.removeprefix("storage."): value for key, value in warehouse.items() if key != "storage.warehouse"}
    eager = {"pipeline.maintenance.min_input_files": 2, "pipeline.maintenance.min_manifests": 2}
    with service_process(tmp_path, BUSY | warehouse) as service:
        service.start()
        spark = open_spark(uri=service.http_url, name="stored", conf=s3_conf(s3, SessionConfig(catalog_name="stored")))
        table = USERS.sql("stored")

        def maintain() -> dict[str, Any]:
            """Run the command as an operator does: what it knows of S3 is what the service's own settings say."""
            told = ("--url", service.http_url, "--catalog-name", "stored", "--json")
            done = run_lakefeed("maintain", "users", *told, env=environment(eager | warehouse))
            assert done.exit_code == 0, done.output
            [report] = json.loads(done.stdout)["tables"]
            return report

        reader = Reader(spark, table, tmp_path / "reader")
        with live_changes(service) as changes:
            changes.push_at_most(60)
            wait_for(lambda: commits(service) > 3, "commits")
            spark.sql(f"ALTER TABLE {table} SET TBLPROPERTIES ({SHORT})")
            with reader.running():
                reader.wait_for(1)
                early = named_data_files(spark, table)
                reports = [maintain()]
                changes.push_at_most(5)
                pushed = changes.pushed
                wait_for(lambda: changes.pushed > pushed, "changes after a compaction")
                everything = list(range(1, changes.stop() + 1))
                reader.wait_for(len(everything))
                reader.wait_until_registered()
        assert sorted(reader.seen) == everything
        reports.append(maintain())
        assert sum(report["steps"]["compact"]["files_rewritten"] for report in reports) > 3
        assert {*reports[0]["steps"]} >= {"compact", "orphans"}
        orphan = plant_object(s3_server, bucket)
        assert f"s3://{bucket}/{orphan}" in remove_orphans_of_any_age(spark, "stored", by_prefix=True)
        stored = {key.rpartition("/")[2] for key in s3_server.keys(bucket) if key.endswith(".parquet")}
        assert len(early) > 3
        assert stored.isdisjoint(early), "they were rewritten, and no reader needs them any more"
        assert stored == named_data_files(spark, table)
        assert sequences(spark, table) == everything
        verify(service, warehouse)
        assert service.stop() == 0


def plant_object(server: S3Server, bucket: str) -> str:
    """Put a file beside a table's data files, as a writer that was killed leaves it."""
    beside = next(key for key in server.keys(bucket) if key.endswith(".parquet"))
    orphan = f"{beside.rpartition('/')[0]}/left-behind.parquet"
    with contextlib.closing(server.client()) as client:
        client.put_object(Bucket=bucket, Key=orphan, Body=b"nobody names me")
    return orphan


def remove_orphans_of_any_age(spark: SparkSession, catalog: str, *, by_prefix: bool) -> list[str]:
    """Remove orphans however young: a store gives files the time at which they come, and the procedure wants a day."""
    jvm = spark._jvm
    table = jvm.org.apache.iceberg.spark.Spark3Util.loadIcebergTable(spark._jsparkSession, f"{catalog}.default.users")
    action = jvm.org.apache.iceberg.spark.actions.SparkActions.get(spark._jsparkSession).deleteOrphanFiles(table)
    return list(
        action.olderThan(int(time.time() * 1000) + 60_000).usePrefixListing(by_prefix).execute().orphanFileLocations()
    )


def test_only_old_files_that_nothing_names_are_orphans(tmp_path: Path, open_spark: OpenSpark) -> None:
    with service_process(tmp_path, BUSY) as service:
        service.start()
        spark = open_spark(uri=service.http_url, name="tidied")
        with live_changes(service) as changes:
            wait_for(lambda: commits(service) > 3, "commits")
            everything = list(range(1, changes.stop() + 1))
        warehouse = local_path(service.data_dir.as_uri()) / "warehouse"
        [data] = {path.parent for path in warehouse.rglob("*.parquet")}
        [metadata] = {path.parent for path in warehouse.rglob("*.metadata.json")}
        for path in (*data.iterdir(), *metadata.iterdir()):  # what lives is as old as what does not
            os.utime(path, (LONG_AGO, LONG_AGO))
        old = [data / "old.parquet", metadata / "old-m0.avro", metadata / "99999-old.metadata.json"]
        young = data / "young.parquet"
        for path in (*old, young):
            path.write_text("nobody names me")
        for path in old:
            os.utime(path, (LONG_AGO, LONG_AGO))
        counted = run_only(spark, "tidied", Step.ORPHANS, is_dry_run=True)
        assert (told(counted, Step.ORPHANS, "orphans"), all(path.exists() for path in old)) == (3, True)
        removed = run_only(spark, "tidied", Step.ORPHANS, is_dry_run=False)
        assert problems([*counted, *removed]) == []
        assert (told(removed, Step.ORPHANS, "orphans"), any(path.exists() for path in old)) == (3, False)
        assert young.exists()
        assert sequences(spark, USERS.sql("tidied")) == everything
        verify(service, {})
        assert service.stop() == 0


def run_only(spark: SparkSession, catalog: str, step: Step, *, is_dry_run: bool) -> list[TableReport]:
    return Maintenance(spark, catalog, EAGER, only=frozenset([step]), is_dry_run=is_dry_run).run([USERS])
