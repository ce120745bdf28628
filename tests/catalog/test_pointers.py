"""Pointers: what is known of a document beside where it is."""

from __future__ import annotations

from typing import Any

import pytest

from lakefeed.catalog.names import point_at


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
    assert point_at("here", document).table_uuid == table_uuid
