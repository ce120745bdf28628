"""What spark-submit runs to fill a table: `lakefeed backfill` without the rest of Lakefeed."""

from lakefeed.pipeline.backfill.commands import backfill

if __name__ == "__main__":
    backfill()
