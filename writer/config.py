"""Settings of the log, the writer and its storage. Owns defaults, units and their checks; reading files is ingest's.

Each field's `why` is shown by `lakefeed config` and in docs/configuration.md, so it is written for an operator. Fields
marked `per_table` can be said for single tables too: rows/table_settings.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lakefeed.iceberg.terms import parse_partition_terms, parse_sort_terms
from lakefeed.settings import check
from lakefeed.storage.config import MIB

# --- writer.config ----------------------------------------------------------------------------------------------------


GIB = 1024 * MIB

SYNC_MODES = ("always", "interval", "none")
SYNC_INTERVAL_MAX_MS = 60_000


PARQUET_COMPRESSIONS = ("zstd", "snappy", "lz4", "gzip", "none")

# Flushes of full size that the memory for rows holds: of a slow table one under way and one that gathers, which is what
# tables that do not get on may have of it (parking.STUCK_MAX_SHARE), and as much for the others.
FLUSHES_IN_MEMORY = 4


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
    table_max_share: float = field(
        default=0.5,
        metadata={
            "why": "share of max_bytes that tables which cannot be written may hold while others can; beyond it their"
            " oldest rows move to the quarantine"
        },
    )

    def __post_init__(self) -> None:
        check(self.segment_max_bytes >= MIB, "segment_max_bytes must be at least 1 MiB")
        check(self.max_bytes >= 2 * self.segment_max_bytes, "max_bytes must hold at least two segments")
        check(self.sync in SYNC_MODES, f"sync must be one of {', '.join(SYNC_MODES)}")
        check(
            0 < self.sync_interval_ms <= SYNC_INTERVAL_MAX_MS,
            f"sync_interval_ms must be between 1 and {SYNC_INTERVAL_MAX_MS}",
        )
        check(0 < self.table_max_share <= 1, "table_max_share must be above 0 and at most 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterConfig:
    """From log to snapshots."""

    flush_max_changes: int = field(
        default=250_000,
        metadata={"why": "flush a table at this many buffered changes; bounds commit size", "per_table": True},
    )
    flush_max_bytes: int = field(
        default=64 * MIB,
        metadata={
            "why": "flush a table at this much buffered Arrow data; about 10 MiB of Parquet",
            "per_table": True,
        },
    )
    flush_max_age_s: float = field(
        default=10.0,
        metadata={
            "why": "flush a table when its oldest buffered change is this old; bounds staleness",
            "per_table": True,
        },
    )
    freshness_target_s: float = field(
        default=0.0,
        metadata={
            "why": "commit a busy table within this; a slow one waits for small_file_bytes or flush_max_age_s; 0 = off",
            "per_table": True,
        },
    )
    target_file_bytes: int = field(
        default=128 * MIB,
        metadata={"why": "size of a data file: flush when one is full, cut what is larger", "per_table": True},
    )
    small_file_bytes: int = field(
        default=MIB,
        metadata={"why": "with freshness_target_s: a smaller file is not worth a commit yet", "per_table": True},
    )
    flush_check_interval_s: float = field(
        default=0.25, metadata={"why": "how often ages are looked at, so that idle tables flush by themselves"}
    )
    buffer_max_bytes: int = field(
        default=256 * MIB,
        metadata={
            "why": "all buffers together; beyond it the writer stops reading the log; at least four times every"
            " flush_max_bytes"
        },
    )
    parquet_compression: str = field(
        default="zstd",
        metadata={
            "why": f"one of {', '.join(PARQUET_COMPRESSIONS)}; zstd reads everywhere and is small",
            "per_table": True,
        },
    )
    parquet_compression_level: int = field(
        default=1,
        metadata={
            "why": "for zstd and gzip; 1 is the fastest, higher levels gain little on change rows",
            "per_table": True,
        },
    )
    parquet_row_group_rows: int = field(
        default=100_000,
        metadata={
            "why": "rows per row group; small enough for readers to skip, large enough to compress",
            "per_table": True,
        },
    )
    tables_max: int = field(
        default=10_000,
        metadata={
            "why": "tables that changes are taken for from one start to the next; batches of others are refused, lest"
            " names with an id in them make tables without end"
        },
    )
    decode_threads: int = field(default=2, metadata={"why": "threads that turn frames into Arrow columns"})
    default_namespace: str = field(
        default="default", metadata={"why": "namespace of a source table whose name has no dot"}
    )
    partition: str = field(
        default="day(_cdc_timestamp)",
        metadata={
            "why": "terms as `day(_cdc_timestamp), bucket[16](id)`, or none; tables follow a change, see partitions.md",
            "per_table": True,
        },
    )
    sort: str = field(
        default="",
        metadata={
            "why": "order of rows in a data file, as `customer_id, created_at desc`; empty leaves the log's order",
            "per_table": True,
        },
    )
    format_version: int = field(
        default=2, metadata={"why": "Iceberg format of new tables; 2 is read by every engine", "per_table": True}
    )
    transactions: bool = field(
        default=False,
        metadata={"why": "commit the tables of a source transaction together, see commit.md; a slow table slows all"},
    )
    transaction_max_wait_s: float = field(
        default=10.0,
        metadata={"why": "with transactions: how long changes wait for the end of theirs; then they go on without it"},
    )
    transaction_max_bytes: int = field(
        default=64 * MIB,
        metadata={
            "why": "with transactions: changes that wait for the end of theirs; beyond it they go on without it, and"
            " also beyond half of buffer_max_bytes"
        },
    )
    ledger: bool = field(
        default=True,
        metadata={
            "why": "record counts and a checksum of the rows in every snapshot, for `lakefeed verify`; off saves"
            " processor time, see performance.md"
        },
    )
    keep_before: bool = field(
        default=False,
        metadata={
            "why": "keep the row before the change as JSON in _cdc_before; doubles the data",
            "per_table": True,
        },
    )

    def __post_init__(self) -> None:
        check(self.flush_max_changes > 0, "flush_max_changes must be positive")
        # Text in one Arrow column ends at 2 GiB, and a flush may be put together in one.
        check(0 < self.flush_max_bytes <= GIB, "flush_max_bytes must be between 1 and 1 GiB")
        check(self.flush_max_age_s > 0, "flush_max_age_s must be positive")
        check(self.freshness_target_s >= 0, "freshness_target_s must not be negative")
        check(self.target_file_bytes >= MIB, "target_file_bytes must be at least 1 MiB")
        check(self.small_file_bytes >= 0, "small_file_bytes must not be negative")
        check(self.flush_check_interval_s > 0, "flush_check_interval_s must be positive")
        check(
            self.buffer_max_bytes >= FLUSHES_IN_MEMORY * self.flush_max_bytes,
            f"buffer_max_bytes must be at least {FLUSHES_IN_MEMORY} times flush_max_bytes; raise the one or lower the"
            f" other: buffer_max_bytes={self.buffer_max_bytes} flush_max_bytes={self.flush_max_bytes}",
        )
        check(
            self.parquet_compression in PARQUET_COMPRESSIONS,
            f"parquet_compression must be one of {', '.join(PARQUET_COMPRESSIONS)}",
        )
        check(self.parquet_row_group_rows > 0, "parquet_row_group_rows must be positive")
        check(self.tables_max > 0, "tables_max must be positive")
        check(self.decode_threads > 0, "decode_threads must be positive")
        check(self.format_version in (2, 3), "format_version must be 2 or 3")
        check(self.transaction_max_wait_s >= 0, "transaction_max_wait_s must not be negative")
        check(self.transaction_max_bytes > 0, "transaction_max_bytes must be positive")
        parse_partition_terms(self.partition)
        parse_sort_terms(self.sort)


# --- writer.iceberg.config --------------------------------------------------------------------------------------------
#
# Settings of the catalog that the writer commits to. Owns defaults, units and their checks.
#
# Each field's `why` is shown by `lakefeed config` and in docs/configuration.md, so it is written for an operator.


@dataclass(frozen=True, slots=True, kw_only=True)
class IcebergConfig:
    """An Iceberg REST catalog elsewhere; without a uri, the one that this service serves."""

    uri: str = field(
        default="",
        metadata={
            "why": "REST catalog to commit to, before /v1; empty means the one served here, else that one is off"
        },
    )
    warehouse: str = field(default="", metadata={"why": "the catalog's name for the warehouse; some have only one"})
    token: str = field(default="", repr=False, metadata={"why": "bearer token for the catalog at uri", "secret": True})
    credential: str = field(
        default="",
        repr=False,
        metadata={"why": "OAuth2 client, as `client-id:client-secret`; tokens are fetched and renewed", "secret": True},
    )
    oauth2_server_uri: str = field(
        default="", metadata={"why": "where tokens are fetched; empty means the catalog's own v1/oauth/tokens"}
    )
    scope: str = field(
        default="catalog", metadata={"why": "OAuth2 scope asked for; Polaris wants `PRINCIPAL_ROLE:ALL`; may be empty"}
    )
    headers: str = field(
        default="",
        repr=False,
        metadata={"why": "further headers of every request, as `X-Realm: lake; X-Team: data`", "secret": True},
    )
    request_timeout_s: float = field(
        default=30.0,
        metadata={"why": "one request to the catalog; a commit without answer is looked up before a retry"},
    )

    def __post_init__(self) -> None:
        for name in ("uri", "oauth2_server_uri"):
            uri = getattr(self, name)
            check(not uri or uri.startswith(("http://", "https://")), f"{name} must start with http:// or https://")
        check(not (self.token and self.credential), "token and credential exclude each other")
        client_id, colon, secret = self.credential.partition(":")
        check(not self.credential or bool(client_id and colon and secret), "credential must be client-id:client-secret")
        needs_uri = any((self.token, self.credential, self.warehouse, self.headers))
        check(bool(self.uri) or not needs_uri, "uri must be set with token, credential, warehouse or headers")
        check(self.request_timeout_s > 0, "request_timeout_s must be positive")
        self.header_map()

    def header_map(self) -> Mapping[str, str]:
        """Read the further headers."""
        parts = [part.strip() for part in self.headers.split(";") if part.strip()]
        pairs = [part.partition(":") for part in parts]
        # The value may be a secret, so that it is not shown.
        check(all(colon and name.strip() for name, colon, _ in pairs), "headers must be `Name: value; Name: value`")
        return {name.strip(): value.strip() for name, _, value in pairs}
