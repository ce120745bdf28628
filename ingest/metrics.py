"""Metrics per source. Owns which sources get a label of their own: how many there are, clients decide.

The first `labels_max` sources by name have their own label, the others share `other`. Sources are never forgotten, so
one that has lost its label to a new name does not get it back, and the counts of `other` only grow.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from lakefeed.contract.changes import Position, SourceId
from lakefeed.ingest.protocol.offers import BEFORE_ALL, Fresh, Offer

# --- ingest.source_metrics --------------------------------------------------------------------------------------------


OTHER = "other"

_LABELS = ("source",)


@dataclass(slots=True)
class _Counts:
    durable: int = 0
    duplicates: int = 0


class SourceCounts:
    """Changes per source since the start; bounded as the marks are, because only sources with a mark are counted."""

    def __init__(self) -> None:
        self._counts: dict[SourceId, _Counts] = {}

    def count_durable(self, fresh: Sequence[Fresh]) -> None:
        """Count offers that the log has synced."""
        for item in fresh:
            counts = self._counts.setdefault(item.offer.source, _Counts())
            counts.durable += item.changes
            counts.duplicates += len(item.offer.sequences) - item.changes

    def count_duplicate(self, offer: Offer) -> None:
        """Count an offer of which nothing was new."""
        self._counts.setdefault(offer.source, _Counts()).duplicates += len(offer.sequences)

    def of(self, source: SourceId) -> tuple[int, int]:
        """Tell how many changes of a source became durable, and how many had been taken before."""
        counts = self._counts.get(source, _Counts())
        return counts.durable, counts.duplicates


@dataclass(frozen=True, slots=True)
class _Row:
    durable: int
    duplicates: int
    sequence: int
    lag: int | None

    def joined(self, other: _Row) -> _Row:
        """Stand for both: counts add up, of lags the worst counts."""
        lags = [lag for lag in (self.lag, other.lag) if lag is not None]
        return _Row(
            durable=self.durable + other.durable,
            duplicates=self.duplicates + other.duplicates,
            sequence=max(self.sequence, other.sequence),
            lag=max(lags, default=None),
        )


Committed: TypeAlias = Callable[[SourceId], Position | None]


class SourceCollector(Collector):
    """Looks at the sources whenever metrics are asked for."""

    def __init__(
        self,
        counts: SourceCounts,
        *,
        sources: Callable[[], Mapping[SourceId, Position]],
        committed: Committed,
        labels_max: int,
    ) -> None:
        self._counts = counts
        self._sources = sources
        self._committed = committed
        self._labels_max = labels_max

    def describe(self) -> Iterator[Metric]:
        """Name the metrics without looking at anything."""
        yield from _families({})

    def collect(self) -> Iterator[Metric]:
        """Give the metrics as of now."""
        marks = self._sources()
        named = heapq.nsmallest(self._labels_max, (source for source in marks if source != OTHER))
        rows: dict[str, _Row] = {source: self._row(source, marks[source]) for source in named}
        for source in marks.keys() - set(named):
            row = self._row(source, marks[source])
            rows[OTHER] = rows[OTHER].joined(row) if OTHER in rows else row
        yield from _families(rows)

    def _row(self, source: SourceId, durable: Position) -> _Row:
        return _Row(*self._counts.of(source), durable.sequence, _lag(durable, self._committed(source)))


def _lag(durable: Position, committed: Position | None) -> int | None:
    """Tell how many sequences of the durable epoch are not committed, with those that were left out; None if unknown.

    That is while the log is read again after a start, and until the writer has seen a new source.
    """
    if committed is None:
        return None
    return durable.sequence - (committed.sequence if committed.epoch == durable.epoch else BEFORE_ALL)


def _families(rows: Mapping[str, _Row]) -> Iterator[Metric]:
    durable = CounterMetricFamily(
        "ingest_source_durable_changes", "Changes in the synced log, by source", labels=_LABELS
    )
    duplicates = CounterMetricFamily(
        "ingest_source_duplicate_changes", "Changes that had been taken before, by source", labels=_LABELS
    )
    sequence = GaugeMetricFamily("ingest_source_last_durable_sequence", "Where a source is durable", labels=_LABELS)
    lag = GaugeMetricFamily(
        "ingest_source_committed_lag", "Sequences from a source's last committed to its last durable", labels=_LABELS
    )
    for label, row in rows.items():
        durable.add_metric([label], row.durable)
        duplicates.add_metric([label], row.duplicates)
        if row.lag is not None:
            lag.add_metric([label], row.lag)
        if label != OTHER:  # sequences of many sources have nothing in common
            sequence.add_metric([label], row.sequence)
    yield from (durable, duplicates, sequence, lag)


# --- ingest.metrics ---------------------------------------------------------------------------------------------------
#
# Metrics of the way from the socket to the log. Owns their names; values are counted where things happen.


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
