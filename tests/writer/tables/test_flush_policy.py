"""When a table is flushed, why, and into how many files."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakefeed.settings import MIB
from lakefeed.writer.config import WriterConfig
from lakefeed.writer.tables.flush_policy import FIRST_FILE_RATIO, FlushPolicy, FlushRecord
from lakefeed.writer.tables.pending import FlushReason, TableBuffer

BASE = WriterConfig(flush_max_changes=1_000, flush_max_bytes=64 * MIB, flush_max_age_s=60.0)
FRESH = WriterConfig(
    flush_max_changes=10**9,
    flush_max_bytes=64 * MIB,
    flush_max_age_s=60.0,
    freshness_target_s=10.0,
    small_file_bytes=MIB,
)


def held(*, rows: int = 1, bytes: int = 1, oldest_at: float = 0.0) -> TableBuffer:  # noqa: A002 - the field's name
    return TableBuffer(rows=rows, bytes=bytes, oldest_at=oldest_at)


def flushed(
    *, arrow_bytes: int = 10 * MIB, file_bytes: int = MIB, seconds: float = 0.0, partitions: int = 1, files: int = 1
) -> FlushRecord:
    return FlushRecord(
        reason=FlushReason.AGE,
        finished_at=100.0,
        seconds=seconds,
        rows=7,
        arrow_bytes=arrow_bytes,
        file_bytes=file_bytes,
        files=files,
        partitions=partitions,
    )


def test_empty_buffer_is_never_due():
    policy = FlushPolicy(BASE)
    assert policy.due(held(rows=0), now=1e9) is None
    assert policy.next_flush(held(rows=0), now=1e9) is None


@pytest.mark.parametrize(
    ("held", "now", "reason"),
    [
        (held(rows=999), 59.9, None),
        (held(rows=1_000), 0.0, FlushReason.CHANGES),
        (held(bytes=64 * MIB), 0.0, FlushReason.BYTES),
        (held(), 60.0, FlushReason.AGE),
    ],
)
def test_table_is_due_by_changes_by_bytes_or_by_age(held, now, reason):
    assert FlushPolicy(BASE).due(held, now=now) is reason


def test_table_is_due_when_what_it_holds_would_fill_a_file():
    policy = FlushPolicy(WriterConfig(target_file_bytes=4 * MIB))
    policy.record(flushed(arrow_bytes=10 * MIB, file_bytes=MIB))
    assert policy.due(held(bytes=39 * MIB), now=0.0) is None
    assert policy.due(held(bytes=41 * MIB), now=0.0) is FlushReason.SIZE
    # Rows of several partitions fill several files.
    policy.record(flushed(arrow_bytes=10 * MIB, file_bytes=MIB, partitions=3))
    assert policy.due(held(bytes=41 * MIB), now=0.0) is None


def test_busy_table_is_flushed_at_the_freshness_target():
    policy = FlushPolicy(FRESH)
    busy = held(bytes=20 * MIB)
    assert policy.due(busy, now=9.9) is None
    assert policy.due(busy, now=10.0) is FlushReason.FRESHNESS


def test_slow_table_waits_until_a_file_is_worth_it_and_never_beyond_the_bound():
    policy = FlushPolicy(FRESH)
    assert policy.due(held(bytes=MIB), now=30.0) is None  # a fifth of it on disk
    assert policy.due(held(bytes=5 * MIB), now=30.0) is FlushReason.FRESHNESS
    assert policy.due(held(bytes=1), now=59.9) is None
    assert policy.due(held(bytes=1), now=60.0) is FlushReason.AGE


def test_time_that_flushes_take_is_taken_off_the_target_but_not_more_than_half_of_it():
    busy, policy = held(bytes=20 * MIB), FlushPolicy(FRESH)
    policy.record(flushed(seconds=3.0))
    assert policy.due(busy, now=6.9) is None
    assert policy.due(busy, now=7.0) is FlushReason.FRESHNESS
    policy.record(flushed(seconds=500.0))
    assert policy.due(busy, now=4.9) is None
    assert policy.due(busy, now=5.0) is FlushReason.FRESHNESS


@given(rate=st.floats(1.0, 1e8), target_s=st.floats(0.5, 60.0))
def test_interval_lies_between_the_target_and_the_bound_and_falls_with_the_rate(rate, target_s):
    config = WriterConfig(flush_max_changes=10**9, flush_max_age_s=60.0, freshness_target_s=target_s)

    def interval_at(bytes_per_s: float) -> float:
        # Looked at young, so that what is compared is what the rate alone foretells.
        *_, timed = FlushPolicy(config).thresholds(held(bytes=int(bytes_per_s)), now=1.0)
        return timed.limit

    assert target_s * 0.99 <= interval_at(rate) <= 60.0
    assert interval_at(rate * 2) <= interval_at(rate)


def test_next_flush_is_the_threshold_that_comes_first_at_this_rate():
    policy = FlushPolicy(BASE)
    coming = policy.next_flush(held(rows=500), now=10.0)
    assert coming is not None
    assert (coming.reason, coming.in_s) == (FlushReason.CHANGES, 10.0)
    slow = policy.next_flush(held(rows=5), now=10.0)
    assert slow is not None
    assert (slow.reason, slow.in_s) == (FlushReason.AGE, 50.0)
    late = policy.next_flush(held(), now=99.0)
    assert late is not None
    assert late.in_s == 0.0


def test_partition_is_cut_into_files_near_the_target():
    policy = FlushPolicy(WriterConfig(target_file_bytes=10 * MIB))
    assert policy.files_for(1) == 1
    policy.record(flushed(arrow_bytes=100 * MIB, file_bytes=50 * MIB))
    assert [policy.files_for(size * MIB) for size in (20, 29, 31, 60, 200)] == [1, 1, 2, 3, 10]


def test_ratio_is_learned_from_large_flushes_more_than_from_small_ones():
    policy = FlushPolicy(BASE)
    assert policy.file_ratio == FIRST_FILE_RATIO
    policy.record(flushed(arrow_bytes=200, file_bytes=9_000))
    assert policy.file_ratio == 1.0  # footers, not rows
    policy.record(flushed(arrow_bytes=10_000_000, file_bytes=1_000_000))
    assert policy.file_ratio == pytest.approx(0.1, rel=0.01)
    policy.record(flushed(arrow_bytes=200, file_bytes=9_000))
    assert policy.file_ratio == pytest.approx(0.1, rel=0.05)


def test_explanation_has_last_and_next_flush_and_every_threshold():
    policy = FlushPolicy(BASE)
    assert policy.explain(held(rows=0, bytes=0), now=5.0)["next"] is None
    policy.record(flushed(seconds=0.25))
    explained = policy.explain(held(rows=500, oldest_at=90.0), now=110.0)
    assert explained["next"] == {"reason": "changes", "inSeconds": 20.0}
    assert (explained["last"]["reason"], explained["last"]["secondsAgo"], explained["last"]["rows"]) == ("age", 10.0, 7)
    assert [(each["reason"], each["filled"], each["limit"]) for each in explained["thresholds"]] == [
        ("changes", 500, 1_000),
        ("bytes", 1, 64 * MIB),
        ("size", 0.1, 128 * MIB),
        ("age", 20.0, 60.0),
    ]
