"""`lakefeed quarantine` on a real catalog: what it prints, asks, does and ends with."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from lakefeed.contract import properties
from lakefeed.contract.changes import SourceId, TableName
from lakefeed.contract.properties import Refusal
from lakefeed.ingest.cli.main import main
from tests.writer.quarantine.bench import ORDERS, USERS, changes_of, lake_bench, sequences


def id_of(sequence, *, table=USERS):
    return properties.change_id(SourceId("shop"), epoch=0, sequence=sequence, table=table)


async def run(bench, *arguments, answer=None):
    """Run a command as a process of its own would be: in a thread, with its own event loop."""
    command = ["quarantine", *arguments, "--url", bench.lake.catalog_url]
    return await asyncio.to_thread(CliRunner().invoke, main, command, input=answer)


async def json_of(bench, *arguments):
    result = await run(bench, *arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


async def test_list_sums_up_by_table_and_reason_over_all_namespaces(local_lake):
    async with lake_bench(local_lake) as bench:
        await bench.quarantine(changes_of({1: {"id": 1}, 2: {"id": 2}}))
        await bench.quarantine(changes_of({3: {"id": 3}}), table=ORDERS, refusal=Refusal.LOG_SHARE)
        sales = TableName(("eu", "sales"), "orders")
        await bench.quarantine(changes_of({4: {"id": 4}}), table=sales)
        found = await json_of(bench, "list")
        assert [(each["table"], each["reason"], each["changes"]) for each in found] == [
            ("default.orders", "log_share", 1),
            ("default.users", "undecodable", 2),
            ("eu.sales.orders", "undecodable", 1),
        ]
        shown = (await run(bench, "list")).stdout
        assert "default.users" in shown
        assert "ValueError: field=id" in shown
        assert [each["table"] for each in await json_of(bench, "list", "--table", "users")] == ["default.users"]
        assert await json_of(bench, "list", "--source", "bank") == []
        assert await json_of(bench, "list", "--until", "2020-01-01") == []
        assert len(await json_of(bench, "list", "--since", "2020-01-01T00:00:00+0100")) == 3


async def test_list_names_single_changes_up_to_a_limit(local_lake):
    async with lake_bench(local_lake) as bench:
        await bench.quarantine(changes_of({n: {"id": n} for n in range(1, 6)}))
        found = await json_of(bench, "list", "--changes", "--limit", "2")
        assert [(each["id"], each["sequence"]) for each in found] == [(id_of(1), 1), (id_of(2), 2)]
        assert "and 3 more" in (await run(bench, "list", "--changes", "--limit", "2")).stdout


async def test_show_prints_a_change_whole_by_the_start_of_its_id(local_lake):
    async with lake_bench(local_lake) as bench:
        await bench.quarantine(changes_of({1: {"id": 1}, 2: {"id": 12345678901234567890}}))
        found = await run(bench, "show", id_of(2)[:10], "--json")
        assert '"id": 12345678901234567890' in found.stdout
        document = json.loads(found.stdout)
        assert document["row_image"] == {"id": 12345678901234567890}
        assert (document["id"], document["source"], document["sequence"]) == (id_of(2), "shop", 2)
        shown = (await run(bench, "show", id_of(2)[:10])).stdout
        assert '{"id": 12345678901234567890}' in shown
        assert "undecodable" in shown


async def test_an_unknown_id_is_a_readable_error(local_lake):
    async with lake_bench(local_lake) as bench:
        await bench.quarantine(changes_of({1: {"id": 1}}))
        result = await run(bench, "show", "zzz")
        assert (result.exit_code, result.stderr) == (1, "Error: no open change has an id with this prefix: id=zzz\n")


async def test_replay_appends_to_the_table_and_empties_the_list(local_lake):
    async with lake_bench(local_lake) as bench:
        await bench.quarantine(changes_of({1: {"id": 1}, 2: {"id": 2}}))
        result = await run(bench, "replay", "users")
        assert (result.exit_code, result.stdout) == (0, "default.users: replayed 2 changes, 0 are still refused\n")
        assert sequences(bench.rows(USERS, "_cdc_sequence")) == [1, 2]
        assert (await run(bench, "list")).stdout == "nothing is in quarantine\n"
        assert (await json_of(bench, "replay", "users"))["replayed"] == 0


async def test_replay_lists_what_is_still_refused_and_exits_with_3(local_lake):
    async with lake_bench(local_lake) as bench:
        await bench.quarantine(replace(changes_of({1: {"id": 1}}), declared=("no declaration",)))
        result = await run(bench, "replay", "users")
        assert result.exit_code == 3
        assert "1 are still refused" in result.stdout
        assert id_of(1)[:12] in result.stdout


async def test_replay_takes_single_ids(local_lake):
    async with lake_bench(local_lake) as bench:
        await bench.quarantine(changes_of({1: {"id": 1}, 2: {"id": 2}, 3: {"id": 3}}))
        assert (await json_of(bench, "replay", "users", id_of(1), id_of(3)[:16]))["replayed"] == 2
        assert sequences(bench.rows(USERS, "_cdc_sequence")) == [1, 3]


@pytest.mark.parametrize(("answer", "left"), [("n\n", 2), ("y\n", 0)])
async def test_drop_asks_first_and_deletes_nothing(local_lake, answer, left):
    async with lake_bench(local_lake) as bench:
        await bench.quarantine(changes_of({1: {"id": 1}, 2: {"id": 2}}))
        result = await run(bench, "drop", "users", answer=answer)
        assert "drop 2 changes of default.users?" in result.stderr
        assert (await bench.contents()).entries.num_rows == left
        kinds = [row[0] for row in bench.rows(properties.quarantine_of(USERS), "kind")]
        assert kinds.count("quarantined") == 2
        assert kinds.count("dropped") == 2 - left


async def test_drop_takes_filters_and_does_not_ask_with_yes(local_lake):
    async with lake_bench(local_lake) as bench:
        await bench.quarantine(changes_of({1: {"id": 1}}), changes_of({2: {"id": 2}}, source="bank"))
        assert await json_of(bench, "drop", "users", "--source", "bank", "--yes") == {"table": str(USERS), "dropped": 1}
        assert (await bench.contents()).entries["source"].cast("string").to_pylist() == ["shop"]


async def test_a_lake_without_quarantine_has_nothing_to_show(local_lake):
    async with lake_bench(local_lake) as bench:
        assert (await run(bench, "list")).stdout == "nothing is in quarantine\n"
        assert (await json_of(bench, "replay", "users"))["replayed"] == 0
        assert (await json_of(bench, "drop", "users", "--yes"))["dropped"] == 0


async def test_a_record_that_still_cannot_be_read_stays_and_makes_the_exit_code_3(local_lake):
    async with lake_bench(local_lake) as bench:
        await bench.quarantine(changes_of({1: {"id": 1}}), table=TableName(("default",), "lakefeed_unreadable"))
        result = await run(bench, "replay", "lakefeed_unreadable")
        assert result.exit_code == 3
        assert "record was not kept with all that a replay needs" in result.stdout
        assert (await bench.contents()).entries.num_rows == 1


def test_a_catalog_that_does_not_answer_is_a_readable_error():
    result = CliRunner().invoke(main, ["quarantine", "list", "--url", "http://127.0.0.1:9"])
    assert result.exit_code == 1
    assert "Error: catalog cannot be reached" in result.stderr
