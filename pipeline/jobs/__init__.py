"""What spark-submit runs: one module per job, each the command of the same name."""
