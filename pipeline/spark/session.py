"""A Spark session on a Lakefeed catalog. Owns its wiring: environment, jars, settings, and the end of its JVM.

PySpark is imported only when a session is asked for, so that everything else works without it.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lakefeed.pipeline.errors import SparkUnavailable
from lakefeed.pipeline.spark.runtime import (
    SparkVersion,
    find_iceberg_jar,
    find_java_home,
    find_s3_jars,
    installed_version,
)
from lakefeed.pipeline.spark.settings import TIME_ZONE, UTC, CatalogConfig, JobKind, SessionConfig
from lakefeed.settings import load_sections
from lakefeed.storage.config import StorageConfig

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


# --- pipeline.s3_settings ---------------------------------------------------------------------------------------------
#
# How Spark reaches S3: what the service's own settings say of it, as Iceberg and Hadoop name it. Owns the names.
#
# A catalog tells its clients the endpoint and the region with each table, and some also hand out keys. Ours does not:
# whoever may read a table's metadata need not be given the keys of the store. So the keys come from the same file and
# the
# same variables that the service reads, [storage] and LAKEFEED_STORAGE_S3_..., or else from the AWS credential chain.


_SECTION = "storage"

# Setting of ours -> of Iceberg's S3FileIO, and of Hadoop's S3A, which Spark keeps checkpoints with.
_NAMES = {
    "s3_endpoint": ("s3.endpoint", "fs.s3a.endpoint"),
    "s3_region": ("client.region", "fs.s3a.endpoint.region"),
    "s3_path_style": ("s3.path-style-access", "fs.s3a.path.style.access"),
    "s3_access_key_id": ("s3.access-key-id", "fs.s3a.access.key"),
    "s3_secret_access_key": ("s3.secret-access-key", "fs.s3a.secret.key"),
    "s3_session_token": ("s3.session-token", "fs.s3a.session.token"),
}

# Keys that come with a session token are of another kind, which S3A has to be told.
_TEMPORARY_KEYS = "org.apache.hadoop.fs.s3a.TemporaryAWSCredentialsProvider"


def load_s3_settings(path: Path | None, environ: Mapping[str, str]) -> dict[str, str]:
    """Read what the service's settings say of S3; empty where its files are elsewhere or AWS's own chain is used.

    Raises: SettingsError.
    """
    loaded = load_sections({_SECTION: StorageConfig}, path, environ)
    storage = loaded.sections[_SECTION]
    found = {name: getattr(storage, name) for name in _NAMES if f"{_SECTION}.{name}" in loaded.origins}
    given = {name: _as_text(value) for name, value in found.items() if value not in ("", False)}
    # Java's client asks the machine for a region where it is told none, and ends if that knows none either.
    return {"s3_region": storage.s3_region, **given} if given else {}


def catalog_properties(s3: Mapping[str, str]) -> dict[str, str]:
    """Name the settings as properties of an Iceberg catalog."""
    return {_NAMES[name][0]: value for name, value in s3.items()}


def hadoop_conf(s3: Mapping[str, str]) -> dict[str, str]:
    """Name the settings as Spark passes them on to Hadoop."""
    conf = {f"spark.hadoop.{_NAMES[name][1]}": value for name, value in s3.items()}
    if "s3_session_token" in s3:
        conf["spark.hadoop.fs.s3a.aws.credentials.provider"] = _TEMPORARY_KEYS
    return conf


def _as_text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


# --- pipeline.spark_conf ----------------------------------------------------------------------------------------------
#
# What Spark is told: settings as plain strings, computed from our configuration. Owns every key that we set.


VARIABLES = "spark.sql.variable.substitute"

_OF_SESSIONS = {
    # Days and hours of partitions are those of UTC for every writer, so they must be for Spark's too.
    TIME_ZONE: UTC,
    # A name or a text with `${x}` in it means just that.
    VARIABLES: "false",
}

# What no defaults of a cluster change: rows would get into other partitions.
NEVER_GIVE_WAY = frozenset((TIME_ZONE,))

_EVERYWHERE = {
    "spark.sql.extensions": "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions",
    **_OF_SESSIONS,
}

_LOCAL = {
    # Costs memory and a port, and nobody looks at the console of a job that lasts seconds.
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
}

_LOCAL_BY_KIND: Mapping[JobKind, Mapping[str, str]] = {
    # The first compiler alone and the simplest collector: a third less CPU and memory for a job of some seconds. That
    # compiler gets 48 MB for its code, and stops for good when some hundred queries have filled them.
    JobKind.SHORT: {
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:ReservedCodeCacheSize=240m",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.adaptive.enabled": "false",
    },
    # Full compilation halves the CPU of large merges; adaptive plans shrink the partitions that turn out small. Java's
    # usual collector cuts the heap into regions, in which Spark's pages of tens of megabytes find no place: a merge
    # into ten million rows ran out of a heap of 3 GB that was half empty.
    JobKind.LONG: {
        "spark.driver.extraJavaOptions": "-XX:+UseParallelGC",
        "spark.sql.shuffle.partitions": "16",
        "spark.sql.adaptive.enabled": "true",
    },
}


def session_conf(config: SessionConfig, *, jars: Sequence[Path], scratch_dir: Path) -> dict[str, str]:
    """Compute all settings of a session. `scratch_dir` has to exist: Spark makes its own, unused warehouse there."""
    conf = {**_EVERYWHERE, "spark.app.name": config.app_name}
    if config.master:
        conf["spark.master"] = config.master
    if config.is_local:
        conf |= {**_LOCAL, **_LOCAL_BY_KIND[config.job_kind]}
        conf["spark.driver.memory"] = config.driver_memory
        conf["spark.sql.warehouse.dir"] = str(scratch_dir)
    if config.packages:
        conf["spark.jars.packages"] = ",".join(config.packages)
    return {**conf, **_jar_conf(config, jars), **catalog_conf(config.catalog), **config.extra_conf}


def remote_conf(config: SessionConfig) -> dict[str, str]:
    """Compute what a session of Spark Connect is told: its server has settled everything else at its start."""
    return {**_OF_SESSIONS, **catalog_conf(config.catalog), **config.extra_conf}


def _jar_conf(config: SessionConfig, jars: Sequence[Path]) -> dict[str, str]:
    if not jars:
        return {}
    if config.is_local:
        # A second faster than spark.jars, which copies the jars and loads them in a class loader of their own.
        return {"spark.driver.extraClassPath": ":".join(map(str, jars))}
    return {"spark.jars": ",".join(map(str, jars))}


def catalog_conf(catalog: CatalogConfig) -> dict[str, str]:
    """Compute the settings that make the catalog known and the default. They can also be set in a running session."""
    properties = {
        "type": "rest",
        "uri": catalog.uri,
        # Spark's own table cache hides the commits of others for as long as the table is in use.
        "cache-enabled": "false",
    }
    if catalog.warehouse:
        properties["warehouse"] = catalog.warehouse
    if catalog.token:
        properties["token"] = catalog.token
        # A bearer token of ours has no end; Iceberg would try to exchange it for another after an hour.
        properties["token-refresh-enabled"] = "false"
    prefix = f"spark.sql.catalog.{catalog.name}"
    return {
        prefix: "org.apache.iceberg.spark.SparkCatalog",
        "spark.sql.defaultCatalog": catalog.name,
        **{f"{prefix}.{key}": value for key, value in {**properties, **catalog.properties}.items()},
    }


# --- pipeline.session -------------------------------------------------------------------------------------------------


# Stopping Spark takes a second or two; after this long the JVM is ended by force.
_JVM_EXIT_TIMEOUT_S = 30.0

# What the client of Spark Connect imports besides PySpark.
_CONNECT_MODULES = ("grpc", "grpc_status", "google.rpc", "pandas", "pyarrow")
_CONNECT_HINT = "pip install 'lakefeed[connect]'"


def build_session(config: SessionConfig) -> SparkSession:
    """Start Spark, or take the session that already runs in this process, with the catalog attached.

    Raises:
        SparkUnavailable: PySpark, a Java or an Iceberg runtime that fits is missing.
    """
    version = installed_version()
    if config.remote:
        return _connect(config)
    jars, packages = find_jars(config, version), wanted_packages(config, version)
    if not config.is_submitted:
        prepare_environment(config, os.environ, version)
    from pyspark.sql import SparkSession  # noqa: PLC0415 - optional, and slow to import

    conf = session_conf(replace(config, packages=packages), jars=jars, scratch_dir=Path(tempfile.gettempdir()))
    if config.is_submitted:
        conf = _after_spark_submit(conf)
    return SparkSession.builder.config(map={**conf}).getOrCreate()


def find_jars(config: SessionConfig, version: SparkVersion) -> tuple[Path, ...]:
    """Find the jars for the class path. What spark-submit or a Maven coordinate brings is not looked for.

    Raises:
        SparkUnavailable: the Iceberg runtime is missing or not whole.
    """
    if config.is_submitted:
        return (*filter(None, [config.iceberg_jar]), *config.extra_jars)
    s3_jars = () if _downloads(config, "iceberg-aws-bundle") else find_s3_jars(version)
    if config.iceberg_jar is None and (_downloads(config, "iceberg-spark-runtime") or not version.has_jar_on_pypi):
        return (*config.extra_jars, *s3_jars)
    return (find_iceberg_jar(config.iceberg_jar), *config.extra_jars, *s3_jars)


def wanted_packages(config: SessionConfig, version: SparkVersion) -> tuple[str, ...]:
    """Name what Spark has to download: what was asked for, and the Iceberg runtime where PyPI has none that fits."""
    is_settled = config.is_submitted or config.iceberg_jar is not None or version.has_jar_on_pypi
    if is_settled or _downloads(config, "iceberg-spark-runtime"):
        return config.packages
    return (version.iceberg_package, *config.packages)


def _downloads(config: SessionConfig, artifact: str) -> bool:
    return any(artifact in package for package in config.packages)


def prepare_environment(config: SessionConfig, environ: MutableMapping[str, str], version: SparkVersion) -> None:
    """Set what PySpark reads from the environment when it starts the JVM.

    Raises:
        SparkUnavailable: no Java that fits was found.
    """
    environ["JAVA_HOME"] = str(find_java_home(environ, version))
    if config.is_local:
        # Without it workers start the first python3 on PATH, which has other packages than this one.
        environ.setdefault("PYSPARK_PYTHON", sys.executable)
        environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")


def _after_spark_submit(conf: Mapping[str, str]) -> dict[str, str]:
    """Let what spark-submit was told stand where ours is only a default."""
    from pyspark import SparkConf, SparkContext  # noqa: PLC0415 - see above

    # Before that PySpark has no way to the JVM, and takes it that nothing was told.
    SparkContext._ensure_initialized()  # noqa: SLF001 - as PySpark's own builder does, but later
    defaults = session_conf(SessionConfig(master=""), jars=(), scratch_dir=Path())
    return give_way(conf, dict(SparkConf().getAll()), defaults)


def give_way(conf: Mapping[str, str], told: Mapping[str, str], defaults: Mapping[str, str]) -> dict[str, str]:
    """Leave out settings that are our defaults where another was told, but none that rows depend on."""
    return {
        key: value
        for key, value in conf.items()
        if key in NEVER_GIVE_WAY or key not in told or defaults.get(key) != value
    }


def _connect(config: SessionConfig) -> SparkSession:
    missing = [name for name in _CONNECT_MODULES if not _is_installed(name)]
    if missing:
        raise SparkUnavailable(f"Spark Connect needs more packages, {_CONNECT_HINT}: missing={','.join(missing)}")
    from pyspark.sql import SparkSession  # noqa: PLC0415 - see above

    spark = SparkSession.builder.remote(config.remote).getOrCreate()
    for key, value in remote_conf(config).items():
        spark.conf.set(key, value)
    return spark


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def attach_catalog(spark: SparkSession, catalog: CatalogConfig) -> None:
    """Make a catalog known to a running session and its default. A name once used keeps its first settings."""
    for key, value in catalog_conf(catalog).items():
        spark.conf.set(key, value)


def stop_session(spark: SparkSession) -> None:
    """Stop Spark and the JVM under it, which PySpark would leave running until the process ends."""
    if is_remote(spark):
        spark.stop()
        return
    gateway = spark.sparkContext._gateway  # noqa: SLF001 - PySpark has no public way to its JVM
    assert gateway is not None
    spark.stop()
    gateway.shutdown()
    jvm = getattr(gateway, "proc", None)
    if jvm is not None:
        _end_jvm(jvm)


def is_remote(spark: SparkSession) -> bool:
    """Tell whether a session is one of Spark Connect, which has no JVM here."""
    return type(spark).__module__.startswith("pyspark.sql.connect")


def _end_jvm(jvm: subprocess.Popen[bytes]) -> None:
    if jvm.stdin is not None:
        jvm.stdin.close()  # the JVM ends by itself when this closes
    try:
        jvm.wait(_JVM_EXIT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        jvm.kill()
        jvm.wait()
