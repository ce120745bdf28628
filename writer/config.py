"""Settings of the write-ahead log, the writer, and the catalog that it commits to.

`lakefeed config` and docs/configuration.md show every sentence here, so they are written for operators. Settings marked
`per_table` can also be given for single tables: rows/table_settings.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lakefeed.iceberg.terms import parse_partition_terms, parse_sort_terms
from lakefeed.settings import GIB, MIB, Settings, check, setting

SYNC_MODES = ("always", "interval", "none")
PARQUET_COMPRESSIONS = ("zstd", "snappy", "lz4", "gzip", "none")

# Full flushes that the memory for rows holds. A slow table takes two: one that is being written and one that gathers.
# The other tables get as much.
FLUSHES_IN_MEMORY = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig(Settings):
    """The write-ahead log."""

    segment_max_bytes: int = setting(64 * MIB, "Size of one segment file of the log, in bytes.", minimum=MIB)
    max_bytes: int = setting(
        8 * GIB,
        "Size of the whole log, in bytes. A larger log survives a longer outage of storage or catalog before clients"
        " have to wait.",
    )
    sync: str = setting(
        "always",
        "When acked changes are on disk: `always` (before the ack), `interval`, or `none` (the operating system"
        " decides). The last two are faster, and lose the newest acked changes when power fails; see log.md.",
        choices=SYNC_MODES,
    )
    sync_interval_ms: int = setting(
        50,
        "With `sync = interval`: longest time in milliseconds until an acked change is on disk.",
        minimum=1,
        maximum=60_000,
    )
    table_max_share: float = setting(
        0.5,
        "Share of `max_bytes` that failing tables may hold while others can be written. Beyond it their oldest rows"
        " move to quarantine.",
        above=0,
        maximum=1,
    )

    def check(self) -> None:
        """Check that the log can trim: it never trims the segment that it writes."""
        check(self.max_bytes >= 2 * self.segment_max_bytes, "max_bytes must hold at least two segments")


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterConfig(Settings):
    """The writer: from log to snapshots."""

    flush_max_changes: int = setting(
        250_000, "Number of buffered changes at which a table is flushed.", minimum=1, per_table=True
    )
    # Text in one Arrow column ends at 2 GiB, and a flush may be put together in one.
    flush_max_bytes: int = setting(
        64 * MIB,
        "Size of buffered Arrow data at which a table is flushed, in bytes. 64 MiB make about 10 MiB of Parquet.",
        minimum=1,
        maximum=GIB,
        per_table=True,
    )
    flush_max_age_s: float = setting(
        10.0, "Age of the oldest buffered change at which a table is flushed, in seconds.", above=0, per_table=True
    )
    freshness_target_s: float = setting(
        0.0,
        "Time in seconds within which a busy table is committed. A slow table waits for `small_file_bytes` or"
        " `flush_max_age_s`. 0 turns this off.",
        minimum=0,
        per_table=True,
    )
    target_file_bytes: int = setting(
        128 * MIB,
        "Size of a data file, in bytes. A table is flushed when it can fill one, and larger flushes are cut.",
        minimum=MIB,
        per_table=True,
    )
    small_file_bytes: int = setting(
        MIB, "With `freshness_target_s`: smallest file worth a commit, in bytes.", minimum=0, per_table=True
    )
    flush_check_interval_s: float = setting(0.25, "Time between two checks of the tables' ages, in seconds.", above=0)
    buffer_max_bytes: int = setting(
        256 * MIB,
        "Memory for the rows of all tables, in bytes. When it is full, the writer stops reading the log. At least four"
        " times every `flush_max_bytes`.",
    )
    parquet_compression: str = setting(
        "zstd", "Compression of Parquet files. Every engine reads zstd.", choices=PARQUET_COMPRESSIONS, per_table=True
    )
    parquet_compression_level: int = setting(
        1, "Level for zstd and gzip. 1 is the fastest; higher levels gain little on change rows.", per_table=True
    )
    parquet_row_group_rows: int = setting(
        100_000, "Rows in one row group of a Parquet file. Engines skip whole row groups.", minimum=1, per_table=True
    )
    tables_max: int = setting(
        10_000,
        "Maximum number of tables. Batches for further tables are rejected, so that an id inside a table name cannot"
        " create tables without bound.",
        minimum=1,
    )
    sources_max: int = setting(
        2_000,
        "Maximum number of sources of one table; a name above 58 bytes counts several times. New sources beyond it are"
        " rejected, because each commit of a table has up to 1 KiB for each source.",
        minimum=1,
    )
    decode_threads: int = setting(2, "Number of threads that decode batches to Arrow columns.", minimum=1)
    default_namespace: str = setting("default", "Namespace of source tables whose name has no dot.")
    partition: str = setting(
        "day(_cdc_timestamp)",
        "Partition terms such as `day(_cdc_timestamp), bucket[16](id)`, or `none`. Existing tables follow a change; see"
        " partitions.md.",
        per_table=True,
    )
    sort: str = setting(
        "",
        "Order of the rows in a data file, such as `customer_id, created_at desc`. Empty keeps the order of the log.",
        per_table=True,
    )
    format_version: int = setting(
        2, "Iceberg format version of new tables. Every engine reads version 2.", choices=(2, 3), per_table=True
    )
    transactions: bool = setting(
        False, "Commit the tables of one source transaction together; see commit.md. A slow table then slows all."
    )
    transaction_max_wait_s: float = setting(
        10.0,
        "With `transactions`: longest time in seconds that changes wait for the end of their transaction. After it they"
        " are committed without the rest.",
        minimum=0,
    )
    transaction_max_bytes: int = setting(
        64 * MIB,
        "With `transactions`: most bytes of changes that wait for the end of their transaction, at most half of"
        " `buffer_max_bytes`. Beyond it they are committed without the rest.",
        minimum=1,
    )
    ledger: bool = setting(
        True,
        "Record the number and a checksum of the rows in every snapshot, for `lakefeed verify`. Off saves processor"
        " time; see performance.md.",
    )
    keep_before: bool = setting(
        False, "Keep the row before the change as JSON in `_cdc_before`. Doubles the data.", per_table=True
    )

    def check(self) -> None:
        """Check that memory holds enough flushes, and the grammar of `partition` and `sort`."""
        check(
            self.buffer_max_bytes >= FLUSHES_IN_MEMORY * self.flush_max_bytes,
            f"buffer_max_bytes must be at least {FLUSHES_IN_MEMORY} times flush_max_bytes; raise the one or lower the"
            f" other: buffer_max_bytes={self.buffer_max_bytes} flush_max_bytes={self.flush_max_bytes}",
        )
        parse_partition_terms(self.partition)
        parse_sort_terms(self.sort)


@dataclass(frozen=True, slots=True, kw_only=True)
class IcebergConfig(Settings):
    """An Iceberg REST catalog elsewhere. Without a `uri` the writer commits to the catalog of this service."""

    uri: str = setting(
        "",
        "REST catalog that the writer commits to, without the `/v1`. Empty means the catalog of this service, which is"
        " off otherwise.",
    )
    warehouse: str = setting("", "Name of the warehouse in that catalog. Many catalogs have only one and need no name.")
    token: str = setting("", "Bearer token for the catalog.", secret=True)
    credential: str = setting(
        "", "OAuth2 client as `client-id:client-secret`. Tokens are fetched and renewed with it.", secret=True
    )
    oauth2_server_uri: str = setting(
        "", "Address that OAuth2 tokens are fetched from. Empty means the catalog's own `v1/oauth/tokens`."
    )
    scope: str = setting("catalog", "OAuth2 scope to ask for, or empty. Polaris needs `PRINCIPAL_ROLE:ALL`.")
    headers: str = setting("", "Further headers of every request, such as `X-Realm: lake; X-Team: data`.", secret=True)
    request_timeout_s: float = setting(
        30.0,
        "Time limit of one request to the catalog, in seconds. A commit without a response is looked up before it is"
        " tried again.",
        above=0,
    )

    def check(self) -> None:
        """Check addresses, and which settings need or exclude each other."""
        for name in ("uri", "oauth2_server_uri"):
            uri = getattr(self, name)
            check(not uri or uri.startswith(("http://", "https://")), f"{name} must start with http:// or https://")
        check(not (self.token and self.credential), "token and credential exclude each other")
        client_id, colon, secret = self.credential.partition(":")
        check(not self.credential or bool(client_id and colon and secret), "credential must be client-id:client-secret")
        needs_uri = any((self.token, self.credential, self.warehouse, self.headers))
        check(bool(self.uri) or not needs_uri, "uri must be set with token, credential, warehouse or headers")
        self.header_map()

    def header_map(self) -> Mapping[str, str]:
        """Return the further headers by name.

        Raises: ValueError, without the text, which may hold a secret.
        """
        parts = [part.strip() for part in self.headers.split(";") if part.strip()]
        pairs = [part.partition(":") for part in parts]
        check(all(colon and name.strip() for name, colon, _ in pairs), "headers must be `Name: value; Name: value`")
        return {name.strip(): value.strip() for name, _, value in pairs}
