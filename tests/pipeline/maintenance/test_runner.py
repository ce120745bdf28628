from __future__ import annotations

from dataclasses import replace

import pytest

from lakefeed.contract.consumers import History
from lakefeed.pipeline.maintenance import runner
from lakefeed.pipeline.maintenance.plan import MaintenanceSettings, TableFacts, TableSizes

TABLE = "`lake`.`sales`.`o'rders`"
SIZES = TableSizes(data_files=0, data_bytes=0, small_files=0, delete_files=0, manifests=1, snapshots=1)
FACTS = TableFacts({}, History([], []), SIZES)


def rewrite(settings: MaintenanceSettings, facts: TableFacts = FACTS, rewrite_bytes: int = 0) -> str:
    return runner.rewrite_data_files(TABLE, settings, facts, rewrite_bytes=rewrite_bytes)


def test_a_compaction_is_called_on_the_tables_catalog_with_its_sizes() -> None:
    assert rewrite(MaintenanceSettings(min_input_files=3)) == (
        "CALL `lake`.system.rewrite_data_files(table => '`lake`.`sales`.`o\\'rders`', "
        "options => map('target-file-size-bytes', '134217728', 'min-input-files', '3'))"
    )


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (MaintenanceSettings(sort="id desc, name"), "strategy => 'sort', sort_order => 'id desc, name'"),
        (MaintenanceSettings(zorder=("x", "y")), "strategy => 'sort', sort_order => 'zorder(x, y)'"),
    ],
)
def test_rows_are_rewritten_in_the_configured_order(settings: MaintenanceSettings, expected: str) -> None:
    assert expected in rewrite(settings, replace(FACTS, properties={"sort-order": "id ASC"}))


def test_a_table_with_a_sort_order_is_rewritten_in_that_order() -> None:
    assert "strategy => 'sort', options" in rewrite(
        MaintenanceSettings(), replace(FACTS, properties={"sort-order": "id ASC NULLS FIRST"})
    )


def test_a_large_rewrite_is_committed_in_parts() -> None:
    assert "partial-progress" not in rewrite(MaintenanceSettings(), rewrite_bytes=runner.PARTS_FROM_BYTES)
    assert "partial-progress" in rewrite(MaintenanceSettings(), rewrite_bytes=runner.PARTS_FROM_BYTES + 1)


@pytest.mark.parametrize(
    ("location", "expected"),
    [("file:///x", "false"), ("s3://b/x", "true"), ("gs://b/x", "true"), ("hdfs://n/x", "false")],
)
def test_object_stores_are_listed_by_their_prefix(location: str, expected: str) -> None:
    spelled = runner.remove_orphan_files(TABLE, older_than_ms=0, location=location, is_dry_run=True)
    assert f"dry_run => true, prefix_listing => {expected})" in spelled


def test_a_timestamp_is_written_with_milliseconds_and_zone() -> None:
    assert runner.timestamp_sql(1_794_800_000_007) == "TIMESTAMP '2026-11-16 03:33:20.007 UTC'"
