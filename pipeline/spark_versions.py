"""Which Spark is installed, and what fits it: Java, and the Iceberg runtime. Owns that table.

Spark 3.5 is the one that PyPI alone serves. For Spark 4 the Iceberg runtime comes from Maven Central.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from dataclasses import dataclass

from pipeline.errors import SparkUnavailable

INSTALL_HINT = "pip install 'lakefeed[spark]'"


@dataclass(frozen=True, slots=True)
class SparkVersion:
    """One line of Spark and what goes with it."""

    line: str
    scala: str
    iceberg: str
    hadoop: str
    java_versions: tuple[str, ...]

    @property
    def iceberg_jar_name(self) -> str:
        """Name the runtime as a file."""
        return f"iceberg-spark-runtime-{self.line}_{self.scala}-{self.iceberg}.jar"

    @property
    def iceberg_package(self) -> str:
        """Name the runtime as Maven does."""
        return f"org.apache.iceberg:iceberg-spark-runtime-{self.line}_{self.scala}:{self.iceberg}"

    @property
    def aws_package(self) -> str:
        """Name, as Maven does, what Iceberg reads and writes s3:// with."""
        return f"org.apache.iceberg:iceberg-aws-bundle:{self.iceberg}"

    @property
    def s3a_package(self) -> str:
        """Name, as Maven does, what Spark itself reads and writes s3a:// with, as for checkpoints."""
        return f"org.apache.hadoop:hadoop-aws:{self.hadoop}"

    @property
    def has_jar_on_pypi(self) -> bool:
        """Whether a PyPI package brings the Iceberg runtime."""
        return self is SPARK_3_5


# Java 21 runs Spark 3.5's SQL but breaks its exchange with Python through Arrow, and newer ones do not start it.
SPARK_3_5 = SparkVersion("3.5", "2.12", "1.10.2", "3.3.4", ("17",))
SPARK_4_0 = SparkVersion("4.0", "2.13", "1.11.0", "3.4.1", ("17", "21"))
SPARK_4_1 = SparkVersion("4.1", "2.13", "1.11.0", "3.4.2", ("17", "21"))

KNOWN = {version.line: version for version in (SPARK_3_5, SPARK_4_0, SPARK_4_1)}


def installed_version() -> SparkVersion:
    """Tell which Spark is installed.

    Raises:
        SparkUnavailable: none is, or one that no Iceberg runtime is known for.
    """
    text = _pyspark_version()
    line = ".".join(text.split(".")[:2])
    if line not in KNOWN:
        raise SparkUnavailable(
            f"no Iceberg runtime is known for this Spark, {INSTALL_HINT}: pyspark={text} known={','.join(KNOWN)}"
        )
    return KNOWN[line]


def _pyspark_version() -> str:
    try:
        return importlib.metadata.version("pyspark")
    except importlib.metadata.PackageNotFoundError:
        pass
    try:
        # spark-submit brings PySpark along as files that no package manager knows of.
        return str(importlib.import_module("pyspark").__version__)
    except ImportError:
        raise SparkUnavailable(f"PySpark is not installed: {INSTALL_HINT} (Python 3.11 or 3.12)") from None
