"""When a table is flushed, why, and into how many files."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakefeed.settings import MIB
from lakefeed.writer.config import WriterConfig
from lakefeed.writer.tables.flush_policy import FIRST_FILE_RATIO, FlushControl, FlushRecord
from lakefeed.writer.tables.pending import FlushReason

BASE = WriterConfig(flush_max_changes=1_000, flush_max_bytes=64 * MIB, flush_max_age_s=60.0)
FRESH = WriterConfig(
    flush_max_changes=10**9,
    flush_max_bytes=64 * MIB,
    flush_max_age_s=60.0,
    freshness_target_s=10.0,
    small_file_bytes=MIB,
)


@dataclass
class Held:
    rows: int = 1
    bytes: int = 1
    oldest_at: float = 0.0


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
    control = FlushControl(BASE)
    assert control.due(Held(rows=0), now=1e9) is None
    assert control.next_flush(Held(rows=0), now=1e9) is None


@pytest.mark.parametrize(
    ("held", "now", "reason"),
    [
        (Held(rows=999), 59.9, None),
        (Held(rows=1_000), 0.0, FlushReason.CHANGES),
        (Held(bytes=64 * MIB), 0.0, FlushReason.BYTES),
        (Held(), 60.0, FlushReason.AGE),
    ],
)
def test_table_is_due_by_changes_by_bytes_or_by_age(held, now, reason):
    assert FlushControl(BASE).due(held, now=now) is reason


def test_table_is_due_when_what_it_holds_would_fill_a_file():
    control = FlushControl(WriterConfig(target_file_bytes=4 * MIB))
    control.record(flushed(arrow_bytes=10 * MIB, file_bytes=MIB))
    assert control.due(Held(bytes=39 * MIB), now=0.0) is None
    assert control.due(Held(bytes=41 * MIB), now=0.0) is FlushReason.SIZE
    # Rows of several partitions fill several files.
    control.record(flushed(arrow_bytes=10 * MIB, file_bytes=MIB, partitions=3))
    assert control.due(Held(bytes=41 * MIB), now=0.0) is None


def test_busy_table_is_flushed_at_the_freshness_target():
    control = FlushControl(FRESH)
    busy = Held(bytes=20 * MIB)
    assert control.due(busy, now=9.9) is None
    assert control.due(busy, now=10.0) is FlushReason.FRESHNESS


def test_slow_table_waits_until_a_file_is_worth_it_and_never_beyond_the_bound():
    control = FlushControl(FRESH)
    assert control.due(Held(bytes=MIB), now=30.0) is None  # a fifth of it on disk
    assert control.due(Held(bytes=5 * MIB), now=30.0) is FlushReason.FRESHNESS
    assert control.due(Held(bytes=1), now=59.9) is None
    assert control.due(Held(bytes=1), now=60.0) is FlushReason.AGE


def test_time_that_flushes_take_is_taken_off_the_target_but_not_more_than_half_of_it():
    busy, control = Held(bytes=20 * MIB), FlushControl(FRESH)
    control.record(flushed(seconds=3.0))
    assert control.due(busy, now=6.9) is None
    assert control.due(busy, now=7.0) is FlushReason.FRESHNESS
    control.record(flushed(seconds=500.0))
    assert control.due(busy, now=4.9) is None
    assert control.due(busy, now=5.0) is FlushReason.FRESHNESS


@given(rate=st.floats(1.0, 1e8), target_s=st.floats(0.5, 60.0))
def test_interval_lies_between_the_target_and_the_bound_and_falls_with_the_rate(rate, target_s):
    config = WriterConfig(flush_max_changes=10**9, flush_max_age_s=60.0, freshness_target_s=target_s)

    def interval_at(bytes_per_s: float) -> float:
        # Looked at young, so that what is compared is what the rate alone foretells.
        *_, timed = FlushControl(config).thresholds(Held(bytes=int(bytes_per_s)), now=1.0)
        return timed.limit

    assert target_s * 0.99 <= interval_at(rate) <= 60.0
    assert interval_at(rate * 2) <= interval_at(rate)


def test_next_flush_is_the_threshold_that_comes_first_at_this_rate():
    control = FlushControl(BASE)
    coming = control.next_flush(Held(rows=500), now=10.0)
    assert coming is not None
    assert (coming.reason, coming.in_s) == (FlushReason.CHANGES, 10.0)
    slow = control.next_flush(Held(rows=5), now=10.0)
    assert slow is not None
    assert (slow.reason, slow.in_s) == (FlushReason.AGE, 50.0)
    late = control.next_flush(Held(), now=99.0)
    assert late is not None
    assert late.in_s == 0.0


def test_partition_is_cut_into_files_near_the_target():
    control = FlushControl(WriterConfig(target_file_bytes=10 * MIB))
    assert control.files_for(1) == 1
    control.record(flushed(arrow_bytes=100 * MIB, file_bytes=50 * MIB))
    assert [control.files_for(size * MIB) for size in (20, 29, 31, 60, 200)] == [1, 1, 2, 3, 10]


def test_ratio_is_learned_from_large_flushes_more_than_from_small_ones():
    control = FlushControl(BASE)
    assert control.file_ratio == FIRST_FILE_RATIO
    control.record(flushed(arrow_bytes=200, file_bytes=9_000))
    assert control.file_ratio == 1.0  # footers, not rows
    control.record(flushed(arrow_bytes=10_000_000, file_bytes=1_000_000))
    assert control.file_ratio == pytest.approx(0.1, rel=0.01)
    control.record(flushed(arrow_bytes=200, file_bytes=9_000))
    assert control.file_ratio == pytest.approx(0.1, rel=0.05)


def test_explanation_tells_last_and_next_and_every_threshold():
    control = FlushControl(BASE)
    assert control.explain(Held(rows=0, bytes=0), now=5.0)["next"] is None
    control.record(flushed(seconds=0.25))
    told = control.explain(Held(rows=500, oldest_at=90.0), now=110.0)
    assert told["next"] == {"reason": "changes", "inSeconds": 20.0}
    assert (told["last"]["reason"], told["last"]["secondsAgo"], told["last"]["rows"]) == ("age", 10.0, 7)
    assert [(each["reason"], each["filled"], each["limit"]) for each in told["thresholds"]] == [
        ("changes", 500, 1_000),
        ("bytes", 1, 64 * MIB),
        ("size", 0.1, 128 * MIB),
        ("age", 20.0, 60.0),
    ]
