"""Backfills for tests: a database that is part of Spark's JVM, the fold of a change table, and inputs that fail."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import SparkSession
from websockets.sync.client import connect

from lakefeed.contract.verification import Range
from lakefeed.pipeline.backfill.inputs import BackfillConfig, FileInput, parse_position
from lakefeed.pipeline.backfill.runner import Backfill, BackfillRequest, BackfillResult
from lakefeed.pipeline.backfill.target import TargetTable
from lakefeed.pipeline.spark.tables import TableIdentifier
from lakefeed.pipeline.verification.commands import verify_all
from tests.service_process import ServiceProcess

CATALOG = "filled"
SOURCE = "shop"
COMMAND_TIMEOUT_S = 900


class Derby:
    """A database in memory, which Spark brings along; tables are read by JDBC like those of any other."""

    def __init__(self, spark: SparkSession, name: str) -> None:
        self.url = f"jdbc:derby:memory:{name};create=true"
        jvm: Any = spark._jvm
        jvm.java.lang.Class.forName("org.apache.derby.jdbc.EmbeddedDriver")
        self._connection = jvm.java.sql.DriverManager.getConnection(self.url)

    def run(self, *statements: str) -> None:
        statement = self._connection.createStatement()
        for text in statements:
            statement.execute(text)
        statement.close()

    def close(self) -> None:
        self._connection.close()


@dataclass(slots=True)
class Pusher:
    """A source that pushes changes, in order, each committed unless it is told not to."""

    service: ServiceProcess
    sequence: int = 0
    tables: dict[str, Any] = field(default_factory=dict)

    def declare(self, tables: dict[str, Any]) -> None:
        """Declare columns, from the next change on."""
        self.tables = tables

    def push(self, table: str, operation: str, row: Mapping[str, Any], *, flush: bool = True) -> None:
        self.sequence += 1
        image = "before" if operation == "DELETE" else "after"
        event = {
            "sequence": self.sequence,
            "operation": operation,
            "table": table,
            "rowId": str(row["id"]),
            image: dict(row),
        }
        with connect(self.service.ws_url) as socket:
            if self.tables:
                socket.send(json.dumps({"type": "connect", "sourceDoId": SOURCE, "tables": self.tables}))
                assert json.loads(socket.recv(timeout=240))["type"] == "status"
            message = {"type": "cdc_batch", "sourceDoId": SOURCE, "sequenceNumber": 0, "events": [event]}
            socket.send(json.dumps(message))
            ack = json.loads(socket.recv(timeout=240))
        assert ack["type"] == "ack", ack
        if flush:
            assert self.service.flush()["success"]


def target(spark: SparkSession, catalog: str, table: str) -> TargetTable:
    return TargetTable(spark, catalog, TableIdentifier.parse(table))


def request(*, position: str, run: str = "", key: tuple[str, ...] = ("id",), **config: Any) -> BackfillRequest:
    return BackfillRequest(
        source=SOURCE, key=key, position=parse_position(position), run=run, config=BackfillConfig(**config)
    )


def backfill(into: TargetTable, source_input: Any, wanted: BackfillRequest, **hooks: Any) -> BackfillResult:
    work = Backfill(into, source_input, wanted, **hooks)
    return work.run(work.prepare())


def rows_of(into: TargetTable) -> list[dict[str, Any]]:
    return [row.asDict() for row in into.spark.table(into.sql).collect()]


def fold(rows: list[dict[str, Any]], columns: tuple[str, ...]) -> dict[Any, tuple[Any, ...]]:
    """Give the last state of each row: by position, and of equal positions the change after what was only read."""
    state: dict[Any, tuple[Any, ...]] = {}
    for row in sorted(rows, key=lambda each: (each["_cdc_sequence"], each["_cdc_operation"] != "READ")):
        if row["_cdc_operation"] == "DELETE":
            state.pop(row["id"], None)
        else:
            state[row["id"]] = tuple(row[name] for name in columns)
    return state


def check_sound(spark: SparkSession, table: str) -> None:
    [report] = verify_all(spark, [table], Range(), {})
    assert report.findings == []
    assert report.totals_compared


def people(count: int, start: int = 0) -> pa.Table:
    ids = range(start, start + count)
    return pa.table(
        {
            "id": pa.array(ids, pa.int64()),
            "name": [f"name {n}" for n in ids],
            "paid": pa.array([Decimal(n) / 4 for n in ids], pa.decimal128(9, 2)),
            "home": [{"city": f"city {n}", "zip": n} for n in ids],
            "born": pa.array([dt.date(2000, 1, 1)] * count, pa.date32()),
        }
    )


def write_parquet(directory: Path, files: int, rows: int) -> FileInput:
    directory.mkdir()
    for number in range(files):
        pq.write_table(people(rows, number * rows), directory / f"part-{number}.parquet")
    return FileInput(format="parquet", path=str(directory))
