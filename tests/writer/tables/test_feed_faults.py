"""From the log to the tables with real parts, and with storage and catalog that fail: nothing lost, nothing twice."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import time
from pathlib import Path

import orjson
import pytest

from lakefeed.contract.changes import Position, SourceId
from lakefeed.writer.tables.pending import FlushReason
from lakefeed.writer.wal.log import FileLog
from lakefeed.writer.wal.payload import Encoding, Frame, encode_frame
from tests.fakes import CatalogFault, FaultyFilesystem, FlakyCatalog
from tests.writer.conftest import Lake
from tests.writer.feeding import LOG_CONFIG, WAIT_S, read_columns, read_sequences, running_feed, shop, wait_for


async def test_everything_in_the_log_is_committed_on_request(tmp_path: Path, local_lake: Lake) -> None:
    async with running_feed(tmp_path, local_lake) as running:
        await running.append(range(1, 4))
        await running.append(range(4, 6), table="orders")
        await running.append(range(6, 8))
        await running.flush()
        assert running.feed.status.committed_position(SourceId("shop")) == Position(0, 7)
    assert read_sequences(local_lake) == shop(1, 2, 3, 6, 7)
    assert read_sequences(local_lake, "default.orders") == shop(4, 5)


async def test_a_restart_reads_the_log_again_and_commits_only_what_is_missing(tmp_path: Path, local_lake: Lake) -> None:
    async with running_feed(tmp_path, local_lake) as running:
        await running.append(range(1, 4))
        await running.flush()
        await running.append(range(4, 6))
        await wait_for(lambda: running.feed.status.buffer_status()["eventCount"] == 2)
    async with running_feed(tmp_path, local_lake) as running:
        await running.flush()
    assert read_sequences(local_lake) == shop(1, 2, 3, 4, 5)


async def test_rows_wait_out_an_outage_of_the_store(tmp_path: Path, local_lake: Lake) -> None:
    async with running_feed(tmp_path, local_lake) as running:
        running.store.broken = lambda _: True
        await running.append(range(1, 4))
        flush = asyncio.create_task(running.feed.flush())
        await wait_for(
            lambda: any("store is down" in (t["problem"] or "") for t in running.feed.status.table_status(now=0))
        )
        assert running.feed.status.problems(now=time.monotonic(), stalled_after_s=0)
        await running.append(range(4, 6))
        running.store.broken = lambda _: False
        await asyncio.wait_for(flush, WAIT_S)
        await running.flush()
        assert running.feed.status.problems(now=time.monotonic(), stalled_after_s=0) == []
        assert running.feed.status.table_status(now=0)[0]["problem"] is None
    assert read_sequences(local_lake) == shop(1, 2, 3, 4, 5)


async def test_one_table_that_cannot_be_written_stops_only_itself(tmp_path: Path, local_lake: Lake) -> None:
    async with running_feed(tmp_path, local_lake) as running:
        running.store.broken = lambda location: "/bad-" in location
        await running.append(range(1, 3), table="bad")
        await running.append(range(3, 5), table="good")
        flush = asyncio.create_task(running.feed.flush())
        await running.feed.flush("default.good")
        await running.append(range(5, 7), table="good")
        await running.feed.flush("default.good")
        assert read_sequences(local_lake, "default.good") == shop(3, 4, 5, 6)
        assert not flush.done()
        assert running.feed.status.committed_position(SourceId("shop")) == Position(0, 0), "the bad table holds it back"
        assert running.log.durable_end - running.feed.status.log_status()["uncommittedRecords"] == 0, (
            "its records are kept"
        )
        running.store.broken = lambda _: False
        await asyncio.wait_for(flush, WAIT_S)
    assert read_sequences(local_lake, "default.bad") == shop(1, 2)


@pytest.mark.parametrize("fault", [fault for fault in CatalogFault if fault is not CatalogFault.SILENCE_AFTER])
async def test_any_fault_of_the_catalog_ends_with_every_row_once(
    tmp_path: Path, local_lake: Lake, fault: CatalogFault
) -> None:
    async with (
        FlakyCatalog(local_lake.catalog_url) as catalog,
        running_feed(tmp_path, local_lake, catalog_url=catalog.url) as running,
    ):
        await running.append(range(1, 4))
        await running.flush()
        catalog.commit_faults.extend([fault, fault])
        await running.append(range(4, 6))
        await running.flush()
    assert read_sequences(local_lake) == shop(1, 2, 3, 4, 5)


@pytest.mark.parametrize("fault", [CatalogFault.ERROR_BEFORE, CatalogFault.ERROR_AFTER])
async def test_files_of_a_flush_that_waited_for_long_are_written_again_before_they_are_committed(
    tmp_path: Path, local_lake: Lake, monkeypatch: pytest.MonkeyPatch, fault: CatalogFault
) -> None:
    """Orphan removal may have taken them: no snapshot named them for that long."""
    monkeypatch.setattr("lakefeed.writer.commit.committer.ATTEMPTS_MAX", 1)
    async with (
        FlakyCatalog(local_lake.catalog_url) as catalog,
        running_feed(tmp_path, local_lake, catalog_url=catalog.url) as running,
    ):
        await running.append(range(1, 4))
        await running.flush()
        monkeypatch.setattr("lakefeed.writer.tables.rounds.FILES_MAX_AGE_S", -1.0)
        catalog.commit_faults.append(fault)
        await running.append(range(4, 6))
        await running.flush()
    assert read_sequences(local_lake) == shop(1, 2, 3, 4, 5)
    assert len(list((tmp_path / "warehouse").rglob("*.parquet"))) == 3, "the second flush was written twice"


async def test_rows_that_another_node_committed_meanwhile_are_left_out(tmp_path: Path, local_lake: Lake) -> None:
    """A source moved to another node, resumed there from what was committed, and this log still holds the rest."""
    async with running_feed(tmp_path / "first", local_lake) as first:
        await first.append(range(1, 3))
        await first.flush()
        await first.append(range(3, 7))
        await wait_for(lambda: first.feed.status.buffer_status()["eventCount"] == 4)
        async with running_feed(tmp_path / "second", local_lake) as second:
            await second.append(range(3, 6))
            await second.flush()
        await first.flush()
    assert read_sequences(local_lake) == shop(1, 2, 3, 4, 5, 6)


async def test_a_source_that_starts_over_is_committed_again_under_its_new_epoch(
    tmp_path: Path, local_lake: Lake
) -> None:
    async with running_feed(tmp_path, local_lake) as running:
        await running.append(range(1, 4))
        await running.append(range(1, 3), epoch=1)
        await running.append(range(3, 5), epoch=1)
        await running.flush()
        assert running.feed.status.committed_position(SourceId("shop")) == Position(1, 4)
    positions = read_columns(local_lake, "_cdc_epoch", "_cdc_sequence")
    assert sorted((epoch or 0, sequence) for epoch, sequence in positions) == [
        *((0, sequence) for sequence in (1, 2, 3)),
        *((1, sequence) for sequence in (1, 2, 3, 4)),
    ]
    assert {epoch for epoch, _ in positions} == {None, 1}


@pytest.mark.parametrize("is_running", [True, False])
async def test_a_table_without_the_column_for_epochs_gets_it(
    tmp_path: Path, local_lake: Lake, *, is_running: bool
) -> None:
    """A table of an earlier version, or one whose column another writer drops meanwhile."""
    async with contextlib.AsyncExitStack() as stack:
        running = await stack.enter_async_context(running_feed(tmp_path, local_lake))
        await running.append(range(1, 2))
        await running.flush()
        if not is_running:
            await stack.aclose()
        with contextlib.closing(local_lake.open_pyiceberg()) as catalog:
            table = catalog.load_table("default.users")
            with table.update_schema() as update:
                update.delete_column("_cdc_epoch")
        if not is_running:
            running = await stack.enter_async_context(running_feed(tmp_path, local_lake))
        # The new column makes a running writer look at the table's columns.
        await running.append(range(1, 2), epoch=1, row=lambda n: {"id": n, "more": True})
        await running.flush()
    assert sorted(read_columns(local_lake, "_cdc_epoch", "more"), key=str) == [(1, True), (None, None)]


async def test_memory_is_bounded_and_everything_still_arrives(tmp_path: Path, local_lake: Lake) -> None:
    limits = {"flush_max_bytes": 16 * 1024, "buffer_max_bytes": 64 * 1024}
    async with running_feed(tmp_path, local_lake, **limits) as running:
        for start in range(0, 4_000, 500):
            await running.append(range(start, start + 500))
        await running.flush()
        assert running.feed.status.buffer_status()["totalSizeBytes"] == 0
        assert running.feed.status.table_status(now=0)[0]["commits"] > 1, "one flush would have held it all"
    assert read_sequences(local_lake) == shop(*range(4_000))


async def test_the_log_is_trimmed_behind_what_is_committed(tmp_path: Path, local_lake: Lake) -> None:
    async with running_feed(tmp_path, local_lake) as running:
        for start in range(0, 60_000, 2_000):
            await running.append(range(start, start + 2_000))
        await wait_for(lambda: running.feed.status.buffer_status()["eventCount"] == 60_000)
        assert running.log.first_offset == 0, "nothing is committed yet"
        await running.flush()
        assert running.log.first_offset > 0
        assert running.feed.status.log_status()["uncommittedRecords"] == 0


async def test_failing_trim_is_reported_and_tried_again_while_changes_are_still_committed(
    tmp_path: Path, local_lake: Lake
) -> None:
    files = FaultyFilesystem()
    log = FileLog.open(tmp_path / "log", LOG_CONFIG, files=files)
    async with running_feed(tmp_path, local_lake, log=log) as running:

        def problems() -> list[str]:
            return running.feed.status.problems(now=time.monotonic(), stalled_after_s=WAIT_S)

        for start in range(0, 60_000, 2_000):
            await running.append(range(start, start + 2_000))
        files.fail("rename", errno.EROFS)
        await running.flush()
        assert "log cannot be trimmed" in problems()[0]
        assert log.first_offset == 0
        assert not running.feed.status.is_stalled(now=time.monotonic(), stalled_after_s=WAIT_S)
        await running.append(range(60_000, 60_001))
        await running.flush()
        files.heal()
        await wait_for(lambda: log.first_offset > 0 and not problems())
    assert read_sequences(local_lake) == shop(*range(60_001))


async def test_a_table_that_was_dropped_is_made_anew(tmp_path: Path, local_lake: Lake) -> None:
    async with running_feed(tmp_path, local_lake) as running:
        await running.append(range(1, 3))
        await running.flush()
        with contextlib.closing(local_lake.open_pyiceberg()) as catalog:
            catalog.drop_table("default.users")
        await running.append(range(3, 5))
        await running.flush()
    assert read_sequences(local_lake) == shop(3, 4)


async def test_columns_that_another_writer_added_are_kept(tmp_path: Path, local_lake: Lake) -> None:
    async with running_feed(tmp_path, local_lake) as running:
        await running.append(range(1, 3))
        await running.flush()
        with contextlib.closing(local_lake.open_pyiceberg()) as catalog:
            from pyiceberg.types import StringType  # noqa: PLC0415 - slow to import, used once

            with catalog.load_table("default.users").update_schema() as update:
                update.add_column("note", StringType())
        events = [{"sequence": 3, "operation": "INSERT", "table": "users", "after": {"id": 3, "extra": True}}]
        frame = Frame(
            SourceId("shop"),
            0,
            -1,
            3,
            1_794_800_000_000_000,
            Encoding.JSON_BATCH,
            orjson.dumps({"type": "cdc_batch", "events": events}),
        )
        await running.log.append([encode_frame(frame)], head=lambda: b"{}")
        await running.flush()
    with contextlib.closing(local_lake.open_pyiceberg()) as catalog:
        rows = catalog.load_table("default.users").scan().to_arrow().sort_by("_cdc_sequence")
    assert rows["extra"].to_pylist() == [None, None, True]
    assert rows["note"].to_pylist() == [None, None, None]


async def test_flush_reasons_are_counted(tmp_path: Path, local_lake: Lake) -> None:
    async with running_feed(tmp_path, local_lake, flush_max_changes=3) as running:
        await running.append(range(1, 4))
        await wait_for(lambda: [table["commits"] for table in running.feed.status.table_status(now=0)] == [1])
        assert running.feed.status.table_status(now=0)[0]["lastFlushReason"] == FlushReason.CHANGES.value
