"""One Spark for all tests of this folder; each test gets its own session on the catalog that it names.

Starting Spark takes seconds, so its JVM is shared. Sessions share nothing else, neither settings nor catalogs. Commands
run on it through `run_lakefeed`. Only tests of what a real start shows have JVMs of their own: a command's process
(test_spark_commands_spark), Spark Connect, the cluster, the kills of mirrors and of a backfill.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from aiohttp import web
from click.testing import CliRunner, Result
from pyspark.sql import SparkSession

from lakefeed.catalog.app import build_catalog
from lakefeed.catalog.config import CatalogConfig, Warehouse
from lakefeed.ingest.cli.main import main
from lakefeed.pipeline.mirrors.settings import MirrorConfig
from lakefeed.pipeline.spark.runtime import installed_version
from lakefeed.pipeline.spark.session import SessionConfig, build_session, catalog_conf, stop_session
from lakefeed.storage.config import StorageConfig
from tests.service_process import ServiceProcess, service_process
from tests.serving import serve_in_thread

OpenSpark = Callable[..., SparkSession]

# A limit for tests that hang: on a busy machine Spark is ten times slower than usual.
TIMEOUT_S = 1800

SHARED_CONF = {
    "spark.log.level": "ERROR",  # pytest prints the JVM's whole output when a test fails
    # Queries over a few rows take less time than the compilation of their code: a third less CPU. Commands in
    # processes of their own compile it.
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.cache.maxEntries": "5000",
}

# For tests whose checkpoints are on S3.
needs_s3a = pytest.mark.skipif(
    not installed_version().has_jar_on_pypi,
    reason="Hadoop's S3A for this Spark is on Maven Central only, with 600 MB of AWS SDK",
)

# PySpark leaves sockets to the garbage collector, and uses what Python 3.12 and pandas 3 deprecate.
PYSPARK_WARNINGS = (
    "ignore:unclosed.*socket:ResourceWarning",
    "ignore::DeprecationWarning:pyspark",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker("spark")
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(TIMEOUT_S))
            for warning in PYSPARK_WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(warning))


@pytest.fixture(scope="session")
def running_spark() -> Iterator[SparkSession]:
    spark = build_session(SessionConfig(master="local[2]", conf=SHARED_CONF))
    yield spark
    stop_session(spark)


def attach_catalog(spark: SparkSession, config: SessionConfig) -> None:
    """Add a catalog to a running session and make it the default. A name that was used keeps its first settings."""
    for key, value in {**catalog_conf(config), **config.conf}.items():
        if key.startswith(("spark.sql.", "spark.hadoop.")):
            spark.conf.set(key.removeprefix("spark.hadoop."), value)
    # Iceberg's DataFrame source looks up its catalog in the active session, not in the one that loads.
    spark._jvm.SparkSession.setActiveSession(spark._jsparkSession)


@pytest.fixture
def open_spark(running_spark: SparkSession) -> OpenSpark:
    """Open a session on a catalog: `open_spark(uri=..., name=...)`, with further settings of Spark."""

    def open_session(
        *, uri: str = SessionConfig().url, name: str = "lake", conf: Mapping[str, str] | None = None
    ) -> SparkSession:
        session = running_spark.newSession()
        attach_catalog(session, SessionConfig(url=uri, catalog_name=name, conf=conf or {}))
        return session

    return open_session


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    """A service for a module's tests of mirrors. It keeps images from before, by which changes of keys are found."""
    with service_process(tmp_path_factory.mktemp("service"), {"writer.keep_before": "true"}) as running:
        running.start()
        yield running


@pytest.fixture
def spark(service: ServiceProcess, open_spark: OpenSpark, request: pytest.FixtureRequest) -> SparkSession:
    """A session on the service, with a catalog of the test's name."""
    return open_spark(uri=service.http_url, name=request.node.originalname[:40])


@pytest.fixture
def config(tmp_path: Path) -> MirrorConfig:
    """Settings of mirrors, with checkpoints of the test's own."""
    return MirrorConfig(checkpoints=str(tmp_path / "checkpoints"))


@pytest.fixture
def run_lakefeed(running_spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Run a command of `lakefeed` in this process, on the shared Spark: `run_lakefeed("maintain", ...)`.

    Only what the start of Spark determines is left out; catalog, settings and errors are the command's own.
    """

    def build(config: SessionConfig, **_start: object) -> SparkSession:
        session = running_spark.newSession()
        attach_catalog(session, config)
        return session

    monkeypatch.setattr("lakefeed.pipeline.spark.options.build_session", build)
    monkeypatch.setattr("lakefeed.pipeline.spark.options.stop_session", lambda _session: None)
    return lambda *arguments, **given: CliRunner().invoke(main, arguments, **given)


@pytest.fixture
def catalog_url(tmp_path: Path) -> Iterator[str]:
    app = web.Application()
    warehouse = Warehouse(StorageConfig(warehouse=(tmp_path / "warehouse").as_uri()))
    app.add_subapp("/v1", build_catalog(CatalogConfig(), warehouse, tmp_path / "catalog.db"))
    with serve_in_thread(app) as url:
        yield url
