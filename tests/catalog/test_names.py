"""Names: the pointer to a document, and the locations of a table's files."""

from __future__ import annotations

from typing import Any

import pytest

from lakefeed.catalog.names import TableId, entry_location, namespace_location, next_version, pointer_to


@pytest.mark.parametrize(
    ("document", "table_uuid"),
    [
        ({"table-uuid": "a"}, "a"),
        ({"table-uuid": 7}, ""),
        ({}, ""),
        ({"view-uuid": "v", "table-uuid": "a"}, ""),
    ],
)
def test_uuid_is_known_of_tables_and_never_of_views(document: dict[str, Any], table_uuid: str):
    assert pointer_to("here", document).table_uuid == table_uuid


def test_locations_are_made_of_safe_characters():
    base = namespace_location("file:///w", ("a b", "..", "c/d"))
    assert base == "file:///w/a_b/__/c_d"
    assert entry_location(base, TableId(("x",), "t?é" + "x" * 500), "u").endswith(f"/t__{'x' * 117}-u")


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("00007-a.metadata.json", 8),
        ("1234567890-a.metadata.json", 1_234_567_891),
        ("9999999999-a.metadata.json", 0),
        ("9" * 200 + "-a.metadata.json", 0),
        ("v3.metadata.json", 0),
        ("x", 0),
    ],
)
def test_version_counts_on_from_the_files_name(name: str, version: int):
    assert next_version(f"file:///t/metadata/{name}") == version
