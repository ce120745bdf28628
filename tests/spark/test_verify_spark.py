"""What Spark does to tables leaves their rows as recorded; and Spark computes the same checksum by itself."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from pyspark.sql import functions as sql

from tests import every_type, pushed_changes
from tests.service_process import LAKEFEED, ServiceProcess, service_process
from tests.spark.conftest import OpenSpark

COMMAND_TIMEOUT_S = 120


def report(service: ServiceProcess, table: str) -> dict[str, Any]:
    command = [LAKEFEED, "verify", table, "--json", "--url", service.http_url]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False, cwd=service.directory
    )
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


def states(found: dict[str, Any]) -> list[str]:
    return [snapshot["state"] for snapshot in found["snapshots"]]


def test_tables_that_spark_compacts_and_expires_stay_as_recorded(tmp_path: Path, open_spark: OpenSpark) -> None:
    with service_process(tmp_path, {"writer.ledger": "true"}) as service:
        service.start()
        spark = open_spark(uri=service.http_url, name="verified")
        every_type.push_every_type(service)
        pushed_changes.push_changes(service)
        for table in ("every_type", "users"):
            rewrite = f"table => 'default.{table}', options => map('min-input-files', '1', 'rewrite-all', 'true')"
            spark.sql(f"CALL verified.system.rewrite_data_files({rewrite})").collect()
            found = report(service, table)
            assert found["findings"] == []
            assert (found["totalsCompared"], states(found)[-1]) == (True, "rewrite")
            assert states(found).count("rewritten") == 2
        later = [{**event, "sequence": event["sequence"] + 100} for event in pushed_changes.EVENTS]
        pushed_changes.push_changes(service, later)
        expiry = "table => 'default.users', older_than => TIMESTAMP '2099-01-01', retain_last => 1"
        spark.sql(f"CALL verified.system.expire_snapshots({expiry})").collect()
        found = report(service, "users")
        assert (found["findings"], found["rows"], states(found)) == ([], 12, ["verified"])
        assert service.stop() == 0


def test_spark_computes_the_same_checksum(tmp_path: Path, open_spark: OpenSpark) -> None:
    with service_process(tmp_path, {"writer.ledger": "true"}) as service:
        service.start()
        spark = open_spark(uri=service.http_url, name="hashed")
        pushed_changes.push_changes(service)
        table = spark.table("hashed.default.users")
        recorded = report(service, "users")["sources"]["shop"]["checksum"]
        fields = json.loads(service.get_text("/v1/namespaces/default/tables/users"))["metadata"]["schemas"][-1][
            "fields"
        ]
        joined = sql.lit(0).cast("long")
        for field in fields:
            joined = joined.bitwiseXOR(_added(field["id"], field["type"], sql.col(field["name"])))
        hashes = [row[0] for row in table.select(sql.xxhash64(joined)).collect()]
        assert service.stop() == 0
    assert f"{sum(hashes) % 2**64:016x}" == recorded


def _added(id_: int, type_: Any, value: Any) -> Any:
    """Write docs/verification.md as Spark's own functions."""
    f, nothing = sql.lit(id_).cast("long"), sql.lit(0).cast("long")
    match type_:
        case {"type": "struct", "fields": fields}:
            added = sql.xxhash64(f, sql.lit(1).cast("long"))
            for field in fields:
                added = added.bitwiseXOR(_added(field["id"], field["type"], value[field["name"]]))
        case {"type": "list", "element-id": element_id, "element": element}:
            parts = sql.transform(value, lambda x, i: sql.xxhash64(_added(element_id, element, x), i.cast("long")))
            size = sql.xxhash64(f, sql.size(value).cast("long"))
            added = sql.aggregate(parts, size, lambda left, right: left.bitwiseXOR(right))
        case "boolean" | "int" | "long":
            added = sql.xxhash64(f, value.cast("long"))
        case _:  # text, doubles and moments go in as they are
            added = sql.xxhash64(f, value)
    return sql.when(value.isNull(), nothing).otherwise(added)
