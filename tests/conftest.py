"""Fixtures that several packages' tests share, the real servers around Lakefeed; and how tests are given to workers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest

from tests.azure_server import AzureServer, find_azurite, run_azure_server
from tests.gcs_server import GcsServer, run_gcs_server
from tests.postgres_server import postgres_server
from tests.s3_server import S3Server, run_s3_server

# The suite tries the same examples every time, so that a change is judged by what it changed. `make soak` looks for
# new ones.
hypothesis.settings.register_profile("suite", derandomize=True)
hypothesis.settings.register_profile("soak", derandomize=False)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "suite"))

# The folders whose files take longest, in the order in which workers take them, so that all workers end together.
_SLOW_FOLDERS = ("tests/spark/", "tests/crash/", "tests/integration/", "tests/model/", "tests/pyiceberg/")


# With Spark and the servers that its tests start, and some reserve.
_WORKER_MAX_BYTES = 5 << 30


def pytest_xdist_auto_num_workers() -> int:
    """Return two workers per core, because tests often wait, or as many as fit into memory."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):  # no limit of a container
        memory_bytes = min(memory_bytes, int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii")))
    return max(1, min(2 * (os.cpu_count() or 1), memory_bytes // _WORKER_MAX_BYTES))


def pytest_configure(config: pytest.Config) -> None:
    # Workers take files in the order of collection, not by their number of tests.
    config.option.loadscopereorder = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=_slowest_first)


def _slowest_first(item: pytest.Item) -> int:
    places = (place for place, folder in enumerate(_SLOW_FOLDERS) if item.nodeid.startswith(folder))
    return next(places, len(_SLOW_FOLDERS))


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """An S3 server for the whole run; tests make buckets with `create_bucket()`."""
    with run_s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture(scope="session")
def make_postgres() -> Iterator[Callable[[], str]]:
    """A PostgreSQL server for the whole run; `make_postgres()` creates a database and returns its URL."""
    with postgres_server() as make_database:
        yield make_database


@pytest.fixture(scope="session")
def azure_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AzureServer]:
    if find_azurite() is None:
        pytest.skip("azurite-blob is not on the PATH: npm install -g azurite")
    with run_azure_server(tmp_path_factory.mktemp("azure")) as server:
        yield server


@pytest.fixture(scope="session")
def gcs_server(tmp_path_factory: pytest.TempPathFactory, s3_server: S3Server) -> Iterator[GcsServer]:
    with run_gcs_server(tmp_path_factory.mktemp("gcs"), s3_server) as server:
        yield server
