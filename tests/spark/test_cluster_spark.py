"""A job runs on a cluster through spark-submit, with the wheel of this project and nothing else of it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from websockets.sync.client import connect

from pipeline.runtime import find_iceberg_jar
from pipeline.spark_versions import installed_version
from tests.service_process import ServiceProcess, service_process
from tests.standalone_cluster import Cluster, standalone_cluster

ROOT = Path(__file__).parents[2]
SOURCES = ("pyproject.toml", "README.md", "LICENSE")
PACKAGES = ("catalog", "ingest", "pipeline", "writer")

FROM_THE_WHEEL = "imported from the wheel"

FAST_AND_SMALL = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.executor.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.executor.memory": "512m",
    "spark.sql.shuffle.partitions": "2",
    "spark.ui.enabled": "false",
}

# Above what a compaction takes as worth its while.
COMMITS = 6


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """The project's wheel, built from a copy: what a build leaves in the tree would go into the next one."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in SOURCES:
        shutil.copy(ROOT / name, copy)
    for name in PACKAGES:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    with (copy / "pipeline" / "__init__.py").open("a") as package:
        package.write(f"print({FROM_THE_WHEEL!r})\n")  # what could be imported here besides is the checkout
    pip_wheel = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation")
    subprocess.run([*pip_wheel, "-w", tmp_path, copy], check=True)
    return next(tmp_path.glob("lakefeed-*.whl"))


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with standalone_cluster(tmp_path, workers=2) as running:
        yield running


@pytest.fixture
def service(tmp_path: Path) -> Iterator[ServiceProcess]:
    """A service whose table has a small file of every commit."""
    directory = tmp_path / "service"
    directory.mkdir()
    with service_process(directory) as running:
        running.start()
        with connect(running.ws_url) as socket:
            for number in range(1, COMMITS + 1):
                event = {"sequence": number, "operation": "INSERT", "table": "users", "after": {"id": number}}
                socket.send(json.dumps({"type": "cdc_batch", "sourceDoId": "shop", "events": [event]}))
                assert json.loads(socket.recv(timeout=60))["status"] == "ok"
                assert running.flush()["success"]
        yield running
        assert running.stop() == 0


def test_job_of_the_wheel_runs_on_a_standalone_cluster(
    cluster: Cluster, wheel: Path, service: ServiceProcess, tmp_path: Path
) -> None:
    # Where the catalog is, spark-submit is told: the job has only a default for it, which gives way.
    told = {**FAST_AND_SMALL, "spark.sql.catalog.lake.uri": service.http_url}
    conf = tmp_path / "spark.conf"
    conf.write_text("\n".join(f"{key} {value}" for key, value in told.items()))

    ended = cluster.submit(
        *("maintain_tables", "default.users", "--only", "compact", "--json"),
        WHEEL=str(wheel),
        ICEBERG=_iceberg(),
        SUBMIT_OPTIONS=f"--properties-file {conf}",
    )

    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert FROM_THE_WHEEL in ended.stdout
    assert _live_files(service) == 1
    (application,) = cluster.finished_applications()
    assert (application["state"], application["cores"]) == ("FINISHED", 2)


def _iceberg() -> str:
    version = installed_version()
    return str(find_iceberg_jar(None)) if version.has_jar_on_pypi else version.iceberg_package


def _live_files(service: ServiceProcess) -> int:
    table = service.get("/v1/namespaces/default/tables/users")["metadata"]
    current = next(each for each in table["snapshots"] if each["snapshot-id"] == table["current-snapshot-id"])
    assert current["summary"]["total-records"] == str(COMMITS)
    return int(current["summary"]["total-data-files"])
