"""Settings of the log, the writer and its storage. Owns defaults, units and their checks; reading files is ingest's.

Each field's `why` is shown by `lakefeed config` and in docs/configuration.md, so it is written for an operator.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MIB = 1024 * 1024
GIB = 1024 * MIB

SYNC_MODES = ("always", "interval", "none")
SYNC_INTERVAL_MAX_MS = 60_000

PARQUET_COMPRESSIONS = ("zstd", "snappy", "lz4", "gzip", "none")


def check(condition: bool, message: str) -> None:
    """Raise ValueError with `message` unless the setting is sound."""
    if not condition:
        raise ValueError(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """The write-ahead log."""

    segment_max_bytes: int = field(
        default=64 * MIB,
        metadata={"why": "size of one segment file; large enough that rotation is rare, small enough to trim often"},
    )
    max_bytes: int = field(
        default=8 * GIB,
        metadata={
            "why": "budget of all segments; how long an outage of storage or catalog can last before clients wait"
        },
    )
    sync: str = field(
        default="always",
        metadata={
            "why": "when acked changes reach the disk: always (before the ack), interval, or none (the system decides);"
            " the last two are faster and lose the newest acks when power is lost, see log.md"
        },
    )
    sync_interval_ms: int = field(
        default=50, metadata={"why": "with sync = interval: how long an acked change may wait for the disk"}
    )

    def __post_init__(self) -> None:
        check(self.segment_max_bytes >= MIB, "segment_max_bytes must be at least 1 MiB")
        check(self.max_bytes >= 2 * self.segment_max_bytes, "max_bytes must hold at least two segments")
        check(self.sync in SYNC_MODES, f"sync must be one of {', '.join(SYNC_MODES)}")
        check(
            0 < self.sync_interval_ms <= SYNC_INTERVAL_MAX_MS,
            f"sync_interval_ms must be between 1 and {SYNC_INTERVAL_MAX_MS}",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterConfig:
    """From log to snapshots."""

    flush_max_changes: int = field(
        default=250_000, metadata={"why": "flush a table at this many buffered changes; bounds commit size"}
    )
    flush_max_bytes: int = field(
        default=64 * MIB, metadata={"why": "flush a table at this much buffered Arrow data; about 10 MiB of Parquet"}
    )
    flush_max_age_s: float = field(
        default=10.0, metadata={"why": "flush a table when its oldest buffered change is this old; bounds staleness"}
    )
    flush_check_interval_s: float = field(
        default=0.25, metadata={"why": "how often ages are looked at, so that idle tables flush by themselves"}
    )
    buffer_max_bytes: int = field(
        default=256 * MIB, metadata={"why": "all buffers together; beyond it the writer stops reading the log"}
    )
    parquet_compression: str = field(
        default="zstd",
        metadata={"why": f"one of {', '.join(PARQUET_COMPRESSIONS)}; zstd reads everywhere and is small"},
    )
    parquet_compression_level: int = field(
        default=1, metadata={"why": "for zstd and gzip; 1 is the fastest, higher levels gain little on change rows"}
    )
    parquet_row_group_rows: int = field(
        default=100_000,
        metadata={"why": "rows per row group; small enough for readers to skip, large enough to compress"},
    )
    decode_threads: int = field(default=2, metadata={"why": "threads that turn frames into Arrow columns"})
    default_namespace: str = field(
        default="default", metadata={"why": "namespace of a source table whose name has no dot"}
    )
    partition: str = field(
        default="day(_cdc_timestamp)",
        metadata={"why": "of new tables, over _cdc_ columns: day(column), also year, month, hour, identity; or none"},
    )
    format_version: int = field(default=2, metadata={"why": "Iceberg format of new tables; 2 is read by every engine"})
    keep_before: bool = field(
        default=False, metadata={"why": "keep the row before the change as JSON in _cdc_before; doubles the data"}
    )

    def __post_init__(self) -> None:
        check(self.flush_max_changes > 0, "flush_max_changes must be positive")
        check(self.flush_max_bytes > 0, "flush_max_bytes must be positive")
        check(self.flush_max_age_s > 0, "flush_max_age_s must be positive")
        check(self.flush_check_interval_s > 0, "flush_check_interval_s must be positive")
        check(self.buffer_max_bytes >= self.flush_max_bytes, "buffer_max_bytes must be at least flush_max_bytes")
        check(
            self.parquet_compression in PARQUET_COMPRESSIONS,
            f"parquet_compression must be one of {', '.join(PARQUET_COMPRESSIONS)}",
        )
        check(self.parquet_row_group_rows > 0, "parquet_row_group_rows must be positive")
        check(self.decode_threads > 0, "decode_threads must be positive")
        check(self.format_version in (2, 3), "format_version must be 2 or 3")


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageConfig:
    """Where data and metadata files live. Secrets left empty come from the usual AWS credential chain."""

    warehouse: str = field(
        default="",
        metadata={"why": "s3://bucket/path, or a local directory; empty means `warehouse` inside the data directory"},
    )
    s3_endpoint: str = field(default="", metadata={"why": "endpoint of R2, MinIO or SeaweedFS; empty means AWS"})
    s3_region: str = field(
        default="us-east-1", metadata={"why": "region that requests are signed for; R2 takes `auto`"}
    )
    s3_path_style: bool = field(
        default=False, metadata={"why": "bucket in the path, not the host; most S3-alikes want it"}
    )
    s3_access_key_id: str = field(default="", metadata={"why": "empty means the AWS credential chain"})
    s3_secret_access_key: str = field(
        default="", repr=False, metadata={"why": "empty means the AWS credential chain", "secret": True}
    )
    s3_part_bytes: int = field(
        default=8 * MIB, metadata={"why": "part size of multipart uploads; larger objects than this use them"}
    )
    request_timeout_s: float = field(
        default=60.0, metadata={"why": "one storage request; a hung store must not hang us"}
    )

    def __post_init__(self) -> None:
        check(self.s3_part_bytes >= 5 * MIB, "s3_part_bytes must be at least 5 MiB, the smallest part S3 takes")
        check(self.request_timeout_s > 0, "request_timeout_s must be positive")
