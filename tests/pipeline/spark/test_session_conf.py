from __future__ import annotations

import tempfile
from pathlib import Path

from lakefeed.pipeline.spark import session
from lakefeed.pipeline.spark.session import JobKind, SessionConfig, catalog_conf

JARS = (Path("/jars/iceberg.jar"), Path("/jars/aws.jar"))


def session_conf(config: SessionConfig, job_kind: JobKind = JobKind.SHORT) -> dict[str, str]:
    return session.session_conf(config, jars=JARS, packages=config.packages, job_kind=job_kind)


def test_catalog_is_reached_by_rest_without_the_cache_that_hides_commits():
    conf = catalog_conf(SessionConfig())

    assert conf == {
        "spark.sql.catalog.lake": "org.apache.iceberg.spark.SparkCatalog",
        "spark.sql.catalog.lake.type": "rest",
        "spark.sql.catalog.lake.uri": "http://127.0.0.1:8181",
        "spark.sql.catalog.lake.cache-enabled": "false",
        "spark.sql.defaultCatalog": "lake",
    }


def test_token_and_warehouse_belong_to_the_named_catalog():
    conf = catalog_conf(SessionConfig(url="https://lake.example/", catalog_name="prod", warehouse="wh", token="t"))

    assert conf["spark.sql.catalog.prod.token"] == "t"
    assert conf["spark.sql.catalog.prod.warehouse"] == "wh"
    assert conf["spark.sql.catalog.prod.uri"] == "https://lake.example"
    assert not any(key.startswith("spark.sql.catalog.lake") for key in conf)


def test_local_session_listens_on_loopback_only_and_has_no_console():
    conf = session_conf(SessionConfig())

    assert conf["spark.driver.bindAddress"] == "127.0.0.1"
    assert conf["spark.driver.host"] == "127.0.0.1"
    assert conf["spark.ui.enabled"] == "false"


def test_session_time_is_utc_wherever_it_runs():
    for master in ("local[2]", "spark://host:7077", ""):
        assert session_conf(SessionConfig(master=master))["spark.sql.session.timeZone"] == "UTC"


def test_session_runs_on_this_machine_unless_spark_submit_has_started_it(submitted):
    assert session_conf(SessionConfig(master="local[2]"))["spark.master"] == "local[2]"
    assert "spark.master" not in session_conf(SessionConfig())
    submitted.delenv("PYSPARK_GATEWAY_PORT")
    assert session_conf(SessionConfig())["spark.master"] == "local[*]"


def test_what_looks_like_a_variable_is_text():
    assert session_conf(SessionConfig())["spark.sql.variable.substitute"] == "false"


def test_short_job_starts_fast_and_long_job_compiles_fully():
    short = session_conf(SessionConfig(), JobKind.SHORT)
    long = session_conf(SessionConfig(), JobKind.LONG)

    assert "-XX:TieredStopAtLevel=1" in short["spark.driver.extraJavaOptions"]
    assert short["spark.sql.adaptive.enabled"] == "false"
    assert long["spark.driver.extraJavaOptions"] == "-XX:+UseParallelGC"
    assert long["spark.sql.adaptive.enabled"] == "true"


def test_local_session_loads_jars_from_the_class_path():
    conf = session_conf(SessionConfig())

    assert conf["spark.driver.extraClassPath"] == "/jars/iceberg.jar:/jars/aws.jar"
    assert "spark.jars" not in conf


def test_cluster_session_ships_jars_to_executors_and_keeps_the_clusters_tuning():
    conf = session_conf(SessionConfig(master="spark://host:7077"))

    assert conf["spark.jars"] == "/jars/iceberg.jar,/jars/aws.jar"
    assert not {"spark.driver.extraClassPath", "spark.driver.bindAddress", "spark.driver.memory"} & conf.keys()
    assert not any("shuffle" in key for key in conf)


def test_packages_are_left_to_spark_to_download():
    conf = session_conf(SessionConfig(packages=("org.example:a:1", "org.example:b:2")))

    assert conf["spark.jars.packages"] == "org.example:a:1,org.example:b:2"


def test_extra_settings_win_over_ours():
    conf = session_conf(SessionConfig(conf={"spark.ui.enabled": "true", "spark.eventLog.enabled": "true"}))

    assert conf["spark.ui.enabled"] == "true"
    assert conf["spark.eventLog.enabled"] == "true"


def test_sparks_own_warehouse_is_not_created_in_the_working_directory():
    assert session_conf(SessionConfig())["spark.sql.warehouse.dir"] == tempfile.gettempdir()
