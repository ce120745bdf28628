"""The control plane: /status, /flush, /explain, /health and /metrics. Owns their JSON; the numbers belong to the parts.

The Iceberg REST catalog is mounted beside them under /v1 by service.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import orjson
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from lakefeed.contract.changes import SourceId
from lakefeed.ingest.admission.auth import Auth
from lakefeed.ingest.config import ServerConfig
from lakefeed.ingest.http.gate import asking_for_token
from lakefeed.ingest.intake.debezium import DebeziumIntake
from lakefeed.ingest.intake.intake import Intake
from lakefeed.ingest.metrics import IngestMetrics
from lakefeed.ingest.protocol.offers import NackReason
from lakefeed.ingest.websocket.client import Connection
from lakefeed.ingest.websocket.server import DataPlane
from lakefeed.writer.commit.sources import ConsumerWatch
from lakefeed.writer.tables.feed import Feed

# A flush that takes longer goes on; only the caller stops waiting.
FLUSH_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Parts:
    """What the control plane looks at."""

    config: ServerConfig
    version: str
    node: str
    started_at: float
    data_plane: DataPlane
    intake: Intake
    feed: Feed
    registry: CollectorRegistry
    metrics: IngestMetrics
    debezium: DebeziumIntake
    auth: Auth
    consumers: ConsumerWatch


PARTS: web.AppKey[Parts] = web.AppKey("parts", Parts)


def build_control_plane(parts: Parts) -> web.Application:
    """Build the application with the control plane's own routes."""
    app = web.Application(middlewares=[asking_for_token(parts.auth)])
    app[PARTS] = parts
    app.router.add_get("/", _index)
    app.router.add_get("/status", _status)
    app.router.add_post("/flush", _flush)
    app.router.add_get("/explain/flush", _explain_flush)
    app.router.add_get("/health", _ready)
    app.router.add_get("/health/ready", _ready)
    app.router.add_get("/health/live", _live)
    app.router.add_get("/metrics", _metrics)
    return app


async def _index(request: web.Request) -> web.Response:
    return _json(
        {
            "service": "lakefeed",
            "version": request.app[PARTS].version,
            "endpoints": [
                "/v1/config",
                "/cdc",
                "/cdc/debezium",
                "/status",
                "/flush",
                "/explain/flush",
                "/health/live",
                "/health/ready",
                "/metrics",
            ],
        }
    )


async def _live(request: web.Request) -> web.Response:
    del request
    return _json({"status": "live"})


async def _ready(request: web.Request) -> web.Response:
    parts = request.app[PARTS]
    now = time.monotonic()
    problems = _problems(parts)
    if parts.intake.problems(now=now) or parts.feed.stands_still(now=now, stalled_after_s=parts.config.stalled_after_s):
        return _json({"status": "not ready", "problems": problems}, 503)
    # One bad table must not take the whole service out of a load balancer.
    return _json({"status": "degraded" if problems else "ready", "problems": problems})


def _problems(parts: Parts) -> list[str]:
    """List what keeps the service from taking changes or committing them."""
    now = time.monotonic()  # the event loop's time too
    return parts.intake.problems(now=now) + parts.feed.problems(now=now, stalled_after_s=parts.config.stalled_after_s)


async def _metrics(request: web.Request) -> web.Response:
    body = generate_latest(request.app[PARTS].registry)
    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})


async def _flush(request: web.Request) -> web.Response:
    parts = request.app[PARTS]
    table = request.query.get("table")
    try:
        async with asyncio.timeout(FLUSH_TIMEOUT_S):
            report = await parts.feed.flush(table)
    except TimeoutError:
        problems = parts.feed.problems(now=time.monotonic(), stalled_after_s=0)
        return _json({"success": False, "error": "not committed in time; it goes on", "problems": problems}, 504)
    # Only now: its first changes may have been durable, and not yet read from the log.
    if table is not None and not parts.feed.knows(table):
        return _json({"success": False, "error": f"no such table here: table={table}"}, 404)
    return _json(report.to_json(), 503 if report.problems else 200)


async def _explain_flush(request: web.Request) -> web.Response:
    table = request.query.get("table", "")
    told = request.app[PARTS].feed.explain_flush(table, now=time.monotonic())
    if told is None:
        return _json({"success": False, "error": f"no such table here: table={table}"}, 404)
    return _json(told)


async def _status(request: web.Request) -> web.Response:
    parts = request.app[PARTS]
    consumers = await parts.consumers.describe()
    return _json(build_status(parts, consumers=consumers, now=time.time()))


def build_status(parts: Parts, *, consumers: Sequence[Mapping[str, Any]], now: float) -> dict[str, Any]:
    """Gather the state of all parts."""
    connections = parts.data_plane.connections()
    return {
        "state": parts.data_plane.state,
        "version": parts.version,
        "node": parts.node,
        "uptimeSeconds": round(now - parts.started_at, 3),
        "connectedSources": len({c.session.source for c in connections if c.session.source}),
        "connections": len(connections),
        "buffer": {**msgspec.to_builtins(parts.data_plane.buffer.stats()), **parts.feed.buffer_status()},
        "log": parts.feed.log_status(),
        "lastFlushTime": parts.data_plane.last_flush_time_ms,
        "nextFlushTime": parts.data_plane.buffer.next_flush_time_ms(),
        "sources": _sources(parts, connections),
        "sourceStates": [_source_state(parts, connection) for connection in connections if connection.session.source],
        "dedupStats": _dedup_stats(parts),
        "tables": parts.feed.table_status(now=time.monotonic()),
        "consumers": consumers,
        "transactionDoubts": list(parts.debezium.doubts),
        "problems": _problems(parts),
        **_admission(parts),
    }


def _admission(parts: Parts) -> dict[str, Any]:
    """Tell how busy the service is, what its limits are and what they have refused."""
    gatekeeper = parts.data_plane.gatekeeper
    limits, budget = gatekeeper.config, gatekeeper.budget
    return {
        "degradedMode": gatekeeper.level.is_degraded,
        "loadLevel": gatekeeper.level.value,
        "memory": {
            "heldBytes": budget.used_bytes,
            "maxBytes": budget.max_bytes,
            "pausedConnections": budget.waiting_readers,
            "httpHeldBytes": gatekeeper.http.held_bytes,
        },
        "httpIngest": {
            "requests": dict(sorted(gatekeeper.http.under_way.items())),
            "served": gatekeeper.http.places.taken,
            "waiting": gatekeeper.http.places.waiting,
            "maxRequests": limits.http_requests_max,
        },
        "rateLimits": {
            "connectionsPerSecond": limits.connection_rate_per_s,
            "maxConnections": limits.connections_max,
            "messagesPerSecond": limits.message_rate_per_s,
            "burstCapacity": limits.message_burst,
            "sourceBytesPerSecond": limits.source_bytes_per_s,
            "maxPayloadSize": limits.frame_max_bytes,
            "maxEventSize": limits.event_max_bytes,
        },
        "rateLimitMetrics": {
            **_refused(parts),
            "activeConnections": gatekeeper.connections.active,
            "peakConnections": gatekeeper.connections.peak,
        },
    }


def _refused(parts: Parts) -> dict[str, int]:
    counts = parts.metrics.counts
    nacks, rejected, closed = counts.nacks, counts.rejected_connections, counts.closed_connections
    return {
        "connectionsRateLimited": rejected["rate_limited"] + rejected["connection_limit"],
        "ipRejections": rejected["ip_limit"],
        "messagesRateLimited": nacks[NackReason.RATE_LIMITED.value],
        "payloadRejections": nacks[NackReason.PAYLOAD_TOO_LARGE.value] + closed[1009],
        "eventSizeRejections": nacks[NackReason.EVENT_TOO_LARGE.value],
        "loadSheddingEvents": nacks[NackReason.LOAD_SHEDDING.value],
        "connectionsClosed": sum(closed[code] for code in (1008, 1009, 4000, 4001, 4002, 4003)),
    }


def _sources(parts: Parts, connections: list[Connection]) -> list[dict[str, Any]]:
    by_source = {c.session.source: c for c in connections}
    return [
        {
            "sourceDoId": source,
            "epoch": durable.epoch,
            "lastDurableSequence": durable.sequence,
            "lastCommittedSequence": committed.sequence
            if (committed := parts.feed.committed_position(source))
            else None,
            "connected": source in by_source,
            **(_connection(by_source[source]) if source in by_source else {}),
            **_requests(parts, source),
        }
        for source, durable in sorted(parts.intake.sources().items())
    ]


def _requests(parts: Parts, source: SourceId) -> dict[str, Any]:
    """Tell what a source has sent over HTTP since the service started, if anything."""
    known = parts.data_plane.gatekeeper.http.sources.get(source)
    if known is None:
        return {}
    return {
        "httpRequests": known.requests,
        "httpEventsAccepted": known.changes,
        "lastHttpRequestAt": int(known.last_at * 1_000),
    }


def _source_state(parts: Parts, connection: Connection) -> dict[str, Any]:
    """Describe a connected source in DoLake's words; received and acked are the same, because an ack says durable."""
    source = connection.session.source
    assert source is not None
    durable = parts.intake.durable_position(source)
    sequence = durable.sequence if durable is not None else None
    return {
        "sourceDoId": source,
        "lastReceivedSequence": sequence,
        "lastAckedSequence": sequence,
        "pendingEvents": connection.pending_events,
        **_connection(connection),
    }


def _dedup_stats(parts: Parts) -> dict[str, int]:
    """Return how many changes were compared and found again, and how many sources have a mark."""
    return {
        "totalChecks": parts.metrics.counts.received_changes,
        "duplicatesFound": parts.metrics.counts.duplicate_changes,
        "entriesTracked": len(parts.intake.sources()),
    }


def _connection(connection: Connection) -> dict[str, Any]:
    return {
        "remote": connection.remote,
        "sourceShardName": connection.gate.slot.shard or None,
        "priority": "high" if connection.gate.slot.is_high_priority else "normal",
        "connectedAt": int(connection.connected_at * 1_000),
        "lastActivityAt": int(connection.last_activity_at * 1_000),
        "batchesReceived": connection.batches,
        "eventsReceived": connection.changes,
    }


def _json(document: Mapping[str, Any], status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(document), status=status, content_type="application/json")
