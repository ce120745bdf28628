from __future__ import annotations

import itertools

import pytest

from lakefeed.contract.properties import DAY_MS
from lakefeed.writer.commit.expiry import REMOVED_MAX, plan_expiry

NOW_MS = 1_794_800_000_000
# By number alone: every snapshot is old enough to go.
LAST_TEN = {"history.expire.max-snapshot-age-ms": "1", "history.expire.min-snapshots-to-keep": "10"}


def own(snapshot_id, *, parent="before", age_ms=DAY_MS, **summary):
    return {
        "snapshot-id": snapshot_id,
        "parent-snapshot-id": snapshot_id - 1 if parent == "before" else parent,
        "timestamp-ms": NOW_MS - age_ms,
        "manifest-list": f"file:///t/metadata/snap-{snapshot_id}.avro",
        "summary": {"operation": "append", "lakefeed.flush-id": f"f{snapshot_id}", **summary},
    }


def other(snapshot_id, operation="replace"):
    return {**own(snapshot_id), "summary": {"operation": operation}}


def table(snapshots, properties=LAST_TEN, *, main=None, **refs):
    head = {"type": "branch", "snapshot-id": main or snapshots[-1]["snapshot-id"]}
    return {"table-uuid": "u", "properties": properties, "refs": {"main": head, **refs}, "snapshots": snapshots}


def chain(last, **properties):
    return table([own(number) for number in range(1, last + 1)], {**LAST_TEN, **properties})


def removed(document):
    plan = plan_expiry(document, now_ms=NOW_MS)
    return sorted(plan.snapshot_ids) if plan else []


def test_the_newest_stay_and_older_ones_go_with_their_lists():
    plan = plan_expiry(chain(13), now_ms=NOW_MS)
    assert sorted(plan.snapshot_ids) == [1, 2, 3]
    assert sorted(plan.lists) == [f"file:///t/metadata/snap-{number}.avro" for number in (1, 2, 3)]
    assert plan.kept_lists == ("file:///t/metadata/snap-4.avro",)


def test_a_removal_requires_that_main_has_not_moved():
    plan = plan_expiry(chain(13), now_ms=NOW_MS)
    assert plan.request.requirements == (
        {"type": "assert-table-uuid", "uuid": "u"},
        {"type": "assert-ref-snapshot-id", "ref": "main", "snapshot-id": 13},
    )
    [update] = plan.request.updates
    assert (update["action"], sorted(update["snapshot-ids"])) == ("remove-snapshots", [1, 2, 3])


def test_young_snapshots_stay_up_to_the_largest_number():
    aged = [own(number, age_ms=(30 - number) * DAY_MS) for number in range(1, 31)]
    five_days = {"history.expire.max-snapshot-age-ms": str(5 * DAY_MS), "history.expire.min-snapshots-to-keep": "2"}
    assert removed(table(aged, five_days)) == list(range(1, 25))
    assert removed(table(aged, {**five_days, "lakefeed.snapshots-max": "3"})) == list(range(1, 28))


def test_without_properties_the_defaults_hold():
    young = [own(number, age_ms=DAY_MS) for number in range(1, 521)]
    old = [own(number, age_ms=6 * DAY_MS) for number in range(1, 111)]
    assert removed(table(young, {})) == list(range(1, 21))
    assert removed(table(old, {})) == list(range(1, 11))


def test_fewer_stay_where_their_summaries_are_large_but_never_fewer_than_the_least():
    large = [own(number, age_ms=DAY_MS, **{"lakefeed.sources": "x" * 1_000}) for number in range(1, 31)]
    by_bytes = {"lakefeed.summaries-max-bytes": "15000", "history.expire.min-snapshots-to-keep": "5"}
    kept = 30 - len(removed(table(large, by_bytes)))
    assert kept == 15_000 // 1_050, "each has some 50 bytes beside"
    assert removed(table(large, {**by_bytes, "history.expire.min-snapshots-to-keep": "20"})) == list(range(1, 11))
    assert removed(table(large, {**by_bytes, "lakefeed.snapshots-max": "3"})) == list(range(1, 28))
    assert removed(table(large, {**by_bytes, "lakefeed.summaries-max-bytes": "0"})) == []
    assert removed(table(large, {"history.expire.min-snapshots-to-keep": "5"})) == []


def test_consumers_keep_what_they_need_however_large_the_summaries_are():
    large = [own(number, age_ms=1, **{"lakefeed.sources": "x" * 1_000}) for number in range(1, 31)]
    by_bytes = {"lakefeed.summaries-max-bytes": "1", "history.expire.min-snapshots-to-keep": "2"}
    tag = {"type": "tag", "snapshot-id": 12}
    assert removed(table(large, by_bytes)) == list(range(1, 29))
    assert removed(table(large, by_bytes, keep=tag)) == [*range(1, 12), *range(13, 29)]
    assert removed(table(large, by_bytes, lakefeed_consumer_stream=tag)) == list(range(1, 12))


@pytest.mark.parametrize("properties", [{"lakefeed.snapshots-max": "0"}, {"gc.enabled": "false"}])
def test_a_table_can_forbid_expiry(properties):
    assert removed(chain(30, **properties)) == []


@pytest.mark.parametrize("text", ["many", "-1", "", "1e3"])
def test_a_limit_that_is_no_number_counts_as_not_set(text):
    assert removed(chain(30, **{"lakefeed.snapshots-max": text})) == list(range(1, 21))


def test_what_a_tag_points_at_stays_and_its_list_is_asked():
    document = chain(13)
    document["refs"]["audit"] = {"type": "tag", "snapshot-id": 2}
    plan = plan_expiry(document, now_ms=NOW_MS)
    assert sorted(plan.snapshot_ids) == [1, 3]
    assert sorted(plan.kept_lists) == [f"file:///t/metadata/snap-{number}.avro" for number in (2, 4)]


def test_a_branch_keeps_its_own_past_by_its_own_limits():
    document = chain(20)
    document["snapshots"].append(own(99, parent=8))
    document["refs"]["work"] = {"type": "branch", "snapshot-id": 99, "min-snapshots-to-keep": 3}
    assert removed(document) == [1, 2, 3, 4, 5, 6, 9, 10]


def test_limits_of_main_itself_win_over_those_of_the_table():
    document = chain(20)
    document["refs"]["main"]["min-snapshots-to-keep"] = 15
    assert removed(document) == [1, 2, 3, 4, 5]


def test_a_snapshot_of_another_writer_and_the_one_before_it_stay():
    snapshots = [*(own(number) for number in range(1, 6)), other(6), *(own(number) for number in range(7, 21))]
    assert removed(table(snapshots)) == [1, 2, 3, 4, 7, 8, 9, 10]


def test_an_overwrite_under_our_flush_id_counts_as_of_another_writer():
    snapshots = [*(own(number) for number in range(1, 21))]
    snapshots[4]["summary"]["operation"] = "overwrite"
    assert removed(table(snapshots)) == [1, 2, 3, *range(6, 11)]


def test_what_does_not_lead_to_main_is_left_alone():
    snapshots = [own(number) for number in range(1, 21)]
    snapshots.append(own(50, parent=3))
    assert 50 not in removed(table(snapshots, main=20))


def test_the_lists_around_a_merge_are_compared_when_the_one_before_it_goes():
    snapshots = [own(number) for number in range(1, 21)]
    for number in (4, 11, 15):
        snapshots[number - 1] = own(number, **{"manifests-replaced": "3"})
    plan = plan_expiry(table(snapshots), now_ms=NOW_MS)
    numbers = sorted(int(after.partition("snap-")[2].removesuffix(".avro")) for _, after in plan.replaced)
    assert sorted(plan.snapshot_ids) == list(range(1, 11))
    assert numbers == [4, 11]


def test_only_so_many_go_at_once_and_the_oldest_first():
    assert removed(chain(REMOVED_MAX + 100)) == list(range(1, REMOVED_MAX + 1))


def test_a_list_that_a_kept_snapshot_shares_is_not_deleted():
    document = chain(13)
    document["snapshots"][12]["manifest-list"] = document["snapshots"][0]["manifest-list"]
    plan = plan_expiry(document, now_ms=NOW_MS)
    assert sorted(plan.lists) == [f"file:///t/metadata/snap-{number}.avro" for number in (2, 3)]


def test_a_circle_of_parents_ends():
    snapshots = [own(number) for number in range(1, 21)]
    snapshots[0]["parent-snapshot-id"] = 20
    assert removed(table(snapshots)) == list(range(1, 11))


def test_an_empty_table_has_nothing_to_remove():
    assert plan_expiry({"table-uuid": "u", "snapshots": [], "refs": {}}, now_ms=NOW_MS) is None


def test_everything_kept_is_reachable_by_number():
    for last in itertools.chain(range(1, 12), (50,)):
        assert len(removed(chain(last))) == max(0, last - 10)
