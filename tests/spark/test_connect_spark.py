"""`--remote`: the commands work on a Spark Connect server, which knows nothing of the catalog before they come."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pyspark
import pytest

from lakefeed.pipeline.spark.runtime import find_java_home, installed_version
from lakefeed.pipeline.spark.session import SessionConfig, find_jars, wanted_packages
from tests.lakefeed_process import LAKEFEED
from tests.service_process import free_ports

SPARK_HOME = Path(pyspark.__file__).parent
START_TIMEOUT_S = 120

# PySpark 4 brings the server along. For 3.5 it is on Maven Central only: org.apache.spark:spark-connect_2.12.
CONNECT_JAR = os.environ.get("SPARK_CONNECT_JAR", "")

pytestmark = pytest.mark.skipif(
    not CONNECT_JAR and not list((SPARK_HOME / "jars").glob("spark-connect_*.jar")),
    reason="this PySpark brings no Spark Connect server: make test-spark4 runs it, or SPARK_CONNECT_JAR names its jar",
)


@pytest.fixture
def remote(tmp_path: Path) -> Iterator[str]:
    port = free_ports(1)[0]
    with (tmp_path / "server.log").open("wb") as log:
        server = subprocess.Popen(_server_command(port), stdout=log, stderr=log, cwd=tmp_path, env=_environment())
        try:
            _wait_for(port, server, tmp_path / "server.log")
            yield f"sc://127.0.0.1:{port}"
        finally:
            server.terminate()
            server.wait(60)


def _server_command(port: int) -> list[str]:
    version = installed_version()
    jars = [*map(str, find_jars(SessionConfig(), version)), *filter(None, [CONNECT_JAR])]
    packages = wanted_packages(SessionConfig(), version)
    return [
        *(str(SPARK_HOME / "bin" / "spark-submit"), "--master", "local[1]", "--jars", ",".join(jars)),
        *(("--packages", ",".join(packages)) if packages else ()),
        *("--conf", f"spark.connect.grpc.binding.port={port}", "--conf", "spark.driver.host=127.0.0.1"),
        *("--conf", "spark.connect.grpc.binding.address=127.0.0.1", "--conf", "spark.driver.bindAddress=127.0.0.1"),
        *("--conf", "spark.ui.enabled=false"),
        *("--conf", "spark.sql.extensions=org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions"),
        *("--class", "org.apache.spark.sql.connect.service.SparkConnectServer", "spark-internal"),
    ]


def _environment() -> dict[str, str]:
    return {**os.environ, "JAVA_HOME": str(find_java_home(os.environ, installed_version()))}


def _wait_for(port: int, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        assert server.poll() is None, log.read_text()
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise AssertionError(f"the server did not get ready\n{log.read_text()}")


def test_commands_run_on_a_spark_connect_server(remote: str, catalog_url: str) -> None:
    statements = (
        "CREATE NAMESPACE sales",
        "CREATE TABLE sales.orders (id bigint) USING iceberg",
        "INSERT INTO sales.orders VALUES (1), (2)",
        "MERGE INTO sales.orders t USING (SELECT 2L AS id) s ON t.id = s.id WHEN MATCHED THEN DELETE",
        "SELECT id, current_catalog() AS catalog FROM sales.orders",
    )

    ended = subprocess.run(
        [
            LAKEFEED,
            *("spark", "sql", "--remote", remote, "--url", catalog_url),
            "-e",
            ";".join(statements),
            "--format=json",
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )

    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout) == {"id": 1, "catalog": "lake"}
