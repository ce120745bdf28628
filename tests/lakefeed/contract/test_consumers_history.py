from __future__ import annotations

from datetime import timedelta

import pytest

from lakefeed.contract import consumers
from lakefeed.contract.consumers import History, Moment, Ref, needs_renewal, retain_minutes, tag_of
from lakefeed.contract.errors import ConsumerError
from lakefeed.pipeline.consumers.registry import finished_snapshot

HOUR_MS = 3_600_000
DAY = timedelta(days=1)


def history(last: int, *refs: Ref) -> History:
    moments = [Moment(number, number - 1 or None, number * 1000) for number in range(1, last + 1)]
    return History([Ref("main", "BRANCH", last, None), *refs], moments)


def consumer(name: str, snapshot_id: int, max_age_ms: int | None = None) -> Ref:
    return Ref(f"lakefeed_consumer_{name}", "TAG", snapshot_id, max_age_ms)


def test_the_writer_and_the_pipeline_mean_the_same_tags() -> None:
    assert consumers.TAG_PREFIX == consumers.TAG_PREFIX


def test_consumers_are_the_tags_of_that_name_with_their_lag() -> None:
    refs = (consumer("slow", 4, HOUR_MS), consumer("at-head", 9), Ref("audit", "TAG", 2, None))
    at_head, slow = history(9, *refs).consumers()
    assert (at_head.name, at_head.snapshots_behind, at_head.behind) == ("at-head", 0, timedelta(0))
    assert (slow.name, slow.snapshots_behind, slow.behind) == ("slow", 5, timedelta(seconds=5))
    assert (at_head.kept_until_ms, slow.kept_until_ms) == (None, 4000 + HOUR_MS)
    assert slow.is_expired(4000 + HOUR_MS + 1)
    assert not slow.is_expired(4000 + HOUR_MS)


def test_lag_of_a_consumer_before_a_hole_in_the_history_is_unknown() -> None:
    whole = history(9, consumer("lost", 2))
    moments = [moment for moment in whole.moments if moment.snapshot_id not in (4, 5)]
    [lost] = History(whole.refs, moments).consumers()
    assert (lost.snapshots_behind, lost.behind) == (None, timedelta(seconds=7))


def test_a_table_without_snapshots_has_no_consumers() -> None:
    assert History([], []).consumers() == []


def test_a_consumer_is_kept_for_its_age_from_now_on_however_old_its_snapshot_is() -> None:
    minutes = retain_minutes(snapshot_ms=0, now_ms=10 * HOUR_MS + 1, max_age=DAY)
    assert minutes == 34 * 60 + 1
    tag = Ref("t", "TAG", 1, minutes * 60_000)
    assert not needs_renewal(tag, snapshot_ms=0, now_ms=15 * HOUR_MS, max_age=DAY)
    assert needs_renewal(tag, snapshot_ms=0, now_ms=17 * HOUR_MS, max_age=DAY)
    assert not needs_renewal(Ref("t", "TAG", 1, None), snapshot_ms=0, now_ms=17 * HOUR_MS, max_age=DAY)


def test_age_below_a_minute_is_refused() -> None:
    with pytest.raises(ConsumerError, match="a minute at least"):
        retain_minutes(snapshot_ms=0, now_ms=0, max_age=timedelta(seconds=59))


@pytest.mark.parametrize("name", ["", "a b", "a`b", "-a", "a" * 101, "naïve"])
def test_a_name_that_cannot_be_a_tags_is_refused(name: str) -> None:
    with pytest.raises(ConsumerError, match="a consumer's name"):
        tag_of(name)


@pytest.mark.parametrize(
    ("progress", "expected"),
    [
        (None, None),
        ({"sources": []}, None),
        ({"sources": [{"endOffset": None}]}, None),
        ({"sources": [{"endOffset": {"snapshot_id": -1, "position": 0}}]}, None),
        ({"sources": [{"endOffset": {"snapshot_id": 12, "position": 3}}]}, 12),
        ({"sources": [{"endOffset": '{"version":1,"snapshot_id":12}'}]}, 12),
        ({"sources": [{"endOffset": "{'version': 1, 'snapshot_id': 7, 'scan_all_files': True}"}]}, 7),
    ],
)
def test_the_finished_snapshot_is_read_from_a_querys_progress(progress: object, expected: int | None) -> None:
    assert finished_snapshot(progress) == expected


def test_the_finished_snapshot_is_that_of_the_table_among_several() -> None:
    progress = {"sources": [{"endOffset": {"snapshot_id": 1}}, {"endOffset": {"snapshot_id": 2}}]}
    assert [finished_snapshot(progress, source=number) for number in range(3)] == [1, 2, None]
