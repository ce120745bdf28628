"""What is in quarantine is the whole change, whatever its table would have kept of it."""

from __future__ import annotations

import contextlib
from typing import Any

import orjson
import pytest

from lakefeed.writer.wal.payload import encode_frame
from tests.unwritable_tables import create_unwritable, make_writable
from tests.writer.feeding import read_columns, running_feed
from tests.writer.quarantine.bench import lake_bench
from tests.writer.sample_rows import event, frame, json_groups

EVENTS = [
    event(1, operation="UPDATE", rowId="1", before={"id": 1, "score": 0.5}, after={"id": 1, "score": 1.5}),
    event(2, table="orders", before={"id": 9}, after={"id": 9}),
    event(3, operation="INSERT", rowId="2", after={"id": 2, "score": 2.5}),
    event(4, operation="DELETE", rowId="1", before={"id": 1, "score": 1.5}),
]


def read_quarantine(lake: Any) -> list[tuple[Any, ...]]:
    with contextlib.closing(lake.open_pyiceberg()) as catalog:
        rows = catalog.load_table("default.lakefeed_quarantine").scan().to_arrow().sort_by("sequence").to_pylist()
    return [
        tuple(None if row[name] is None else orjson.loads(row[name]) for name in ("row_image", "before_image"))
        for row in rows
    ]


@pytest.mark.parametrize("keep_before", [True, False])
async def test_a_refused_row_keeps_the_image_from_before_whatever_its_table_keeps(tmp_path, local_lake, keep_before):
    create_unwritable(local_lake.catalog_url, "users")
    async with running_feed(tmp_path, local_lake, keep_before=keep_before) as running:
        await running.log.append([encode_frame(frame(EVENTS, after_sequence=0))], head=lambda: b"{}")
        assert (await running.flush())["success"]
    assert read_quarantine(local_lake) == [
        ({"id": 1, "score": 1.5}, {"id": 1, "score": 0.5}),
        ({"id": 2, "score": 2.5}, None),
        ({"id": 1, "score": 1.5}, {"id": 1, "score": 1.5}),
    ]


async def test_the_image_from_before_is_there_for_a_table_that_keeps_it_by_the_time_of_the_replay(tmp_path, local_lake):
    create_unwritable(local_lake.catalog_url, "users")
    async with running_feed(tmp_path, local_lake, keep_before=False) as running:
        await running.log.append([encode_frame(frame(EVENTS, after_sequence=0))], head=lambda: b"{}")
        await running.flush()
    make_writable(local_lake.catalog_url, "users")
    async with lake_bench(local_lake, keep_before=True) as bench:
        report = await bench.replay()
    assert (report.replayed, report.failed) == (3, 0)
    assert [(n, before and orjson.loads(before)) for n, before in read_columns(local_lake, "id", "_cdc_before")] == [
        (1, {"id": 1, "score": 0.5}),
        (2, None),
        (1, {"id": 1, "score": 1.5}),
    ]


def test_any_part_of_a_group_has_the_images_from_before():
    frames = [
        (0, frame([event(n, before={"n": n}, table="users" if n % 2 else "orders") for n in range(1, 9)])),
        (1, frame([event(n, before={"b": n}) for n in range(1, 4)], source="b", after_sequence=1)),
    ]
    part = json_groups(frames)["users"].between(1, 5)
    assert [orjson.loads(bytes(event.before)) for event in part.events] == [{"n": 3}, {"n": 5}, {"n": 7}, {"b": 2}]
