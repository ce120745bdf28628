"""One bad table stops only itself: others go on at their pace, it says why, and it comes back with every row once."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path

import orjson
import pytest

import lakefeed.writer.rows.runs
from lakefeed.contract.changes import Position, SourceId
from lakefeed.writer.tables.pending import FlushReason
from lakefeed.writer.wal.payload import Encoding, Frame, encode_frame
from tests.fakes import CatalogFault, FlakyCatalog
from tests.writer.conftest import Lake
from tests.writer.feeding import WAIT_S, Running, read_sequences, running_feed, shop, wait_for

SHOP = SourceId("shop")
KIB = 1024

# One batch is some 30 KiB in memory, and `bad` gets many times what fits.
SMALL = {"flush_max_changes": 200, "flush_max_bytes": 48 * KIB, "buffer_max_bytes": 192 * KIB}
ROUNDS = 40
BATCH = 50


@pytest.fixture(autouse=True)
def _short_lag_limit(monkeypatch):
    """Nothing here takes longer by itself."""
    monkeypatch.setattr("lakefeed.writer.tables.table.LAG_MAX_S", 0.3)


async def push_to_three(running: Running) -> None:
    """Steady changes: in each round every table gets a batch, and the two good ones commit it before the next."""
    for number in range(ROUNDS):
        start = number * 3 * BATCH
        for part, table in enumerate(("bad", "good", "other")):
            sequences = range(start + part * BATCH, start + (part + 1) * BATCH)
            await running.append(sequences, table=table, row=lambda n: {"id": n, "text": "x" * 200})
        for table in ("good", "other"):
            flushed = (await running.flush(table))["tables"][f"default.{table}"]
            assert flushed["rows"] <= 2 * BATCH, "it waited for another table"


def pushed_to(part: int) -> list[tuple[str, int]]:
    starts = [number * 3 * BATCH + part * BATCH for number in range(ROUNDS)]
    return shop(*(sequence for start in starts for sequence in range(start, start + BATCH)))


async def check_that_bad_is_reported(running: Running) -> None:
    await wait_for(lambda: running.is_evicted("default.bad"))
    status = running.status("default.bad")
    assert status["problem"]
    assert status["problemSeconds"] >= 0
    assert status["resumeOffset"] < running.log.durable_end
    await wait_for(lambda: running.metric("lakefeed_writer_table_paused", "default.bad") == 1)
    assert running.metric("lakefeed_writer_table_paused", "default.good") == 0
    assert running.feed.status.buffer_status()["pausedTables"] == 1
    (problem,) = running.feed.status.problems(now=time.monotonic(), stalled_after_s=3600)
    assert problem.startswith("table is paused: table=default.bad reason=")
    held = running.feed.status.buffer_status()["totalSizeBytes"]
    assert held <= SMALL["buffer_max_bytes"], "its rows have left memory"
    assert running.feed.status.committed_position(SHOP) < Position(0, ROUNDS * 3 * BATCH), "what waits is not committed"


async def check_that_bad_recovers(running: Running) -> None:
    await wait_for(lambda: running.status("default.bad")["state"] == "writing")
    assert (await running.flush())["success"]
    assert running.feed.status.committed_position(SHOP) == Position(0, ROUNDS * 3 * BATCH - 1)
    assert running.feed.status.log_status()["uncommittedRecords"] == 0
    assert running.feed.status.problems(now=time.monotonic(), stalled_after_s=0) == []


def check_tables(lake: Lake) -> None:
    for part, table in enumerate(("bad", "good", "other")):
        assert read_sequences(lake, f"default.{table}") == pushed_to(part)


async def test_table_whose_storage_is_refused_is_evicted_and_the_others_go_on_at_their_pace(
    tmp_path: Path, local_lake: Lake
) -> None:
    async with running_feed(tmp_path, local_lake, **SMALL) as running:
        running.store.broken = lambda location: "/bad-" in location
        await push_to_three(running)
        await check_that_bad_is_reported(running)
        running.store.broken = lambda _: False
        await check_that_bad_recovers(running)
    check_tables(local_lake)


@pytest.mark.parametrize("fault", [CatalogFault.FORBIDDEN, CatalogFault.SLOW_DOWN])
async def test_table_whose_commits_are_refused_is_evicted_and_the_others_go_on_at_their_pace(
    tmp_path: Path, local_lake: Lake, fault: CatalogFault, monkeypatch
) -> None:
    monkeypatch.setattr("lakefeed.writer.commit.committer.ATTEMPTS_MAX", 2)
    async with (
        FlakyCatalog(local_lake.catalog_url) as catalog,
        running_feed(tmp_path, local_lake, catalog_url=catalog.url, **SMALL) as running,
    ):
        catalog.broken_tables["bad"] = fault
        await push_to_three(running)
        await check_that_bad_is_reported(running)
        catalog.broken_tables.clear()
        await check_that_bad_recovers(running)
    check_tables(local_lake)


async def test_table_whose_commits_meet_others_for_long_is_evicted_before_it_fails(
    tmp_path: Path, local_lake: Lake
) -> None:
    """The committer itself retries conflicts for half a minute: no other table waits for that."""
    async with (
        FlakyCatalog(local_lake.catalog_url) as catalog,
        running_feed(tmp_path, local_lake, catalog_url=catalog.url, **SMALL) as running,
    ):
        catalog.broken_tables["bad"] = CatalogFault.CONFLICT
        await push_to_three(running)
        assert running.status("default.bad")["resumeOffset"] is not None
        assert running.feed.status.buffer_status()["totalSizeBytes"] <= SMALL["buffer_max_bytes"]
        catalog.broken_tables.clear()
        await check_that_bad_recovers(running)
    check_tables(local_lake)


async def test_commit_that_landed_unheard_before_its_table_was_evicted_is_not_made_twice(
    tmp_path: Path, local_lake: Lake
) -> None:
    async with (
        FlakyCatalog(local_lake.catalog_url) as catalog,
        running_feed(tmp_path, local_lake, catalog_url=catalog.url, flush_max_changes=10) as running,
    ):
        await running.append(range(1, 5))
        await running.flush()
        catalog.commit_faults.append(CatalogFault.SILENCE_AFTER)
        await running.append(range(5, 20))
        await wait_for(lambda: catalog.commits_seen == 2)
        running.feed.tables["default.users"].evict_all()
        await running.append(range(20, 25))
        await running.flush()
        assert not running.feed.tables["default.users"].state.is_behind
    assert read_sequences(local_lake) == shop(*range(1, 25))


async def test_rows_that_do_not_fit_the_table_any_more_are_decoded_again_from_the_log(
    tmp_path: Path, local_lake: Lake
) -> None:
    async with running_feed(tmp_path, local_lake) as running:
        await running.append(range(1, 3), row=lambda n: {"id": f"text {n}"})
        await wait_for(lambda: running.status("default.users").get("bufferedRows") == 2)
        await asyncio.to_thread(_create_with_numbers, local_lake)
        await wait_for(lambda: _is_committed(running))
    assert read_sequences(local_lake) == shop(1, 2)


def _is_committed(running: Running) -> bool:
    running.feed.tables["default.users"].request_flush(FlushReason.REQUEST)
    return running.feed.status.committed_position(SHOP) == Position(0, 2)


def _create_with_numbers(lake: Lake) -> None:
    from pyiceberg.schema import Schema  # noqa: PLC0415 - slow to import, used once
    from pyiceberg.types import LongType, NestedField  # noqa: PLC0415

    with contextlib.closing(lake.open_pyiceberg()) as catalog:
        catalog.create_namespace_if_not_exists("default")
        catalog.create_table("default.users", Schema(NestedField(1, "id", LongType(), required=False)))


async def test_flush_of_a_paused_table_answers_with_its_reason_and_shutdown_does_not_wait_for_it(
    tmp_path: Path, local_lake: Lake
) -> None:
    async with running_feed(tmp_path, local_lake) as running:
        running.store.broken = lambda location: "/bad-" in location
        await running.append(range(1, 3), table="bad")
        await running.append(range(3, 5), table="good")
        first = await running.flush()
        assert not first["success"], "waiting callers are answered once the table is paused"
        assert "store is down" in first["tables"]["default.bad"]["error"]
        assert first["error"] == f"default.bad: {first['tables']['default.bad']['error']}"
        assert first["tables"]["default.good"]["rows"] == 2
        again = await running.flush("bad")
        assert "store is down" in again["tables"]["default.bad"]["error"]
        report = await running.feed.flush(reason=FlushReason.SHUTDOWN)
        assert list(report.problems) == ["default.bad"]
        running.store.broken = lambda _: False
        healed = await running.flush("bad")
        assert healed["success"], "a request tries a paused table at once"
        assert healed["tables"]["default.bad"]["rows"] == 2


async def test_table_that_the_catalog_refuses_for_good_is_paused_with_its_reason_and_keeps_its_rows(
    tmp_path: Path, local_lake: Lake
) -> None:
    async with running_feed(tmp_path, local_lake) as running:
        await running.append(range(1, 3), table="bell\x07")
        await running.append(range(3, 5), table="good")
        flushed = await running.flush()
        assert "control characters are not allowed" in flushed["tables"]["default.bell\x07"]["error"]
        assert flushed["tables"]["default.good"]["rows"] == 2
        assert "default.lakefeed_quarantine" not in running.feed.tables, "it may be allowed tomorrow"
        assert running.feed.status.committed_position(SHOP) == Position(0, 0)


async def test_table_catches_up_though_changes_come_with_every_run_that_it_reads(
    tmp_path: Path, local_lake: Lake, monkeypatch
) -> None:
    async with running_feed(tmp_path, local_lake, flush_max_age_s=0.05) as running:

        def outrun(*args, **options):
            """Read a run that is no longer the last one when it is read, unless the applier holds still."""
            seen, deadline = running.feed.applier.offset, time.monotonic() + 0.5
            while running.feed.applier.offset == seen and time.monotonic() < deadline:
                time.sleep(0.001)
            return lakefeed.writer.rows.runs.decode_run(*args, **options)

        monkeypatch.setattr("lakefeed.writer.tables.feed.decode_run", outrun)
        await running.append(range(100))
        await wait_for(lambda: running.status("default.users").get("bufferedRows") == 100)
        running.feed.tables["default.users"].evict_all()
        end = 100
        async with asyncio.timeout(WAIT_S):
            while running.feed.tables["default.users"].state.is_behind:
                await running.append(range(end, end + 10))
                end += 10
        await running.flush()
    assert read_sequences(local_lake) == shop(*range(end))


async def test_restart_while_a_table_is_evicted_loses_nothing(tmp_path: Path, local_lake: Lake) -> None:
    async with running_feed(tmp_path, local_lake, **SMALL) as running:
        running.store.broken = lambda location: "/bad-" in location
        await push_to_three(running)
        await wait_for(lambda: running.is_evicted("default.bad"))
    async with running_feed(tmp_path, local_lake, **SMALL) as running:
        await wait_for(lambda: running.feed.status.committed_position(SHOP) is not None)
        await check_that_bad_recovers(running)
    check_tables(local_lake)


async def test_two_source_names_of_one_table_are_written_in_the_order_of_the_log(
    tmp_path: Path, local_lake: Lake
) -> None:
    async with running_feed(tmp_path, local_lake) as running:
        names = ["users", "default.users", "users", "default.users"]
        events = [
            {"sequence": n, "operation": "INSERT", "table": name, "after": {"id": n}} for n, name in enumerate(names)
        ]
        await _append(running, orjson.dumps({"type": "cdc_batch", "events": events}), last=3)
        await running.flush()
    with contextlib.closing(local_lake.open_pyiceberg()) as catalog:
        rows = catalog.load_table("default.users").scan().to_arrow()
    assert rows["_cdc_sequence"].to_pylist() == [0, 1, 2, 3]


async def _append(running: Running, body: bytes, *, last: int) -> None:
    frame = Frame(SHOP, 0, -1, last, 1_794_800_000_000_000, Encoding.JSON_BATCH, body)
    await running.log.append([encode_frame(frame)], head=lambda: b"{}")


def read_quarantine(lake: Lake) -> list[dict]:
    with contextlib.closing(lake.open_pyiceberg()) as catalog:
        return catalog.load_table("default.lakefeed_quarantine").scan().to_arrow().sort_by("sequence").to_pylist()


def poisoned(n: int) -> dict:
    return {"id": n, "text": "poison" if n in {7, 8, 31} else "fine"}


@pytest.mark.usefixtures("poison")
async def test_rows_that_cannot_be_decoded_go_to_the_quarantine_alone_and_whole(
    tmp_path: Path, local_lake: Lake
) -> None:
    async with running_feed(tmp_path, local_lake) as running:
        await running.append(range(20), row=poisoned)
        await running.append(range(20, 40), row=poisoned)
        assert (await running.flush())["success"]
        assert running.feed.status.committed_position(SHOP) == Position(0, 39)
        assert running.metric("lakefeed_writer_quarantined_changes_total", "default.users") == 3
    assert read_sequences(local_lake) == shop(*(n for n in range(40) if n not in {7, 8, 31}))
    rows = read_quarantine(local_lake)
    assert [row["sequence"] for row in rows] == [7, 8, 31]
    assert orjson.loads(rows[0]["row_image"]) == poisoned(7)
    assert {(row["table_name"], row["reason"], row["reason_text"]) for row in rows} == {
        ("default.users", "undecodable", "KeyError")
    }


@pytest.mark.usefixtures("poison")
async def test_quarantine_that_cannot_be_written_holds_back_only_its_table_and_nothing_is_lost(
    tmp_path: Path, local_lake: Lake
) -> None:
    async with running_feed(tmp_path, local_lake, **SMALL) as running:
        running.store.broken = lambda location: "/lakefeed_quarantine-" in location
        await running.append(range(20), row=poisoned)
        await running.append(range(20, 25), table="good")
        await running.flush("good")
        await wait_for(lambda: "lakefeed_quarantine" in (running.status("default.users")["problem"] or ""))
        assert running.feed.status.committed_position(SHOP) == Position(0, -1), "what is in no table is not committed"
        assert running.feed.status.log_status()["uncommittedRecords"] == 2
    async with running_feed(tmp_path, local_lake, **SMALL) as running:
        await running.flush()
    assert [row["sequence"] for row in read_quarantine(local_lake)] == [7, 8]
    assert read_sequences(local_lake) == shop(*(n for n in range(20) if n not in {7, 8}))


@pytest.mark.usefixtures("poison")
async def test_restart_after_the_quarantine_was_committed_puts_nothing_there_twice(
    tmp_path: Path, local_lake: Lake
) -> None:
    async with running_feed(tmp_path, local_lake) as running:
        running.store.broken = lambda location: "/users-" in location
        await running.append(range(7, 20), row=poisoned)
        await wait_for(lambda: running.status("default.lakefeed_quarantine").get("committedRows") == 2)
    async with running_feed(tmp_path, local_lake) as running:
        await running.flush()
    assert [row["sequence"] for row in read_quarantine(local_lake)] == [7, 8]
    assert read_sequences(local_lake) == shop(*range(9, 20))


@pytest.mark.usefixtures("poison")
async def test_nothing_is_quarantined_before_what_lies_before_it_is_committed(tmp_path: Path, local_lake: Lake) -> None:
    async with running_feed(tmp_path, local_lake, **SMALL) as running:
        running.store.broken = lambda location: "/users-" in location
        await running.append(range(20), row=poisoned)
        await wait_for(lambda: bool(running.status("default.users").get("problem")))
        assert not running.status("default.lakefeed_quarantine").get("committedRows")
        running.store.broken = lambda _: False
        await running.flush()
    assert [row["sequence"] for row in read_quarantine(local_lake)] == [7, 8]
    assert read_sequences(local_lake) == shop(*(n for n in range(20) if n not in {7, 8}))


async def test_record_that_cannot_be_read_at_all_goes_to_the_quarantine_and_its_neighbours_go_on(
    tmp_path: Path, local_lake: Lake
) -> None:
    async with running_feed(tmp_path, local_lake) as running:
        await running.append(range(1, 3))
        await _append(running, b'{"type": "cdc_batch", "events": 7}', last=3)
        await running.append(range(4, 6))
        assert (await running.flush())["success"]
        assert running.feed.status.committed_position(SHOP) == Position(0, 5)
    assert read_sequences(local_lake) == shop(1, 2, 4, 5)
    (row,) = read_quarantine(local_lake)
    assert (row["sequence"], row["table_name"]) == (3, "default.lakefeed_unreadable")
    assert "BatchMalformed" in row["reason_text"]
