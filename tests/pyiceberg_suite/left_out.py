"""A pytest plugin that leaves out, with the reason, what of PyIceberg's tests is not about a REST catalog alone.

It runs inside PyIceberg's tests, whose package is called `tests` too, so it imports nothing of this project.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

SPARK = "needs a Spark Connect server"
PROVISIONED = "needs tables that Spark provisions"
HIVE = "about the Hive catalog"
SERVERLESS = "about a catalog without a server"

# By the fixtures that a test asks for.
NEEDS = {
    "spark": SPARK,
    "session_catalog_hive": HIVE,
    "hive_catalog": HIVE,
    "memory_catalog": SERVERLESS,
    "sqlite_catalog_memory": SERVERLESS,
    "sqlite_catalog_file": SERVERLESS,
    "table_test_all_types": PROVISIONED,
}

# By the name of the test.
SINGLE = {
    "test_duckdb_url_import": SERVERLESS,
    "test_sanitize_character_partitioned_avro_bug": "downloads an extension of DuckDB",
    "test_rest_custom_namespace_separator": "wants a catalog whose namespace separator is a dot",
    "test_merge_manifests_file_content": "wants tables in directories without the table's uuid",
}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Function]) -> None:
    tables = _provisioned_tables(config.rootpath / "dev" / "provision.py")
    for item in items:
        reason = _reason_to_leave_out(item, tables)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


def _reason_to_leave_out(item: pytest.Function, tables: re.Pattern[str]) -> str:
    names = {*item.fixturenames, *_lazy_fixtures(item)}
    reasons = [reason for name, reason in NEEDS.items() if name in names]
    if reasons:
        return reasons[0]
    if tables.search(inspect.getsource(item.function)):
        return PROVISIONED
    return SINGLE.get(item.originalname, "")


def _lazy_fixtures(item: pytest.Function) -> Iterator[str]:
    """Name the fixtures that stand in the parameters of a test (pytest-lazy-fixtures)."""
    if hasattr(item, "callspec"):
        yield from (getattr(value, "name", "") for value in item.callspec.params.values())


def _provisioned_tables(script: Path) -> re.Pattern[str]:
    """Match the name of a table that upstream's set-up makes, in quotes or behind its namespace."""
    names = re.findall(r"[.\"](test_\w+)", script.read_text(encoding="utf-8"))
    return re.compile(rf"[.\"]({'|'.join(sorted(set(names)))})(?![a-z_])")
