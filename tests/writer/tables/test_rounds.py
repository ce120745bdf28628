"""Tables of one source transaction become visible together, on the real catalog, whatever fails."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
from pyiceberg.types import StringType

from lakefeed.backoff import Backoff
from lakefeed.contract.changes import Position
from lakefeed.writer.rows.groups import JsonGroup
from lakefeed.writer.wal.payload import Encoding, Frame, encode_frame
from tests.fakes import CatalogFault, FlakyCatalog, OldCatalog
from tests.writer.conftest import Lake
from tests.writer.feeding import Running, read_columns, running_feed, wait_for
from tests.writer.transfers import (
    ACCOUNTS,
    BANK,
    LEDGER,
    event,
    log_batch,
    log_transfer,
    read_transfers,
    reading,
    sequence_of,
)

TOGETHER: dict[str, Any] = {"transactions": True, "transaction_max_wait_s": 3600.0}
NOTHING_SPLIT: dict[str, float] = {}


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch):
    monkeypatch.setattr("lakefeed.writer.commit.committer.BACKOFF", Backoff(0.01, 0.01))
    _short_retries(monkeypatch)


def _short_retries(monkeypatch):
    monkeypatch.setattr("lakefeed.writer.tables.state.BACKOFF", Backoff(0.02, 0.05))


def splits(running: Running) -> dict[str, float]:
    """Count by reason what may have been torn apart."""
    (metric,) = (each for each in running.registry.collect() if each.name == "lakefeed_writer_split_transactions")
    return {each.labels["reason"]: each.value for each in metric.samples if each.name.endswith("_total") and each.value}


def check_both(lake, *transfers: int) -> None:
    assert read_transfers(lake, ACCOUNTS) == list(transfers)
    assert read_transfers(lake, LEDGER) == list(transfers)


async def test_reader_sees_each_transfer_in_both_tables_or_in_none(tmp_path, local_lake):
    async with running_feed(tmp_path, local_lake, **TOGETHER, flush_max_changes=7) as running:
        with reading(local_lake) as reader:
            for transfer in range(1, 151):
                await log_transfer(running, transfer, batches=transfer % 3 or 2)
                await asyncio.sleep(0)
            await running.flush()
            await wait_for(lambda: reader.seen[-1] == (150, 150, 150))
        assert splits(running) == NOTHING_SPLIT
    assert reader.torn() == []
    assert len(set(reader.seen)) > 3, "it saw several commits"
    check_both(local_lake, *range(1, 151))


async def test_with_the_setting_off_tables_are_committed_one_by_one_and_nothing_waits(tmp_path, local_lake):
    async with (
        FlakyCatalog(local_lake.catalog_url) as catalog,
        running_feed(tmp_path, local_lake, catalog_url=catalog.url) as running,
    ):
        await log_batch(running, event("accounts", 10), event("ledger", 11), open_transaction="t1")
        await running.flush()
        assert catalog.transactions_seen == 0
    check_both(local_lake, 1)


async def test_tables_of_a_catalog_without_transactions_are_committed_one_by_one(tmp_path, local_lake):
    async with (
        OldCatalog(local_lake.catalog_url) as catalog,
        running_feed(tmp_path, local_lake, catalog_url=catalog.url, **TOGETHER) as running,
    ):
        await log_batch(running, event("accounts", 10), event("ledger", 11), open_transaction="t1")
        await running.flush()
        assert catalog.transactions_seen == 0
    check_both(local_lake, 1)


async def test_all_tables_are_flushed_when_one_is_due(tmp_path, local_lake):
    async with running_feed(tmp_path, local_lake, **TOGETHER, flush_max_changes=3) as running:
        for transfer in (1, 2):
            await log_transfer(running, transfer)
        await log_batch(running, event("accounts", 30))
        await wait_for(lambda: running.feed.status.committed_position(BANK) == Position(0, 30))
    assert (read_transfers(local_lake, ACCOUNTS), read_transfers(local_lake, LEDGER)) == ([1, 2, 3], [1, 2])


async def test_tables_that_are_quick_wait_for_one_whose_rows_take_longer_to_decode(tmp_path, local_lake):
    async with running_feed(tmp_path, local_lake, **TOGETHER, flush_max_changes=1) as running:
        for transfer in range(1, 21):
            # Each ledger row brings a column of its own, which takes the slow path; the account's row is ready before.
            slow = event("ledger", sequence_of(transfer, 1), {"transfer": transfer, f"column_{transfer}": 1})
            await log_batch(running, event("accounts", sequence_of(transfer, 0)), slow)
            await wait_for(lambda: not running.feed.status.log_status()["uncommittedRecords"])
        assert splits(running) == NOTHING_SPLIT
    check_both(local_lake, *range(1, 21))


# -- tables that others change


def drop_column(lake: Lake, table: str, column: str) -> None:
    with contextlib.closing(lake.open_pyiceberg()) as catalog, catalog.load_table(table).update_schema() as update:
        update.delete_column(column)


async def test_a_round_stays_whole_when_a_column_that_it_does_not_fill_is_dropped(tmp_path, local_lake):
    async with running_feed(tmp_path, local_lake, **TOGETHER) as running:
        note = event("ledger", sequence_of(1, 1), {"transfer": 1, "amount": 2, "note": "first"})
        await log_batch(running, event("accounts", sequence_of(1, 0)), note)
        await running.flush()
        drop_column(local_lake, LEDGER, "note")
        await log_transfer(running, 2)
        await running.flush()
        assert splits(running) == NOTHING_SPLIT
    check_both(local_lake, 1, 2)


async def test_values_of_a_column_that_is_dropped_during_a_round_are_not_lost_and_the_split_is_reported(
    tmp_path, local_lake
):
    async with running_feed(tmp_path, local_lake, **TOGETHER) as running:
        for transfer in (1, 2):
            note = event("ledger", sequence_of(transfer, 1), {"transfer": transfer, "note": f"n{transfer}"})
            await log_batch(running, event("accounts", sequence_of(transfer, 0)), note)
            if transfer == 1:
                await running.flush()
                drop_column(local_lake, LEDGER, "note")
        await running.flush()
        assert set(splits(running)) == {"table_left"}
    check_both(local_lake, 1, 2)
    assert read_columns(local_lake, "transfer", "note", table=LEDGER) == [(1, None), (2, "n2")]


async def test_table_that_is_paused_by_a_change_of_its_columns_has_no_second_flush_of_rows_that_left_memory(
    tmp_path, local_lake, monkeypatch
):
    async with running_feed(tmp_path, local_lake, **TOGETHER) as running:
        await log_audited(running, 1)
        await running.flush()
        await log_audited(running, 2)
        make_json(local_lake, LEDGER, "note")
        # Only those who ask for a flush make it try again, so that the change comes between two failures.
        monkeypatch.setattr("lakefeed.writer.tables.state.BACKOFF", Backoff(3600.0, 3600.0))
        running.store.broken = lambda location: "/ledger-" in location
        ledger = running.feed.tables[LEDGER]
        async with asyncio.TaskGroup() as asking:
            for failures in (1, 2):
                asking.create_task(running.flush())
                await wait_for(lambda failures=failures: ledger.retry.attempts == failures)
            await ledger.columns.refresh()
            running.store.broken = lambda _: False
            _short_retries(monkeypatch)
            asking.create_task(running.flush())
        await wait_for(lambda: running.status(LEDGER)["problem"] is None and ledger.pending.needed_offset is None)
        assert splits(running)["table_left"] == 1, "it left once, with its rows"
    check_both(local_lake, 1, 2)
    assert read_transfers(local_lake, AUDITS) == [1, 2]
    assert read_columns(local_lake, "note", table=LEDGER) == [(None,), ('"n2"',)]


AUDITS = "default.audits"


async def log_audited(running: Running, transfer: int) -> None:
    """Log a transfer with a note of it, and a row of a third table."""
    note = event("ledger", sequence_of(transfer, 1), {"transfer": transfer, "note": f"n{transfer}"})
    audit = event("audits", sequence_of(transfer, 2))
    await log_batch(running, event("accounts", sequence_of(transfer, 0)), note, audit)


def make_json(lake: Lake, table: str, column: str) -> None:
    """Make a column of text anew, as one of JSON text."""
    drop_column(lake, table, column)
    with contextlib.closing(lake.open_pyiceberg()) as catalog, catalog.load_table(table).update_schema() as update:
        update.add_column(column, StringType(), doc="json")


# -- transactions in several batches


async def test_open_transaction_is_visible_once_it_has_ended_and_survives_a_crash(tmp_path, local_lake):
    async with running_feed(tmp_path, local_lake, **TOGETHER) as running:
        await log_transfer(running, 1)
        await log_batch(running, event("accounts", 20), open_transaction="t2")
        await log_batch(running, event("ledger", 21), open_transaction="t2")
        await running.flush()
        check_both(local_lake, 1)
        assert running.feed.status.committed_position(BANK) == Position(0, 11)
        assert running.feed.status.log_status()["uncommittedRecords"] == 2, "what is open is kept"
    async with running_feed(tmp_path, local_lake, **TOGETHER) as running:
        await running.flush()
        check_both(local_lake, 1)
        await log_batch(running, event("accounts", 25, {"transfer": 2, "amount": 0}))
        await running.flush()
        assert splits(running) == NOTHING_SPLIT
    assert (read_transfers(local_lake, ACCOUNTS), read_transfers(local_lake, LEDGER)) == ([1, 2, 2], [1, 2])


async def test_transaction_without_an_end_is_awaited_once_and_not_forever(tmp_path, local_lake):
    settings = {**TOGETHER, "transaction_max_wait_s": 0.05}
    async with running_feed(tmp_path, local_lake, **settings) as running:
        await log_batch(running, event("accounts", 10), open_transaction="lost")
        await log_batch(running, event("accounts", 7, {"transfer": 7}), source="shop")
        await wait_for(lambda: splits(running) == {"too_long": 1})
        await running.flush()
        assert read_transfers(local_lake, ACCOUNTS) == [1, 7]
        await log_batch(running, event("ledger", 11), open_transaction="lost")
        await running.flush()
        assert splits(running) == {"too_long": 1}, "it was given up"
    assert read_transfers(local_lake, LEDGER) == [1]


async def test_transaction_that_is_too_large_goes_on_in_parts(tmp_path, local_lake):
    async with running_feed(tmp_path, local_lake, **TOGETHER, transaction_max_bytes=2_000) as running:
        for number in range(40):
            row = {"transfer": 1, "text": "x" * 100}
            await log_batch(running, event("accounts", 10 + number, row), open_transaction="large")
        await wait_for(lambda: "too_large" in splits(running))
        await log_batch(running, event("ledger", 90, {"transfer": 1}))
        await running.flush()
    assert (len(read_transfers(local_lake, ACCOUNTS)), read_transfers(local_lake, LEDGER)) == (40, [1])


async def test_memory_is_bounded_while_transactions_are_open(tmp_path, local_lake):
    limits = {"flush_max_bytes": 16 * 1024, "buffer_max_bytes": 64 * 1024}
    async with running_feed(tmp_path, local_lake, **TOGETHER, **limits) as running:
        for number in range(60):
            rows = [
                event("accounts", 1_000 * number + each, {"transfer": number, "text": "x" * 200}) for each in range(20)
            ]
            await log_batch(running, *rows, open_transaction=f"t{number // 20}" if number % 20 < 19 else "")
            assert running.feed.status.buffer_status()["totalSizeBytes"] < 4 * limits["buffer_max_bytes"]
        await running.flush()
    assert len(read_transfers(local_lake, ACCOUNTS)) == 60 * 20


# -- commits that fail


@pytest.mark.parametrize(
    "fault", [fault for fault in CatalogFault if fault is not CatalogFault.FORBIDDEN], ids=lambda fault: fault.name
)
async def test_any_fault_of_the_commit_ends_with_each_transfer_once_and_whole(tmp_path, local_lake, fault):
    async with (
        FlakyCatalog(local_lake.catalog_url) as catalog,
        running_feed(tmp_path, local_lake, catalog_url=catalog.url, **TOGETHER) as running,
    ):
        await log_transfer(running, 1)
        await running.flush()
        with reading(local_lake) as reader:
            catalog.commit_faults.extend([fault, fault])
            await log_transfer(running, 2)
            await running.flush()
            await wait_for(lambda: reader.seen[-1] == (2, 2, 2))
        assert splits(running) == NOTHING_SPLIT
    assert reader.torn() == []
    check_both(local_lake, 1, 2)


async def test_rows_that_another_node_committed_to_one_table_are_left_out_there(tmp_path, local_lake):
    async with running_feed(tmp_path / "first", local_lake, **TOGETHER) as first:
        await log_transfer(first, 1)
        await first.flush()
        await log_transfer(first, 2)
        await wait_for(lambda: first.feed.status.buffer_status()["eventCount"] == 2)
        async with running_feed(tmp_path / "second", local_lake) as second:
            await log_batch(second, event("ledger", 21))
            await second.flush()
        await log_transfer(first, 3)
        await first.flush()
    check_both(local_lake, 1, 2, 3)


async def test_table_that_another_writer_drops_is_created_again_and_the_other_continues(tmp_path, local_lake):
    async with running_feed(tmp_path, local_lake, **TOGETHER) as running:
        await log_transfer(running, 1)
        await running.flush()
        local_lake.open_pyiceberg().drop_table(LEDGER)
        await log_transfer(running, 2)
        await running.flush()
    assert (read_transfers(local_lake, ACCOUNTS), read_transfers(local_lake, LEDGER)) == ([1, 2], [2])


@pytest.mark.parametrize(
    "fault", [CatalogFault.FORBIDDEN, CatalogFault.CONFLICT, CatalogFault.SLOW_DOWN], ids=lambda fault: fault.name
)
async def test_table_whose_commits_are_refused_leaves_and_the_other_goes_on(tmp_path, local_lake, fault):
    async with (
        FlakyCatalog(local_lake.catalog_url) as catalog,
        running_feed(tmp_path, local_lake, catalog_url=catalog.url, **TOGETHER) as running,
    ):
        await log_transfer(running, 1)
        await running.flush()
        catalog.broken_tables["ledger"] = fault
        await log_transfer(running, 2)
        await running.flush("accounts")
        await log_transfer(running, 3)
        await running.flush("accounts")
        assert read_transfers(local_lake, ACCOUNTS) == [1, 2, 3]
        assert read_transfers(local_lake, LEDGER) == [1]
        assert running.status(ACCOUNTS)["state"] == "writing"
        assert splits(running) == {"table_left": 1, "table_out": 1}
        catalog.broken_tables.clear()
        await check_that_all_tables_recovered(running, catalog)
    check_both(local_lake, 1, 2, 3, 4)


async def check_that_all_tables_recovered(running: Running, catalog: FlakyCatalog) -> None:
    await wait_for(lambda: running.status(LEDGER)["state"] == "writing" and running.status(LEDGER)["problem"] is None)
    await running.flush()
    before = (splits(running), catalog.transactions_seen)
    await log_transfer(running, 4)
    await running.flush()
    assert splits(running) == before[0], "they are together again"
    assert catalog.transactions_seen == before[1] + 1


async def test_table_whose_files_cannot_be_written_leaves_and_the_other_goes_on(tmp_path, local_lake):
    async with (
        FlakyCatalog(local_lake.catalog_url) as catalog,
        running_feed(tmp_path, local_lake, catalog_url=catalog.url, **TOGETHER) as running,
    ):
        running.store.broken = lambda location: "/ledger-" in location
        await log_transfer(running, 1)
        await running.flush("accounts")
        await log_transfer(running, 2)
        await running.flush("accounts")
        assert (read_transfers(local_lake, ACCOUNTS), read_transfers(local_lake, LEDGER)) == ([1, 2], [])
        assert splits(running) == {"table_left": 1, "table_out": 1}
        running.store.broken = lambda _: False
        await log_transfer(running, 3)
        await check_that_all_tables_recovered(running, catalog)
    check_both(local_lake, 1, 2, 3, 4)


async def test_outage_of_the_store_leaves_transactions_whole(tmp_path, local_lake):
    async with running_feed(tmp_path, local_lake, **TOGETHER) as running:
        await log_transfer(running, 1)
        await running.flush()
        running.store.broken = lambda _: True
        with reading(local_lake) as reader:
            await log_transfer(running, 2)
            assert not (await running.flush())["success"]
            await log_transfer(running, 3)
            await wait_for(lambda: running.feed.status.buffer_status()["pausedTables"] == 2)
            running.store.broken = lambda _: False
            await wait_for(lambda: running.feed.status.buffer_status()["pausedTables"] == 0)
            await running.flush()
            await wait_for(lambda: reader.seen[-1] == (3, 3, 3))
        assert splits(running) == NOTHING_SPLIT
    assert reader.torn() == []
    check_both(local_lake, 1, 2, 3)


async def test_outage_of_the_catalog_leaves_transactions_whole(tmp_path, local_lake):
    async with (
        FlakyCatalog(local_lake.catalog_url) as catalog,
        running_feed(tmp_path, local_lake, catalog_url=catalog.url, **TOGETHER) as running,
    ):
        await log_transfer(running, 1)
        await running.flush()
        catalog.commit_faults.extend([CatalogFault.ERROR_BEFORE] * 30)
        catalog.load_faults.extend([CatalogFault.ERROR_BEFORE] * 1_000)
        await log_transfer(running, 2)
        assert not (await running.flush())["success"]
        await log_transfer(running, 3)
        await wait_for(lambda: len(catalog.load_faults) < 950)
        with reading(local_lake) as reader:
            catalog.load_faults.clear()
            catalog.commit_faults.clear()
            await wait_for(lambda: running.feed.status.buffer_status()["pausedTables"] == 0)
            await running.flush()
            await wait_for(lambda: reader.seen[-1] == (3, 3, 3))
        assert splits(running) == NOTHING_SPLIT
    assert reader.torn() == []
    check_both(local_lake, 1, 2, 3)


async def test_evicted_table_leaves_its_round_and_catches_up(tmp_path, local_lake):
    small = {"flush_max_bytes": 16 * 1024, "buffer_max_bytes": 64 * 1024, "flush_max_changes": 50}
    async with running_feed(tmp_path, local_lake, **TOGETHER, **small) as running:
        running.store.broken = lambda location: location.endswith(".parquet")
        for transfer in range(1, 601):
            await log_transfer(running, transfer)
        await wait_for(lambda: running.feed.status.buffer_status()["tablesBehind"] > 0)
        running.store.broken = lambda _: False
        await wait_for(lambda: running.feed.status.buffer_status()["tablesBehind"] == 0)
        await running.flush()
        assert running.feed.status.committed_position(BANK) == Position(0, sequence_of(600, 1))
    check_both(local_lake, *range(1, 601))


# -- what the intake of a table waits for


async def test_source_that_starts_over_is_committed_again_under_its_new_epoch(tmp_path, local_lake):
    async with running_feed(tmp_path, local_lake, **TOGETHER) as running:
        for epoch in (0, 1):
            both = [event("accounts", 10), event("ledger", 11)]
            await log_batch(running, *both, epoch=epoch)
        await running.flush()
        assert running.feed.status.committed_position(BANK) == Position(1, 11)
        assert splits(running) == {"cut_short": 1}
    check_both(local_lake, 1, 1)


async def test_other_tables_do_not_wait_for_a_row_that_goes_to_the_quarantine(tmp_path, local_lake, monkeypatch):
    def stumble(group: JsonGroup, *args, **kwargs):
        if any(b"poison" in bytes(image) for image in group.images):
            raise KeyError("a value of the row")
        return exact(group, *args, **kwargs)

    exact = JsonGroup.exact
    monkeypatch.setattr(JsonGroup, "exact", stumble)
    async with running_feed(tmp_path, local_lake, **TOGETHER) as running:
        for transfer in (1, 2):
            await log_transfer(running, transfer)
        poisoned = event("ledger", 31, {"transfer": 3, "poison": True})
        await log_batch(running, event("accounts", 30), poisoned)
        await log_transfer(running, 4)
        assert (await running.flush())["success"]
        assert running.feed.status.committed_position(BANK) == Position(0, 41)
    assert (read_transfers(local_lake, ACCOUNTS), read_transfers(local_lake, LEDGER)) == ([1, 2, 3, 4], [1, 2, 4])


async def test_quarantine_that_cannot_be_written_holds_back_only_its_table(tmp_path, local_lake):
    async with running_feed(tmp_path, local_lake, **TOGETHER) as running:
        running.store.broken = lambda location: "/lakefeed_quarantine-" in location
        await log_transfer(running, 1)
        frame = Frame(BANK, 0, -1, 20, 5, Encoding.JSON_BATCH, b"no batch at all")
        await running.log.append([encode_frame(frame)], head=lambda: b"{}")
        await log_transfer(running, 3)
        await running.flush("accounts")
        check_both(local_lake, 1, 3)
        assert "table_out" in splits(running)
