"""Prometheus metrics of ingest: their names, and the counts that `/status` shows as well.

Counts that something besides Prometheus reads (`/status`, the collector per source) are kept in plain attributes and
rendered by a collector, so that nothing reads its own metrics back by name. All others are Prometheus objects.

Clients decide how many sources exist. The first `labels_max` sources by name get a label of their own, the others
share `other`. Sources are never forgotten, so a source that lost its label to a new name does not get it back, and
the counts of `other` only grow.
"""

from __future__ import annotations

import heapq
from collections import Counter as Counts
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from lakefeed.contract.changes import Position, SourceId
from lakefeed.ingest.protocol.offers import BEFORE_ALL, Fresh, Offer

OTHER = "other"

_ACK_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


@dataclass(slots=True)
class _SourceCounts:
    durable: int = 0
    duplicates: int = 0


@dataclass(slots=True, eq=False)
class IngestCounts(Collector):
    """What happened since the start, as plain numbers; Prometheus and `/status` both read them here.

    Counts per source are bounded as the high-water marks are: only sources with a mark are counted.
    """

    received_changes: int = 0
    duplicate_changes: int = 0
    nacks: Counts[str] = field(default_factory=Counts)
    rejected_connections: Counts[str] = field(default_factory=Counts)
    closed_connections: Counts[int] = field(default_factory=Counts)
    _sources: dict[SourceId, _SourceCounts] = field(default_factory=dict)

    def add_durable(self, fresh: Sequence[Fresh]) -> None:
        """Count offers that the log has synced."""
        for item in fresh:
            repeated = len(item.offer.sequences) - item.changes
            counts = self._sources.setdefault(item.offer.source, _SourceCounts())
            counts.durable += item.changes
            counts.duplicates += repeated
            self.duplicate_changes += repeated

    def add_duplicate(self, offer: Offer) -> None:
        """Count an offer without any new change."""
        self._sources.setdefault(offer.source, _SourceCounts()).duplicates += len(offer.sequences)
        self.duplicate_changes += len(offer.sequences)

    def of_source(self, source: SourceId) -> tuple[int, int]:
        """Return how many changes of a source became durable, and how many had been accepted before."""
        counts = self._sources.get(source, _SourceCounts())
        return counts.durable, counts.duplicates

    def collect(self) -> Iterator[Metric]:
        """Render the counts for Prometheus."""

        def counters(name: str, text: str, label: str, counts: Mapping[str, int] | Mapping[int, int]) -> Metric:
            family = CounterMetricFamily(f"lakefeed_ingest_{name}", text, labels=[label])
            for value, count in counts.items():
                family.add_metric([str(value)], count)
            return family

        received, duplicate = "Changes that arrived and passed their checks", "Changes that had been accepted before"
        yield CounterMetricFamily("lakefeed_ingest_received_changes", received, value=self.received_changes)
        yield CounterMetricFamily("lakefeed_ingest_duplicate_changes", duplicate, value=self.duplicate_changes)
        yield counters("nacks", "Rejected messages, by reason", "reason", self.nacks)
        yield counters("rejected_connections", "Rejected connections, by reason", "reason", self.rejected_connections)
        closed = "Connections that the server closed, by close code"
        yield counters("closed_connections", closed, "code", self.closed_connections)


class IngestMetrics:
    """The metrics of one service, on that service's registry, so that two services in one process do not mix."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"lakefeed_ingest_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"lakefeed_ingest_{name}", text, labels, registry=registry)

        self.counts = IngestCounts()
        registry.register(self.counts)
        self.received_bytes = counter("received_bytes_total", "Bytes of frames that arrived")
        self.durable_changes = counter("durable_changes_total", "Changes in the synced log")
        self.durable_bytes = counter("durable_bytes_total", "Bytes of frames in the synced log")
        self.sequence_regressions = counter(
            "sequence_regressions_total",
            "Batches without new changes whose source seems to have restarted its sequences",
        )
        self.incomplete_transactions = counter(
            "incomplete_transactions_total", "Source transactions that may be incomplete, by reason", "reason"
        )
        self.connections = gauge("connections", "Open WebSocket connections")
        self.peak_connections = gauge("peak_connections", "Highest number of open WebSocket connections")
        self.held_bytes = gauge("held_bytes", "Bytes read from sockets and not yet durable, including reservations")
        self.paused_connections = gauge("paused_connections", "Connections and requests that wait for memory")
        self.http_requests = counter(
            "http_requests_total", "Answered requests of HTTP ingest, by route and status", "route", "status"
        )
        self.http_unread_responses = counter(
            "http_unread_responses_total", "Responses of HTTP ingest that the client did not read in time"
        )
        self.http_requests_in_flight = gauge(
            "http_requests_in_flight", "Requests of HTTP ingest that are not answered yet", "route"
        )
        self.http_requests_waiting = gauge("http_requests_waiting", "Requests of HTTP ingest that wait for a slot")
        self.http_held_bytes = gauge(
            "http_held_bytes", "Part of lakefeed_ingest_held_bytes that requests of HTTP ingest hold"
        )
        self.load_level = gauge("load_level", "0 normal, 1 elevated, 2 high, 3 critical")
        self.event_loop_lag_s = gauge("event_loop_lag_seconds", "Delay of the event loop's last timer")
        self.ack_s = Histogram(
            "lakefeed_ingest_ack_seconds",
            "Time from the arrival of a batch to its ack",
            buckets=_ACK_BUCKETS_S,
            registry=registry,
        )

    def count_durable(self, fresh: Sequence[Fresh]) -> None:
        """Count offers that the log has synced."""
        self.durable_changes.inc(sum(item.changes for item in fresh))
        self.durable_bytes.inc(sum(len(item.offer.body) for item in fresh))
        self.counts.add_durable(fresh)


CommittedPosition: TypeAlias = Callable[[SourceId], Position | None]


class SourceCollector(Collector):
    """Metrics per source, computed when they are scraped."""

    def __init__(
        self,
        counts: IngestCounts,
        *,
        sources: Callable[[], Mapping[SourceId, Position]],
        committed: CommittedPosition,
        labels_max: int,
    ) -> None:
        self._counts = counts
        self._sources = sources
        self._committed = committed
        self._labels_max = labels_max

    def collect(self) -> Iterator[Metric]:
        """Return the metrics as of now. Counts of sources that share a label add up; the largest lag counts."""
        marks = self._sources()
        named = heapq.nsmallest(self._labels_max, (source for source in marks if source != OTHER))
        # Sequences of different sources cannot be compared, so `other` has none.
        sequences: dict[str, int] = {source: marks[source].sequence for source in named}
        durable, duplicates, lags = Counts[str](), Counts[str](), dict[str, int]()
        for source, mark in marks.items():
            label = source if source in sequences else OTHER
            source_durable, source_duplicates = self._counts.of_source(source)
            durable[label] += source_durable
            duplicates[label] += source_duplicates
            lag = _lag(mark, self._committed(source))
            if lag is not None:
                lags[label] = max(lag, lags.get(label, lag))
        counter, gauge = CounterMetricFamily, GaugeMetricFamily
        yield _by_source(counter, "durable_changes", "Changes in the synced log, by source", durable)
        yield _by_source(counter, "duplicate_changes", "Changes that had been accepted before, by source", duplicates)
        yield _by_source(gauge, "last_durable_sequence", "Last durable sequence of a source", sequences)
        lag_text = "Sequences from a source's last committed to its last durable change"
        yield _by_source(gauge, "commit_lag_sequences", lag_text, lags)


def _lag(durable: Position, committed: Position | None) -> int | None:
    """Return how many sequences of the durable epoch are not committed, unused numbers included; None if unknown.

    It is unknown while the log is read again after a start, and until the writer has seen a new source.
    """
    if committed is None:
        return None
    return durable.sequence - (committed.sequence if committed.epoch == durable.epoch else BEFORE_ALL)


def _by_source(
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily], name: str, text: str, values: Mapping[str, int]
) -> Metric:
    family = kind(f"lakefeed_ingest_source_{name}", text, labels=["source"])
    for source, value in values.items():
        family.add_metric([source], value)
    return family
