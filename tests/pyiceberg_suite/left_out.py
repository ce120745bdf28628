"""A pytest plugin that leaves out, with the reason, what of PyIceberg's tests is not about a REST catalog alone.

It runs inside PyIceberg's tests, whose package is called `tests` too, so it imports nothing of this project.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

# The fixtures that a test asks for, by name, tell what it needs.
NEEDS = {
    "spark": "needs a Spark Connect server",
    "session_catalog_hive": "Hive catalog",
    "hive_catalog": "Hive catalog",
    "memory_catalog": "catalog without a server",
    "sqlite_catalog_memory": "catalog without a server",
    "sqlite_catalog_file": "catalog without a server",
}

PROVISIONED = "needs tables that Spark provisions"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Function]) -> None:
    tables = _provisioned_tables(config.rootpath / "dev" / "provision.py")
    for item in items:
        reason = _reason_to_leave_out(item, tables)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


def _reason_to_leave_out(item: pytest.Function, tables: re.Pattern[str]) -> str:
    reasons = [NEEDS[name] for name in _fixtures(item) if name in NEEDS]
    if reasons:
        return reasons[0]
    return PROVISIONED if tables.search(inspect.getsource(item.function)) else ""


def _fixtures(item: pytest.Function) -> Iterator[str]:
    yield from item.fixturenames
    if hasattr(item, "callspec"):
        yield from (getattr(value, "name", "") for value in item.callspec.params.values())


def _provisioned_tables(script: Path) -> re.Pattern[str]:
    """Match the tables that upstream's set-up makes, where a test names one in the namespace `default`."""
    names = set(re.findall(r"\bdefault\.(test_\w+)|\(\"(test_\w+)\"", script.read_text(encoding="utf-8")))
    return re.compile(r"default\.(" + "|".join(sorted(a or b for a, b in names)) + ")")
