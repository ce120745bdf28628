"""A Spark cluster of its own for the tests: a standalone master and workers, as processes on loopback.

The installed PySpark brings all it takes. Its scripts for clusters are left out of the package, so the classes behind
them are started.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyspark

from lakefeed.pipeline.spark.runtime import find_java_home, installed_version
from tests.service_process import free_ports

SPARK_HOME = Path(pyspark.__file__).parent
SUBMIT = Path(__file__).parent.parent / "deploy" / "spark" / "submit"

_START_TIMEOUT_S = 600.0
_STOP_TIMEOUT_S = 20.0
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Cluster:
    """A running cluster."""

    master_url: str
    console_url: str

    def submit(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a job to its end as an operator would, with deploy/spark/submit and its variables."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("LAKEFEED_")}
        environ = {**_with_java(inherited), "SPARK_HOME": str(SPARK_HOME), "MASTER": self.master_url, **variables}
        return subprocess.run(
            [str(SUBMIT), *arguments], capture_output=True, text=True, check=False, timeout=900, env=environ
        )

    def finished_applications(self) -> list[dict[str, object]]:
        """Tell which applications the cluster has run."""
        return list(self.state()["completedapps"])

    def state(self) -> dict[str, list[dict[str, object]]]:
        """Ask the master for what its console shows."""
        with urllib.request.urlopen(f"{self.console_url}/json/", timeout=10) as answer:
            return json.loads(answer.read())


@contextlib.contextmanager
def standalone_cluster(directory: Path, *, workers: int) -> Iterator[Cluster]:
    """Start a master and its workers, wait until all are known to it, and end them by their processes afterwards."""
    port, console_port = free_ports(2)
    cluster = Cluster(f"spark://127.0.0.1:{port}", f"http://127.0.0.1:{console_port}")
    master = ("master.Master", "--host", "127.0.0.1", "--port", str(port), "--webui-port", str(console_port))
    worker = ("worker.Worker", "--host", "127.0.0.1", "--webui-port", "0", "--cores", "1", "--memory", "1g")
    with contextlib.ExitStack() as stack:
        stack.enter_context(_process(directory / "master", master))
        for number in range(workers):
            home = directory / f"worker-{number}"
            stack.enter_context(_process(home, (*worker, "--work-dir", str(home), cluster.master_url)))
        _wait_for_workers(cluster, workers)
        yield cluster


@contextlib.contextmanager
def _process(directory: Path, arguments: Sequence[str]) -> Iterator[None]:
    directory.mkdir()
    command = [str(SPARK_HOME / "bin" / "spark-class"), f"org.apache.spark.deploy.{arguments[0]}", *arguments[1:]]
    # Starting fast and staying small is all that is asked of these.
    environ = {**_with_java(os.environ), "SPARK_DAEMON_JAVA_OPTS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=directory, env=environ)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_for_workers(cluster: Cluster, count: int) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            if [worker["state"] for worker in cluster.state()["workers"]] == ["ALIVE"] * count:
                return
        time.sleep(_POLL_S)
    raise AssertionError("the workers did not come to the master")


def _with_java(environ: dict[str, str] | os._Environ[str]) -> dict[str, str]:
    java = find_java_home(os.environ, installed_version())
    return {**environ, "JAVA_HOME": str(java), "SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable}
