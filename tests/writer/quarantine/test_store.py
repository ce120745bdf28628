"""The quarantine as a table: each change once whatever is repeated, and which changes are open."""

from __future__ import annotations

import datetime as dt

import pytest

from lakefeed.contract import properties
from lakefeed.contract.changes import SourceId
from lakefeed.contract.errors import RowsAlreadyCommitted
from lakefeed.contract.properties import Kind, Refusal
from lakefeed.writer.quarantine.store import Filter, NotInQuarantine, Quarantine, apply_filter, find_id, summarise
from tests.writer.quarantine.bench import NOW_US, ORDERS, QUARANTINE, USERS, changes_of, lake_bench, quarantined
from tests.writer.wire.arrow_batches import arrow_group, changes


def id_of(sequence, *, table=USERS, source="shop", epoch=0):
    return properties.change_id(SourceId(source), epoch=epoch, sequence=sequence, table=table)


async def open_ids(bench):
    return sorted((await bench.contents()).entries["id"].to_pylist())


async def test_the_same_run_of_the_log_read_twice_is_in_quarantine_once(local_lake):
    async with lake_bench(local_lake) as bench:
        group = changes_of({1: {"id": 1}, 2: {"id": 2}})
        await bench.quarantine(group)
        await bench.quarantine(group, changes_of({3: {"id": 3}}))
        assert bench.rows(QUARANTINE, "sequence", "kind") == [
            (1, "quarantined"),
            (2, "quarantined"),
            (3, "quarantined"),
        ]


async def test_tables_of_one_source_come_into_quarantine_in_any_order(local_lake):
    async with lake_bench(local_lake) as bench:
        orders, users = changes_of({5: {"id": 5}, 9: {"id": 9}}), changes_of({4: {"id": 4}, 6: {"id": 6}})
        await bench.quarantine(orders, table=ORDERS)
        await bench.quarantine(users, table=USERS)
        await bench.quarantine(orders, table=ORDERS)
        expected = [("default.orders", 5), ("default.orders", 9), ("default.users", 4), ("default.users", 6)]
        assert bench.rows(QUARANTINE, "table_name", "sequence") == expected


async def test_a_source_that_starts_over_has_its_new_changes_in_quarantine_too(local_lake):
    async with lake_bench(local_lake) as bench:
        await bench.quarantine(changes_of({7: {"id": 7}}), changes_of({1: {"id": 1}}, epoch=1))
        await bench.quarantine(changes_of({7: {"id": 7}}), changes_of({1: {"id": 1}}, epoch=1))
        assert bench.rows(QUARANTINE, "epoch", "sequence") == [(0, 7), (1, 1)]
        assert await open_ids(bench) == sorted([id_of(7), id_of(1, epoch=1)])


async def test_arrow_rows_and_json_rows_share_a_quarantine(local_lake):
    async with lake_bench(local_lake) as bench:
        await bench.quarantine(changes_of({1: {"id": 1}}))
        await bench.quarantine(arrow_group(changes({"id": [2]}, first=2)))
        assert bench.rows(QUARANTINE, "encoding", "row_image") == [("arrow", '{"id":2}'), ("json", '{"id": 1}')]


async def test_a_change_that_is_resolved_is_not_open_and_stays_readable(local_lake):
    async with lake_bench(local_lake) as bench:
        await bench.quarantine(changes_of({1: {"id": 1}, 2: {"id": 2}}))
        store = Quarantine(("default",), bench.context)
        await store.resolve([id_of(1)], kind=Kind.DROPPED, table=USERS, now_us=NOW_US)
        await store.resolve([id_of(1)], kind=Kind.DROPPED, table=USERS, now_us=NOW_US)
        assert await open_ids(bench) == [id_of(2)]
        kinds = bench.rows(QUARANTINE, "kind", "_cdc_operation", "_cdc_row_id")
        assert kinds.count(("quarantined", "INSERT", id_of(1))) == 1
        assert kinds.count(("dropped", "DELETE", id_of(1))) == 2


async def test_commands_that_resolve_at_once_number_on_behind_each_other(local_lake, monkeypatch):
    async with lake_bench(local_lake) as bench:
        await bench.quarantine(changes_of({1: {"id": 1}, 2: {"id": 2}}))
        store = Quarantine(("default",), bench.context)
        commit, overtaken = bench.context.committer.commit, []

        async def commit_second(state, flush):
            if not overtaken:
                overtaken.append(True)
                await store.resolve([id_of(2)], kind=Kind.DROPPED, table=USERS, now_us=NOW_US)
            try:
                return await commit(state, flush)
            except RowsAlreadyCommitted as error:
                overtaken.append(error)
                raise

        monkeypatch.setattr(bench.context.committer, "commit", commit_second)
        await store.resolve([id_of(1)], kind=Kind.DROPPED, table=USERS, now_us=NOW_US)
        assert len(overtaken) == 2, "the first commit met the other command's mark"
        dropped = [row for row in bench.rows(QUARANTINE, "kind", "_cdc_sequence", "_cdc_row_id") if row[0] == "dropped"]
        assert [row[1:] for row in dropped] == [(1, id_of(2)), (2, id_of(1))]


async def test_a_namespace_without_quarantine_has_nothing_in_it(local_lake):
    async with lake_bench(local_lake) as bench:
        assert await Quarantine(("sales",), bench.context).load() is None


async def test_filters_and_sums_go_by_table_reason_source_and_time(local_lake):
    async with lake_bench(local_lake) as bench:
        await bench.quarantine(changes_of({1: {"id": 1}}), changes_of({1: {"id": 1}}, source="bank"))
        await bench.quarantine(changes_of({2: {"id": 2}}), table=ORDERS, refusal=Refusal.LOG_SHARE)
        entries = (await bench.contents()).entries
        sums = [(each["table"], each["reason"], each["changes"], each["sources"]) for each in summarise(entries)]
        assert sums == [("default.orders", "log_share", 1, 1), ("default.users", "undecodable", 2, 2)]
        at = dt.datetime.fromtimestamp(NOW_US / 1e6, dt.UTC)
        assert {(each["oldest"], each["newest"], each["text"]) for each in summarise(entries)} == {
            (at, at, "ValueError: field=id")
        }

        def count(**wanted):
            return apply_filter(entries, Filter(**wanted)).num_rows

        assert count() == 3
        assert count(table="default.users") == 2
        assert count(source="bank") == 1
        assert count(reason="log_share") == 1
        assert count(since=at) == 3
        assert count(until=at) == 0
        assert count(since=at + dt.timedelta(microseconds=1)) == 0
        assert count(ids=(id_of(1)[:12],)) == 1


async def test_an_id_may_be_cut_short_but_must_name_one_change(local_lake):
    async with lake_bench(local_lake) as bench:
        await bench.quarantine(changes_of({n: {"id": n} for n in range(1, 40)}))
        entries = (await bench.contents()).entries
        assert find_id(entries, id_of(7)[:16].upper()) == id_of(7)
        with pytest.raises(NotInQuarantine, match="several changes have an id with this prefix: id="):
            find_id(entries, "")
        with pytest.raises(NotInQuarantine, match="no open change has an id with this prefix: id=xyz"):
            find_id(entries, "xyz")


async def test_rows_are_read_back_as_they_were_put_there(local_lake):
    async with lake_bench(local_lake) as bench:
        await bench.quarantine(changes_of({1: {"id": 1}}))
        await bench.quarantine(changes_of({2: {"id": 2.50}}))
        contents = await bench.contents()
        (row,) = (await Quarantine(("default",), bench.context).read(contents, contents.entries, file=1)).to_pylist()
        expected = quarantined(changes_of({2: {"id": 2.50}})).rows.to_pylist()[0]
        assert {name: row[name] for name in expected if name in row} == {
            name: value for name, value in expected.items() if name in row
        }
        assert row["row_image"] == '{"id": 2.5}'
