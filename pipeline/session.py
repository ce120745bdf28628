"""A Spark session on a Lakefeed catalog. Owns its wiring: environment, jars, settings, and the end of its JVM.

PySpark is imported only when a session is asked for, so that everything else works without it.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, MutableMapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.config import CatalogConfig, SessionConfig
from pipeline.errors import SparkUnavailable
from pipeline.runtime import find_iceberg_jar, find_java_home, find_s3_jars
from pipeline.spark_conf import NEVER_GIVE_WAY, catalog_conf, remote_conf, session_conf
from pipeline.spark_versions import SparkVersion, installed_version

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

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
