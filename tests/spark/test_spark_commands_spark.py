"""`lakefeed spark sql` and `lakefeed spark shell` read the catalog's tables."""

from __future__ import annotations

import json
import subprocess

import pytest

from tests.lakefeed_process import LAKEFEED


@pytest.fixture
def users_url(open_spark, catalog_url: str) -> str:
    spark = open_spark(uri=catalog_url)
    spark.sql("CREATE NAMESPACE sales")
    spark.sql("CREATE TABLE sales.users (id bigint, tags array<string>, bytes binary) USING iceberg")
    spark.sql("INSERT INTO sales.users VALUES (1, array('a'), X'00FF'), (2, null, null)")
    return catalog_url


def test_statements_are_run_one_after_the_other_and_rows_printed(run_lakefeed, users_url):
    query = "INSERT INTO sales.users VALUES (3, null, null); SELECT id, tags, bytes FROM sales.users ORDER BY id"

    printed = run_lakefeed("spark", "sql", "--url", users_url, "-e", query, "--format", "json")

    assert [json.loads(line) for line in printed.stdout.splitlines()] == [
        {"id": 1, "tags": ["a"], "bytes": "00ff"},
        {"id": 2, "tags": None, "bytes": None},
        {"id": 3, "tags": None, "bytes": None},
    ]


def test_rows_are_printed_up_to_the_limit_with_a_notice(run_lakefeed, users_url):
    query = "SELECT id FROM sales.users ORDER BY id"

    printed = run_lakefeed("spark", "sql", "--url", users_url, "-e", query, "--format", "csv", "--rows", "1")

    assert printed.stdout == "id\n1\n"
    assert "1 rows shown, there are more" in printed.stderr


def test_rows_are_printed_as_a_table(run_lakefeed, users_url):
    printed = run_lakefeed("spark", "sql", "--url", users_url, "-e", "SELECT tags FROM sales.users WHERE id = 1")

    assert '["a"]' in printed.stdout


def test_error_of_a_statement_is_some_lines_and_fails_the_command(run_lakefeed, users_url):
    failed = run_lakefeed("spark", "sql", "--url", users_url, "-e", "SELECT * FROM sales.absent")

    assert failed.exit_code == 1
    assert "TABLE_OR_VIEW_NOT_FOUND" in failed.output
    assert len(failed.output.splitlines()) < 10


def test_shell_has_a_session_on_the_catalog_and_ends_with_its_input(run_lakefeed, users_url):
    program = "print('rows:', spark.table('sales.users').count())\n"

    ended = run_lakefeed("spark", "shell", "--url", users_url, input=program)

    assert ended.exit_code == 0
    assert "rows: 2" in ended.stdout


def test_command_in_a_process_of_its_own_says_why_spark_failed_and_ends_with_its_jvm(users_url):
    query = "SELECT id FROM sales.users WHERE id = 2; SELECT raise_error('out of ink')"

    ended = subprocess.run(
        [LAKEFEED, *("spark", "sql", "--url", users_url, "--master", "local[1]", "--format", "csv", "-e", query)],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )

    assert ended.returncode == 1
    assert ended.stdout == "id\n2\n"
    assert "Error: " in ended.stderr
    assert "out of ink" in ended.stderr
    assert "Traceback" not in ended.stderr
