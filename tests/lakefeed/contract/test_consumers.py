from __future__ import annotations

import pytest

from lakefeed.contract.consumers import describe_consumers, read_consumers
from lakefeed.contract.properties import DAY_MS
from lakefeed.writer.commit.expiry import plan_expiry
from tests.writer.commit.test_expiry import NOW_MS, chain, own, removed, table


def consumer(snapshot_id, **fields):
    return {"type": "tag", "snapshot-id": snapshot_id, **fields}


def followed(last, **tags):
    document = chain(last)
    document["refs"] |= {f"lakefeed_consumer_{name}": tag for name, tag in tags.items()}
    return document


def test_all_snapshots_since_the_slowest_consumer_are_kept():
    assert removed(followed(30, slow=consumer(6), fast=consumer(28))) == [1, 2, 3, 4, 5]


def test_consumer_at_the_head_keeps_no_further_snapshots():
    assert removed(followed(13, fast=consumer(13))) == [1, 2, 3]


def test_an_expired_consumer_keeps_no_snapshots_and_is_reported():
    # Its snapshot is a day old; only its own is left, because a tag points at it.
    plan = plan_expiry(
        followed(30, gone=consumer(6, **{"max-ref-age-ms": DAY_MS - 1}), slow=consumer(9)), now_ms=NOW_MS
    )
    assert sorted(plan.snapshot_ids) == [1, 2, 3, 4, 5, 7, 8]
    assert plan.unread_by == ("gone",)
    kept = plan_expiry(followed(30, gone=consumer(6, **{"max-ref-age-ms": DAY_MS})), now_ms=NOW_MS)
    assert sorted(kept.snapshot_ids) == [1, 2, 3, 4, 5]
    assert kept.unread_by == ()


def test_consumers_keep_no_more_snapshots_than_the_table_allows():
    document = followed(30, slow=consumer(6))
    document["properties"] = {**document["properties"], "lakefeed.consumer-snapshots-max": "20"}
    plan = plan_expiry(document, now_ms=NOW_MS)
    assert sorted(plan.snapshot_ids) == [*range(1, 6), *range(7, 21)]
    assert plan.unread_by == ("slow",)


def test_tag_of_another_writer_and_branch_of_that_name_are_no_consumers():
    document = chain(13)
    document["refs"] |= {
        "audit": consumer(2),
        "lakefeed_consumer_branch": {"type": "branch", "snapshot-id": 2, "min-snapshots-to-keep": 1},
    }
    assert read_consumers(document) == []
    assert removed(document) == [1, 3]


@pytest.mark.parametrize("at", ["a snapshot of another branch", "one that is not known"])
def test_consumer_of_another_branch_keeps_no_snapshots(at):
    document = followed(13, lost=consumer(99))
    if at == "a snapshot of another branch":
        document["snapshots"] = [*document["snapshots"], own(99, parent=None)]
    assert removed(document) == [1, 2, 3]


def test_lag_is_reported_in_snapshots_and_seconds():
    aged = [{**own(n, age_ms=(10 - n) * 1000), "sequence-number": n} for n in range(1, 11)]
    document = table(
        aged, lakefeed_consumer_slow=consumer(4, **{"max-ref-age-ms": 60_000}), lakefeed_consumer_new=consumer(10)
    )
    assert describe_consumers(document, now_ms=NOW_MS) == [
        {
            "name": "new",
            "snapshotId": 10,
            "snapshotsBehind": 0,
            "secondsBehind": 0.0,
            "keptForSeconds": None,
            "isExpired": False,
        },
        {
            "name": "slow",
            "snapshotId": 4,
            "snapshotsBehind": 6,
            "secondsBehind": 6.0,
            "keptForSeconds": 54.0,
            "isExpired": False,
        },
    ]
    [_, later] = describe_consumers(document, now_ms=NOW_MS + 55_000)
    assert (later["keptForSeconds"], later["isExpired"]) == (0.0, True)
