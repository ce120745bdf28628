"""Files are read by a schema that has all of their columns, as long as some snapshot still has one."""

from __future__ import annotations

from typing import Any

from lakefeed.pipeline.verification.scan import plan_reads


def column(id_: int, type_: Any = "long") -> dict[str, Any]:
    return {"id": id_, "name": f"c{id_}", "type": type_}


def document(*schema_ids: int, first_parent: int | None = None) -> dict[str, Any]:
    """Give a table with snapshots 1, 2, ... of these schemas: 0 has a column that 1 lacks, 2 has one more than 1."""
    nested = {"type": "list", "element-id": 5, "element": {"type": "struct", "fields": [column(6)]}}
    schemas = [[column(1), column(2)], [column(1)], [column(1), column(3, nested)]]
    return {
        "current-schema-id": 2,
        "schemas": [{"schema-id": number, "fields": fields} for number, fields in enumerate(schemas)],
        "snapshots": [
            {"snapshot-id": number, "schema-id": schema_id, "parent-snapshot-id": number - 1 or first_parent}
            for number, schema_id in enumerate(schema_ids, start=1)
        ],
    }


def test_columns_that_were_only_added_are_read_in_one_scan() -> None:
    reads = plan_reads(document(1, 1, 2), [1, 2, 3])
    assert [(scan.version, scan.snapshot_ids) for scan in reads.scans] == [(3, frozenset())]
    assert [field["id"] for field in reads.scans[0].fields] == [1, 3]


def test_files_from_before_a_column_was_dropped_are_read_as_of_the_last_snapshot_that_had_it() -> None:
    reads = plan_reads(document(0, 0, 1, 2), [1, 2, 3, 4])
    assert [(scan.version, scan.snapshot_ids) for scan in reads.scans] == [(4, frozenset()), (2, frozenset({1, 2}))]
    assert [field["id"] for field in reads.scans[1].fields] == [1, 2]
    assert reads.are_whole


def test_a_dropped_column_of_expired_snapshots_makes_the_reads_incomplete() -> None:
    assert not plan_reads(document(1, 2, first_parent=99), [1, 2]).are_whole
    # An older version of the table still has all columns that there were until then.
    assert plan_reads(document(0, 0), [1, 2]).scans[0].fields[1]["id"] == 2
