"""What deploy/spark says of jobs and versions is what the code has."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import click
import pytest

from lakefeed.pipeline.maintenance.commands import maintain
from lakefeed.pipeline.mirrors.commands import run_command
from lakefeed.pipeline.spark.runtime import SPARK_3_5

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy" / "spark"
COMMANDS = {"run_mirror": run_command, "maintain_tables": maintain}


def applications() -> list[tuple[str, list[str]]]:
    text = (DEPLOY / "kubernetes.yaml").read_text(encoding="utf-8")
    jobs = re.findall(r"mainApplicationFile: local:///opt/lakefeed/jobs/(\w+)\.py", text)
    return list(zip(jobs, map(json.loads, re.findall(r"arguments: (\[.*\])", text)), strict=True))


@pytest.mark.parametrize(("job", "arguments"), applications())
def test_kubernetes_runs_jobs_that_exist_with_arguments_that_they_take(job: str, arguments: list[str]) -> None:
    assert (ROOT / "pipeline" / "jobs" / f"{job}.py").exists()
    assert isinstance(COMMANDS[job].make_context(job, arguments), click.Context)


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


def test_submit_names_master_wheel_iceberg_and_job(spark_home: Path) -> None:
    asked = submit("run_mirror", "users", "--once", SPARK_HOME=str(spark_home), MASTER="yarn", WHEEL="/w.whl")

    packages = f"{SPARK_3_5.iceberg_package},{SPARK_3_5.aws_package}"
    assert asked.stdout.splitlines() == [
        *("--master", "yarn", "--py-files", "/w.whl", "--packages", packages),
        *(str(ROOT / "pipeline" / "jobs" / "run_mirror.py"), "users", "--once"),
    ]


def test_submit_says_what_is_missing() -> None:
    assert "usage:" in submit().stderr
    assert "no such job: nothing (jobs: backfill_table maintain_tables" in submit("nothing").stderr
    assert "MASTER" in submit("run_mirror", WHEEL="/w.whl").stderr
