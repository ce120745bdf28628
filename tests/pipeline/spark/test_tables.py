from __future__ import annotations

import pytest

from lakefeed.contract import properties
from lakefeed.pipeline.spark.tables import QUARANTINE_TABLE, TableName


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("users", TableName(("default",), "users")),
        ("sales.orders", TableName(("sales",), "orders")),
        ("sales.west.orders", TableName(("sales", "west"), "orders")),
    ],
)
def test_name_is_read_as_sources_write_it(text, expected):
    assert TableName.parse(text) == expected


@pytest.mark.parametrize("text", ["", ".", "sales.", ".orders", "a..b"])
def test_name_with_an_empty_part_is_refused(text):
    with pytest.raises(ValueError, match="no empty parts"):
        TableName.parse(text)


def test_name_is_quoted_for_sql():
    assert TableName(("sales",), "odd `name").sql("lake") == "`lake`.`sales`.`odd ``name`"


def test_quarantine_is_known_by_the_name_that_the_writer_gives_it():
    assert QUARANTINE_TABLE == properties.TABLE
