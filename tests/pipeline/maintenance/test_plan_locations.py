from __future__ import annotations

import pytest

from lakefeed.pipeline.maintenance.plan import SharedLocation, check_location_is_own, directories_of

A, B = "default.a", "default.a.b"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("s3://lake/a", "s3://lake/a/b"),
        ("s3://lake/a", "s3://lake/a"),
        ("file:///lake/a", "file:/lake/a/"),
        ("file:/lake/a/", "file:///lake/a/b"),
        ("/lake/a", "file:///lake/a/b"),
        ("file://localhost/lake//a", "/lake/x/../a"),
        ("s3a://lake/a", "s3://lake/a/b"),
        ("s3://lake/a", "s3n://lake/a/"),
        ("S3://lake/a", "s3a://lake/a"),
        ("abfs://c@lake/a", "abfss://c@lake/a"),
    ],
)
def test_location_that_contains_another_tables_files_is_shared(first: str, second: str) -> None:
    with pytest.raises(SharedLocation, match=r"default\.a\.b"):
        check_location_is_own(A, {A: [first], B: [second]})


@pytest.mark.parametrize("key", ["write.data.path", "write.metadata.path"])
def test_location_where_another_table_writes_new_files_is_shared(key: str) -> None:
    elsewhere = directories_of("s3://lake/b", {"owner": "x", key: "s3a://lake/a/of-b"})
    with pytest.raises(SharedLocation, match=r"other tables have files there.*default\.a\.b"):
        check_location_is_own(A, {A: ["s3://lake/a"], B: elsewhere})
    assert check_location_is_own(A, {A: directories_of("s3://lake/a", {key: "s3://lake/a/data"}), B: ["s3://lake/b"]})


def test_no_location_is_own_while_the_location_of_some_table_is_unknown() -> None:
    for directories in ({A: ["s3://lake/a"], B: []}, {A: [], B: ["s3://lake/b"]}, {B: ["s3://lake/b"]}):
        with pytest.raises(SharedLocation, match="location of some tables is unknown"):
            check_location_is_own(A, directories)


@pytest.mark.parametrize("other", ["s3://lake/ab", "s3://lake", "s3://other/a", "file:/lake/a", "s3://lake//a"])
def test_location_beside_or_above_another_table_is_own(other: str) -> None:
    assert check_location_is_own(A, {A: ["s3://lake/a"], B: [other]}) == "s3://lake/a"
