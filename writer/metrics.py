"""Prometheus metrics of the writer, from the log to committed snapshots: their names. Each part counts its own."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_FLUSH_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0)


class WriterMetrics:
    """The metrics of one service, on that service's registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(name, text, labels, registry=registry)

        def seconds(name: str, text: str) -> Histogram:
            return Histogram(name, text, buckets=_FLUSH_BUCKETS_S, registry=registry)

        self.committed_changes = counter(
            "lakefeed_writer_committed_changes_total", "Changes in committed snapshots", "table"
        )
        self.committed_bytes = counter(
            "lakefeed_writer_committed_bytes_total", "Bytes of committed data files", "table"
        )
        self.committed_files = counter("lakefeed_writer_committed_files_total", "Committed data files", "table")
        self.duplicate_changes = counter(
            "lakefeed_writer_duplicate_changes_total", "Changes skipped because the table already had them", "table"
        )
        self.quarantined_changes = counter(
            "lakefeed_writer_quarantined_changes_total",
            "Changes written to the quarantine table of their namespace",
            "table",
        )
        self.split_transactions = counter(
            "lakefeed_writer_split_transactions_total",
            "Source transactions whose changes may have become visible in several snapshots, by reason",
            "reason",
        )
        self.slow_groups = counter(
            "lakefeed_writer_slow_path_groups_total", "Groups of changes decoded by the exact slow path", "table"
        )
        self.schema_changes = counter("lakefeed_writer_schema_changes_total", "Columns added or widened", "table")
        self.flushes = counter("lakefeed_writer_flushes_total", "Flushes, by what started them", "reason")
        self.flush_failures = counter(
            "lakefeed_writer_flush_failures_total", "Failed attempts of a flush, which are retried", "table"
        )
        self.flush_s = seconds("lakefeed_writer_flush_seconds", "Time from taking a buffer to its committed snapshot")
        self.commit_s = seconds(
            "lakefeed_writer_commit_seconds", "Time of the commit alone: manifests, manifest list and catalog"
        )
        self.log_bytes = gauge("lakefeed_writer_log_bytes", "Size of the log on disk")
        self.log_uncommitted_records = gauge(
            "lakefeed_writer_log_uncommitted_records", "Records of the log that are not committed in every table"
        )
        self.buffered_bytes = gauge(
            "lakefeed_writer_buffered_bytes", "Bytes of Arrow data in open and flushing buffers"
        )
        self.paused_tables = gauge(
            "lakefeed_writer_table_paused", "1 while a table is paused after failed writes", "table"
        )
        self.tables_behind = gauge(
            "lakefeed_writer_table_behind",
            "1 while rows of a table are in the log only and have to be read again",
            "table",
        )
        self.since_commit_s = gauge(
            "lakefeed_writer_last_commit_age_seconds", "Seconds since a table's last commit by this process", "table"
        )
        self.oldest_change_s = gauge(
            "lakefeed_writer_oldest_uncommitted_age_seconds",
            "Age of a table's oldest change that is not committed",
            "table",
        )
