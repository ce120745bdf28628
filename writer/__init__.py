"""From the log to committed snapshots: log, decoding, schemas, buffers, Parquet, storage, Iceberg commits."""
