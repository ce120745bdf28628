"""Jobs run on a cluster with spark-submit, from the project's wheel and nothing else of it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from websockets.sync.client import connect

from lakefeed.pipeline.spark.runtime import find_iceberg_jar, installed_version
from tests.service_process import ServiceProcess, service_process
from tests.standalone_cluster import Cluster, standalone_cluster

ROOT = Path(__file__).parents[2]
SOURCES = ("pyproject.toml", "README.md", "LICENSE")
PACKAGES = ("catalog", "ingest", "lakefeed", "pipeline", "writer")

FROM_THE_WHEEL = "imported from the wheel"

FAST_AND_SMALL = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.executor.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.executor.memory": "512m",
    "spark.sql.shuffle.partitions": "2",
    "spark.ui.enabled": "false",
}

# Above the number of files that are worth a compaction.
COMMITS = 6


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """The project's wheel, built from a copy: what a build leaves in the tree would go into the next one."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in SOURCES:
        shutil.copy(ROOT / name, copy)
    for name in PACKAGES:
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    with (copy / "pipeline" / "__init__.py").open("a") as package:
        package.write(f"print({FROM_THE_WHEEL!r})\n")  # what could be imported here besides is the checkout
    pip_wheel = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation")
    subprocess.run([*pip_wheel, "-w", tmp_path, copy], check=True)
    return next(tmp_path.glob("lakefeed-*.whl"))


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with standalone_cluster(tmp_path, workers=1) as running:
        yield running


@pytest.fixture
def service(tmp_path: Path) -> Iterator[ServiceProcess]:
    """A service whose table has a small file of every commit."""
    directory = tmp_path / "service"
    directory.mkdir()
    with service_process(directory) as running:
        running.start()
        _push(running, range(1, COMMITS + 1))
        yield running
        assert running.stop() == 0


def test_jobs_of_the_wheel_run_on_a_standalone_cluster(
    cluster: Cluster, wheel: Path, service: ServiceProcess, tmp_path: Path
) -> None:
    # spark-submit is given the catalog's address, which overrides the default of the job.
    told = {**FAST_AND_SMALL, "spark.sql.catalog.lake.uri": service.http_url}
    conf = tmp_path / "spark.conf"
    conf.write_text("\n".join(f"{key} {value}" for key, value in told.items()))

    def submit(*arguments: str) -> None:
        given = {"WHEEL": str(wheel), "ICEBERG": _iceberg(), "SUBMIT_OPTIONS": f"--properties-file {conf}"}
        ended = cluster.submit(*arguments, "default.users", **given)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert FROM_THE_WHEEL in ended.stdout

    submit("maintain", "--only", "compact", "--json")
    assert _total(service, "users", "total-records") == COMMITS
    assert _total(service, "users", "total-data-files") == 1

    # A stream, whose batches the JVM passes to the driver's Python.
    checkpoints = tmp_path / "checkpoints"
    submit("mirror", "run", "--once", "--checkpoints", checkpoints.as_uri())
    assert _total(service, "users_current", "total-records") == COMMITS
    assert list(checkpoints.glob("default.users_current/*/commits/*"))

    assert [each["state"] for each in cluster.finished_applications()] == ["FINISHED"] * 2


def _iceberg() -> str:
    version = installed_version()
    return str(find_iceberg_jar(None)) if version.has_jar_on_pypi else version.iceberg_package


def _push(service: ServiceProcess, numbers: Iterable[int]) -> None:
    """Push rows, each of which is a commit."""
    with connect(service.ws_url) as socket:
        for number in numbers:
            event = {"sequence": number, "operation": "INSERT", "table": "users"}
            row = {"rowId": str(number), "after": {"id": number}}
            socket.send(json.dumps({"type": "cdc_batch", "sourceDoId": "shop", "events": [event | row]}))
            assert json.loads(socket.recv(timeout=240))["status"] == "ok"
            assert service.flush()["success"]


def _total(service: ServiceProcess, name: str, what: str) -> int:
    table = service.get(f"/v1/namespaces/default/tables/{name}")["metadata"]
    current = next(each for each in table["snapshots"] if each["snapshot-id"] == table["current-snapshot-id"])
    return int(current["summary"][what])
