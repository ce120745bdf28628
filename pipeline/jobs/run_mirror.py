"""The job that keeps mirrors, for spark-submit: `spark-submit --py-files lakefeed.whl run_mirror.py --once`."""

from __future__ import annotations

from lakefeed.pipeline.mirrors.commands import run_command

if __name__ == "__main__":
    run_command()
