from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.config import SessionConfig
from pipeline.errors import SparkUnavailable
from pipeline.runtime import ICEBERG_JAR_NAME, ICEBERG_PACKAGE
from pipeline.session import build_session, find_jars, prepare_environment


def test_importing_the_pipeline_does_not_import_spark():
    program = "import sys, pipeline.session; sys.exit('pyspark' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_missing_pyspark_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyspark", None)

    with pytest.raises(SparkUnavailable, match=r"pip install 'lakefeed\[spark\]'"):
        build_session(SessionConfig())


def test_iceberg_comes_first_on_the_class_path():
    aws = Path("/jars/aws.jar")

    jars = find_jars(SessionConfig(extra_jars=(aws,)))

    assert [jar.name for jar in jars] == [ICEBERG_JAR_NAME, "aws.jar"]


def test_requested_iceberg_download_replaces_the_jar():
    assert find_jars(SessionConfig(packages=(ICEBERG_PACKAGE,))) == ()


def test_other_downloads_do_not_replace_the_jar():
    assert len(find_jars(SessionConfig(packages=("org.apache.iceberg:iceberg-aws-bundle:1.10.2",)))) == 1


def test_submitted_session_takes_the_clusters_jars():
    assert find_jars(SessionConfig(master="")) == ()


def test_local_workers_run_this_python():
    environ = {"PATH": ""}

    prepare_environment(SessionConfig(), environ)

    assert environ["PYSPARK_PYTHON"] == sys.executable
    assert Path(environ["JAVA_HOME"], "bin", "java").exists()


def test_cluster_workers_keep_their_own_python():
    environ = {"PATH": ""}

    prepare_environment(SessionConfig(master="spark://host:7077"), environ)

    assert "PYSPARK_PYTHON" not in environ


def test_users_choice_of_worker_python_is_kept():
    environ = {"PATH": "", "PYSPARK_PYTHON": "/usr/bin/mine"}

    prepare_environment(SessionConfig(), environ)

    assert environ["PYSPARK_PYTHON"] == "/usr/bin/mine"
