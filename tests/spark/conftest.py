"""One Spark for all tests of this folder; each test gets a session of its own on the catalog it names.

Starting Spark takes seconds, so its JVM is shared. Sessions on it share nothing else: neither settings nor catalogs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from aiohttp import web
from click.testing import CliRunner, Result
from pyspark.sql import SparkSession

from lakefeed.catalog.app import build_catalog
from lakefeed.catalog.config import CatalogConfig, Warehouse
from lakefeed.ingest.cli.main import main
from lakefeed.pipeline.mirrors.settings import MirrorConfig
from lakefeed.pipeline.spark import settings as pipeline_config
from lakefeed.pipeline.spark.runtime import installed_version
from lakefeed.pipeline.spark.session import attach_catalog, build_session, stop_session
from lakefeed.storage.config import StorageConfig
from tests.service_process import ServiceProcess, service_process
from tests.serving import serve_in_thread

OpenSpark = Callable[..., SparkSession]

# For tests whose checkpoints lie on S3.
needs_s3a = pytest.mark.skipif(
    not installed_version().has_jar_on_pypi,
    reason="Hadoop's S3A for this Spark is on Maven Central only, with 600 MB of AWS SDK",
)

# Of PySpark itself: it leaves sockets to the garbage collector, and knows neither Python 3.12's nor pandas 3's ways.
PYSPARK_WARNINGS = (
    "ignore:unclosed.*socket:ResourceWarning",
    "ignore::DeprecationWarning:pyspark",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker("spark")
            for warning in PYSPARK_WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(warning))


@pytest.fixture(scope="session")
def running_spark() -> Iterator[SparkSession]:
    quiet = {"spark.log.level": "ERROR"}  # pytest shows all that a JVM said since its start, when any test fails
    spark = build_session(pipeline_config.SessionConfig(master="local[2]", extra_conf=quiet))
    yield spark
    stop_session(spark)


@pytest.fixture
def open_spark(running_spark: SparkSession) -> OpenSpark:
    """Open a session on a catalog: `open_spark(uri=..., token=...)` takes what the pipeline's CatalogConfig takes."""

    def open_session(**catalog: str) -> SparkSession:
        session = running_spark.newSession()
        attach_catalog(session, pipeline_config.CatalogConfig(**catalog))
        # Iceberg's DataFrame source looks up its catalog in the active session, whichever session is asked to load.
        session._jvm.SparkSession.setActiveSession(session._jsparkSession)
        return session

    return open_session


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    """A service for a module's tests of mirrors; rows that got another key are found by their images from before."""
    with service_process(tmp_path_factory.mktemp("service"), {"writer.keep_before": "true"}) as running:
        running.start()
        yield running


@pytest.fixture
def spark(service: ServiceProcess, open_spark: OpenSpark, request: pytest.FixtureRequest) -> SparkSession:
    """A session on that service, by a catalog with the test's name."""
    return open_spark(uri=service.http_url, name=request.node.originalname[:40])


@pytest.fixture
def config(tmp_path: Path) -> MirrorConfig:
    """Mirrors whose checkpoints are the test's own."""
    return MirrorConfig(checkpoints=str(tmp_path / "checkpoints"))


@pytest.fixture
def run_lakefeed(running_spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Run a command of `lakefeed` in this process, on the Spark that is already there: `run_lakefeed("maintain", ...)`.

    Only what a start of Spark settles is left out; catalog, settings and errors are the command's own.
    """

    def build(config: pipeline_config.SessionConfig) -> SparkSession:
        session = running_spark.newSession()
        attach_catalog(session, config.catalog)
        for key, value in config.extra_conf.items():
            if key.startswith(("spark.sql.", "spark.hadoop.")):
                session.conf.set(key.removeprefix("spark.hadoop."), value)
        session._jvm.SparkSession.setActiveSession(session._jsparkSession)
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
