from __future__ import annotations

import pytest

from lakefeed.pipeline.mirrors.marker import MARKER, Marker
from lakefeed.pipeline.mirrors.merge import ConcurrentMirror, MirrorRolledBack, MirrorState, check_commits
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


def test_compactions_own_commits_and_earlier_commits_are_no_conflict() -> None:
    check(compaction(3), merge(2, "ours"), merge(1, "another"), since=1)
    check(merge(1, "another"), since=1)
    check(merge(1, "ours"), since=None)


def test_rollback_of_the_mirror_during_a_merge_is_an_error() -> None:
    with pytest.raises(MirrorRolledBack):
        check(merge(1, "ours"), since=2)
