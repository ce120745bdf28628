from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from lakefeed.pipeline.errors import SparkUnavailable
from lakefeed.pipeline.spark.runtime import SPARK_3_5, SPARK_4_1, find_s3_jars, installed_version
from lakefeed.pipeline.spark.session import (
    SessionConfig,
    build_session,
    find_jars,
    prepare_environment,
    wanted_packages,
    without_overridden,
)

S3_JARS = find_s3_jars()


def test_importing_the_pipeline_does_not_import_spark():
    program = "import sys, lakefeed.pipeline.spark.session; sys.exit('pyspark' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def _not_installed(name: str) -> str:
    raise PackageNotFoundError(name)


def test_missing_pyspark_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", _not_installed)
    monkeypatch.setitem(sys.modules, "pyspark", None)

    with pytest.raises(SparkUnavailable, match=r"pip install 'lakefeed\[spark\]'"):
        build_session(SessionConfig())


def test_iceberg_comes_first_on_the_class_path():
    aws = Path("/jars/aws.jar")

    jars = find_jars(SessionConfig(jar=(str(aws),)), SPARK_3_5)

    assert [jar.name for jar in jars[:2]] == [SPARK_3_5.iceberg_jar_name, "aws.jar"]
    assert jars[2:] == S3_JARS


def test_requested_iceberg_download_replaces_the_jar():
    config = SessionConfig(packages=(SPARK_3_5.iceberg_package,))

    assert find_jars(config, SPARK_3_5) == S3_JARS
    assert wanted_packages(config, SPARK_3_5) == (SPARK_3_5.iceberg_package,)


def test_requested_aws_bundle_replaces_the_jars_for_s3_but_not_iceberg():
    (jar,) = find_jars(SessionConfig(packages=(SPARK_3_5.aws_package,)), SPARK_3_5)

    assert jar.name == SPARK_3_5.iceberg_jar_name


def test_spark_4_downloads_the_iceberg_runtime_that_fits_it():
    assert wanted_packages(SessionConfig(packages=("org.example:a:1",)), SPARK_4_1) == (
        "org.apache.iceberg:iceberg-spark-runtime-4.1_2.13:1.11.0",
        "org.example:a:1",
    )
    assert find_jars(SessionConfig(), SPARK_4_1) == find_s3_jars(SPARK_4_1)


@pytest.mark.parametrize(
    "config",
    [
        SessionConfig(jar=("/jars/iceberg-spark-runtime-4.1_2.13-1.11.0.jar",)),
        SessionConfig(packages=("org.apache.iceberg:iceberg-spark-runtime-4.1_2.13:1.12.0",)),
    ],
)
def test_spark_4_downloads_nothing_where_a_runtime_is_named(config):
    assert wanted_packages(config, SPARK_4_1) == config.packages


def test_submitted_session_takes_the_clusters_jars_and_downloads_nothing(submitted):
    assert find_jars(SessionConfig(), SPARK_3_5) == ()
    assert wanted_packages(SessionConfig(), SPARK_4_1) == ()


@pytest.mark.parametrize(("text", "line"), [("3.5.9", "3.5"), ("4.1.4", "4.1"), ("4.0.0.dev1", "4.0")])
def test_runtime_follows_the_installed_pyspark(monkeypatch, text, line):
    monkeypatch.setattr("importlib.metadata.version", lambda _name: text)

    assert installed_version().line == line


def test_spark_without_a_known_runtime_is_refused_by_its_version(monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda _name: "9.9.1")

    with pytest.raises(SparkUnavailable, match=r"pyspark=9\.9\.1 known=3\.5,4\.0,4\.1"):
        installed_version()


def test_settings_of_spark_submit_override_our_defaults_but_the_time_zone_is_always_utc():
    defaults = {"spark.sql.session.timeZone": "UTC", "spark.app.name": "lakefeed", "spark.a": "1"}
    told = {"spark.sql.session.timeZone": "Asia/Tokyo", "spark.app.name": "theirs", "spark.b": "2"}

    conf = without_overridden({**defaults, "spark.b": "3"}, told, defaults)

    assert conf == {"spark.sql.session.timeZone": "UTC", "spark.a": "1", "spark.b": "3"}


def test_local_workers_run_this_python():
    environ = {"PATH": ""}

    prepare_environment(SessionConfig(), environ, SPARK_3_5)

    assert environ["PYSPARK_PYTHON"] == sys.executable
    assert Path(environ["JAVA_HOME"], "bin", "java").exists()


def test_cluster_workers_keep_their_own_python():
    environ = {"PATH": ""}

    prepare_environment(SessionConfig(master="spark://host:7077"), environ, SPARK_3_5)

    assert "PYSPARK_PYTHON" not in environ


def test_users_choice_of_worker_python_is_kept():
    environ = {"PATH": "", "PYSPARK_PYTHON": "/usr/bin/mine"}

    prepare_environment(SessionConfig(), environ, SPARK_3_5)

    assert environ["PYSPARK_PYTHON"] == "/usr/bin/mine"
