"""The value of `_cdc_partition`: metadata first, then partition_key, then the day of created_at."""

from __future__ import annotations

import datetime as dt
import random

import pyarrow as pa
import pytest

from lakefeed.writer.files.write import fill_route


def routed(*, metadata: list | None = None, key=None, created_at=None, rows: int = 1) -> list:
    columns = {"_cdc_partition": pa.nulls(rows, pa.string())}
    if metadata is not None:
        columns["_cdc_metadata"] = pa.array(metadata, pa.string())
    if key is not None:
        columns["partition_key"] = key
    if created_at is not None:
        columns["created_at"] = created_at
    return fill_route(pa.table(columns))["_cdc_partition"].to_pylist()


def test_table_without_the_column_is_left_alone():
    table = pa.table({"partition_key": ["a"]})
    assert fill_route(table) is table


def test_first_of_metadata_key_and_time_wins_row_by_row():
    found = routed(
        metadata=['{"partition": "eu"}', '{"partition": null}', '{"lsn": 5}', None],
        key=pa.array(["k", "k", None, None]),
        created_at=pa.array(["2026-11-16T10:00:00Z", None, "2026-11-17", "yesterday"]),
        rows=4,
    )
    assert found == ["eu", "k", "dt=2026-11-17", None]


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ('{"partition": "a\\u00e9\\n"}', "aé\n"),
        ('{"partition": 7}', "7"),
        ('{"partition": {"a": 1}}', '{"a": 1}'),
        ('{"partition": ""}', ""),
        ('{"other": {"partition": "x"}}', None),
        ("[1]", None),
        ("not json", None),
    ],
)
def test_metadata_routes_by_its_own_member_alone(metadata, expected):
    assert routed(metadata=[metadata]) == [expected]


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        (pa.array([7]), "7"),
        (pa.array([True]), "true"),
        (pa.array([dt.date(2026, 1, 2)]), "2026-01-02"),
        (pa.array([b"x"]), None),
        (pa.array([[1]]), None),
    ],
)
def test_key_of_another_type_counts_as_its_text(key, expected):
    assert routed(key=key) == [expected]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (pa.array(["2026-11-16"]), "dt=2026-11-16"),
        (pa.array(["2026-11-16 23:59:59"]), "dt=2026-11-16"),
        (pa.array(["2026-11-160"]), None),
        (pa.array([1_794_787_200_000]), "dt=2026-11-16"),
        (pa.array([-1]), "dt=1969-12-31"),
        (pa.array([2**63 - 1]), None),
        (pa.array([dt.datetime(1969, 12, 31, 23, tzinfo=dt.UTC)], pa.timestamp("us", "UTC")), "dt=1969-12-31"),
        (pa.array([-1], pa.int64()).cast(pa.timestamp("ns")), "dt=1969-12-31"),
        (pa.array([dt.date(2026, 2, 28)]), "dt=2026-02-28"),
        (pa.array([1.5]), None),
    ],
)
def test_day_of_created_at_is_that_of_utc(values, expected):
    assert routed(created_at=values) == [expected]


def test_chunks_and_repeated_metadata_keep_their_rows():
    texts = [f'{{"partition": "{random.Random(n).choice("abc")}"}}' if n % 4 else None for n in range(200)]
    expected = [text and text[15:16] for text in texts]
    chunked = pa.chunked_array([texts[:50], texts[50:51], texts[51:]], pa.string())
    table = pa.table({"_cdc_metadata": chunked, "_cdc_partition": pa.nulls(200, pa.string())})
    assert fill_route(table)["_cdc_partition"].to_pylist() == expected
