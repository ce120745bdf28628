"""What spark-submit runs to verify tables: `lakefeed verify --spark` without the rest of Lakefeed."""

from lakefeed.pipeline.verification.commands import verify_tables

if __name__ == "__main__":
    verify_tables()
