from __future__ import annotations

from lakefeed.pipeline.mirrors.marker import (
    CLOCK_SKEW_MAX_MS,
    MARKER,
    Marker,
    ReadTable,
    StreamFrom,
    completed_snapshot,
    find_marker,
    parse_marker,
    plan_resume,
)
from lakefeed.pipeline.mirrors.runner import seconds_between, unmerged
from lakefeed.pipeline.spark.tables import Snapshot, ancestors

MINUTE_MS = 60_000


def snapshot(number: int, *, at_ms: int | None = None, files: int = 2, **summary: str) -> Snapshot:
    committed_ms = number * 10 * MINUTE_MS if at_ms is None else at_ms
    facts = {"added-data-files": str(files), "added-records": "100", **summary}
    return Snapshot(number, number - 1 or None, committed_ms, "append", facts)


def marker(snapshot: int, **facts: object) -> Marker:
    return Marker(**{"snapshot": snapshot, "stream": "s", "batch": 0, "run": "r", "merges": 1, **facts})


def test_a_marker_is_read_as_it_was_written() -> None:
    written = marker(2**62, batch=-1)
    assert parse_marker(written.to_text()) == written


def test_other_texts_are_not_markers() -> None:
    assert [parse_marker(text) for text in (None, "", "{", "[]", '{"snapshot": 1}')] == [None] * 5


def test_ancestors_end_at_the_oldest_snapshot_that_has_not_expired() -> None:
    branch = Snapshot(9, 2, 0, "append", {})
    assert [each.snapshot_id for each in ancestors([snapshot(2), branch, snapshot(4), snapshot(3)], 4)] == [4, 3, 2]
    assert ancestors([snapshot(1)], None) == []


def test_marker_is_the_newest_in_a_snapshot_or_else_the_property() -> None:
    lineage = [
        snapshot(3),
        snapshot(2, **{MARKER: marker(20).to_text()}),
        snapshot(1, **{MARKER: marker(10).to_text()}),
    ]
    properties = {MARKER: marker(5).to_text()}
    assert find_marker(lineage, properties) == marker(20)
    assert find_marker(lineage[:1], properties) == marker(5)
    assert find_marker(lineage[:1], {}) is None


def test_mirror_without_a_marker_or_with_an_expired_one_reads_the_whole_table() -> None:
    lineage = [snapshot(3), snapshot(2)]
    assert plan_resume([], None) is None
    assert plan_resume(lineage, None) == ReadTable(3)
    assert plan_resume(lineage, marker(1)) == ReadTable(3)


def test_a_stream_starts_before_every_unmerged_snapshot_although_clocks_differ() -> None:
    lineage = [snapshot(4), snapshot(3, at_ms=5 * MINUTE_MS), snapshot(2), snapshot(1, at_ms=1)]
    assert plan_resume(lineage, marker(2)) == StreamFrom(5 * MINUTE_MS - CLOCK_SKEW_MAX_MS)
    assert plan_resume(lineage, marker(4)) == StreamFrom(40 * MINUTE_MS - CLOCK_SKEW_MAX_MS)


def test_a_snapshot_counts_as_merged_when_all_of_its_files_are() -> None:
    lineage = [snapshot(3, files=2), snapshot(2)]
    assert completed_snapshot(lineage, 3, 2) == 3
    assert completed_snapshot(lineage, 3, 1) == 2
    assert completed_snapshot(lineage, 7, 1) is None


def test_lag_of_a_mirror_counts_appends_only() -> None:
    compaction = Snapshot(4, 3, 45 * MINUTE_MS, "replace", {})
    lineage = [snapshot(5), compaction, snapshot(3), snapshot(2)]
    behind = unmerged(lineage, marker(2))
    assert behind is not None
    assert [each.snapshot_id for each in behind] == [5, 3]
    assert seconds_between(behind) == 20 * 60
    assert unmerged(lineage, marker(5)) == []
    assert unmerged(lineage, marker(1)) is None
