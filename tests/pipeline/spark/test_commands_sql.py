from __future__ import annotations

import pytest

from lakefeed.pipeline.spark.commands import split_statements


@pytest.mark.parametrize(
    ("text", "statements"),
    [
        ("SELECT 1", ["SELECT 1"]),
        ("SELECT 1; SELECT 2;", ["SELECT 1", "SELECT 2"]),
        ("SELECT 1;\nSELECT 2", ["SELECT 1", "SELECT 2"]),
        ("SELECT ';' AS a; SELECT 2", ["SELECT ';' AS a", "SELECT 2"]),
        (r"SELECT '\';' AS a;", [r"SELECT '\';' AS a"]),
        ('SELECT ";";', ['SELECT ";"']),
        ("SELECT `a;b`;", ["SELECT `a;b`"]),
        ("SELECT 1 -- ;\n;", ["SELECT 1 -- ;"]),
        ("/* ; */ SELECT 1;", ["/* ; */ SELECT 1"]),
        ("SELECT 'open;", ["SELECT 'open;"]),
        ("SELECT 1; /* open ;", ["SELECT 1", "/* open ;"]),
        (";; ;", []),
        ("-- only this", []),
        ("", []),
    ],
)
def test_statements_end_at_semicolons_outside_of_texts_names_and_comments(text, statements):
    assert split_statements(text) == statements
