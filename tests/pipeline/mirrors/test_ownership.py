from __future__ import annotations

import pytest

from lakefeed.pipeline.mirrors.marker import MARKER, Marker, Version
from lakefeed.pipeline.mirrors.merge import MirrorRolledBack, Seen, TwoApplications, check_commits


def merge(number: int, run: str) -> Version:
    marker = Marker(snapshot=number, stream="s", batch=number, run=run, merges=number)
    return Version(number, number - 1 or None, number, "overwrite", {MARKER: marker.to_text()})


def compaction(number: int) -> Version:
    return Version(number, number - 1 or None, number, "replace", {})


def check(*lineage: Version, seen: int | None) -> None:
    check_commits(lineage, seen=Seen(seen, frozenset()), run="ours", mirror="default.users_current")


def test_commits_of_another_application_since_the_mirror_was_seen_are_found() -> None:
    with pytest.raises(TwoApplications, match=r"mirror=default\.users_current"):
        check(compaction(3), merge(2, "another"), merge(1, "ours"), seen=1)
    with pytest.raises(TwoApplications):
        check(merge(1, "another"), seen=None)


def test_compactions_and_ones_own_commits_do_no_harm_nor_do_others_from_before() -> None:
    check(compaction(3), merge(2, "ours"), merge(1, "another"), seen=1)
    check(merge(1, "another"), seen=1)
    check(merge(1, "ours"), seen=None)


def test_a_mirror_that_was_rolled_back_under_a_merge_is_found() -> None:
    with pytest.raises(MirrorRolledBack):
        check(merge(1, "ours"), seen=2)
