"""Requirements on documents: which hold, and Iceberg's exact words for those that do not."""

from __future__ import annotations

import pytest

from lakefeed.catalog.errors import BadRequest, CommitFailed
from lakefeed.catalog.metadata.updates import check_requirements, is_create, parse_requirements
from tests.catalog.documents import NOW_MS, UUID, append, new_table, require_main
from tests.catalog.metadata.test_updates import apply


@pytest.fixture
def table() -> dict:
    tag = {"action": "set-snapshot-ref", "ref-name": "v1", "type": "tag", "snapshot-id": 1}
    return apply(new_table(), *append(1, 1), tag, now_ms=NOW_MS)


@pytest.mark.parametrize(
    "requirement",
    [
        {"type": "assert-table-uuid", "uuid": UUID.upper()},
        require_main(1),
        {"type": "assert-ref-snapshot-id", "ref": "none", "snapshot-id": None},
        {"type": "assert-ref-snapshot-id", "ref": "none"},
        {"type": "assert-last-assigned-field-id", "last-assigned-field-id": 2},
        {"type": "assert-current-schema-id", "current-schema-id": 0},
        {"type": "assert-last-assigned-partition-id", "last-assigned-partition-id": 999},
        {"type": "assert-default-spec-id", "default-spec-id": 0},
        {"type": "assert-default-sort-order-id", "default-sort-order-id": 0},
    ],
)
def test_requirement_that_holds_passes(table: dict, requirement: dict):
    check_requirements(parse_requirements([requirement]), table)


@pytest.mark.parametrize(
    ("requirement", "message"),
    [
        ({"type": "assert-create"}, "table already exists"),
        ({"type": "assert-table-uuid", "uuid": "u"}, f"UUID does not match: expected {UUID} != u"),
        (require_main(2), "branch main has changed: expected id 2 != 1"),
        (require_main(None), "branch main was created concurrently"),
        (
            {"type": "assert-ref-snapshot-id", "ref": "v1", "snapshot-id": 2},
            "tag v1 has changed: expected id 2 != 1",
        ),
        (
            {"type": "assert-ref-snapshot-id", "ref": "none", "snapshot-id": 2},
            "branch or tag none is missing, expected 2",
        ),
        (
            {"type": "assert-last-assigned-field-id", "last-assigned-field-id": 1},
            "last assigned field id changed: expected id 1 != 2",
        ),
        (
            {"type": "assert-current-schema-id", "current-schema-id": 1},
            "current schema changed: expected id 1 != 0",
        ),
        (
            {"type": "assert-last-assigned-partition-id", "last-assigned-partition-id": 1},
            "last assigned partition id changed: expected id 1 != 999",
        ),
        (
            {"type": "assert-default-spec-id", "default-spec-id": 1},
            "default partition spec changed: expected id 1 != 0",
        ),
        (
            {"type": "assert-default-sort-order-id", "default-sort-order-id": 1},
            "default sort order changed: expected id 1 != 0",
        ),
    ],
)
def test_failed_requirement_has_icebergs_message(table: dict, requirement: dict, message: str):
    with pytest.raises(CommitFailed) as caught:
        check_requirements(parse_requirements([requirement]), table)
    assert str(caught.value) == f"Requirement failed: {message}"


def test_create_stands_alone():
    create = {"type": "assert-create"}
    assert is_create(parse_requirements([create]))
    with pytest.raises(BadRequest):
        parse_requirements([create, require_main(1)])
