"""The Spark session: its settings, S3 credentials, class path, environment, and the end of its JVM.

    [pipeline.spark] --> SessionConfig --session_conf--> settings of Spark --build_session--> SparkSession

Under spark-submit the JVM, master and jars are given, and settings given to spark-submit override our defaults. Over
Spark Connect the server has settled everything but the catalog.

A catalog tells its clients endpoint and region with each table, and some also hand out keys. Ours does not, because a
client that may read a table's metadata need not get the keys of the store. The keys come from the same file and
variables that the service reads, [storage] and LAKEFEED_STORAGE_S3_..., or else from the AWS credential chain.

PySpark is imported only when a session is opened, so that everything else works without it.
"""

from __future__ import annotations

import enum
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
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
from lakefeed.settings import Settings, check, load_sections, setting
from lakefeed.storage.config import StorageConfig

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


LOCAL_MASTER = "local[*]"
APP_NAME = "lakefeed"

# Days and hours of partitions are in UTC for every writer, so they must be for Spark, whatever a cluster's default is.
_TIME_ZONE = "spark.sql.session.timeZone"
_UTC = "UTC"

VARIABLES = "spark.sql.variable.substitute"

# spark-submit starts Python with the port of the JVM that it has started before.
_SUBMITTED_VARIABLE = "PYSPARK_GATEWAY_PORT"

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class JobKind(enum.Enum):
    """How long a session lives: `short` starts faster and takes less memory, `long` is tuned for large merges."""

    SHORT = "short"
    LONG = "long"


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionConfig(Settings):
    """Section [pipeline.spark]: addresses of the catalog and of Spark, for every Spark command."""

    url: str = setting("http://127.0.0.1:8181", "Address of the Iceberg REST catalog, without the `/v1`.")
    token: str = setting("", "Bearer token, if the catalog requires one.", secret=True)
    warehouse: str = setting("", "Warehouse of the catalog. Empty means its only one.")
    catalog_name: str = setting("lake", "First part of a table's name in SQL.")
    master: str = setting("", "Spark master. Empty means `local[*]`, or under spark-submit the master given there.")
    remote: str = setting("", "Spark Connect server such as `sc://host:15002`, in place of a master.")
    driver_memory: str = setting("1g", "Heap of a local session, as Spark writes sizes.")
    packages: tuple[str, ...] = setting((), "Maven coordinates for Spark to download.")
    jar: tuple[str, ...] = setting((), "Jars for the class path. An Iceberg runtime among them replaces ours.")
    conf: Mapping[str, str] = setting({}, "Further settings of Spark. They override ours.")

    def check(self) -> None:
        """Check the addresses, that SQL can use the catalog's name, and that days of partitions are those of UTC."""
        check(self.url.startswith(("http://", "https://")), f"url must be http or https: {self.url}")
        is_identifier = _IDENTIFIER.fullmatch(self.catalog_name) is not None
        check(is_identifier, f"catalog_name must be letters, digits and underscores: {self.catalog_name}")
        check(self.catalog_name != "spark_catalog", "catalog_name is taken by Spark itself: spark_catalog")
        check(self.remote == "" or self.remote.startswith("sc://"), f"remote must begin with sc://: {self.remote}")
        zone = self.conf.get(_TIME_ZONE, _UTC)
        check(zone == _UTC, f"conf must leave the time zone at UTC, as days of partitions are: {_TIME_ZONE}={zone}")

    @property
    def is_submitted(self) -> bool:
        """Return whether spark-submit started this process, with master, JVM and class path."""
        return not self.master and not self.remote and _SUBMITTED_VARIABLE in os.environ

    @property
    def is_local(self) -> bool:
        """Return whether driver and executors are one process on this machine."""
        return (self.master or LOCAL_MASTER).startswith("local") and not self.remote and not self.is_submitted

    @property
    def iceberg_jar(self) -> Path | None:
        """Return the Iceberg runtime among the jars."""
        return next((Path(jar) for jar in self.jar if "iceberg-spark-runtime" in Path(jar).name), None)

    @property
    def other_jars(self) -> tuple[Path, ...]:
        """Return the jars without the Iceberg runtime."""
        return tuple(Path(jar) for jar in self.jar if Path(jar) != self.iceberg_jar)


_SESSION_CONF = {
    _TIME_ZONE: _UTC,
    # `${x}` in a name or a text is not a variable.
    VARIABLES: "false",
}

_LOCAL_CONF = {
    # The web console costs memory and a port, and is of no use for a job of some seconds.
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
}

_LOCAL_CONF_BY_KIND: Mapping[JobKind, Mapping[str, str]] = {
    # Only the first compiler, and the simplest collector: a third less CPU and memory for a job of some seconds. That
    # compiler has a code cache of 48 MB by default, and stops for good when some hundred queries have filled it.
    JobKind.SHORT: {
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:ReservedCodeCacheSize=240m",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.adaptive.enabled": "false",
    },
    # Full compilation halves the CPU of large merges; adaptive plans merge small partitions. Java's default collector
    # divides the heap into regions that are too small for Spark's pages of tens of megabytes: a merge into ten million
    # rows ran out of memory in a heap of 3 GB that was half empty.
    JobKind.LONG: {
        "spark.driver.extraJavaOptions": "-XX:+UseParallelGC",
        "spark.sql.shuffle.partitions": "16",
        "spark.sql.adaptive.enabled": "true",
    },
}

_STORAGE = "storage"

# Key in [storage] -> property of Iceberg's S3FileIO, and of Hadoop's S3A, which Spark writes checkpoints with.
_S3_NAMES = {
    "s3_endpoint": ("s3.endpoint", "fs.s3a.endpoint"),
    "s3_region": ("client.region", "fs.s3a.endpoint.region"),
    "s3_path_style": ("s3.path-style-access", "fs.s3a.path.style.access"),
    "s3_access_key_id": ("s3.access-key-id", "fs.s3a.access.key"),
    "s3_secret_access_key": ("s3.secret-access-key", "fs.s3a.secret.key"),
    "s3_session_token": ("s3.session-token", "fs.s3a.session.token"),
}
# Keys with a session token need another provider of S3A.
_TEMPORARY_KEYS = "org.apache.hadoop.fs.s3a.TemporaryAWSCredentialsProvider"

# Stopping Spark takes a second or two; after this time the JVM is killed.
_JVM_EXIT_TIMEOUT_S = 30.0

# What the client of Spark Connect imports besides PySpark.
_CONNECT_MODULES = ("grpc", "grpc_status", "google.rpc", "pandas", "pyarrow")
_CONNECT_HINT = "pip install 'lakefeed[connect]'"


# -- settings of Spark


def session_conf(
    config: SessionConfig,
    *,
    jars: Sequence[Path],
    packages: Sequence[str] = (),
    app_name: str = APP_NAME,
    job_kind: JobKind = JobKind.SHORT,
) -> dict[str, str]:
    """Return all settings of a session that starts in this process."""
    conf = {"spark.app.name": app_name}
    if not config.is_local:
        conf |= {"spark.master": config.master} if config.master else {}
        return {**conf, **portable_conf(config, jars=jars, packages=packages)}
    conf |= {"spark.master": config.master or LOCAL_MASTER, **_LOCAL_CONF, **_LOCAL_CONF_BY_KIND[job_kind]}
    conf["spark.driver.memory"] = config.driver_memory
    # Spark creates its own, unused warehouse in a directory that must exist.
    conf["spark.sql.warehouse.dir"] = tempfile.gettempdir()
    if jars:
        # A second faster than spark.jars, which copies the jars and loads them in a class loader of their own.
        conf["spark.driver.extraClassPath"] = ":".join(map(str, jars))
    return {**conf, **portable_conf(config, jars=(), packages=packages)}


def portable_conf(config: SessionConfig, *, jars: Sequence[Path], packages: Sequence[str]) -> dict[str, str]:
    """Return the settings that connect any Spark to the catalog, wherever it runs."""
    conf = {
        "spark.sql.extensions": "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions",
        **_SESSION_CONF,
    }
    if packages:
        conf["spark.jars.packages"] = ",".join(packages)
    if jars:
        conf["spark.jars"] = ",".join(map(str, jars))
    return {**conf, **catalog_conf(config), **config.conf}


def catalog_conf(config: SessionConfig) -> dict[str, str]:
    """Return the settings that add the catalog and make it the default. A running session takes them too."""
    properties = {
        "type": "rest",
        "uri": config.url.removesuffix("/"),
        # Spark's table cache hides the commits of other writers for as long as the table is in use.
        "cache-enabled": "false",
    }
    if config.warehouse:
        properties["warehouse"] = config.warehouse
    if config.token:
        properties["token"] = config.token
        # Our bearer tokens do not expire; Iceberg would try to exchange one for another after an hour.
        properties["token-refresh-enabled"] = "false"
    prefix = f"spark.sql.catalog.{config.catalog_name}"
    return {
        prefix: "org.apache.iceberg.spark.SparkCatalog",
        "spark.sql.defaultCatalog": config.catalog_name,
        **{f"{prefix}.{key}": value for key, value in properties.items()},
    }


def load_s3_settings(path: Path | None, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the service's settings of S3; empty if its files are elsewhere or the AWS credential chain is used."""
    loaded = load_sections({_STORAGE: StorageConfig}, path, environ)
    storage = loaded.sections[_STORAGE]
    found = {name: getattr(storage, name) for name in _S3_NAMES if f"{_STORAGE}.{name}" in loaded.origins}
    given = {
        name: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in found.items()
        if value not in ("", False)
    }
    # Without a region Java's client asks the machine for one, and fails if the machine has none either.
    return {"s3_region": storage.s3_region, **given} if given else {}


def s3_conf(s3: Mapping[str, str], config: SessionConfig) -> dict[str, str]:
    """Return settings of S3 as Iceberg's catalog and, through Spark, Hadoop take them."""
    prefix = f"spark.sql.catalog.{config.catalog_name}"
    conf = {f"{prefix}.{_S3_NAMES[name][0]}": value for name, value in s3.items()}
    if not config.remote:  # Hadoop is configured once, when Spark starts
        conf |= {f"spark.hadoop.{_S3_NAMES[name][1]}": value for name, value in s3.items()}
        if "s3_session_token" in s3:
            conf["spark.hadoop.fs.s3a.aws.credentials.provider"] = _TEMPORARY_KEYS
    return conf


# -- the session


def build_session(
    config: SessionConfig, *, app_name: str = APP_NAME, job_kind: JobKind = JobKind.SHORT
) -> SparkSession:
    """Start Spark with the catalog attached, or return the session that already runs in this process.

    `app_name` is its name in logs and cluster consoles.

    Raises:
        SparkUnavailable: PySpark, a suitable Java or a suitable Iceberg runtime is missing.
    """
    version = installed_version()
    if config.remote:
        return _connect(config)
    jars, packages = find_jars(config, version), wanted_packages(config, version)
    if not config.is_submitted:
        prepare_environment(config, os.environ, version)
    from pyspark.sql import SparkSession  # noqa: PLC0415 - optional, and slow to import

    conf = session_conf(config, jars=jars, packages=packages, app_name=app_name, job_kind=job_kind)
    if config.is_submitted:
        from pyspark import SparkConf, SparkContext  # noqa: PLC0415 - see above

        # Before this call PySpark has no way to the JVM, and assumes that spark-submit was given no settings.
        SparkContext._ensure_initialized()  # noqa: SLF001 - as PySpark's own builder does, but later
        defaults = session_conf(SessionConfig(), jars=())
        conf = without_overridden(conf, dict(SparkConf().getAll()), defaults)
    return SparkSession.builder.config(map={**conf}).getOrCreate()


def find_jars(config: SessionConfig, version: SparkVersion) -> tuple[Path, ...]:
    """Return the jars for the class path, without what spark-submit or a Maven coordinate provides."""
    if config.is_submitted:
        return (*filter(None, [config.iceberg_jar]), *config.other_jars)
    s3_jars = () if _downloads(config, "iceberg-aws-bundle") else find_s3_jars(version)
    if config.iceberg_jar is None and (_downloads(config, "iceberg-spark-runtime") or not version.has_jar_on_pypi):
        return (*config.other_jars, *s3_jars)
    return (find_iceberg_jar(config.iceberg_jar), *config.other_jars, *s3_jars)


def wanted_packages(config: SessionConfig, version: SparkVersion) -> tuple[str, ...]:
    """Return what Spark has to download: the configured packages, and the Iceberg runtime if PyPI has none."""
    has_runtime = config.is_submitted or config.iceberg_jar is not None or version.has_jar_on_pypi
    if has_runtime or _downloads(config, "iceberg-spark-runtime"):
        return config.packages
    return (version.iceberg_package, *config.packages)


def _downloads(config: SessionConfig, artifact: str) -> bool:
    return any(artifact in package for package in config.packages)


def prepare_environment(config: SessionConfig, environ: MutableMapping[str, str], version: SparkVersion) -> None:
    """Set what PySpark reads from the environment when it starts the JVM."""
    environ["JAVA_HOME"] = str(find_java_home(environ, version))
    if config.is_local:
        # Workers would otherwise start the first python3 on PATH, which has other packages than this one.
        environ.setdefault("PYSPARK_PYTHON", sys.executable)
        environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")


def without_overridden(
    conf: Mapping[str, str], submitted: Mapping[str, str], defaults: Mapping[str, str]
) -> dict[str, str]:
    """Return the settings without defaults of ours that spark-submit was given other values for."""
    return {
        key: value
        for key, value in conf.items()
        if key == _TIME_ZONE or key not in submitted or defaults.get(key) != value
    }


def _connect(config: SessionConfig) -> SparkSession:
    missing = [name for name in _CONNECT_MODULES if not _is_installed(name)]
    if missing:
        raise SparkUnavailable(f"Spark Connect needs more packages, {_CONNECT_HINT}: missing={','.join(missing)}")
    from pyspark.sql import SparkSession  # noqa: PLC0415 - see above

    spark = SparkSession.builder.remote(config.remote).getOrCreate()
    # The server has settled everything else at its start.
    for key, value in {**_SESSION_CONF, **catalog_conf(config), **config.conf}.items():
        spark.conf.set(key, value)
    return spark


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def stop_session(spark: SparkSession) -> None:
    """Stop Spark and its JVM, which PySpark would leave running until the process ends."""
    if type(spark).__module__.startswith("pyspark.sql.connect"):
        spark.stop()
        return
    gateway = spark.sparkContext._gateway  # noqa: SLF001 - PySpark has no public way to its JVM
    assert gateway is not None
    spark.stop()
    gateway.shutdown()
    jvm: subprocess.Popen[bytes] | None = getattr(gateway, "proc", None)
    if jvm is None:
        return
    if jvm.stdin is not None:
        jvm.stdin.close()  # the JVM ends by itself when this closes
    try:
        jvm.wait(_JVM_EXIT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        jvm.kill()
        jvm.wait()
