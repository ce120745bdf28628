"""A Spark session on a Lakefeed catalog. Owns its wiring: environment, jars, settings, and the end of its JVM.

PySpark is imported only when a session is asked for, so that everything else works without it.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.config import CatalogConfig, SessionConfig
from pipeline.errors import SparkUnavailable
from pipeline.runtime import INSTALL_HINT, find_iceberg_jar, find_java_home
from pipeline.spark_conf import catalog_conf, session_conf

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Stopping Spark takes a second or two; after this long the JVM is ended by force.
_JVM_EXIT_TIMEOUT_S = 30.0


def build_session(config: SessionConfig) -> SparkSession:
    """Start Spark, or take the session that already runs in this process, with the catalog attached.

    Raises:
        SparkUnavailable: PySpark, Java 17 or the Iceberg runtime is missing.
    """
    if importlib.util.find_spec("pyspark") is None:
        raise SparkUnavailable(f"PySpark is not installed: {INSTALL_HINT} (Python 3.11 or 3.12)")
    jars = find_jars(config)
    if not config.is_submitted:
        prepare_environment(config, os.environ)
    from pyspark.sql import SparkSession  # noqa: PLC0415 - optional, and slow to import

    conf = session_conf(config, jars=jars, scratch_dir=Path(tempfile.gettempdir()))
    return SparkSession.builder.config(map={**conf}).getOrCreate()


def find_jars(config: SessionConfig) -> tuple[Path, ...]:
    """Find the jars for the class path. What spark-submit or a Maven coordinate brings is not looked for.

    Raises:
        SparkUnavailable: the Iceberg runtime is missing or not whole.
    """
    downloads_iceberg = any("iceberg-spark-runtime" in package for package in config.packages)
    if config.iceberg_jar is None and (config.is_submitted or downloads_iceberg):
        return config.extra_jars
    return (find_iceberg_jar(config.iceberg_jar), *config.extra_jars)


def prepare_environment(config: SessionConfig, environ: MutableMapping[str, str]) -> None:
    """Set what PySpark reads from the environment when it starts the JVM.

    Raises:
        SparkUnavailable: no Java 17 was found.
    """
    environ["JAVA_HOME"] = str(find_java_home(environ))
    if config.is_local:
        # Without it workers start the first python3 on PATH, which has other packages than this one.
        environ.setdefault("PYSPARK_PYTHON", sys.executable)
        environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")


def attach_catalog(spark: SparkSession, catalog: CatalogConfig) -> None:
    """Make a catalog known to a running session and its default. A name once used keeps its first settings."""
    for key, value in catalog_conf(catalog).items():
        spark.conf.set(key, value)


def stop_session(spark: SparkSession) -> None:
    """Stop Spark and the JVM under it, which PySpark would leave running until the process ends."""
    gateway = spark.sparkContext._gateway  # noqa: SLF001 - PySpark has no public way to its JVM
    assert gateway is not None
    spark.stop()
    gateway.shutdown()
    jvm = getattr(gateway, "proc", None)
    if jvm is not None:
        _end_jvm(jvm)


def _end_jvm(jvm: subprocess.Popen[bytes]) -> None:
    if jvm.stdin is not None:
        jvm.stdin.close()  # the JVM ends by itself when this closes
    try:
        jvm.wait(_JVM_EXIT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        jvm.kill()
        jvm.wait()
