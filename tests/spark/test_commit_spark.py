"""Spark looks after a table while we commit to it: compaction, manifest rewrites and expiry; every row stays, once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests import pushed_changes
from tests.service_process import service_process
from tests.spark.conftest import OpenSpark

MAINTENANCE = (
    "rewrite_data_files(table => 'default.users', options => map('min-input-files', '2'))",
    "rewrite_manifests('default.users')",
    "expire_snapshots(table => 'default.users', older_than => TIMESTAMP '2099-01-01', retain_last => 1)",
)


def batch(number: int) -> list[dict[str, Any]]:
    return [{**event, "sequence": 100 * number + event["sequence"]} for event in pushed_changes.EVENTS]


def test_our_commits_go_on_around_sparks_maintenance(tmp_path: Path, open_spark: OpenSpark) -> None:
    with service_process(tmp_path) as service:
        service.start()
        spark = open_spark(uri=service.http_url, name="kept")
        for number, call in enumerate(MAINTENANCE):
            pushed_changes.push_changes(service, batch(number))
            spark.sql(f"CALL kept.system.{call}").collect()
        pushed_changes.push_changes(service, batch(len(MAINTENANCE)))
        spark.sql("REFRESH TABLE kept.default.users")
        sequences = [row[0] for row in spark.sql("SELECT _cdc_sequence FROM kept.default.users").collect()]
        assert service.stop() == 0
    assert sorted(sequences) == [100 * number + event for number in range(4) for event in range(1, 7)]


def event(sequence: int, **after: Any) -> dict[str, Any]:
    return {"sequence": sequence, "operation": "INSERT", "table": "users", "rowId": str(sequence), "after": after}


def test_values_of_a_column_that_spark_drops_or_makes_anew_are_all_there(tmp_path: Path, open_spark: OpenSpark) -> None:
    with service_process(tmp_path) as service:
        service.start()
        spark = open_spark(uri=service.http_url, name="altered")
        pushed_changes.push_changes(service, [event(1, id=1, note="a", at=1731769200000)])
        spark.sql("ALTER TABLE altered.default.users DROP COLUMN note")
        pushed_changes.push_changes(service, [event(2, id=2, note="b", at=1731769200000)])
        spark.sql("ALTER TABLE altered.default.users DROP COLUMN at")
        spark.sql("ALTER TABLE altered.default.users ADD COLUMN at TIMESTAMP")
        pushed_changes.push_changes(service, [event(3, id=3, note="c", at=1731769200000)])
        spark.sql("REFRESH TABLE altered.default.users")
        found = spark.sql("SELECT id, note, at, _cdc_rescued FROM altered.default.users ORDER BY id").collect()
        assert service.stop() == 0
    assert [tuple(row) for row in found] == [
        (1, None, None, None),
        (2, "b", None, None),
        (3, "c", None, '{"at":1731769200000}'),
    ]
