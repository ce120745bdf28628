"""What Spark does to tables leaves their rows as recorded; and Spark verifies tables as well as we do without it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from pyspark.sql import SparkSession

from lakefeed.contract.verification import Range, Report, report_document
from lakefeed.ingest.cli.main import main
from lakefeed.pipeline.mirrors.commands import run_mirrors
from lakefeed.pipeline.mirrors.settings import MirrorConfig, RowsWithoutKey
from lakefeed.pipeline.spark.tables import TableIdentifier, catalog_of
from lakefeed.pipeline.verification import commands
from lakefeed.pipeline.verification.commands import verify_all
from lakefeed.pipeline.verification.mirrors import compare_mirror
from tests import every_type, pushed_changes
from tests.lakefeed_process import run_lakefeed
from tests.service_process import ServiceProcess, service_process
from tests.spark.conftest import OpenSpark

Change = Callable[[pa.Table], pa.Table]


def report(service: ServiceProcess, table: str) -> dict[str, Any]:
    done = run_lakefeed("verify", table, "--json", "--url", service.http_url, directory=service.directory)
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


def spark_report(spark: SparkSession, table: str, **wanted: int) -> dict[str, Any]:
    [found] = verify_all(spark, [table], Range(**wanted), {})
    return json.loads(json.dumps(report_document(found)))


def states(found: dict[str, Any]) -> list[str]:
    return [snapshot["state"] for snapshot in found["snapshots"]]


def kinds(found: dict[str, Any]) -> set[str]:
    return {finding["kind"] for finding in found["findings"]}


def later_changes(number: int) -> list[dict[str, Any]]:
    return [{**event, "sequence": event["sequence"] + 100 * number} for event in pushed_changes.EVENTS]


def test_tables_that_spark_compacts_and_expires_stay_as_recorded(tmp_path: Path, open_spark: OpenSpark) -> None:
    with service_process(tmp_path) as service:
        service.start()
        spark = open_spark(uri=service.http_url, name="verified")
        every_type.push_every_type(service)
        pushed_changes.push_changes(service)
        assert spark_report(spark, "every_type") == report(service, "every_type")
        for table in ("every_type", "users"):
            rewrite = f"table => 'default.{table}', options => map('min-input-files', '1', 'rewrite-all', 'true')"
            spark.sql(f"CALL verified.system.rewrite_data_files({rewrite})").collect()
            found = report(service, table)
            assert found["findings"] == []
            assert (found["totalsCompared"], states(found)[-1]) == (True, "rewrite")
            assert states(found).count("rewritten") == 2
        assert spark_report(spark, "users") == found
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


@pytest.fixture(scope="module")
def tampered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    with service_process(tmp_path_factory.mktemp("tampered")) as running:
        running.start()
        pushed_changes.push_changes(running)
        yield running
        assert running.stop() == 0


@contextlib.contextmanager
def spoiled(service: ServiceProcess, change: Change) -> Iterator[None]:
    """Change the rows of the largest data file, and put it back afterwards."""
    path = max(service.data_dir.rglob("data/**/*.parquet"), key=lambda path: pq.read_metadata(path).num_rows)
    before = path.read_bytes()
    with pq.ParquetFile(path) as file:
        rows = file.read()
    pq.write_table(change(rows), path, store_schema=False)
    yield
    path.write_bytes(before)


def flip(rows: pa.Table) -> pa.Table:
    index = rows.schema.get_field_index("name")
    return rows.set_column(index, rows.schema.field(index), pc.utf8_upper(rows.column("name")))


def test_a_changed_data_file_is_found_by_spark_too(tampered: ServiceProcess, open_spark: OpenSpark) -> None:
    spark = open_spark(uri=tampered.http_url, name="tampered")
    changes: dict[str, tuple[Change, set[str]]] = {
        "loss": (lambda rows: rows.slice(1), {"loss"}),
        "duplicate": (lambda rows: pa.concat_tables([rows, rows.slice(0, 1)]), {"duplicate", "surplus"}),
        "flipped value": (flip, {"difference"}),
    }
    for name, (change, expected) in changes.items():
        with spoiled(tampered, change):
            found = spark_report(spark, "users")
            assert kinds(found) == expected, name
            local = report(tampered, "users")
            assert sorted(f["text"] for f in found["findings"]) == sorted(f["text"] for f in local["findings"])
            assert states(found) == states(local)


def test_the_command_ends_as_without_spark(
    tampered: ServiceProcess, open_spark: OpenSpark, monkeypatch: pytest.MonkeyPatch
) -> None:
    spark = open_spark(uri=tampered.http_url, name="commanded")
    monkeypatch.setattr(commands, "opened_session", lambda *_, **__: contextlib.nullcontext(spark))
    path = max(tampered.data_dir.rglob("data/**/*.parquet"))
    moved = path.rename(path.with_suffix(".away"))
    try:
        result = CliRunner().invoke(main, ["verify", "users", "--spark", "--json"])
    finally:
        moved.rename(path)
    assert result.exit_code == 1, result.output
    [finding] = json.loads(result.stdout)["findings"]
    assert (finding["kind"], Path(finding["file"]).name) == ("unreadable", path.name)
    for arguments, exit_code, shown in (
        (["nothing", "--spark"], 2, "Error: "),
        (["users", "--spark", "--to", "17"], 2, "no such snapshot"),
        (["users", "--master", "local[2]"], 2, "needs --spark"),
    ):
        result = CliRunner().invoke(main, ["verify", *arguments])
        assert (result.exit_code, shown in result.output) == (exit_code, True), result.output
    result = CliRunner().invoke(commands.verify_tables, ["--json"])
    assert [document["table"] for document in json.loads(result.output)] == ["default.users"]


def test_a_dropped_column_is_still_counted_where_it_was_recorded(tmp_path: Path, open_spark: OpenSpark) -> None:
    with service_process(tmp_path) as service:
        service.start()
        spark = open_spark(uri=service.http_url, name="dropped")
        pushed_changes.push_changes(service)
        spark.sql("ALTER TABLE dropped.default.users DROP COLUMN score")
        events = [{**event, "after": {"id": 1}} for event in later_changes(1) if "after" in event]
        pushed_changes.push_changes(service, events)
        found = spark_report(spark, "users")
        assert (found["findings"], found["totalsCompared"], states(found)) == ([], True, 4 * ["verified"])
        assert service.stop() == 0


def test_a_mirror_that_another_client_changed_is_found(tmp_path: Path, open_spark: OpenSpark) -> None:
    with service_process(tmp_path) as service:
        service.start()
        spark = open_spark(uri=service.http_url, name="mirrored")
        every_type.push_every_type(service)
        pushed_changes.push_changes(service)
        config = MirrorConfig(checkpoints=str(tmp_path / "checkpoints"), rows_without_key=RowsWithoutKey.SKIP)
        assert run_mirrors(spark, ["users", "every_type"], config, once=True) == {}
        found = spark_report(spark, "every_type")
        assert (found["findings"], "1 rows compared" in found["notes"][-1]) == ([], True)
        mirror = "mirrored.default.users_current"
        spark.sql(f"UPDATE {mirror} SET name = 'nobody' WHERE id = 2")
        spark.sql(f"INSERT INTO {mirror} SELECT * FROM {mirror} WHERE id = 2")
        spark.sql(f"DELETE FROM {mirror} WHERE id > 1000")
        found = spark_report(spark, "users")
        assert kinds(found) == {"difference", "loss", "duplicate"}
        assert '{"_cdc_row_id":"2"}' in found["findings"][1]["text"]
        # What keeps a mirror from being compared is told with its table, and ends nothing.
        settings = tmp_path / "other.toml"
        settings.write_text('[pipeline.mirror.tables."default.users"]\nkey = ["name"]\n')
        note, _ = compared(spark, "users", config_path=settings)
        assert "is not compared: the mirror was built with another key" in note
        for [path] in spark.sql(f"SELECT file_path FROM {mirror}.files").collect():
            Path(urlparse(path).path).unlink()
        _, texts = compared(spark, "users")
        assert [text.partition(":")[0] for text in texts] == ["mirror default.users_current cannot be read"]
        assert service.stop() == 0


def compared(spark: SparkSession, table: str, **options: Any) -> tuple[str, list[str]]:
    """Compare a mirror alone: what was compared, and what was found."""
    report = Report(table=table)
    compare_mirror(spark, TableIdentifier.parse(table), catalog_of(spark), report=report, options=options)
    return "\n".join(report.notes), [finding.text for finding in report.findings]


def test_a_mirror_is_compared_by_its_key_however_close_and_whatever_it_is_called(
    tmp_path: Path, catalog_url: str, open_spark: OpenSpark
) -> None:
    spark = open_spark(uri=catalog_url, name="named")
    spark.sql("CREATE NAMESPACE named.default")
    spark.sql(
        "CREATE TABLE default.ticks (at timestamp, `count` bigint, home struct<zip: bigint>, _cdc_source string, "
        "_cdc_sequence bigint, _cdc_operation string, _cdc_row_id string, _cdc_timestamp timestamp) USING iceberg "
        "TBLPROPERTIES ('lakefeed.append-only' = 'true')"
    )
    row = "{n}, named_struct('zip', {n}), 's', {n}, 'INSERT', '{n}', now()"
    for number in (1, 2):
        values = f"TIMESTAMP '2026-11-16 00:00:00.00000{number}', {row.format(n=number)}"
        spark.sql(f"INSERT INTO default.ticks VALUES ({values})")
    config = MirrorConfig(checkpoints=str(tmp_path / "checkpoints"), key=("at", "count"))
    assert run_mirrors(spark, ["ticks"], config, once=True) == {}
    note, found = compared(spark, "ticks")
    assert ("2 rows compared" in note, found) == (True, []), "keys differ in a microsecond"

    for old, new in (("count", "number"), ("home.zip", "code")):
        path = f"home.{new}" if "." in old else new
        spark.sql(f"ALTER TABLE default.ticks RENAME COLUMN {old} TO {new}")
        spark.sql(f"""ALTER TABLE default.ticks ALTER COLUMN {path} COMMENT 'formerly ["{old.rpartition(".")[2]}"]'""")
    note, found = compared(spark, "ticks")
    assert ("2 rows compared" in note, found) == (True, []), f"the mirror has not followed yet: {note}"
    assert run_mirrors(spark, ["ticks"], dataclasses.replace(config, key=()), once=True) == {}
    assert "number" in spark.table("default.ticks_current").columns
    note, found = compared(spark, "ticks")
    assert ("2 rows compared" in note, found) == (True, []), "the mirror has followed, and merged nothing since"
    spark.sql("UPDATE default.ticks_current SET home = named_struct('code', 7) WHERE number = 2")
    note, found = compared(spark, "ticks")
    key = '{"at":"2026-11-16T00:00:00.000002Z","number":2}'
    assert found == [f"1 rows are different in mirror default.ticks_current, for example {key}"]
