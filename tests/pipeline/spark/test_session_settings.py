from __future__ import annotations

import pytest

from lakefeed.pipeline.spark.session import SessionConfig


@pytest.mark.parametrize("name", ["", "my-lake", "lake.sales", "1lake", "lake;drop"])
def test_catalog_name_that_sql_would_have_to_quote_is_refused(name):
    with pytest.raises(ValueError, match="catalog_name must be letters"):
        SessionConfig(catalog_name=name)


def test_sparks_own_catalog_name_is_refused():
    with pytest.raises(ValueError, match="taken by Spark"):
        SessionConfig(catalog_name="spark_catalog")


def test_catalog_url_without_scheme_is_refused():
    with pytest.raises(ValueError, match="must be http or https: 127"):
        SessionConfig(url="127.0.0.1:8181")


@pytest.mark.parametrize(
    ("master", "is_local", "is_submitted"),
    [("local[*]", True, False), ("local", True, False), ("spark://host:7077", False, False), ("", False, True)],
)
def test_master_decides_where_spark_runs(master, is_local, is_submitted, submitted):
    config = SessionConfig(master=master)

    assert (config.is_local, config.is_submitted) == (is_local, is_submitted)


def test_another_time_zone_is_refused_because_days_of_partitions_are_those_of_utc():
    with pytest.raises(ValueError, match=r"UTC.*spark\.sql\.session\.timeZone=Asia/Tokyo"):
        SessionConfig(conf={"spark.sql.session.timeZone": "Asia/Tokyo"})
    SessionConfig(conf={"spark.sql.session.timeZone": "UTC"})
