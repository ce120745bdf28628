"""PyIceberg that has its scans planned by the catalog reads what it reads when it plans them itself."""

from __future__ import annotations

import contextlib
import datetime as dt
from collections.abc import Iterator

import pyarrow as pa
import pytest
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.expressions import (
    And,
    BooleanExpression,
    EqualTo,
    GreaterThanOrEqual,
    In,
    IsNaN,
    IsNull,
    LessThan,
    Not,
    NotEqualTo,
    NotStartsWith,
    Or,
    StartsWith,
)
from pyiceberg.table import Table

from tests.catalog.conftest import Server
from tests.catalog.planning.conftest import SCHEMA, PlanResult, append, rows
from tests.clients import open_duckdb

DAY_TWO = dt.datetime(1970, 1, 3, tzinfo=dt.UTC)

FILTERS = [
    EqualTo("id", 21),
    NotEqualTo("id", 21),
    In("id", [10, 32, 77]),
    And(GreaterThanOrEqual("at", DAY_TWO.isoformat()), LessThan("ratio", 15.5)),
    Or(StartsWith("v", "v1"), EqualTo("ratio", 16.0)),
    NotStartsWith("v", "v2"),
    Not(Or(IsNull("id"), LessThan("id", 21))),
    Or(IsNaN("ratio"), IsNull("v")),
]


@pytest.fixture
def planned(server: Server) -> Iterator[RestCatalog]:
    """PyIceberg with scan planning on the server."""
    catalog = RestCatalog("planned", uri=server.url, **{"scan-planning-mode": "server"})
    with contextlib.closing(catalog):
        yield catalog


def sorted_rows(content: pa.Table) -> list[dict[str, object]]:
    return sorted(content.to_pylist(), key=lambda row: str(row["id"]))


@pytest.mark.parametrize("filter_", FILTERS, ids=str)
def test_rows_are_those_of_a_scan_that_the_client_plans(table: Table, planned: RestCatalog, filter_: BooleanExpression):
    # No null partition: PyIceberg cannot read a plan that has one.
    at = pa.array([DAY_TWO, DAY_TWO], pa.timestamp("us", "UTC"))
    ids, ratios = pa.array([None, 40], pa.int64()), pa.array([float("nan"), None], pa.float64())
    append(table, pa.table({"id": ids, "at": at, "v": [None, "w"], "ratio": ratios}))
    assert planned.supports_server_side_planning()
    theirs = table.refresh().scan(row_filter=filter_).to_arrow()
    ours = planned.load_table("db.t").scan(row_filter=filter_).to_arrow()
    assert str(sorted_rows(ours)) == str(sorted_rows(theirs))


def test_rows_that_duckdb_deleted_stay_deleted(server: Server, pyiceberg: RestCatalog, planned: RestCatalog):
    pyiceberg.create_namespace("db")
    table = pyiceberg.create_table("db.t", SCHEMA)
    table.append(rows(1, 10, 11, 12))
    table.append(rows(2, 20, 21))
    with contextlib.closing(open_duckdb(server.url)) as connection:
        connection.execute("DELETE FROM lake.db.t WHERE id = 11")
    assert table.refresh().current_snapshot().summary["total-position-deletes"] == "1"
    scan = planned.load_table("db.t").scan()
    assert [len(task.delete_files) for task in scan.plan_files()] == [1, 1]
    assert sorted(scan.to_arrow()["id"].to_pylist()) == [10, 12, 20, 21]


def test_delete_file_that_is_older_than_a_data_file_is_not_for_it(server: Server, pyiceberg: RestCatalog, plan):
    pyiceberg.create_namespace("db")
    pyiceberg.create_table("db.t", SCHEMA).append(rows(1, 10, 11, 12))
    with contextlib.closing(open_duckdb(server.url)) as connection:
        connection.execute("DELETE FROM lake.db.t WHERE id = 11")
    pyiceberg.load_table("db.t").append(rows(2, 20, 21))
    planned: PlanResult = plan()
    deletes = {task["data-file"]["record-count"]: task["deletes"] for task in planned.tasks}
    assert [delete["content"] for delete in deletes[3]] == ["position-deletes"]
    assert deletes[2] == []
