"""Metrics of the way from the log to the snapshots. Owns their names; values are counted where things happen."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_FLUSH_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0)


class WriterMetrics:
    """One instance per service, on that service's registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(name, text, labels, registry=registry)

        def seconds(name: str, text: str) -> Histogram:
            return Histogram(name, text, buckets=_FLUSH_BUCKETS_S, registry=registry)

        self.committed_changes = counter("writer_committed_changes_total", "Changes in committed snapshots", "table")
        self.committed_bytes = counter("writer_committed_bytes_total", "Bytes of committed data files", "table")
        self.committed_files = counter("writer_committed_files_total", "Committed data files", "table")
        self.duplicate_changes = counter(
            "writer_duplicate_changes_total", "Changes left out because the table already had them", "table"
        )
        self.quarantined_changes = counter(
            "writer_quarantined_changes_total", "Changes that went to the quarantine of their namespace", "table"
        )
        self.split_transactions = counter(
            "writer_split_transactions_total",
            "Times that changes of one source transaction may have become visible apart, by why",
            "reason",
        )
        self.slow_groups = counter("writer_slow_groups_total", "Groups that took the exact slow path", "table")
        self.schema_changes = counter("writer_schema_changes_total", "Columns added or widened", "table")
        self.flushes = counter("writer_flushes_total", "Flushes by what started them", "reason")
        self.flush_failures = counter("writer_flush_failures_total", "Attempts that failed and are repeated", "table")
        self.flush_s = seconds("writer_flush_seconds", "From taking a buffer to its committed snapshot")
        self.commit_s = seconds("writer_commit_seconds", "The commit alone: manifests, list and catalog")
        self.log_bytes = gauge("writer_log_bytes", "Size of the log on disk")
        self.log_uncommitted_records = gauge("writer_log_uncommitted_records", "Records that trim must keep")
        self.buffered_bytes = gauge("writer_buffered_bytes", "Arrow data in open and flushing buffers")
        self.paused_tables = gauge(
            "writer_paused_tables", "1 while a table is paused because it cannot be written", "table"
        )
        self.tables_behind = gauge(
            "writer_tables_behind", "1 while a table's rows wait in the log only, to be read again", "table"
        )
        self.since_commit_s = gauge(
            "writer_seconds_since_last_commit", "Seconds since a table's last commit by this process", "table"
        )
        self.oldest_change_s = gauge(
            "writer_oldest_uncommitted_seconds", "Age of a table's oldest change that is not committed", "table"
        )
