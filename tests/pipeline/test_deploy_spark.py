"""What deploy/spark says of jobs and versions is what the code has."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import click
import pytest

from lakefeed.pipeline.cli import main
from lakefeed.pipeline.spark.runtime import SPARK_3_5

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy" / "spark"
JOB = DEPLOY / "job.py"


def applications() -> list[list[str]]:
    text = (DEPLOY / "kubernetes.yaml").read_text(encoding="utf-8")
    assert set(re.findall(r"mainApplicationFile: local:///opt/lakefeed/(\S+)", text)) == {JOB.name}
    return [json.loads(arguments) for arguments in re.findall(r"arguments: (\[.*\])", text)]


@pytest.mark.parametrize("arguments", applications(), ids=" ".join)
def test_kubernetes_runs_commands_that_exist_with_arguments_that_they_accept(arguments: list[str]) -> None:
    command: click.Command = main
    while isinstance(command, click.Group):
        name, command, arguments = command.resolve_command(click.Context(command), arguments)

    assert isinstance(command.make_context(name, arguments), click.Context)


def test_image_has_the_jars_that_fit_spark() -> None:
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")

    assert f"ICEBERG_VERSION={SPARK_3_5.iceberg}" in text
    assert f"HADOOP_VERSION={SPARK_3_5.hadoop}" in text
    assert f"iceberg-spark-runtime-{SPARK_3_5.line}_{SPARK_3_5.scala}/" in text


def submit(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    path = {"PATH": os.environ["PATH"]}
    return subprocess.run(
        [DEPLOY / "submit", *arguments], capture_output=True, text=True, check=False, env={**path, **environ}
    )


@pytest.fixture
def spark_home(tmp_path: Path) -> Path:
    """A Spark whose spark-submit prints what it is asked."""
    program = tmp_path / "bin" / "spark-submit"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    program.chmod(0o755)
    return tmp_path


def test_submit_passes_master_wheel_iceberg_and_job(spark_home: Path) -> None:
    asked = submit("mirror", "run", "--once", SPARK_HOME=str(spark_home), MASTER="yarn", WHEEL="/w.whl")

    packages = f"{SPARK_3_5.iceberg_package},{SPARK_3_5.aws_package}"
    assert asked.stdout.splitlines() == [
        *("--master", "yarn", "--py-files", "/w.whl", "--packages", packages),
        *(str(JOB), "mirror", "run", "--once"),
    ]


def test_submit_reports_missing_arguments() -> None:
    assert "usage:" in submit().stderr
    assert "MASTER" in submit("mirror", "run", WHEEL="/w.whl").stderr
