from __future__ import annotations

import pytest

from lakefeed.pipeline.spark.tables import TableIdentifier, text_literal
from lakefeed.settings import SettingsError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("users", TableIdentifier(("default",), "users")),
        ("sales.orders", TableIdentifier(("sales",), "orders")),
        ("sales.west.orders", TableIdentifier(("sales", "west"), "orders")),
    ],
)
def test_name_is_read_as_sources_write_it(text, expected):
    assert TableIdentifier.parse(text) == expected


@pytest.mark.parametrize("text", ["", ".", "sales.", ".orders", "a..b"])
def test_name_with_an_empty_part_is_refused(text):
    with pytest.raises(SettingsError, match="must not have empty parts"):
        TableIdentifier.parse(text)


def test_name_is_quoted_for_sql():
    assert TableIdentifier(("sales",), "odd `name").sql("lake") == "`lake`.`sales`.`odd ``name`"


def test_text_is_quoted():
    assert text_literal("it's a \\ path") == "'it\\'s a \\\\ path'"


def test_text_has_no_character_that_starts_a_variable_of_spark():
    assert text_literal("a${b}") == "'a\\u0024{b}'"
