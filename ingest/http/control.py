"""The control plane: /status, /flush, /explain/flush, /health and /metrics. The numbers belong to the parts.

`rateLimitMetrics`, `dedupStats` and `sourceStates` in /status are DoLake's names, for its senders and dashboards.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from lakefeed.ingest.admission.auth import Auth
from lakefeed.ingest.admission.limits import CloseCode, SharedLimits
from lakefeed.ingest.config import IngestConfig, ServerConfig
from lakefeed.ingest.http.gate import RequestGate, json_response, require_token
from lakefeed.ingest.intake.debezium import DebeziumIntake
from lakefeed.ingest.intake.intake import Intake
from lakefeed.ingest.metrics import IngestMetrics
from lakefeed.ingest.protocol.offers import NackReason
from lakefeed.ingest.websocket.client import ClientConnection
from lakefeed.ingest.websocket.server import DataPlane
from lakefeed.writer.commit.sources import ConsumerWatch
from lakefeed.writer.tables.feed import Feed

# A flush that takes longer continues; only the caller stops waiting.
FLUSH_TIMEOUT_S = 120.0

# Close codes by which DoLake counts a connection as closed for misuse.
MISUSE_CODES = (
    *(CloseCode.POLICY, CloseCode.TOO_BIG, CloseCode.HEARTBEAT_TIMEOUT),
    *(CloseCode.NOT_AUTHENTICATED, CloseCode.RATE_LIMITED),
)


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts that the control plane shows."""

    config: ServerConfig
    ingest_config: IngestConfig
    version: str
    node: str
    started_at: float
    data_plane: DataPlane
    request_gate: RequestGate
    limits: SharedLimits
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
    app = web.Application(middlewares=[require_token(parts.auth)])
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
    endpoints = [
        *("/v1/config", "/cdc", "/cdc/debezium", "/status", "/flush", "/explain/flush"),
        *("/health/live", "/health/ready", "/metrics"),
    ]
    return json_response({"service": "lakefeed", "version": request.app[PARTS].version, "endpoints": endpoints})


async def _live(_request: web.Request) -> web.Response:
    return json_response({"status": "live"})


async def _ready(request: web.Request) -> web.Response:
    parts = request.app[PARTS]
    now, stalled_after_s = time.monotonic(), parts.config.stalled_after_s
    problems = _problems(parts)
    if parts.intake.problems(now=now) or parts.feed.status.is_stalled(now=now, stalled_after_s=stalled_after_s):
        return json_response({"status": "not ready", "problems": problems}, 503)
    # One bad table must not take the whole service out of a load balancer.
    return json_response({"status": "degraded" if problems else "ready", "problems": problems})


def _problems(parts: Parts) -> list[str]:
    """Return what keeps the service from accepting changes or committing them."""
    now, stalled_after_s = time.monotonic(), parts.config.stalled_after_s  # the event loop's time too
    feed = parts.feed.status.problems(now=now, stalled_after_s=stalled_after_s)
    return [*parts.intake.problems(now=now), *feed, *parts.intake.source_problems()]


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
        problems = parts.feed.status.problems(now=time.monotonic(), stalled_after_s=0)
        error = "not committed in time; the flush continues"
        return json_response({"success": False, "error": error, "problems": problems}, 504)
    # After the flush, because a new table's first changes may have been durable and not yet read from the log.
    if table is not None and not parts.feed.status.knows(table):
        return json_response({"success": False, "error": f"no such table here: table={table}"}, 404)
    return json_response(report.to_json(), 503 if report.problems else 200)


async def _explain_flush(request: web.Request) -> web.Response:
    table = request.query.get("table", "")
    explained = request.app[PARTS].feed.status.explain_flush(table, now=time.monotonic())
    if explained is None:
        return json_response({"success": False, "error": f"no such table here: table={table}"}, 404)
    return json_response(explained)


async def _status(request: web.Request) -> web.Response:
    parts = request.app[PARTS]
    consumers = await parts.consumers.describe()
    connections, counts = parts.data_plane.connections(), parts.metrics.counts
    return json_response(
        {
            "state": parts.data_plane.state,
            "version": parts.version,
            "node": parts.node,
            "uptimeSeconds": round(time.time() - parts.started_at, 3),
            "connectedSources": len({c.session.source for c in connections if c.session.source}),
            "connections": len(connections),
            "buffer": {**msgspec.to_builtins(parts.data_plane.backlog.stats()), **parts.feed.status.buffer_status()},
            "log": parts.feed.status.log_status(),
            "lastFlushTime": parts.data_plane.backlog.last_flush_time_ms,
            "nextFlushTime": parts.data_plane.backlog.next_flush_time_ms(),
            "sources": list(_sources(parts, connections)),
            "sourceStates": list(_source_states(parts, connections)),
            "dedupStats": {
                "totalChecks": counts.received_changes,
                "duplicatesFound": counts.duplicate_changes,
                "entriesTracked": len(parts.intake.sources()),
            },
            "tables": parts.feed.status.table_status(now=time.monotonic()),
            "consumers": consumers,
            "incompleteTransactions": list(parts.debezium.incomplete_transactions),
            "problems": _problems(parts),
            **_admission(parts),
        }
    )


def _admission(parts: Parts) -> dict[str, Any]:
    """Return how busy the service is, its limits, and what they have refused."""
    level, limits, gate = parts.data_plane.admission.level, parts.limits, parts.request_gate
    config, counts = parts.ingest_config, parts.metrics.counts
    nacks, rejected, closed = counts.nacks, counts.rejected_connections, counts.closed_connections
    return {
        "degradedMode": level.is_degraded,
        "loadLevel": level.value,
        "memory": {
            "heldBytes": limits.budget.used_bytes,
            "maxBytes": limits.budget.max_bytes,
            "pausedConnections": limits.budget.waiting_readers,
            "httpHeldBytes": gate.held_bytes,
        },
        "httpIngest": {
            "requests": dict(sorted(gate.in_flight.items())),
            "served": gate.slots.used,
            "waiting": gate.slots.waiting,
            "maxRequests": config.http_requests_max,
        },
        "rateLimits": {
            "connectionsPerSecond": config.connection_rate_per_s,
            "maxConnections": config.connections_max,
            "messagesPerSecond": config.message_rate_per_s,
            "burstCapacity": config.message_burst,
            "sourceBytesPerSecond": config.source_bytes_per_s,
            "maxPayloadSize": config.frame_max_bytes,
            "maxEventSize": config.event_max_bytes,
        },
        "rateLimitMetrics": {
            "connectionsRateLimited": rejected["rate_limited"] + rejected["connection_limit"],
            "ipRejections": rejected["ip_limit"],
            "messagesRateLimited": nacks[NackReason.RATE_LIMITED.value],
            "payloadRejections": nacks[NackReason.PAYLOAD_TOO_LARGE.value] + closed[CloseCode.TOO_BIG.value],
            "eventSizeRejections": nacks[NackReason.EVENT_TOO_LARGE.value],
            "loadSheddingEvents": nacks[NackReason.LOAD_SHEDDING.value],
            "connectionsClosed": sum(closed[code.value] for code in MISUSE_CODES),
            "activeConnections": limits.slots.active,
            "peakConnections": limits.slots.peak,
        },
    }


def _sources(parts: Parts, connections: list[ClientConnection]) -> Iterator[dict[str, Any]]:
    by_source = {c.session.source: c for c in connections}
    for source, durable in sorted(parts.intake.sources().items()):
        committed = parts.feed.status.committed_position(source)
        document = {
            "sourceDoId": source,
            "epoch": durable.epoch,
            "lastDurableSequence": durable.sequence,
            "lastCommittedSequence": committed.sequence if committed and committed.epoch == durable.epoch else None,
            "connected": source in by_source,
        }
        if source in by_source:
            document |= _connection(by_source[source])
        if (requests := parts.request_gate.sources.get(source)) is not None:
            document |= {
                "httpRequests": requests.requests,
                "httpEventsAccepted": requests.changes,
                "lastHttpRequestAt": int(requests.last_at * 1_000),
            }
        yield document


def _source_states(parts: Parts, connections: list[ClientConnection]) -> Iterator[dict[str, Any]]:
    for connection in connections:
        if (source := connection.session.source) is not None:
            durable = parts.intake.durable_position(source)
            sequence = durable.sequence if durable is not None else None
            # Received and acked are equal, because an ack means durable.
            sequences = {"lastReceivedSequence": sequence, "lastAckedSequence": sequence}
            pending = {"pendingEvents": connection.pending_events}
            yield {"sourceDoId": source, **sequences, **pending, **_connection(connection)}


def _connection(connection: ClientConnection) -> dict[str, Any]:
    return {
        "remote": str(connection.slot.address or ""),
        "sourceShardName": connection.slot.shard or None,
        "priority": "high" if connection.slot.is_high_priority else "normal",
        "connectedAt": int(connection.connected_at * 1_000),
        "lastActivityAt": int(connection.last_activity_at * 1_000),
        "batchesReceived": connection.batches,
        "eventsReceived": connection.changes,
    }
