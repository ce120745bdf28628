"""A table's share of the log is bounded: what it cannot take moves to the quarantine, nothing is lost or doubled."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lakefeed.contract.changes import Position, SourceId, TableName
from lakefeed.contract.errors import WalFull
from lakefeed.settings import MIB
from lakefeed.writer.config import LogConfig
from tests.writer.conftest import Lake
from tests.writer.feeding import WAIT_S, Running, read_columns, read_sequences, running_feed, shop, wait_for
from tests.writer.quarantine.bench import lake_bench

SHOP = SourceId("shop")
LITTLE_LOG = LogConfig(segment_max_bytes=MIB, max_bytes=8 * MIB, table_max_share=0.25)
SMALL = {"flush_max_changes": 200, "flush_max_bytes": 48 * 1024, "buffer_max_bytes": 192 * 1024}
BATCH = 20


def wide(n: int) -> dict[str, Any]:
    return {"id": n, "text": "x" * 2_000}


async def push_until(running: Running, condition: Callable[[], bool]) -> int:
    """Push to `bad` and `good` in turns until something happens; tell the next sequence."""
    end = 0
    async with asyncio.timeout(WAIT_S):
        while not condition():
            for table in ("bad", "good"):
                await running.append(range(end, end + BATCH), table=table, row=wide)
                end += BATCH
            await running.flush("good")
    return end


def pushed_to_bad(end: int) -> list[int]:
    return [sequence for start in range(0, end, 2 * BATCH) for sequence in range(start, start + BATCH)]


def quarantined_changes(running: Running) -> float:
    return running.metric("lakefeed_writer_quarantined_changes_total", "default.bad")


def read_quarantine(lake: Lake) -> list[dict[str, Any]]:
    with contextlib.closing(lake.open_pyiceberg()) as catalog:
        return catalog.load_table("default.lakefeed_quarantine").scan().to_arrow().sort_by("sequence").to_pylist()


def check_that_each_row_is_in_one_of_both(lake: Lake, *, end: int) -> None:
    aside = read_quarantine(lake)
    written = [sequence for _, sequence in read_sequences(lake, "default.bad")]
    assert written, "it went on"
    assert [row["sequence"] for row in aside] + written == pushed_to_bad(end), "the oldest aside, all others written"
    assert {(row["table_name"], row["reason"]) for row in aside} == {("default.bad", "log_share")}


async def test_table_that_holds_more_than_its_share_of_the_log_goes_on_without_its_oldest_rows(
    tmp_path: Path, local_lake: Lake
) -> None:
    async with running_feed(tmp_path, local_lake, log_config=LITTLE_LOG, **SMALL) as running:
        running.store.broken = lambda location: "/bad-" in location
        end = await push_until(running, lambda: quarantined_changes(running) > 0)
        await wait_for(lambda: running.is_evicted("default.bad"))
        assert running.status("default.bad")["logBytes"] <= LITTLE_LOG.max_bytes * LITTLE_LOG.table_max_share
        assert running.log.first_offset > 0, "the log got room"
        running.store.broken = lambda _: False
        await wait_for(lambda: running.status("default.bad")["state"] == "writing")
        assert (await running.flush())["success"]
        assert running.feed.status.committed_position(SHOP) == Position(0, end - 1)
    check_that_each_row_is_in_one_of_both(local_lake, end=end)


async def test_table_that_starts_again_leaves_out_what_was_drained_from_it(tmp_path: Path, local_lake: Lake) -> None:
    async with running_feed(tmp_path, local_lake, log_config=LITTLE_LOG, **SMALL) as running:
        running.store.broken = lambda location: "/bad-" in location
        end = await push_until(running, lambda: quarantined_changes(running) > 0)
    async with running_feed(tmp_path, local_lake, log_config=LITTLE_LOG, **SMALL) as running:
        assert (await running.flush())["success"]
    check_that_each_row_is_in_one_of_both(local_lake, end=end)


async def test_rows_that_were_drained_to_quarantine_are_replayed_once_whatever_is_read_again(
    tmp_path: Path, local_lake: Lake
) -> None:
    bad = TableName(("default",), "bad")
    async with running_feed(tmp_path, local_lake, log_config=LITTLE_LOG, **SMALL) as running:
        running.store.broken = lambda location: "/bad-" in location
        end = await push_until(running, lambda: quarantined_changes(running) > 0)
        await wait_for(lambda: running.is_evicted("default.bad"))
        async with lake_bench(local_lake) as bench:  # while the table's other rows are still in the log
            first = await bench.replay(table=bad)
    async with running_feed(tmp_path, local_lake, log_config=LITTLE_LOG, **SMALL) as running:
        assert (await running.flush())["success"]
        assert running.feed.status.committed_position(SHOP) == Position(0, end - 1)
    async with lake_bench(local_lake) as bench:  # rows may have been on their way when the first one looked
        second = await bench.replay(table=bad)
        assert (await bench.contents()).entries.num_rows == 0
    assert first.replayed > 0
    assert [(report.found, report.failed) for report in (first, second)] == [(0, 0), (0, 0)]
    assert first.replayed + second.replayed == len(read_quarantine(local_lake)) // 2, "a row each that says so"
    rows = read_columns(local_lake, "_cdc_sequence", "id", "text", table="default.bad")
    assert rows == [(n, n, "x" * 2_000) for n in pushed_to_bad(end)]


async def test_log_fills_and_keeps_everything_when_the_quarantine_cannot_be_written_either(
    tmp_path: Path, local_lake: Lake
) -> None:
    async with running_feed(tmp_path, local_lake, log_config=LITTLE_LOG, **SMALL) as running:
        running.store.broken = lambda location: "/bad-" in location or "/lakefeed_quarantine-" in location
        with pytest.raises(WalFull):
            await push_until(running, lambda: False)
        assert running.log.first_offset == 0
        assert running.status("default.bad")["state"] == "quarantining"
        assert "lakefeed_quarantine" in running.status("default.bad")["problem"]


async def test_outage_of_all_tables_moves_nothing_to_the_quarantine(tmp_path: Path, local_lake: Lake) -> None:
    async with running_feed(tmp_path, local_lake, log_config=LITTLE_LOG, **SMALL) as running:
        running.store.broken = lambda _: True
        end = 0
        with contextlib.suppress(WalFull):
            while True:
                table = "bad" if end % (2 * BATCH) == 0 else "good"
                await running.append(range(end, end + BATCH), table=table, row=wide)
                end += BATCH
        await wait_for(lambda: running.feed.status.buffer_status()["pausedTables"] == 2)
        assert "default.lakefeed_quarantine" not in running.feed.tables
        running.store.broken = lambda _: False
        await wait_for(lambda: running.feed.status.buffer_status()["tablesBehind"] == 0)
        assert (await running.flush())["success"]
        assert "default.lakefeed_quarantine" not in running.feed.tables
    written = [read_sequences(local_lake, f"default.{table}") for table in ("bad", "good")]
    assert sorted(written[0] + written[1]) == shop(*range(end))
