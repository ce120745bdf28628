from __future__ import annotations

from lakefeed.pipeline.mirrors.marker import (
    CLOCK_SKEW_MAX_MS,
    MARKER,
    Follow,
    Marker,
    ReadAll,
    Version,
    Wait,
    ancestors,
    completed_snapshot,
    find_marker,
    plan_start,
    read_marker,
)
from lakefeed.pipeline.mirrors.runner import missing, seconds_between

MINUTE_MS = 60_000


def version(number: int, *, at_ms: int | None = None, files: int = 2, **summary: str) -> Version:
    committed_ms = number * 10 * MINUTE_MS if at_ms is None else at_ms
    facts = {"added-data-files": str(files), "added-records": "100", **summary}
    return Version(number, number - 1 or None, committed_ms, "append", facts)


def marker(snapshot: int, **facts: object) -> Marker:
    return Marker(**{"snapshot": snapshot, "stream": "s", "batch": 0, "run": "r", "merges": 1, **facts})


def test_a_marker_is_read_as_it_was_written() -> None:
    written = marker(2**62, batch=-1)
    assert read_marker(written.to_text()) == written


def test_what_is_no_marker_is_none() -> None:
    assert [read_marker(text) for text in (None, "", "{", "[]", '{"snapshot": 1}')] == [None] * 5


def test_ancestors_are_those_of_the_newest_and_end_where_history_does() -> None:
    branch = Version(9, 2, 0, "append", {})
    assert [each.snapshot_id for each in ancestors([version(2), branch, version(4), version(3)], 4)] == [4, 3, 2]
    assert ancestors([version(1)], None) == []


def test_the_newest_snapshot_with_a_marker_counts_and_then_the_property() -> None:
    lineage = [version(3), version(2, **{MARKER: marker(20).to_text()}), version(1, **{MARKER: marker(10).to_text()})]
    properties = {MARKER: marker(5).to_text()}
    assert find_marker(lineage, properties) == marker(20)
    assert find_marker(lineage[:1], properties) == marker(5)
    assert find_marker(lineage[:1], {}) is None


def test_a_mirror_without_a_marker_or_behind_expiry_reads_all() -> None:
    lineage = [version(3), version(2)]
    assert plan_start([], None) == Wait()
    assert plan_start(lineage, None) == ReadAll(3)
    assert plan_start(lineage, marker(1)) == ReadAll(3)


def test_a_stream_starts_below_every_snapshot_that_is_not_merged_though_clocks_differ() -> None:
    lineage = [version(4), version(3, at_ms=5 * MINUTE_MS), version(2), version(1, at_ms=1)]
    assert plan_start(lineage, marker(2)) == Follow(5 * MINUTE_MS - CLOCK_SKEW_MAX_MS)
    assert plan_start(lineage, marker(4)) == Follow(40 * MINUTE_MS - CLOCK_SKEW_MAX_MS)


def test_a_snapshot_counts_as_merged_when_all_of_its_files_are() -> None:
    lineage = [version(3, files=2), version(2)]
    assert completed_snapshot(lineage, 3, 2) == 3
    assert completed_snapshot(lineage, 3, 1) == 2
    assert completed_snapshot(lineage, 7, 1) is None


def test_what_a_mirror_lacks_is_counted_in_appends_only() -> None:
    compaction = Version(4, 3, 45 * MINUTE_MS, "replace", {})
    lineage = [version(5), compaction, version(3), version(2)]
    behind = missing(lineage, marker(2))
    assert behind is not None
    assert [each.snapshot_id for each in behind] == [5, 3]
    assert seconds_between(behind) == 20 * 60
    assert missing(lineage, marker(5)) == []
    assert missing(lineage, marker(1)) is None
