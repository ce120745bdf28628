"""The program that spark-submit runs: `spark-submit --py-files lakefeed.whl job.py mirror run --once`."""

from lakefeed.pipeline.cli import main

if __name__ == "__main__":
    main()
