"""Whatever fails meanwhile: what was promised is committed once and in order, what nodes say is true, nothing hangs.

SIMULATION_SEEDS sets how many seeds, SIMULATION_SEED (a number, or `random`) the first one. `python -m tests.simulation
SEED` replays one and prints what happened.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from unittest import mock

import pytest

from lakefeed.contract.progress import Progress
from lakefeed.ingest.intake import dedup
from lakefeed.writer.commit import state
from lakefeed.writer.tables.columns import RowFitter
from lakefeed.writer.tables.feed_state import FeedState
from lakefeed.writer.wal.log import FileLog
from tests.seeds import choose_count, choose_seed
from tests.simulation.scenarios import KNOWN_DEFECTS, REGRESSIONS, SAFE, Defect, Fault
from tests.simulation.world import Run, describe, run_seed

SEEDS = choose_count("SIMULATION_SEEDS", 24)
SHOW_PROGRESS_EVERY = 500

# The first one shows it. Another change of the product may give that seed another course, so a few more are tried.
SEEDS_PER_DEFECT = 30


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Leave out the log lines of all nodes: they cost more than the run."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def _fail_if_wrong(run: Run) -> None:
    if run.problems:
        pytest.fail(describe(run), pytrace=False)


def test_promised_changes_are_committed_once_in_order_and_reported_truthfully_under_all_faults():
    first = choose_seed("SIMULATION_SEED", 1)
    for number, seed in enumerate(range(first, first + SEEDS), 1):
        _fail_if_wrong(run_seed(seed, SAFE))
        if number % SHOW_PROGRESS_EVERY == 0:
            print(f"seeds: {number} of {SEEDS}", flush=True)


@pytest.mark.parametrize(("seed", "faults"), REGRESSIONS)
def test_seed_that_failed_before_passes(seed: int, faults: frozenset[Fault]):
    _fail_if_wrong(run_seed(seed, (), required=faults))


@pytest.mark.parametrize("defect", KNOWN_DEFECTS, ids=lambda defect: defect.name)
@pytest.mark.xfail(
    strict=True, reason="a known defect: with the fix, move its seed to REGRESSIONS and its fault to SAFE"
)
def test_known_defect_is_fixed(defect: Defect):
    for seed in range(defect.seed, defect.seed + SEEDS_PER_DEFECT):
        _fail_if_wrong(run_seed(seed, (), required=defect.faults))


def test_seed_gives_the_same_run_each_time():
    faults = SAFE - {Fault.DISK}
    first, second = (run_seed(7, faults) for _ in range(2))
    assert first.trace == second.trace
    assert (first.steps, first.commits, first.virtual_s) == (second.steps, second.commits, second.virtual_s)


# -- the simulation itself: with a guarantee switched off, it finds what is lost or doubled


def _finds_problems(required: set[Fault]) -> bool:
    return any(run_seed(seed, (), required=required).problems for seed in range(20))


def test_rows_that_are_not_compared_with_the_tables_marks_are_found():
    with (
        mock.patch.object(RowFitter, "_fresh_part", lambda _, group: group),
        mock.patch.object(Progress, "marks_in", return_value={}),
    ):
        assert _finds_problems({Fault.KILL})


def test_a_removed_progress_marker_that_is_not_rebuilt_is_found():
    with mock.patch.object(state, "progress_from_summaries", return_value=Progress()):
        assert _finds_problems({Fault.MARKER})


def test_changes_that_overtake_those_of_another_node_are_found():
    with mock.patch.object(dedup, "_refuse_gap", return_value=None):
        assert _finds_problems({Fault.MOVES_UNACKED})


def test_an_ack_for_changes_that_are_not_in_the_log_is_found():
    async def pretend(log: FileLog, _payloads: object, *, head: object) -> int:
        del head
        return log.durable_end

    with mock.patch.object(FileLog, "append", pretend):
        assert _finds_problems(set())


def test_a_receipt_before_the_commit_is_found():
    with mock.patch.object(FeedState, "committed", lambda self, source: self._delivered.get(source)):
        assert _finds_problems({Fault.STORE})
