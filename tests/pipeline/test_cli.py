from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
from click.testing import CliRunner
from lakefeed.pipeline.cli import JOBS, main
assert all(CliRunner().invoke(main, [name, "--help"]).exit_code == 0 for name in JOBS)
print(sorted({"pyspark", "pyarrow", "aiohttp", "msgspec", "lakefeed.iceberg"} & {*sys.modules}))
"""


def test_help_of_every_job_needs_neither_spark_nor_the_packages_of_the_service() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)

    assert ended.stdout == "[]\n"
