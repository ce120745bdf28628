"""Changes replayed out of quarantine are in their table once and as they were, whatever is killed on the way."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import json
from dataclasses import replace

import pyarrow as pa
import pytest

from lakefeed.contract import properties
from lakefeed.contract.changes import SourceId
from lakefeed.contract.errors import WriterError
from lakefeed.writer.quarantine.replay import REPLAYS, image_of
from lakefeed.writer.quarantine.store import Filter, Quarantine
from lakefeed.writer.rows.values import text_of
from tests.fakes import CatalogFault
from tests.writer import lakes
from tests.writer.quarantine.bench import ORDERS, QUARANTINE, USERS, changes_of, lake_bench, sequences
from tests.writer.sample_rows import event, frame, json_groups, raw_group
from tests.writer.wire.arrow_batches import arrow_group, changes


def id_of(sequence, *, table=USERS, source="shop"):
    return properties.change_id(SourceId(source), epoch=0, sequence=sequence, table=table)


class Killed(BaseException):
    """Ends a replay where it stands, past every handler."""


async def test_replayed_changes_keep_their_source_sequence_operation_and_times(local_lake):
    async with lake_bench(local_lake) as bench:
        await bench.write(USERS, changes_of({9: {"id": 9}}))
        events = [
            event(3, operation="UPDATE", rowId="7", timestamp=1_763_000_000_123, before={"id": 7}, after={"id": 8}),
            event(4, operation="DELETE", rowId="7", timestamp=1_763_000_000_124, before={"id": 8}, metadata={"lsn": 1}),
        ]
        (group,) = json_groups([(0, frame(events, source="shop"))]).values()
        await bench.quarantine(group)
        report = await bench.replay()
        assert (report.replayed, report.found, report.failed) == (2, 0, 0)
        columns = ("_cdc_sequence", "_cdc_source", "_cdc_operation", "_cdc_row_id", "_cdc_timestamp", "id")
        rows = [row for row in bench.rows(USERS, *columns) if row[0] < 9]
        at = dt.datetime.fromtimestamp(1_763_000_000, dt.UTC)
        assert rows == [
            (3, "shop", "UPDATE", "7", at.replace(microsecond=123_000), 8),
            (4, "shop", "DELETE", "7", at.replace(microsecond=124_000), 8),
        ]
        assert (4, '{"lsn": 1}') in bench.rows(USERS, "_cdc_sequence", "_cdc_metadata")[1:2]


async def test_a_replay_creates_the_table_and_adds_columns_where_they_are_missing(local_lake):
    async with lake_bench(local_lake) as bench:
        await bench.quarantine(changes_of({1: {"id": 1}}))
        await bench.replay()
        assert bench.rows(USERS, "id") == [(1,)]
        await bench.quarantine(changes_of({2: {"id": 2, "name": "Ada"}}))
        await bench.replay()
        assert sorted(bench.rows(USERS, "id", "name"), key=str) == [(1, None), (2, "Ada")]


async def test_rows_that_came_in_arrow_keep_every_digit_and_microsecond(local_lake):
    async with lake_bench(local_lake) as bench:
        moment = pa.array([1_763_000_000_123_456], pa.timestamp("us"))
        columns = {"at": pa.array([1_763_000_000_123_456], pa.timestamp("us", "UTC")), "big": pa.array([2**63 - 1])}
        await bench.write(USERS, arrow_group(changes(columns, first=1, timestamp=moment)))
        await bench.quarantine(arrow_group(changes(columns, first=2, timestamp=moment)))
        assert (await bench.replay()).failed == 0
        first, second = bench.rows(USERS, "_cdc_sequence", "_cdc_timestamp", "at", "big")
        assert first[1:] == second[1:]
        assert second[3] == 2**63 - 1


async def test_a_replay_works_on_an_object_store(s3_lake):
    async with lake_bench(s3_lake) as bench:
        await bench.write(USERS, changes_of({2: {"id": 2}}))
        await bench.quarantine(changes_of({1: {"id": 1}, 2: {"id": 2}}))
        report = await bench.replay()
        assert (report.replayed, report.found) == (1, 1)
        assert sequences(bench.rows(USERS, "_cdc_sequence")) == [1, 2]


async def test_what_was_replayed_is_not_replayed_again(local_lake):
    async with lake_bench(local_lake) as bench:
        await bench.quarantine(changes_of({1: {"id": 1}, 2: {"id": 2}}))
        await bench.replay()
        again = await bench.replay()
        assert (again.replayed, again.found, again.failed) == (0, 0, 0)
        assert sequences(bench.rows(USERS, "_cdc_sequence")) == [1, 2]


@pytest.mark.parametrize("kills", range(1, 7))
async def test_a_replay_killed_around_any_commit_and_run_again_appends_each_change_once(local_lake, monkeypatch, kills):
    async with lake_bench(local_lake) as bench:
        monkeypatch.setattr("lakefeed.writer.quarantine.replay.BATCH_MAX_ROWS", 2)
        await bench.quarantine(changes_of({n: {"id": n} for n in range(1, 6)}))
        commit, calls = bench.context.committer.commit, 0

        async def commit_or_die(state, flush):
            """Die before or after one commit: those of the table and of the quarantine take turns."""
            nonlocal calls
            calls += 1
            if calls == (kills + 1) // 2 and kills % 2:
                raise Killed
            result = await commit(state, flush)
            if calls == (kills + 1) // 2:
                raise Killed
            return result

        monkeypatch.setattr(bench.context.committer, "commit", commit_or_die)
        with contextlib.suppress(Killed):
            await bench.replay()
        monkeypatch.setattr(bench.context.committer, "commit", commit)
        await bench.replay()
        assert calls == (kills + 1) // 2, "it was killed"
        assert sequences(bench.rows(USERS, "_cdc_sequence")) == [1, 2, 3, 4, 5]
        assert (await bench.contents()).entries.num_rows == 0


@pytest.mark.parametrize("fault", [fault for fault in CatalogFault if fault is not CatalogFault.SILENCE_AFTER])
async def test_commits_of_unknown_outcome_append_each_change_once(local_lake, fault):
    async with lake_bench(local_lake) as bench:
        await bench.write(USERS, changes_of({9: {"id": 9}}))
        await bench.quarantine(changes_of({1: {"id": 1}, 2: {"id": 2}}))
        bench.flaky.commit_faults.extend([fault, fault])
        with contextlib.suppress(WriterError):
            await bench.replay()
        bench.flaky.commit_faults.clear()
        await bench.replay()
        assert sequences(bench.rows(USERS, "_cdc_sequence")) == [1, 2, 9]
        assert (await bench.contents()).entries.num_rows == 0


async def test_two_replays_at_once_append_each_change_once(local_lake):
    async with lake_bench(local_lake) as bench:
        await bench.write(USERS, changes_of({99: {"id": 99}}))
        await bench.quarantine(changes_of({n: {"id": n} for n in range(1, 20)}))
        await asyncio.gather(*(bench.replay() for _ in range(3)))
        assert sequences(bench.rows(USERS, "_cdc_sequence")) == [*range(1, 20), 99]
        assert (await bench.contents()).entries.num_rows == 0


async def test_the_service_goes_on_committing_while_a_replay_runs(local_lake, monkeypatch):
    async with lake_bench(local_lake) as bench:
        await bench.write(USERS, changes_of({10: {"id": 10}}))
        await bench.quarantine(changes_of({1: {"id": 1}}))
        commit, done = bench.context.committer.commit, []

        async def commit_second(state, flush, **options):
            if not done:
                done.append(True)
                await bench.write(USERS, changes_of({11: {"id": 11, "new": True}}))
            return await commit(state, flush, **options)

        monkeypatch.setattr(bench.context.committer, "commit", commit_second)
        await bench.replay()
        assert sequences(bench.rows(USERS, "_cdc_sequence")) == [1, 10, 11]
        progress = json.loads(bench.properties(USERS)["lakefeed.progress"])
        assert progress["sources"]["shop"] == [0, 11], "the source's own mark was left alone"


async def test_a_change_that_its_table_got_by_another_way_is_found_there(local_lake):
    async with lake_bench(local_lake) as bench:
        group = changes_of({1: {"id": 1}, 2: {"id": 2}})
        await bench.quarantine(group)
        await bench.write(USERS, changes_of({2: {"id": 2}}))
        report = await bench.replay()
        assert (report.replayed, report.found) == (1, 1)
        assert sequences(bench.rows(USERS, "_cdc_sequence")) == [1, 2]
        assert (await bench.contents()).entries.num_rows == 0


async def test_the_same_sequence_of_another_source_or_time_is_another_change(local_lake):
    async with lake_bench(local_lake) as bench:
        await bench.write(USERS, changes_of({1: {"id": 1}}, source="bank"))
        (older,) = json_groups(
            [(0, frame([event(1, rowId="1", timestamp=5, after={"id": 0})], source="shop"))]
        ).values()
        await bench.write(USERS, older)
        await bench.quarantine(changes_of({1: {"id": 1}}))
        report = await bench.replay()
        assert (report.replayed, report.found) == (1, 0)


async def test_the_same_sequence_and_time_of_another_epoch_is_another_change(local_lake):
    """A source that starts over may send its history again, as it was."""
    async with lake_bench(local_lake) as bench:
        await bench.write(USERS, changes_of({1: {"id": 1}, 2: {"id": 2}}))
        await bench.quarantine(changes_of({1: {"id": 1}}, epoch=1))
        report = await bench.replay()
        assert (report.replayed, report.found) == (1, 0)
        columns = ("_cdc_sequence", "_cdc_timestamp", "_cdc_epoch")
        first, again, second = bench.rows(USERS, *columns)
        assert (first[0], first[2]) == (1, None)
        assert again == (first[0], first[1], 1)
        assert (second[0], second[2]) == (2, None)


async def test_only_what_was_asked_for_is_replayed(local_lake):
    async with lake_bench(local_lake) as bench:
        await bench.quarantine(changes_of({1: {"id": 1}, 2: {"id": 2}, 3: {"id": 3}}))
        await bench.quarantine(changes_of({4: {"id": 4}}), table=ORDERS)
        await bench.replay(Filter(ids=(id_of(2),)))
        assert sequences(bench.rows(USERS, "_cdc_sequence")) == [2]
        assert sorted((await bench.contents()).entries["sequence"].to_pylist()) == [1, 3, 4]


async def test_a_change_that_fails_again_stays_and_its_neighbours_go(local_lake):
    async with lake_bench(local_lake) as bench:
        damaged = replace(changes_of({2: {"id": 2}}), declared=("no declaration",))
        await bench.quarantine(changes_of({1: {"id": 1}}), damaged, changes_of({3: {"id": 3}}))
        report = await bench.replay()
        assert (report.replayed, report.failed) == (2, 1)
        (failure,) = report.failures
        assert failure.id == id_of(2)
        assert failure.reason
        assert sequences(bench.rows(USERS, "_cdc_sequence")) == [1, 3]
        assert (await bench.contents()).entries["id"].to_pylist() == [id_of(2)]
        assert (await bench.replay()).failed == 1, "it is tried again each time"


async def test_changes_out_of_many_small_files_go_in_one_commit(local_lake):
    async with lake_bench(local_lake) as bench:
        for sequence in range(1, 6):
            await bench.quarantine(changes_of({sequence: {"id": sequence}}))
        await bench.replay()
        assert sequences(bench.rows(USERS, "_cdc_sequence")) == [1, 2, 3, 4, 5]
        progress = json.loads(bench.properties(USERS)["lakefeed.progress"])
        assert progress["sources"][REPLAYS] == [0, 1]


async def test_replayed_changes_are_found_after_a_crash_though_a_compaction_moved_them(local_lake, monkeypatch):
    async with lake_bench(local_lake) as bench:
        await bench.quarantine(changes_of({1: {"id": 1}, 2: {"id": 2}}))
        with monkeypatch.context() as patch, contextlib.suppress(Killed):
            patch.setattr(Quarantine, "resolve", _die)
            await bench.replay()
        await lakes.compact(bench, lambda rows: rows)
        report = await bench.replay()
        assert (report.replayed, report.found) == (0, 2)
        assert sequences(bench.rows(USERS, "_cdc_sequence")) == [1, 2]
        assert (await bench.contents()).entries.num_rows == 0


async def _die(*_, **__):
    raise Killed


@pytest.mark.parametrize(
    "image", [b'{"a": 1}', b'{"a":"\xff"}', b'{"_cdc_base64":"YQ=="}', b'{"_cdc_base64":1}', b"[]"]
)
def test_the_image_that_is_replayed_is_the_one_that_came(image):
    (kept,) = raw_group(image).images
    assert bytes(image_of(text_of(kept))) == image


async def test_a_quarantine_of_another_namespace_is_another(local_lake):
    async with lake_bench(local_lake) as bench:
        sales = replace(USERS, namespace=("sales",))
        await bench.quarantine(changes_of({1: {"id": 1}}))
        assert await Quarantine(sales.namespace, bench.context).load() is None
        assert properties.quarantine_of(USERS) == QUARANTINE
        assert properties.quarantine_of(sales) != QUARANTINE
