"""A job runs on a cluster through spark-submit, with the wheel of this project and nothing else of it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.config import SessionConfig
from pipeline.session import find_jars, wanted_packages
from pipeline.spark_versions import installed_version
from tests.pushed_changes import push_rows
from tests.service_process import ServiceProcess, service_process
from tests.standalone_cluster import Cluster, standalone_cluster

ROOT = Path(__file__).parents[2]
SOURCES = ("pyproject.toml", "README.md", "LICENSE")
PACKAGES = ("catalog", "ingest", "pipeline", "writer")


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """The project's wheel, built from a copy: what a build leaves in the tree would go into the next one."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in SOURCES:
        shutil.copy(ROOT / name, copy)
    for name in PACKAGES:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", tmp_path, copy]
    subprocess.run(command, check=True)
    return next(tmp_path.glob("lakefeed-*.whl"))


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with standalone_cluster(tmp_path, workers=2) as running:
        yield running
