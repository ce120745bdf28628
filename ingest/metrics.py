"""Metrics of the way from the socket to the log. Owns their names; values are counted where things happen."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from ingest.dedup import Fresh
from ingest.offers import Offer
from ingest.source_metrics import SourceCounts

_ACK_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


class IngestMetrics:
    """One instance per service, on that service's registry, so that two services in one process do not mix."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, registry=registry)

        self.by_source = SourceCounts()
        self.received_changes = counter("ingest_received_changes_total", "Changes that arrived and passed their checks")
        self.received_bytes = counter("ingest_received_bytes_total", "Bytes of frames that arrived")
        self.durable_changes = counter("ingest_durable_changes_total", "Changes in the synced log")
        self.durable_bytes = counter("ingest_durable_bytes_total", "Bytes of frames in the synced log")
        self.duplicate_changes = counter("ingest_duplicate_changes_total", "Changes that had been taken before")
        self.sequence_regressions = counter(
            "ingest_sequence_regressions_total", "Batches of old changes only whose source seems to have started over"
        )
        self.transaction_doubts = counter(
            "ingest_transaction_doubts_total", "Source transactions that may not be whole, by doubt", "doubt"
        )
        self.nacks = counter("ingest_nacks_total", "Messages refused, by reason", "reason")
        self.turned_away = counter("ingest_turned_away_connections_total", "Connections refused, by reason", "reason")
        self.closed = counter("ingest_closed_connections_total", "Connections that we ended, by close code", "code")
        self.connections = Gauge("ingest_connections", "Open WebSocket connections", registry=registry)
        self.peak_connections = Gauge("ingest_peak_connections", "Most connections at once", registry=registry)
        self.held_bytes = Gauge(
            "ingest_held_bytes", "Bytes read from sockets and not yet durable, with what is reserved", registry=registry
        )
        self.paused_connections = Gauge(
            "ingest_paused_connections", "Connections and requests that wait for room to be read", registry=registry
        )
        self.http_requests = counter(
            "ingest_http_requests_total", "Requests of HTTP ingest that were answered, by route", "route", "status"
        )
        self.http_unread_answers = counter(
            "ingest_http_unread_answers_total", "Answers to HTTP ingest that the client did not read in time"
        )
        self.http_requests_under_way = Gauge(
            "ingest_http_requests_under_way",
            "Requests of HTTP ingest that are not answered yet",
            ["route"],
            registry=registry,
        )
        self.http_waiting_requests = Gauge(
            "ingest_http_waiting_requests", "Of those, requests that wait for a place", registry=registry
        )
        self.http_held_bytes = Gauge(
            "ingest_http_held_bytes", "Of ingest_held_bytes, what requests of HTTP ingest hold", registry=registry
        )
        self.load_level = Gauge("ingest_load_level", "0 normal, 1 elevated, 2 high, 3 critical", registry=registry)
        self.event_loop_lag_s = Gauge(
            "ingest_event_loop_lag_seconds", "How late the event loop ran its last timer", registry=registry
        )
        self.ack_s = Histogram(
            "ingest_ack_seconds", "From a batch's arrival to its ack", buckets=_ACK_BUCKETS_S, registry=registry
        )

    def count_durable(self, fresh: Sequence[Fresh]) -> None:
        """Count offers that the log has synced."""
        self.durable_changes.inc(sum(item.changes for item in fresh))
        self.durable_bytes.inc(sum(len(item.offer.body) for item in fresh))
        self.duplicate_changes.inc(sum(len(item.offer.sequences) - item.changes for item in fresh))
        self.by_source.count_durable(fresh)

    def count_duplicate(self, offer: Offer) -> None:
        """Count an offer of which nothing was new."""
        self.duplicate_changes.inc(len(offer.sequences))
        self.by_source.count_duplicate(offer)
