"""DoLake's vocabulary in /status: names that its senders and dashboards expect, for numbers that lakefeed keeps.

Acks and nacks use DoLake's field names too; those are the wire protocol (messages.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lakefeed.ingest.protocol.offers import NackReason

# Close codes by which DoLake counts a connection as closed for misuse.
_MISUSE_CODES = (1008, 1009, 4000, 4001, 4002)
_TOO_BIG = 1009


def rate_limit_metrics(
    *,
    nacks: Mapping[str, int],
    rejected: Mapping[str, int],
    closed: Mapping[int, int],
    active_connections: int,
    peak_connections: int,
) -> dict[str, int]:
    """Return `rateLimitMetrics` from counts by nack reason, by reason of rejection and by close code."""

    def nacked(reason: NackReason) -> int:
        return nacks.get(reason.value, 0)

    return {
        "connectionsRateLimited": rejected.get("rate_limited", 0) + rejected.get("connection_limit", 0),
        "ipRejections": rejected.get("ip_limit", 0),
        "messagesRateLimited": nacked(NackReason.RATE_LIMITED),
        "payloadRejections": nacked(NackReason.PAYLOAD_TOO_LARGE) + closed.get(_TOO_BIG, 0),
        "eventSizeRejections": nacked(NackReason.EVENT_TOO_LARGE),
        "loadSheddingEvents": nacked(NackReason.LOAD_SHEDDING),
        "connectionsClosed": sum(closed.get(code, 0) for code in _MISUSE_CODES),
        "activeConnections": active_connections,
        "peakConnections": peak_connections,
    }


def dedup_stats(*, received_changes: int, duplicate_changes: int, sources: int) -> dict[str, int]:
    """Return `dedupStats`: changes that were compared and found again, and sources that have a mark."""
    return {"totalChecks": received_changes, "duplicatesFound": duplicate_changes, "entriesTracked": sources}


def source_state(source: str, *, durable_sequence: int | None, pending_events: int) -> dict[str, Any]:
    """Return the first fields of an entry in `sourceStates`. Received and acked are equal: an ack means durable."""
    return {
        "sourceDoId": source,
        "lastReceivedSequence": durable_sequence,
        "lastAckedSequence": durable_sequence,
        "pendingEvents": pending_events,
    }
