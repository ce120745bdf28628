"""A partitioned table with a few snapshots, written by PyIceberg, and a client that plans scans of it."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.transforms import DayTransform
from pyiceberg.types import DoubleType, LongType, NestedField, StringType, TimestamptzType

from tests.catalog.conftest import Client

PATH = "namespaces/db/tables/t"
DAY_US = 86_400_000_000

SCHEMA = Schema(
    NestedField(1, "id", LongType(), required=False),
    NestedField(2, "at", TimestamptzType(), required=False),
    NestedField(3, "v", StringType(), required=False),
    NestedField(4, "ratio", DoubleType(), required=False),
)
SPEC = PartitionSpec(PartitionField(source_id=2, field_id=1000, transform=DayTransform(), name="at_day"))


def rows(day: int, *ids: int) -> pa.Table:
    """Make rows of one day."""
    return pa.table(
        {
            "id": pa.array(ids, pa.int64()),
            "at": pa.array([day * DAY_US + number for number in ids], pa.timestamp("us", "UTC")),
            "v": [f"v{number}" for number in ids],
            "ratio": pa.array([number / 2 for number in ids], pa.float64()),
        }
    )


@dataclass(frozen=True, slots=True)
class PlanResult:
    """A plan with all of its pages: tasks with their delete files in place."""

    first: dict[str, Any]
    tasks: list[dict[str, Any]]

    @property
    def sizes(self) -> list[int]:
        """The row counts of the files to read, by which tests know them."""
        return sorted(task["data-file"]["record-count"] for task in self.tasks)

    @property
    def paths(self) -> set[str]:
        return {task["data-file"]["file-path"] for task in self.tasks}


@pytest.fixture
def table(pyiceberg: RestCatalog) -> Table:
    """A file of 1 row on day 1, of 2 rows on day 2, of 3 rows on day 3, each of a snapshot of its own."""
    pyiceberg.create_namespace("db")
    table = pyiceberg.create_table("db.t", SCHEMA, partition_spec=SPEC)
    for content in (rows(1, 10), rows(2, 20, 21), rows(3, 30, 31, 32)):
        append(table, content)
    return table


def append(table: Table, content: pa.Table) -> None:
    """Append one file. PyIceberg writes partitions by day only of files that exist already."""
    path = Path(table.location().removeprefix("file://")) / "data" / f"{uuid.uuid4()}.parquet"
    path.parent.mkdir(exist_ok=True)
    pq.write_table(content, path)
    table.add_files([f"file://{path}"])


@pytest.fixture
def plan(client: Client) -> Callable[..., PlanResult]:
    """Plan a scan, fetching all tasks."""

    def run(filter_: Any = None, **options: Any) -> PlanResult:
        body = {name.replace("_", "-"): value for name, value in options.items()}
        status, first = client.post(f"{PATH}/plan", body if filter_ is None else {**body, "filter": filter_})
        assert (status, first["status"]) == (200, "completed"), first
        return PlanResult(first, list(all_tasks(client, first)))

    return run


def all_tasks(client: Client, first: dict[str, Any]) -> list[dict[str, Any]]:
    tasks, waiting = [], [first]
    while waiting:
        answer = waiting.pop()
        for task in answer["file-scan-tasks"]:
            deletes = [answer["delete-files"][index] for index in task.get("delete-file-references", ())]
            tasks.append({**task, "deletes": deletes})
        for plan_task in answer.get("plan-tasks", ()):
            status, page = client.post(f"{PATH}/tasks", {"plan-task": plan_task})
            assert status == 200, page
            waiting.append(page)
    return tasks
