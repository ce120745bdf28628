"""Reads the JUnit reports of one run of the kit, or of another suite."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree as ET


class Result(NamedTuple):
    """What became of one test; the message is why it failed or was skipped."""

    kit_class: str
    name: str
    outcome: str
    message: str


def read_results(reports: Path) -> list[Result]:
    files = sorted(reports.glob("TEST-*.xml"))
    return [_read(case) for file in files for case in ET.parse(file).iter("testcase")]


def show_failures(results: Sequence[Result]) -> Iterator[str]:
    """Yield a line per failed test, or one for a whole class that failed for one reason, as in its set-up."""
    for kit_class, tests in Counter(result.kit_class for result in results).items():
        failed = [result for result in results if result.kit_class == kit_class and result.outcome == "failed"]
        if 1 < tests == len(failed) and len({result.message for result in failed}) == 1:
            yield f"FAILED {kit_class}, all {tests} tests: {failed[0].message}"
        else:
            yield from (f"FAILED {kit_class}.{result.name}: {result.message}" for result in failed)


def show_counts(counts: Counter[str]) -> str:
    """Say how many tests passed, failed and were skipped."""
    return ", ".join(f"{counts[outcome]} {outcome}" for outcome in ("passed", "failed", "skipped"))


def find_problem(counts: Counter[str], exit_status: int, *, expected: Counter[str] | None) -> str | None:
    """Say why a run is no pass, or None if it is one; of a part of the kit nobody knows how much to expect."""
    if counts["failed"]:
        return "tests failed"
    if not counts["passed"]:
        return f"no test ran: exit_status={exit_status}"
    if exit_status:
        return f"the kit ended with an error, though no test failed: exit_status={exit_status}"
    if expected is not None and counts != expected:
        return f"not the expected number of tests: {show_counts(expected)}"
    return None


def _read(case: ET.Element) -> Result:
    kit_class = case.get("classname", "").rpartition(".")[2]
    name = case.get("name", "")
    problem = next((part for part in case if part.tag in ("failure", "error")), None)
    if problem is not None:
        return Result(kit_class, name, "failed", _message_of(problem))
    skipped = case.find("skipped")
    if skipped is not None:
        return Result(kit_class, name, "skipped", skipped.get("message", ""))
    return Result(kit_class, name, "passed", "")


def _message_of(problem: ET.Element) -> str:
    """Put the message, which AssertJ spreads over several lines, and the root cause on one line."""
    message = problem.get("message", problem.get("type", ""))
    causes = [line for line in (problem.text or "").splitlines() if line.startswith("Caused by: ")]
    return textwrap.shorten(message, width=240) + "".join(f" ({cause})" for cause in causes[-1:])
