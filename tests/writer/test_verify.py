"""A verification finds what was lost, doubled or changed behind Lakefeed's back, and nothing on healthy tables."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from lakefeed.contract.errors import CatalogError
from lakefeed.contract.ledger import LEDGER_KEY, TOTALS_PROPERTY
from lakefeed.contract.verification import Kind, Range, Report, State
from lakefeed.writer.rows.groups import JsonGroup
from tests.writer import lakes
from tests.writer.conftest import Lake
from tests.writer.lakes import largest_file, load_document, spoil_file, verify
from tests.writer.quarantine.bench import QUARANTINE, USERS, Bench, changes_of, lake_bench
from tests.writer.sample_rows import event, frame, json_groups


@pytest.fixture
async def bench(local_lake: Lake) -> AsyncIterator[Bench]:
    async with lake_bench(local_lake) as opened:
        yield opened


def rows(*sequences: int) -> dict[int, Any]:
    return {n: {"id": n, "name": f"name {n}", "score": n / 2} for n in sequences}


def kinds(report: Report) -> set[Kind]:
    return {finding.kind for finding in report.findings}


async def write_two(bench: Bench) -> None:
    await bench.write(USERS, changes_of(rows(1, 2, 3)))
    await bench.write(USERS, changes_of(rows(4, 5)))


# -- healthy tables


async def test_a_healthy_table_is_as_it_was_recorded(bench: Bench) -> None:
    await write_two(bench)
    report = await verify(bench)
    assert report.is_sound, report.findings
    assert (report.rows, report.totals_compared) == (5, True)
    assert list(report.snapshots.values()) == [State.VERIFIED, State.VERIFIED]


async def test_each_snapshot_records_its_rows_and_the_table_their_sum(bench: Bench) -> None:
    await write_two(bench)
    document = await load_document(bench)
    ledgers = [json.loads(snapshot["summary"][LEDGER_KEY])["shop"] for snapshot in document["snapshots"]]
    checksums = [ledger.pop("checksum") for ledger in ledgers]
    assert ledgers == [
        {"epoch": 0, "first": 1, "last": 3, "rows": 3, "operations": {"INSERT": 3}},
        {"epoch": 0, "first": 4, "last": 5, "rows": 2, "operations": {"INSERT": 2}},
    ]
    total = sum(int(checksum, 16) for checksum in checksums) % 2**64
    assert json.loads(document["properties"][TOTALS_PROPERTY]) == {
        "complete": True,
        "sources": {"shop": {"rows": 5, "checksum": f"{total:016x}", "epoch": 0}},
    }


async def test_columns_that_were_added_and_widened_leave_older_ledgers_true(bench: Bench) -> None:
    await bench.write(USERS, changes_of({1: {"id": 1}}))
    await bench.write(USERS, changes_of({2: {"id": 2, "home": {"city": "Paris"}, "tags": ["a"]}}))
    await bench.write(USERS, changes_of({3: {"id": 3, "home": {"city": "Oslo", "zip": 150}, "more": None}}))
    report = await verify(bench)
    assert report.is_sound, report.findings
    assert list(report.snapshots.values()).count(State.VERIFIED) == 3


async def test_several_sources_in_one_snapshot_are_counted_apart(bench: Bench) -> None:
    await bench.write(USERS, changes_of(rows(1, 2)), changes_of(rows(1, 5, 9), source="depot"))
    report = await verify(bench)
    assert report.is_sound, report.findings
    assert {source: facts.rows for source, facts in report.facts.items()} == {"shop": 2, "depot": 3}


def received(rows_: dict[int, Any], *, epoch: int, at_us: int) -> JsonGroup:
    events = [event(n, rowId=str(n), timestamp=1_763_000_000_000, after=row) for n, row in rows_.items()]
    sent = replace(frame(events, source="shop", epoch=epoch), received_at_us=at_us)
    return json_groups([(0, sent)])["users"]


async def test_a_source_that_started_over_has_its_sequences_again(bench: Bench) -> None:
    for epoch in (0, 1):
        await bench.write(USERS, received(rows(1, 2), epoch=epoch, at_us=1_794_800_000_000_000 + epoch))
    report = await verify(bench)
    assert report.is_sound, report.findings
    assert list(report.snapshots.values()).count(State.VERIFIED) == 2


async def test_the_quarantine_and_what_was_replayed_from_it_are_as_recorded(bench: Bench) -> None:
    await bench.write(USERS, changes_of(rows(1, 9)))
    await bench.quarantine(changes_of(rows(2, 3)))
    await bench.replay()
    for name, count in ((USERS, 4), (QUARANTINE, 4)):
        report = await verify(bench, name)
        assert report.is_sound, report.findings
        assert (report.rows, report.totals_compared) == (count, True)
        assert set(report.snapshots.values()) == {State.VERIFIED}


async def test_a_table_without_rows_is_sound(bench: Bench) -> None:
    await write_two(bench)
    document = {**await load_document(bench), "refs": {}, "snapshots": [], "properties": {}}
    report = await lakes.verify_document(bench, document)
    assert report.is_sound
    assert report.rows == 0


async def test_after_expiry_the_totals_still_speak_for_the_rows(bench: Bench) -> None:
    await write_two(bench)
    document = await load_document(bench)
    await lakes.remove_snapshots(bench, [document["snapshots"][0]["snapshot-id"]])
    report = await verify(bench)
    assert report.is_sound, report.findings
    assert (report.rows, len(report.snapshots), report.totals_compared) == (5, 1, True)


async def test_snapshots_of_a_version_without_ledgers_are_not_recorded_and_no_fault(bench: Bench) -> None:
    await write_two(bench)
    document = await load_document(bench)
    for snapshot in document["snapshots"]:
        del snapshot["summary"][LEDGER_KEY]
    del document["properties"][TOTALS_PROPERTY]
    report = await lakes.verify_document(bench, document)
    assert report.is_sound, report.findings
    assert set(report.snapshots.values()) == {State.NOT_RECORDED}
    assert report.notes == ["the table has no totals: rows of snapshots that are expired cannot be checked"]


async def test_a_table_written_without_the_ledger_is_not_recorded_and_no_fault(local_lake: Lake) -> None:
    async with lake_bench(local_lake, ledger=False) as bench:
        await write_two(bench)
        report = await verify(bench)
    assert report.is_sound, report.findings
    assert (report.rows, set(report.snapshots.values())) == (5, {State.NOT_RECORDED})


async def test_a_table_from_before_the_ledger_says_that_its_totals_are_not_complete(bench: Bench) -> None:
    await bench.write(USERS, changes_of(rows(1)))
    await lakes.remove_properties(bench, [TOTALS_PROPERTY])
    await bench.write(USERS, changes_of(rows(2)))
    report = await verify(bench)
    assert report.is_sound, report.findings
    assert not report.totals_compared
    assert "do not reach back to its start" in report.notes[0]


async def test_only_what_came_after_a_snapshot_is_read(bench: Bench) -> None:
    await write_two(bench)
    first, second = (each["snapshot-id"] for each in (await load_document(bench))["snapshots"])
    report = await verify(bench, wanted=Range(after_id=first))
    assert (report.is_sound, report.rows, list(report.snapshots)) == (True, 2, [second])
    report = await verify(bench, wanted=Range(to_id=first))
    assert (report.is_sound, report.rows, list(report.snapshots)) == (True, 3, [first])
    with pytest.raises(CatalogError, match="no such snapshot"):
        await verify(bench, wanted=Range(to_id=17))


# -- losses


async def test_a_data_file_that_an_edited_commit_left_out_is_a_loss(bench: Bench) -> None:
    await write_two(bench)
    await lakes.leave_out_a_manifest(bench)
    report = await verify(bench)
    assert kinds(report) == {Kind.LOSS}
    assert any("gone from the table" in finding.text for finding in report.findings)
    assert list(report.snapshots.values()).count(State.DIFFERENT) == 1


async def test_a_rewrite_that_left_rows_out_is_a_loss(bench: Bench) -> None:
    await write_two(bench)
    await lakes.compact(bench, lambda rows: rows.slice(1))
    report = await verify(bench)
    assert kinds(report) == {Kind.LOSS}
    assert [finding.source for finding in report.findings] == ["shop"]
    assert "recorded 5 rows" in report.findings[0].text


async def test_a_rewrite_that_kept_every_row_is_none(bench: Bench) -> None:
    await write_two(bench)
    await lakes.compact(bench, lambda rows: rows.take([4, 2, 0, 1, 3]))
    report = await verify(bench)
    assert report.is_sound, report.findings
    assert [state.value for state in report.snapshots.values()] == ["rewritten", "rewritten", "rewrite"]


async def test_rows_dropped_in_a_file_are_a_loss(bench: Bench) -> None:
    await write_two(bench)
    await spoil_file(bench, lambda rows: rows.slice(1))
    assert Kind.LOSS in kinds(await verify(bench))


async def test_a_file_that_is_not_there_any_more_is_found_and_the_others_are_still_read(bench: Bench) -> None:
    await write_two(bench)
    await bench.context.store.delete(await largest_file(bench))
    report = await verify(bench)
    assert kinds(report) == {Kind.UNREADABLE, Kind.LOSS}
    assert report.files == 1


async def test_a_delete_of_another_engine_is_a_finding(bench: Bench) -> None:
    await write_two(bench)
    document = await load_document(bench)
    document["snapshots"][-1]["summary"]["operation"] = "delete"
    report = await lakes.verify_document(bench, document)
    assert any("another writer removed or replaced rows" in finding.text for finding in report.findings)


# -- duplicates


async def test_a_file_that_was_appended_again_is_a_duplicate(bench: Bench) -> None:
    await write_two(bench)
    await lakes.append_again(bench)
    report = await verify(bench)
    assert kinds(report) == {Kind.DUPLICATE}
    assert report.findings[0].source == "shop"
    assert list(report.snapshots.values())[-1] is State.FOREIGN


async def test_a_row_doubled_in_a_rewrite_is_a_duplicate_and_a_surplus(bench: Bench) -> None:
    await write_two(bench)
    await lakes.compact(bench, lambda rows: rows.take([0, 1, 2, 3, 4, 4]))
    report = await verify(bench)
    assert kinds(report) == {Kind.DUPLICATE, Kind.SURPLUS}
    doubled = next(finding for finding in report.findings if finding.kind is Kind.DUPLICATE)
    assert doubled.text == "1 duplicate rows, for example sequences 5"


async def test_a_doubled_row_of_a_source_that_started_over_is_a_duplicate_too(bench: Bench) -> None:
    for epoch in (0, 1):
        await bench.write(USERS, received(rows(1, 2), epoch=epoch, at_us=1_794_800_000_000_000 + epoch))
    await lakes.compact(bench, lambda rows: rows.take([0, 1, 2, 3, 3]))
    assert kinds(await verify(bench)) == {Kind.DUPLICATE, Kind.SURPLUS}


async def test_duplicates_are_found_in_parts_where_too_many_rows_overlap(bench: Bench) -> None:
    await write_two(bench)
    sound = await lakes.verify_document(bench, await load_document(bench), held_max_rows=1)
    assert (sound.findings, sound.rows) == ([], 5)
    await lakes.compact(bench, lambda rows: rows.take([0, 0, 1, 2, 3, 4, 4]))
    report = await lakes.verify_document(bench, await load_document(bench), held_max_rows=1)
    doubled = [finding.text for finding in report.findings if finding.kind is Kind.DUPLICATE]
    assert sorted(text.partition("for example ")[2] for text in doubled) in (
        ["sequences 1", "sequences 5"],
        ["sequences 1, 5"],
    )
    assert report.rows == 7


async def test_a_loss_that_a_duplicate_hides_from_counting_is_found(bench: Bench) -> None:
    await write_two(bench)
    await lakes.compact(bench, lambda rows: rows.take([0, 1, 2, 3, 3]))
    assert kinds(await verify(bench)) == {Kind.DUPLICATE, Kind.DIFFERENCE}


# -- changed values and records


def with_column(name: str, change: Any) -> Any:
    def spoil(rows: pa.Table) -> pa.Table:
        index = rows.schema.get_field_index(name)
        values = change(rows.column(name).to_pylist())
        return rows.set_column(index, rows.schema.field(index), pa.array(values, rows.schema.field(index).type))

    return spoil


@pytest.mark.parametrize(
    ("column", "change"),
    [
        ("name", lambda values: ["Name 1", *values[1:]]),
        ("score", lambda values: [-values[0], *values[1:]]),
        ("id", lambda values: [values[1], values[0], *values[2:]]),
        ("_cdc_operation", lambda values: ["DELETE", *values[1:]]),
        ("name", lambda values: [None, *values[1:]]),
    ],
)
async def test_a_flipped_value_is_a_difference(bench: Bench, column: str, change: Any) -> None:
    await write_two(bench)
    await spoil_file(bench, with_column(column, change))
    report = await verify(bench)
    assert kinds(report) == {Kind.DIFFERENCE}
    (spoiled,) = (each for each, state in report.snapshots.items() if state is State.DIFFERENT)
    assert [finding.snapshot_id for finding in report.findings] == [spoiled, None], "in its snapshot, and in sum"


async def test_a_flipped_value_is_a_difference_after_a_rewrite_and_expiry_too(bench: Bench) -> None:
    await write_two(bench)
    await lakes.compact(bench, with_column("name", lambda values: ["Name 1", *values[1:]]))
    ids = [each["snapshot-id"] for each in (await load_document(bench))["snapshots"]]
    await lakes.remove_snapshots(bench, ids[:-1])
    assert kinds(await verify(bench)) == {Kind.DIFFERENCE}


@pytest.mark.parametrize("change", [('"first":4', '"first":5'), ('"INSERT":2', '"UPDATE":2')])
async def test_all_counts_of_a_ledger_are_compared(bench: Bench, change: tuple[str, str]) -> None:
    await write_two(bench)
    document = await load_document(bench)
    last = document["snapshots"][-1]["summary"]
    last[LEDGER_KEY] = last[LEDGER_KEY].replace(*change)
    report = await lakes.verify_document(bench, document)
    assert kinds(report) == {Kind.DIFFERENCE}
    assert report.findings[0].text.startswith("recorded 2 rows with checksum ")


async def test_ledgers_that_overlap_contradict_one_another(bench: Bench) -> None:
    await write_two(bench)
    document = await load_document(bench)
    last = document["snapshots"][-1]["summary"]
    last[LEDGER_KEY] = last[LEDGER_KEY].replace('"first":4', '"first":3')
    report = await lakes.verify_document(bench, document)
    assert any("at or before the end of an earlier snapshot" in finding.text for finding in report.findings)


async def test_a_snapshot_that_is_cut_out_of_the_history_is_missed(bench: Bench) -> None:
    await write_two(bench)
    document = await load_document(bench)
    del document["snapshots"][-1]["parent-snapshot-id"]
    report = await lakes.verify_document(bench, document)
    assert any("ledgers and totals do not agree" in finding.text for finding in report.findings)


async def test_a_damaged_ledger_is_a_finding(bench: Bench) -> None:
    await write_two(bench)
    document = await load_document(bench)
    document["snapshots"][0]["summary"][LEDGER_KEY] = "{"
    report = await lakes.verify_document(bench, document)
    assert Kind.UNREADABLE in kinds(report)


async def test_a_mark_behind_the_rows_is_a_finding(bench: Bench) -> None:
    await write_two(bench)
    document = await load_document(bench)
    progress = document["properties"]["lakefeed.progress"]
    document["properties"]["lakefeed.progress"] = progress.replace("[0,5]", "[0,4]")
    report = await lakes.verify_document(bench, document)
    assert [finding.kind for finding in report.findings] == [Kind.HISTORY]
    assert "mark is behind its rows" in report.findings[0].text


async def test_a_table_on_s3_is_verified_too(s3_lake: Lake) -> None:
    async with lake_bench(s3_lake) as bench:
        await write_two(bench)
        assert (await verify(bench)).is_sound
        await spoil_file(bench, with_column("name", lambda values: ["Name 1", *values[1:]]))
        assert kinds(await verify(bench)) == {Kind.DIFFERENCE}
