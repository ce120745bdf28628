from __future__ import annotations

from dataclasses import replace

import pytest

from lakefeed.contract.consumers import History, Moment, Ref
from lakefeed.pipeline.maintenance.plan import (
    DAY_S,
    MIB,
    MaintenanceSettings,
    PartitionFiles,
    Step,
    TableFacts,
    TableSizes,
    plan_compaction,
    plan_expiry,
    plan_table,
)

NOW_MS = 1_794_800_000_000
HOUR_MS = 3_600_000
SETTINGS = MaintenanceSettings(target_file_bytes=100 * MIB)
SIZES = TableSizes(data_files=0, data_bytes=0, small_files=0, delete_files=0, manifests=1, snapshots=1)


def facts(*refs: Ref, last: int = 1, newest_write: int = 0, wrong_sizes=(), **properties: str) -> TableFacts:
    """A table with one snapshot an hour, the newest now."""
    moments = [
        Moment(n, n - 1 or None, NOW_MS - (last - n) * HOUR_MS, "replace" if 0 < newest_write < n else "append")
        for n in range(1, last + 1)
    ]
    return TableFacts(
        properties={key.replace("_", "-").replace("--", "."): value for key, value in properties.items()},
        sizes=SIZES,
        wrong_sizes=wrong_sizes,
        position_deletes=0,
        history=History([Ref("main", "BRANCH", last, None), *refs], moments),
    )


def consumer(name: str, snapshot_id: int, max_age_ms: int | None = None) -> Ref:
    return Ref(f"lakefeed_consumer_{name}", "TAG", snapshot_id, max_age_ms)


def hours_ago(hours: int) -> int:
    return NOW_MS - hours * HOUR_MS


AGE = {"history--expire--max_snapshot_age_ms": str(10 * HOUR_MS)}


@pytest.mark.parametrize(
    ("files", "is_worth_it"),
    [
        (PartitionFiles(count=4, bytes=4 * MIB, largest_bytes=MIB), False),
        (PartitionFiles(count=5, bytes=5 * MIB, largest_bytes=MIB), True),
        (PartitionFiles(count=2, bytes=101 * MIB, largest_bytes=60 * MIB), True),
        (PartitionFiles(count=1, bytes=74 * MIB, largest_bytes=74 * MIB), False),
        (PartitionFiles(count=1, bytes=181 * MIB, largest_bytes=181 * MIB), True),
    ],
)
def test_a_partition_is_rewritten_when_it_has_many_small_files_or_one_too_large(files, is_worth_it) -> None:
    assert (plan_compaction(facts(wrong_sizes=[files]), SETTINGS) is not None) is is_worth_it


def test_a_compaction_adds_up_the_partitions_that_are_worth_it() -> None:
    many = PartitionFiles(count=30, bytes=150 * MIB, largest_bytes=9 * MIB)
    few = PartitionFiles(count=2, bytes=2 * MIB, largest_bytes=MIB)
    plan = plan_compaction(facts(wrong_sizes=[many, few, many]), SETTINGS)
    assert (plan.files, plan.bytes, plan.files_after) == (60, 300 * MIB, 4)


def test_a_table_with_delete_files_is_left_to_icebergs_own_planner() -> None:
    table = facts()
    assert plan_compaction(table, SETTINGS) is None
    assert plan_compaction(replace(table, sizes=replace(SIZES, delete_files=1)), SETTINGS) is not None


def test_history_ends_at_the_tables_age() -> None:
    plan = plan_expiry(facts(last=20, **AGE), SETTINGS, now_ms=NOW_MS)
    assert (plan.older_than_ms, plan.snapshots) == (hours_ago(10), 9)
    own = plan_expiry(facts(last=20, **AGE), replace(SETTINGS, history_s=5 * 3600), now_ms=NOW_MS)
    assert (own.older_than_ms, own.snapshots) == (hours_ago(5), 14)


def test_a_snapshot_stays_for_the_tables_age_after_another_took_its_place() -> None:
    idle = facts(last=3, **AGE)
    moments = [Moment(1, None, hours_ago(40), "append"), Moment(2, 1, hours_ago(30), "append")]
    moments += [Moment(3, 2, hours_ago(1), "overwrite"), Moment(4, 3, NOW_MS, "overwrite")]
    table = replace(idle, history=History([Ref("main", "BRANCH", 4, None)], moments))
    plan = plan_expiry(table, SETTINGS, now_ms=NOW_MS)
    assert (plan.older_than_ms, plan.snapshots) == (hours_ago(30), 1), "the second could be read until an hour ago"


def test_history_ends_at_the_tables_number_of_snapshots_as_in_the_writer() -> None:
    plan = plan_expiry(facts(last=20, lakefeed__snapshots_max="3"), SETTINGS, now_ms=NOW_MS)
    assert (plan.older_than_ms, plan.snapshots) == (hours_ago(2), 17)


def test_the_newest_snapshots_stay_at_any_age() -> None:
    table = facts(last=20, **AGE, history__expire__min_snapshots_to_keep="15")
    assert plan_expiry(table, SETTINGS, now_ms=NOW_MS).snapshots == 5


def test_expiry_stops_at_the_slowest_consumer() -> None:
    table = facts(consumer("slow", 4), consumer("fast", 19), last=20, **AGE)
    plan = plan_expiry(table, SETTINGS, now_ms=NOW_MS)
    assert (plan.older_than_ms, plan.snapshots) == (hours_ago(16), 3)
    assert (plan.held_by, plan.expired_consumers) == (("slow",), ())


def test_expiry_keeps_snapshots_with_earlier_times_after_the_consumers_snapshot() -> None:
    table = facts(consumer("slow", 4), last=20, **AGE)
    moments = [
        replace(each, committed_ms=hours_ago(16) - 30_000) if each.snapshot_id == 5 else each
        for each in table.history.moments
    ]
    plan = plan_expiry(replace(table, history=replace(table.history, moments=moments)), SETTINGS, now_ms=NOW_MS)
    assert plan.older_than_ms == hours_ago(16) - 30_000


def test_a_consumer_whose_registration_has_expired_is_ignored() -> None:
    table = facts(consumer("gone", 4, 15 * HOUR_MS), consumer("slow", 8), last=20, **AGE)
    plan = plan_expiry(table, SETTINGS, now_ms=NOW_MS)
    assert (plan.older_than_ms, plan.held_by, plan.expired_consumers) == (hours_ago(12), ("slow",), ("gone",))


def test_a_consumer_too_many_snapshots_behind_is_ignored() -> None:
    table = facts(consumer("slow", 4), last=20, **AGE, lakefeed__consumer_snapshots_max="16")
    assert plan_expiry(table, SETTINGS, now_ms=NOW_MS).expired_consumers == ("slow",)
    table = facts(consumer("slow", 4), last=20, **AGE, lakefeed__consumer_snapshots_max="17")
    assert plan_expiry(table, SETTINGS, now_ms=NOW_MS).expired_consumers == ()


def test_the_newest_snapshot_that_wrote_rows_stays_because_of_its_summary() -> None:
    plan = plan_expiry(facts(last=20, newest_write=6, **AGE), SETTINGS, now_ms=NOW_MS)
    assert (plan.older_than_ms, plan.snapshots) == (hours_ago(14), 5)


def test_nothing_is_planned_where_nothing_would_expire() -> None:
    assert plan_expiry(facts(last=5, **AGE), SETTINGS, now_ms=NOW_MS) is None
    assert plan_expiry(replace(facts(), history=History([], [])), SETTINGS, now_ms=NOW_MS) is None


def test_a_table_with_gc_disabled_loses_neither_snapshots_nor_orphans() -> None:
    plan = plan_table(facts(last=20, **AGE, gc__enabled="false"), SETTINGS, now_ms=NOW_MS)
    assert (plan.expiry, plan.orphans_before_ms) == (None, None)
    assert set(plan.skipped) == {Step.EXPIRE, Step.ORPHANS}


def test_snapshots_stay_if_main_has_its_own_age_which_ignores_consumers() -> None:
    table = facts(consumer("slow", 4), last=20, **AGE)
    own = replace(
        table, history=replace(table.history, refs=[Ref("main", "BRANCH", 20, None, 0), *table.history.refs[1:]])
    )
    plan = plan_table(own, SETTINGS, now_ms=NOW_MS)
    assert (plan.expiry, set(plan.skipped), plan.orphans_before_ms is None) == (None, {Step.EXPIRE}, False)
    branch = replace(table, history=replace(table.history, refs=[*table.history.refs, Ref("b", "BRANCH", 9, None, 1)]))
    assert plan_table(branch, SETTINGS, now_ms=NOW_MS).expiry.held_by == ("slow",)


def test_only_the_steps_that_are_asked_for_are_planned() -> None:
    table = facts(last=20, wrong_sizes=[PartitionFiles(9, 9 * MIB, MIB)], **AGE)
    table = replace(table, sizes=replace(SIZES, manifests=50, delete_files=9), position_deletes=9)
    for step in Step:
        plan = plan_table(table, replace(SETTINGS, run=(step,)), now_ms=NOW_MS)
        assert [each for each in Step if plan.has(each)] == [step]


def test_orphans_have_the_configured_age() -> None:
    plan = plan_table(facts(), replace(SETTINGS, orphan_age_s=2 * DAY_S), now_ms=NOW_MS)
    assert plan.orphans_before_ms == hours_ago(48)


@pytest.mark.parametrize(("manifests", "data_files", "expected"), [(19, 0, False), (20, 0, True), (20, 50_000, False)])
def test_manifests_are_rewritten_when_there_are_several_times_as_many_as_needed(
    manifests, data_files, expected
) -> None:
    table = replace(facts(), sizes=replace(SIZES, manifests=manifests, data_files=data_files))
    assert plan_table(table, SETTINGS, now_ms=NOW_MS).manifests is expected


def test_deletion_vectors_are_not_merged() -> None:
    table = replace(facts(format_version="2"), position_deletes=9)
    assert plan_table(table, SETTINGS, now_ms=NOW_MS).deletes
    assert not plan_table(replace(table, properties={"format-version": "3"}), SETTINGS, now_ms=NOW_MS).deletes
