from __future__ import annotations

import pytest
from pyspark.sql.types import LongType, StructField, StructType

from lakefeed.pipeline.mirrors.fold import Truncate, latest_truncates, truncated
from lakefeed.pipeline.mirrors.marker import MARKER, Marker
from lakefeed.pipeline.mirrors.merge import (
    ConcurrentMirror,
    KeyBounds,
    MirrorRolledBack,
    MirrorState,
    check_commits,
    merge_current,
    within,
)
from lakefeed.pipeline.mirrors.settings import MirrorSettings
from lakefeed.pipeline.mirrors.table import plan_layout
from lakefeed.pipeline.spark.tables import Snapshot


def merge(number: int, run: str) -> Snapshot:
    marker = Marker(snapshot=number, stream="s", batch=number, run=run, merges=number)
    return Snapshot(number, number - 1 or None, number, "overwrite", {MARKER: marker.to_text()})


def compaction(number: int) -> Snapshot:
    return Snapshot(number, number - 1 or None, number, "replace", {})


def check(*lineage: Snapshot, since: int | None) -> None:
    check_commits(lineage, state=MirrorState(since, frozenset()), run="ours", mirror="default.users_current")


def test_commit_of_another_application_during_a_merge_is_an_error() -> None:
    with pytest.raises(ConcurrentMirror, match=r"mirror=default\.users_current"):
        check(compaction(3), merge(2, "another"), merge(1, "ours"), since=1)
    with pytest.raises(ConcurrentMirror):
        check(merge(1, "another"), since=None)


def test_compactions_and_commits_of_this_run_or_before_it_are_no_conflict() -> None:
    check(compaction(3), merge(2, "ours"), merge(1, "another"), since=1)
    check(merge(1, "another"), since=1)
    check(merge(1, "ours"), since=None)


def test_rollback_of_the_mirror_during_a_merge_is_an_error() -> None:
    with pytest.raises(MirrorRolledBack):
        check(merge(1, "ours"), since=2)


def test_bounds_are_part_of_the_condition_unless_they_are_long() -> None:
    bounds = [KeyBounds("id", "bigint", "1", "9"), KeyBounds("name", "string", "a", "z" * 300)]
    assert within(bounds, "t") == "t.`id` >= CAST('1' AS bigint) AND t.`id` <= CAST('9' AS bigint)"
    assert within([], "t") == "true"


def test_only_a_batch_with_truncates_touches_rows_of_other_keys() -> None:
    plain = plan_layout(StructType([StructField("id", LongType())]), MirrorSettings(key=("id",)))
    assert "BY SOURCE" not in merge_current(plain, target="t", view="v")
    assert "BY SOURCE" in merge_current(plain, target="t", view="v", truncates=[Truncate("s", 0, 1)])


def test_the_last_truncate_of_a_source_covers_those_before() -> None:
    given = [Truncate("b", 0, 9), Truncate("a", 1, 2), Truncate("a", 0, 7), Truncate("b", 0, 3)]
    assert latest_truncates(given) == (Truncate("a", 1, 2), Truncate("b", 0, 9))
    assert truncated([]) == "false"
