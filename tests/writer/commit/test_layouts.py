"""Partitions, sort orders and files of real tables: as configured, changed by configuration, and read by engines."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import orjson
import pyarrow.parquet as pq
import pytest
from pyiceberg.expressions import EqualTo
from pyiceberg.table.sorting import SortDirection
from pyiceberg.transforms import BucketTransform
from pyiceberg.types import StringType

from lakefeed.contract.changes import SourceId
from lakefeed.writer.wal.payload import Encoding, Frame, encode_frame
from tests.fakes import CatalogFault, FlakyCatalog
from tests.writer.feeding import Running, running_feed, wait_for

DAY_MS = 86_400_000
NOW_MS = 1_794_787_200_000  # 2026-11-16
BY_DAY = "day(_cdc_timestamp)"


async def log_events(running: Running, first: int, *events: dict[str, Any], table: str = "orders") -> None:
    """Log one batch whose events are numbered from `first`."""
    numbered = [
        {"sequence": first + n, "operation": "INSERT", "table": table, "rowId": "", "timestamp": NOW_MS, **event}
        for n, event in enumerate(events)
    ]
    body = orjson.dumps({"type": "cdc_batch", "events": numbered})
    last = first + len(events) - 1
    frame = Frame(SourceId("shop"), 0, -1, last, NOW_MS * 1000, Encoding.JSON_BATCH, body)
    await running.log.append([encode_frame(frame)], head=lambda: b"{}")


def rows(*values: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"after": value} for value in values]


@contextlib.contextmanager
def opened(lake, name: str = "default.orders"):
    with contextlib.closing(lake.open_pyiceberg()) as catalog:
        yield catalog.load_table(name)


def read(lake, where: str = "true") -> list[int]:
    with lake.open_duckdb() as connection:
        query = f"SELECT _cdc_sequence FROM lake.default.orders WHERE {where} ORDER BY 1"
        return [row[0] for row in connection.execute(query).fetchall()]


def files_of(lake) -> list[dict[str, Any]]:
    with opened(lake) as table:
        return table.inspect.files().to_pylist()


async def commit(tmp_path, lake, settings: dict[str, Any], first: int, *events: dict[str, Any]) -> None:
    """Run a service with settings for the table, give it events, and stop."""
    async with running_feed(tmp_path, lake, tables={"default.orders": settings}) as running:
        await log_events(running, first, *events)
        await running.flush()


@pytest.mark.parametrize(
    ("partition", "where", "wanted", "files_read"),
    [
        ("bucket[8](id)", EqualTo("id", 7), [7], 1),
        ("truncate[10](id)", EqualTo("id", 7), [7], 1),
        ("truncate[1](region)", EqualTo("region", "eu-1"), [1, 4, 7, 10, 13, 16, 19], 1),
        ("identity(region), bucket[2](id)", EqualTo("region", "eu-1"), [1, 4, 7, 10, 13, 16, 19], 2),
    ],
)
async def test_engines_read_the_right_rows_from_the_right_files(
    tmp_path, local_lake, partition, where, wanted, files_read
):
    events = rows(*({"id": n, "region": ["us-0", "eu-1", None][n % 3]} for n in range(20)))
    await commit(tmp_path, local_lake, {"partition": partition}, 0, *events)
    with opened(local_lake) as table:
        scan = table.scan(row_filter=where)
        assert sorted(scan.to_arrow()["_cdc_sequence"].to_pylist()) == wanted
        assert len(list(scan.plan_files())) == files_read < len(list(table.scan().plan_files()))
    assert read(local_lake, f"{where.term.name} = {where.literal.value!r}") == wanted
    assert read(local_lake) == list(range(20))


async def test_changed_setting_evolves_the_table_and_old_files_keep_their_partitions(tmp_path, local_lake):
    await commit(tmp_path, local_lake, {"partition": BY_DAY}, 1, *rows({"id": 1}))
    await commit(tmp_path, local_lake, {"partition": f"{BY_DAY}, bucket[4](id)"}, 2, *rows({"id": 2}, {"id": 3}))
    with opened(local_lake) as table:
        assert {field.name: field.field_id for field in table.spec().fields} == {
            "_cdc_timestamp_day": 1000,
            "id_bucket_4": 1001,
        }
        manifests = table.current_snapshot().manifests(table.io)
        assert sorted(manifest.partition_spec_id for manifest in manifests) == [0, 1]
        assert len(list(table.scan(row_filter=EqualTo("id", 2)).plan_files())) < 3
    assert read(local_lake) == [1, 2, 3]
    assert read(local_lake, "id = 1") == [1]
    assert read(local_lake, "id = 3") == [3]


async def test_setting_that_is_changed_back_takes_up_the_old_spec_and_its_field_ids(tmp_path, local_lake):
    await commit(tmp_path, local_lake, {"partition": BY_DAY}, 1, *rows({"id": 1}))
    await commit(tmp_path, local_lake, {"partition": "bucket[4](id)"}, 2, *rows({"id": 2}))
    await commit(tmp_path, local_lake, {"partition": f"bucket[4](id), {BY_DAY}"}, 3, *rows({"id": 3}))
    await commit(tmp_path, local_lake, {"partition": BY_DAY}, 4, *rows({"id": 4}))
    with opened(local_lake) as table:
        specs = {number: [field.field_id for field in spec.fields] for number, spec in table.specs().items()}
        assert specs == {0: [1000], 1: [1001], 2: [1001, 1000]}
        assert table.spec().spec_id == 0
    assert read(local_lake) == [1, 2, 3, 4]


async def test_merged_manifests_hold_files_of_one_spec_each(tmp_path, local_lake):
    merging = {"properties": {"commit.manifest.min-count-to-merge": "2"}}
    for number, partition in enumerate([BY_DAY] * 3 + ["bucket[4](id)"] * 3):
        settings = {"partition": partition, **merging}
        await commit(tmp_path, local_lake, settings, number + 1, *rows({"id": number}))
    with opened(local_lake) as table:
        for manifest in table.current_snapshot().manifests(table.io):
            width = len(table.specs()[manifest.partition_spec_id].fields)
            assert all(len(entry.data_file.partition) == width for entry in manifest.fetch_manifest_entry(table.io))
        assert len({manifest.partition_spec_id for manifest in table.current_snapshot().manifests(table.io)}) == 2
    assert read(local_lake) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    "fault",
    [CatalogFault.CONFLICT, CatalogFault.ERROR_BEFORE, CatalogFault.ERROR_AFTER, CatalogFault.HANG_UP_AFTER],
)
async def test_any_fault_while_a_table_follows_a_changed_setting_ends_with_every_row_once(tmp_path, local_lake, fault):
    await commit(tmp_path, local_lake, {}, 1, *rows({"id": 1}))
    sections = {"default.orders": {"partition": "bucket[4](id)", "sort": "id"}}
    async with (
        FlakyCatalog(local_lake.catalog_url) as flaky,
        running_feed(tmp_path, local_lake, catalog_url=flaky.url, tables=sections) as running,
    ):
        flaky.commit_faults.append(fault)  # the first commit is the one that changes the layout
        await log_events(running, 2, *rows({"id": 2}))
        await running.flush()
    with opened(local_lake) as table:
        assert (len(table.specs()), table.spec().spec_id, table.sort_order().order_id) == (2, 1, 1)
    assert read(local_lake) == [1, 2]


async def test_late_changes_go_to_the_partition_of_their_day(tmp_path, local_lake):
    on_time, late = {"after": {"id": 1}}, {"after": {"id": 2}, "timestamp": NOW_MS - 400 * DAY_MS}
    await commit(tmp_path, local_lake, {}, 1, on_time, late, on_time)
    await commit(tmp_path, local_lake, {}, 4, late)
    with opened(local_lake) as table:
        partitions = {
            str(each["partition"]["_cdc_timestamp_day"]): each["record_count"]
            for each in table.inspect.partitions().to_pylist()
        }
    assert partitions == {"2026-11-16": 2, "2025-10-12": 2}
    assert read(local_lake, "_cdc_timestamp < '2026-01-01'") == [2, 4]


async def test_layout_that_an_engine_has_altered_is_not_altered_back(tmp_path, local_lake):
    await commit(tmp_path, local_lake, {"partition": BY_DAY}, 1, *rows({"id": 1}))
    with opened(local_lake) as table, table.update_spec() as update:
        update.add_field("id", BucketTransform(4), "by_id")
    await commit(tmp_path, local_lake, {"partition": BY_DAY}, 2, *rows({"id": 2}))
    with opened(local_lake) as table:
        assert [field.name for field in table.spec().fields] == ["_cdc_timestamp_day", "by_id"]
    assert read(local_lake) == [1, 2]


async def test_new_table_waits_for_its_partition_column_and_says_so(tmp_path, local_lake):
    sections = {"default.orders": {"partition": "identity(region)"}}
    async with running_feed(tmp_path, local_lake, tables=sections) as running:
        await log_events(running, 1, *rows({"id": 1}))
        flushing = asyncio.create_task(running.flush("orders"))
        await wait_for(lambda: bool(running.status("default.orders").get("problem")))
        assert running.status("default.orders")["problem"] == (
            "partition names an unknown column: term=identity(region)"
        )
        await log_events(running, 2, *rows({"id": 2, "region": "eu"}))
        await flushing
        await running.flush("orders")
    assert read(local_lake) == [1, 2]
    assert read(local_lake, "region = 'eu'") == [2]


async def test_table_that_exists_goes_on_when_its_new_setting_cannot_be_followed(tmp_path, local_lake):
    await commit(tmp_path, local_lake, {}, 1, *rows({"id": 1}))
    sections = {"default.orders": {"partition": "day(id)", "sort": "nowhere"}}
    async with running_feed(tmp_path, local_lake, tables=sections) as running:
        await log_events(running, 2, *rows({"id": 2}))
        await running.flush()
        problem = running.status("default.orders")["layoutProblem"]
    assert "transform=day type=long" in problem
    assert "column=nowhere" in problem
    assert read(local_lake) == [1, 2]


async def test_rows_lie_in_the_configured_order_and_files_and_table_say_so(tmp_path, local_lake):
    settings = {"sort": "id desc", "properties": {"owner": "sales"}}
    await commit(tmp_path, local_lake, settings, 1, *rows({"id": 2}, {"id": None}, {"id": 9}, {"id": 4}))
    with opened(local_lake) as table:
        (field,) = table.sort_order().fields
        assert (field.source_id, field.direction) == (table.schema().find_field("id").field_id, SortDirection.DESC)
        assert table.properties["owner"] == "sales"
        (file,) = table.scan().plan_files()
        assert file.file.sort_order_id == table.sort_order().order_id
        path = file.file.file_path.removeprefix("file://")
    assert pq.read_table(path)["id"].to_pylist() == [9, 4, 2, None]


async def test_order_and_properties_follow_a_changed_setting(tmp_path, local_lake):
    await commit(tmp_path, local_lake, {}, 1, *rows({"id": 1}))
    await commit(tmp_path, local_lake, {"sort": "later", "properties": {"a": "1"}}, 2, *rows({"id": 2}))
    with opened(local_lake) as table:
        assert (table.sort_order().fields, table.properties["a"]) == ([], "1")  # its column has not come yet
    await commit(tmp_path, local_lake, {"sort": "later"}, 3, *rows({"id": 3, "later": 1}))
    with opened(local_lake) as table:
        assert len(table.sort_order().fields) == 1
    await commit(tmp_path, local_lake, {"sort": ""}, 4, *rows({"id": 4}))
    with opened(local_lake) as table:
        assert table.sort_order().order_id == 0


async def test_sort_order_of_a_new_table_waits_for_its_column_and_rows_do_not(tmp_path, local_lake):
    settings = {"sort": "later desc"}
    await commit(tmp_path, local_lake, settings, 1, *rows({"id": 1}))
    with opened(local_lake) as table:
        assert table.sort_order().order_id == 0
    await commit(tmp_path, local_lake, settings, 2, *rows({"later": 1}, {"later": 2}))
    with opened(local_lake) as table:
        assert len(table.sort_order().fields) == 1
        newest = max(table.scan().plan_files(), key=lambda task: task.file.record_count)
        path = newest.file.file_path.removeprefix("file://")
    assert pq.read_table(path)["later"].to_pylist() == [2, 1]


async def test_table_with_a_reserved_column_that_is_no_longer_filled_goes_on_with_nulls_in_it(tmp_path, local_lake):
    await commit(tmp_path, local_lake, {}, 1, *rows({"id": 1}))
    settings = {"partition": "identity(_cdc_partition)"}
    with opened(local_lake) as table, table.update_schema() as update:
        update.add_column("_cdc_partition", StringType())
    await commit(tmp_path, local_lake, settings, 2, *rows({"id": 2}))
    await commit(tmp_path, local_lake, settings, 3, *rows({"id": 3}))
    assert read(local_lake) == [1, 2, 3]
    assert read(local_lake, "_cdc_partition IS NULL") == [1, 2, 3]


async def test_before_images_are_kept_for_those_tables_that_ask(tmp_path, local_lake):
    async with running_feed(tmp_path, local_lake, tables={"default.orders": {"keep_before": True}}) as running:
        update = {"operation": "UPDATE", "before": {"id": 0}, "after": {"id": 1}}
        await log_events(running, 1, update)
        await log_events(running, 2, update, table="users")
        await running.flush()
    with opened(local_lake) as orders, opened(local_lake, "default.users") as users:
        assert orders.scan().to_arrow()["_cdc_before"].to_pylist() == ['{"id":0}']
        assert "_cdc_before" not in users.schema().column_names


async def test_explanation_tells_the_last_flush_and_the_next(tmp_path, local_lake):
    sections = {"default.orders": {"flush_max_changes": 100}}
    async with running_feed(tmp_path, local_lake, tables=sections) as running:
        assert running.feed.status.explain_flush("orders", now=0.0) is None
        await log_events(running, 1, *rows({"id": 1}))
        await running.flush()
        await log_events(running, 2, *rows({"id": 2}, {"id": 3}))
        await wait_for(lambda: running.feed.tables["default.orders"].pending.buffer.rows == 2)
        status = running.status("default.orders")
        explained = running.feed.status.explain_flush("orders", now=running.feed._clock())
    assert explained is not None
    assert (explained["last"]["reason"], explained["last"]["rows"], explained["last"]["partitions"]) == (
        "request",
        1,
        1,
    )
    assert (explained["bufferedRows"], explained["thresholds"][0]["limit"]) == (2, 100)
    assert explained["next"]["reason"] == status["nextFlushReason"]
