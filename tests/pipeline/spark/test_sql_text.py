from __future__ import annotations

import pytest

from lakefeed.pipeline.spark.conf import split_statements


@pytest.mark.parametrize(
    ("text", "finished", "begun"),
    [
        ("SELECT 1", [], "SELECT 1"),
        ("SELECT 1; SELECT 2;", ["SELECT 1", "SELECT 2"], ""),
        ("SELECT 1;\nSELECT 2", ["SELECT 1"], "SELECT 2"),
        ("SELECT ';' AS a; SELECT 2", ["SELECT ';' AS a"], "SELECT 2"),
        (r"SELECT '\';' AS a;", [r"SELECT '\';' AS a"], ""),
        ('SELECT ";";', ['SELECT ";"'], ""),
        ("SELECT `a;b`;", ["SELECT `a;b`"], ""),
        ("SELECT 1 -- ;\n;", ["SELECT 1 -- ;"], ""),
        ("/* ; */ SELECT 1;", ["/* ; */ SELECT 1"], ""),
        ("SELECT 'open;", [], "SELECT 'open;"),
        ("SELECT 1; /* open ;", ["SELECT 1"], "/* open ;"),
        (";; ;", [], ""),
        ("-- only this", [], ""),
        ("", [], ""),
    ],
)
def test_statements_end_at_semicolons_that_stand_in_no_text_name_or_comment(text, finished, begun):
    assert split_statements(text) == (finished, begun)
