"""Records of the log that could not be read: after the fault is mended their changes are in their tables, once."""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import replace
from typing import Any

import pytest
from click.testing import CliRunner

import lakefeed.writer.commit.committer
from lakefeed.contract.changes import Position, SourceId, Span, TableName
from lakefeed.ingest.cli.main import main
from lakefeed.writer.rows import groups
from lakefeed.writer.rows.groups import UNREADABLE_TABLE, unreadable_record
from lakefeed.writer.wal.payload import Encoding, Frame, encode_frame
from tests.writer.feeding import Running, read_columns, read_sequences, running_feed, shop
from tests.writer.quarantine.bench import Bench, changes_of, lake_bench
from tests.writer.sample_rows import event

SHOP = SourceId("shop")
UNREADABLE = "default.lakefeed_unreadable"

# Sequences 3 and 4 were taken before; those after them are of three tables in two namespaces.
EVENTS = [
    event(3, after={"id": 3}),
    event(4, after={"id": 4}),
    event(5, operation="UPDATE", rowId="5", before={"id": 5, "price": "1.00"}, after={"id": 5, "price": "2.50"}),
    event(6, table="orders", after={"id": 6}),
    event(7, table="sales.lines", after={"id": 7}),
    event(8, after={"id": 8, "price": None}),
]
DECLARED = json.dumps({"users": {"columns": {"price": "decimal(9, 2)"}}})


class Killed(BaseException):
    """Ends a replay where it stands, past every handler."""


@contextlib.contextmanager
def fault(monkeypatch):
    """Let our own code stumble over the record, as it would over a defect that is not known yet."""

    def stumbling(frames, **options):
        if any(frame.last_sequence == 8 for _, frame in frames):
            raise RecursionError("a value of the record")
        return groups.group_json(frames, **options)

    with monkeypatch.context() as patch:
        patch.setitem(groups.GROUPERS, Encoding.JSON_BATCH, stumbling)
        yield


def record(*, epoch: int = 0) -> Frame:
    body = json.dumps({"events": EVENTS}).encode()
    return Frame(SHOP, epoch, 4, 8, 1_794_800_000_000_000, Encoding.JSON_BATCH, body, declared=DECLARED)


async def append_record(running: Running, *, epoch: int = 0) -> None:
    await running.log.append([encode_frame(record(epoch=epoch))], head=lambda: b"{}")


async def append_around(running: Running) -> None:
    """Log the record between others, so that its tables get past it."""
    await running.append(range(1, 5))
    await append_record(running)
    for first, table in ((9, "users"), (11, "orders"), (13, "sales.lines")):
        await running.append(range(first, first + 2), table=table)
    assert (await running.flush())["success"]
    assert running.feed.status.committed_position(SHOP) == Position(0, 14)


async def replay(bench: Bench, *options: str) -> tuple[int, dict[str, Any]]:
    command = ["quarantine", "replay", UNREADABLE, "--json", "--url", bench.lake.catalog_url, *options]
    result = await asyncio.to_thread(CliRunner().invoke, main, command)
    assert result.stdout, result.output
    return result.exit_code, json.loads(result.stdout)


def read_all(lake) -> dict[str, list[int]]:
    tables = ("default.users", "default.orders", "sales.lines")
    return {table: [sequence for _, sequence in read_sequences(lake, table)] for table in tables}


AROUND = {"default.users": [1, 2, 3, 4, 9, 10], "default.orders": [11, 12], "sales.lines": [13, 14]}
WHOLE = {"default.users": [1, 2, 3, 4, 5, 8, 9, 10], "default.orders": [6, 11, 12], "sales.lines": [7, 13, 14]}


async def test_a_record_is_taken_apart_and_its_changes_are_in_their_tables_as_they_were(
    tmp_path, local_lake, monkeypatch
):
    with fault(monkeypatch):
        async with running_feed(tmp_path, local_lake) as running:
            await append_around(running)
    assert read_all(local_lake) == AROUND
    async with lake_bench(local_lake) as bench:
        code, report = await replay(bench)
        assert (code, report["replayed"], report["found"], report["failed"]) == (0, 4, 0, 0)
        assert (await bench.contents()).entries.num_rows == 0
        assert (await replay(bench))[1]["replayed"] == 0
    async with running_feed(tmp_path, local_lake) as running:  # which reads its log again
        await running.flush()
    assert read_all(local_lake) == WHOLE
    columns = ("_cdc_sequence", "_cdc_operation", "_cdc_row_id", "id", "price")
    (row,) = [row for row in read_columns(local_lake, *columns) if row[0] == 5]
    assert (*row[:4], str(row[4])) == (5, "UPDATE", "5", 5, "2.50")
    ingested = {moment for _, moment in read_columns(local_lake, "_cdc_sequence", "_cdc_ingested_at")}
    assert len(ingested) == 1, "that is when it was received, not replayed"


async def test_a_record_that_still_cannot_be_read_stays_with_the_reason(tmp_path, local_lake, monkeypatch):
    with fault(monkeypatch):
        async with running_feed(tmp_path, local_lake) as running:
            await append_around(running)
        async with lake_bench(local_lake) as bench:
            code, report = await replay(bench)
            assert (code, report["replayed"], report["failed"]) == (3, 0, 1)
            assert report["failures"][0]["reason"] == "still cannot be read: RecursionError"
            assert (await bench.contents()).entries.num_rows == 1
    assert read_all(local_lake) == AROUND


async def test_a_record_that_the_log_may_bring_yet_is_not_replayed(tmp_path, local_lake, monkeypatch):
    with fault(monkeypatch):
        async with running_feed(tmp_path, local_lake) as running:
            await running.append(range(1, 5))
            await append_record(running)
            await running.flush()
    async with lake_bench(local_lake) as bench:
        code, report = await replay(bench)
        assert (code, report["replayed"], report["failed"]) == (3, 0, 1)
        assert "the log may still bring its changes" in report["failures"][0]["reason"]
        async with running_feed(tmp_path, local_lake) as running:  # mended by now
            await running.flush()
        assert read_sequences(local_lake) == shop(1, 2, 3, 4, 5, 8)
        code, report = await replay(bench)
        assert (code, report["replayed"], report["found"]) == (0, 0, 4)
        assert (await bench.contents()).entries.num_rows == 0
    assert read_sequences(local_lake) == shop(1, 2, 3, 4, 5, 8)


async def test_a_record_that_no_log_has_any_more_is_replayed_on_demand(tmp_path, local_lake, monkeypatch):
    with fault(monkeypatch):
        async with running_feed(tmp_path / "lost", local_lake) as running:
            await append_record(running, epoch=2)
            await running.flush()
    async with lake_bench(local_lake) as bench:
        assert (await replay(bench))[0] == 3
        assert (await replay(bench, "--not-in-log"))[1]["replayed"] == 4
        assert (await bench.contents()).entries.num_rows == 0
    assert read_columns(local_lake, "_cdc_sequence", "_cdc_epoch") == [(5, 2), (8, 2)]


def test_a_record_that_waits_holds_back_all_of_its_changes():
    unreadable = unreadable_record(record(), table=UNREADABLE, offset=0, reason="RecursionError")
    assert unreadable.spans() == {SHOP: Span(Position(0, 5), Position(0, 8))}


async def test_changes_of_a_record_and_of_a_replay_around_them_are_appended_once(local_lake):
    async with lake_bench(local_lake) as bench:
        await quarantine_record(bench)
        await bench.quarantine(changes_of({4: {"id": 4}, 9: {"id": 9}}))
        await bench.replay()
        assert (await replay(bench, "--not-in-log"))[1]["replayed"] == 4
    assert read_sequences(local_lake) == shop(4, 5, 8, 9)


async def quarantine_record(bench: Bench, **changes: Any) -> None:
    unreadable = unreadable_record(replace(record(), **changes), table=UNREADABLE, offset=0, reason="RecursionError")
    await bench.quarantine(unreadable, table=TableName(("default",), UNREADABLE_TABLE))


async def test_a_change_that_is_in_two_records_is_appended_once(local_lake):
    async with lake_bench(local_lake) as bench:
        await quarantine_record(bench)
        more = [*EVENTS, event(9, after={"id": 9, "added": True})]
        await quarantine_record(bench, last_sequence=9, body=json.dumps({"events": more}).encode())
        code, report = await replay(bench, "--not-in-log")
        assert (code, report["replayed"], report["failed"]) == (0, 5, 0)
        assert (await bench.contents()).entries.num_rows == 0
    assert read_sequences(local_lake) == shop(5, 8, 9)


async def test_a_record_stays_until_all_of_its_changes_are_in_their_tables(local_lake, monkeypatch, poison):
    async with lake_bench(local_lake) as bench:
        events = [event(5, after={"id": 5, "text": "poison"}), event(6, after={"id": 6})]
        await quarantine_record(bench, last_sequence=6, body=json.dumps({"events": events}).encode(), declared="")
        code, report = await replay(bench, "--not-in-log")
        assert (code, report["replayed"], report["failed"]) == (3, 1, 1)
        assert report["failures"][0]["reason"].startswith("table=default.users: ")
        assert (await bench.contents()).entries.num_rows == 1
        monkeypatch.undo()
        code, report = await replay(bench, "--not-in-log")
        assert (code, report["replayed"], report["found"]) == (0, 1, 1)
        assert (await bench.contents()).entries.num_rows == 0
    assert read_sequences(local_lake) == shop(5, 6)


# Each of the three tables is committed to, and at last the record is marked as replayed.
@pytest.mark.parametrize("commits", range(1, 5))
async def test_a_replay_killed_after_any_commit_and_run_again_appends_each_change_once(
    tmp_path, local_lake, monkeypatch, commits
):
    with fault(monkeypatch):
        async with running_feed(tmp_path, local_lake) as running:
            await append_around(running)
    calls, commit = 0, lakefeed.writer.commit.committer.Committer.commit

    async def commit_or_die(self, state, flush):
        nonlocal calls
        calls += 1
        result = await commit(self, state, flush)
        if calls == commits:
            raise Killed
        return result

    async with lake_bench(local_lake) as bench:
        with monkeypatch.context() as patch, contextlib.suppress(Killed):
            patch.setattr(lakefeed.writer.commit.committer.Committer, "commit", commit_or_die)
            await replay(bench)
        assert calls == commits, "it was killed"
        assert (await replay(bench))[0] == 0
        assert (await bench.contents()).entries.num_rows == 0
    assert read_all(local_lake) == WHOLE
    with contextlib.closing(local_lake.open_pyiceberg()) as catalog:
        rows = catalog.load_table("default.lakefeed_quarantine").scan().to_arrow().to_pylist()
    kept = [row["_cdc_row_id"] for row in rows if row["kind"] == "quarantined"]
    assert len(kept) == 1, "only the record was ever quarantined"
