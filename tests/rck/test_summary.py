"""A run of the kit passes only when the whole of it did."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.rck.__main__ import SETTINGS, expected_counts
from tests.rck.summary import find_problem

WHOLE = Counter(passed=147, skipped=10)


def test_whole_kit_without_a_failure_passes():
    assert find_problem(WHOLE, 0, expected=WHOLE) is None


@pytest.mark.parametrize(
    ("counts", "exit_status", "reason"),
    [
        (Counter(passed=146, failed=1, skipped=10), 1, "tests failed"),
        (Counter(), 255, "no test ran"),
        (Counter(skipped=157), 0, "no test ran"),
        (WHOLE, 134, "ended with an error"),
        (Counter(passed=90), 0, "not the expected number"),
        (Counter(passed=146, skipped=11), 0, "not the expected number"),
        (Counter(passed=148, skipped=10), 0, "not the expected number"),
    ],
)
def test_run_that_is_not_whole_is_no_pass(counts: Counter[str], exit_status: int, reason: str):
    assert reason in (find_problem(counts, exit_status, expected=WHOLE) or "")


def test_part_of_the_kit_passes_without_a_number_to_reach_but_not_with_an_error():
    assert find_problem(Counter(passed=3), 0, expected=None) is None
    assert find_problem(Counter(passed=3), 134, expected=None) is not None


def test_one_test_less_is_expected_where_the_catalog_plans():
    expected = {name: expected_counts(name)["passed"] for name in SETTINGS}
    assert expected == {"plain": 147, "paged": 147, "refs": 147, "planned": 146}
