"""The WebSocket listener and the two tasks of each connection.

    reader   decodes frames, offers batches, and queues the replies-to-be
    sender   awaits the replies in that order and sends them

Acks therefore keep the order of their batches while many are in flight. A client that does not read its replies is not
read either once the queue is full. A flush is answered out of order, when it is done.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed

from lakefeed.contract.changes import Position, SourceId
from lakefeed.ingest.admission.auth import Auth, Unauthenticated, choose_subprotocol
from lakefeed.ingest.admission.limits import (
    FAILED,
    GOODBYE,
    SHUTTING_DOWN,
    TOO_MANY_SIZE_VIOLATIONS,
    SharedLimits,
    not_authenticated,
)
from lakefeed.ingest.config import IngestConfig
from lakefeed.ingest.debezium.events import DebeziumMalformed
from lakefeed.ingest.errors import ProtocolError
from lakefeed.ingest.intake.debezium import DebeziumIntake
from lakefeed.ingest.intake.intake import Intake
from lakefeed.ingest.metrics import IngestMetrics
from lakefeed.ingest.protocol.batch import AnyBatch, head_of, invalid
from lakefeed.ingest.protocol.messages import (
    Ack,
    Connect,
    DebeziumBatch,
    Disconnect,
    FlushRequest,
    FlushResponse,
    Heartbeat,
    Limits,
    Nack,
    Pong,
    ServerMessage,
    Status,
    decode_message,
    encode_message,
    open_arrow_frame,
)
from lakefeed.ingest.protocol.offers import Duplicate, Durable, NackReason, Refused, Verdict
from lakefeed.ingest.protocol.session import Session, State
from lakefeed.ingest.websocket import replies
from lakefeed.ingest.websocket.client import BacklogMonitor, BatchReplies, ClientConnection, PendingAck, SequenceHistory
from lakefeed.ingest.websocket.handshake import CLOSE_TIMEOUT_S, AdmissionControl, AnyMessage
from lakefeed.ingest.websocket.socket import BudgetedConnection, connection_factory, raise_open_files_limit
from lakefeed.writer.tables.feed import Feed
from lakefeed.writer.wire.arrow_frame import ArrowFrame, is_arrow_frame
from lakefeed.writer.wire.json_batch import BatchHead

logger = logging.getLogger(__name__)

# Frames that websockets reads ahead of us, per connection; more only adds memory, since the intake is the real queue.
READ_AHEAD_FRAMES = 2

# A client that asks for more flushes than this at once gains nothing: each covers everything durable.
FLUSHES_PER_CONNECTION = 4

# Connections that the kernel queues until we accept them: all clients may reconnect at once after a restart.
LISTEN_BACKLOG = 1024

# How often load is measured and timeouts are checked; a close may be late by this.
MONITOR_INTERVAL_S = 0.5

# Pings within the heartbeat timeout, so that a lost one does not end a live client.
PINGS_PER_TIMEOUT = 3
PING_INTERVAL_DEFAULT_S = 20.0

# Smaller messages are decoded before there is room in the intake: heartbeats need none. Larger ones wait for it first,
# because a decoded batch takes several times its bytes.
ROOM_FIRST_BYTES = 1024


class DataPlane:
    """The WebSocket listener and its connections."""

    def __init__(
        self,
        intake: Intake,
        feed: Feed,
        *,
        debezium: DebeziumIntake,
        config: IngestConfig,
        auth: Auth,
        limits: SharedLimits,
        metrics: IngestMetrics,
    ) -> None:
        self._intake = intake
        self._feed = feed
        self._debezium = debezium
        self._config = config
        self._metrics = metrics
        self._budget = limits.budget
        self.admission = AdmissionControl(config, limits=limits, auth=auth, metrics=metrics)
        self.backlog = BacklogMonitor(feed, intake)
        self._batches = BatchReplies(feed, self.backlog, in_flight_max=config.in_flight_max_batches, metrics=metrics)
        self._connections: set[ClientConnection] = set()
        self._recovered_offset = feed.status.log_status()["durableEnd"]

    @property
    def state(self) -> str:
        """Return `error`, `recovering` (reads what the last process left in the log), `receiving` or `idle`."""
        if self._feed.status.log_status()["failed"] or self._intake.problems(now=time.monotonic()):
            return "error"
        if self._feed.applier.offset < self._recovered_offset:
            return "recovering"
        return "receiving" if self._connections else "idle"

    def connections(self) -> list[ClientConnection]:
        """Return the open connections."""
        return list(self._connections)

    @asynccontextmanager
    async def listen(self, listener: socket.socket) -> AsyncIterator[None]:
        """Accept connections until the block ends; then close them with 1001."""
        raise_open_files_limit(self._config.connections_max)
        async with serve(
            self._serve,
            sock=listener,
            process_request=self.admission.on_request,
            process_response=self.admission.on_response,
            select_subprotocol=lambda _, offered: choose_subprotocol(offered),
            create_connection=connection_factory(
                self._budget,
                connections_max=self._config.connections_max,
                is_compressed=self._config.compression,
            ),
            ping_interval=self._config.heartbeat_timeout_s / PINGS_PER_TIMEOUT or PING_INTERVAL_DEFAULT_S,
            ping_timeout=None,  # `run_monitor` finds silent clients and closes them with 4000
            close_timeout=CLOSE_TIMEOUT_S,
            backlog=LISTEN_BACKLOG,
            compression="deflate" if self._config.compression else None,
            max_size=self._config.frame_max_bytes,
            max_queue=READ_AHEAD_FRAMES,
        ) as server:
            yield
            server.close(code=SHUTTING_DOWN.code, reason=SHUTTING_DOWN.reason)
            try:
                async with asyncio.timeout(CLOSE_TIMEOUT_S + MONITOR_INTERVAL_S):
                    await server.wait_closed()
            except TimeoutError:  # some clients do not read our close frame
                for connection in self._connections:
                    connection.socket.transport.abort()
                await server.wait_closed()

    async def run_monitor(self) -> None:
        """Measure load, and close connections that exceed a timeout."""
        async with asyncio.TaskGroup() as closings:
            while True:
                await asyncio.sleep(MONITOR_INTERVAL_S)
                self.admission.measure_load(
                    longest_wait_s=self._intake.longest_wait_s(time.time()), log_utilization=self.backlog.utilization()
                )
                for connection in self.admission.find_timeouts(self._connections):
                    closings.create_task(self.admission.close(connection), name="ws-close")

    async def run_receipts(self) -> None:
        """Send receipts to connected clients after every commit."""
        seen = 0
        while True:
            seen = await self._feed.wait_for_commit(seen)
            self.backlog.note_commit()
            for connection in self._connections:
                self._maybe_send_receipt(connection)

    def _maybe_send_receipt(self, connection: ClientConnection) -> None:
        if connection.replies.full():
            connection.owes_receipt = True  # the sender checks again when it has caught up
        elif (receipt := self._batches.take_receipt(connection)) is not None:
            connection.replies.put_nowait(receipt)

    async def _serve(self, client: ServerConnection) -> None:
        assert isinstance(client, BudgetedConnection)
        assert client.slot is not None, "a client without a slot is rejected in the handshake"
        now = time.time()
        connection = ClientConnection(
            session=Session(event_max_bytes=self._config.event_max_bytes, default_source=client.slot.source),
            socket=client,
            slot=client.slot,
            limiter=self.admission.new_limiter(now),
            replies=asyncio.Queue(self._config.in_flight_max_batches),
            connected_at=now,
            last_activity_at=now,
        )
        if isinstance(client.principal, Unauthenticated):
            connection.closing = not_authenticated(client.principal.message)
        self._connections.add(connection)
        self._metrics.connections.inc()
        try:
            async with asyncio.TaskGroup() as tasks:
                sender = tasks.create_task(self._send_replies(connection), name="ws-sender")
                reader = tasks.create_task(self._read_frames(connection, tasks), name="ws-reader")
                # Without the sender nothing drains the queue that the reader may be waiting for.
                sender.add_done_callback(lambda _: reader.cancel())
        except ExceptionGroup:
            logger.exception("connection_failed", extra={"source": connection.session.source})
            connection.closing = FAILED
            await self.admission.close(connection)
        finally:
            self._connections.discard(connection)
            self._metrics.connections.dec()

    async def _read_frames(self, connection: ClientConnection, tasks: asyncio.TaskGroup) -> None:
        client = connection.socket
        try:
            while connection.session.state is not State.ENDED and connection.closing is None:
                frame = await client.recv(decode=False)
                connection.charged_bytes = client.take_charge()
                try:
                    if frame == b"ping":  # outside the JSON protocol, for the simplest clients
                        await self._on_ping(connection)
                    else:
                        await self._on_frame(frame, connection, tasks)
                finally:
                    client.release(connection.charged_bytes)
            if connection.flushes:  # requested before the goodbye, so answered before it
                await asyncio.wait(connection.flushes)
        except ConnectionClosed as end:
            self.admission.count_ended(connection, end)
            logger.debug("client_disconnected", extra={"source": connection.session.source})
        finally:
            connection.session.end()
            client.discard_unread()
            for task in connection.flushes:
                task.cancel()
        await connection.replies.put(None)

    async def _on_frame(self, frame: bytes, connection: ClientConnection, tasks: asyncio.TaskGroup) -> None:
        connection.last_activity_at = time.time()
        self._metrics.received_bytes.inc(len(frame))
        if len(frame) > ROOM_FIRST_BYTES and not self.admission.sheds(connection):
            await self._intake.wait_for_room()
        message: AnyMessage | None = None
        try:
            if is_arrow_frame(frame):
                message = open_arrow_frame(frame, frame_max_bytes=self._config.frame_max_bytes)
            else:
                message = decode_message(frame)
            reply = await self._on_message(message, frame, connection, tasks)
        except ProtocolError as error:
            reply = self._on_protocol_error(error, message, connection)
        if reply is not None:
            await connection.replies.put(reply)
        if connection.owes_receipt:  # without another reply the sender would not check
            self._maybe_send_receipt(connection)

    async def _on_message(
        self, message: AnyMessage, frame: bytes, connection: ClientConnection, tasks: asyncio.TaskGroup
    ) -> PendingAck | ServerMessage | None:
        """Handle a message; return its reply, unless that comes out of order or not at all."""
        received_at = connection.last_activity_at
        refusal = self.admission.admit(message, connection, size_bytes=len(frame), now=received_at)
        match message:
            case _ if refusal is not None:
                return self._refuse(message, refusal, connection, frame)
            case BatchHead() | ArrowFrame():
                return await self._on_batch(message, frame, connection)
            case DebeziumBatch():
                return await self._on_debezium(message, connection)
            case Connect():
                return await self._on_connect(message, connection)
            case Heartbeat():
                connection.pending_events = message.pending_events
                return Pong(message.timestamp, int(received_at * 1_000), message.correlation_id)
            case FlushRequest():
                self._start_flush(message, connection, tasks)
            case Disconnect():
                connection.session.end()
        return None

    def _on_protocol_error(
        self, error: ProtocolError, message: AnyMessage | None, connection: ClientConnection
    ) -> ServerMessage:
        if error.sequence_number is not None:
            connection.session.on_malformed(error.sequence_number)
        refused = Refused(
            NackReason(error.reason),
            str(error),
            retry=error.retry,
            max_size=error.max_size,
            actual_size=error.actual_size,
        )
        if refused.reason is NackReason.EVENT_TOO_LARGE and connection.limiter.count_too_large():
            connection.closing = TOO_MANY_SIZE_VIOLATIONS
        correlation_id = _correlation_of(message) if message is not None else error.correlation_id
        return self._batches.nack(refused, error.sequence_number or 0, correlation_id)

    async def _on_ping(self, connection: ClientConnection) -> None:
        refusal = self.admission.admit(Heartbeat(), connection, size_bytes=0, now=time.time())
        if refusal is None:
            await connection.socket.send("pong")
        else:
            await connection.replies.put(self._refuse(Heartbeat(), refusal, connection, b""))

    def _refuse(
        self, message: AnyMessage, refusal: Refused, connection: ClientConnection, frame: bytes
    ) -> ServerMessage:
        """Refuse a message over a limit. A batch is expected again, and nothing of its source may overtake it."""
        number = 0
        if isinstance(message, BatchHead | ArrowFrame):
            number = connection.session.number_of(head_of(message))
            offer = connection.session.on_batch(message, frame, received_at_us=int(time.time() * 1_000_000))
            if offer is not None:
                self._intake.block_behind(offer)
            connection.session.on_refused(number)
        elif isinstance(message, DebeziumBatch):
            number = connection.session.on_debezium(message)
            connection.session.on_refused(number)
        return self._batches.nack(refusal, number, _correlation_of(message))

    async def _on_batch(self, batch: AnyBatch, frame: bytes, connection: ClientConnection) -> PendingAck:
        head, received_at = head_of(batch), connection.last_activity_at
        number = connection.session.number_of(head)
        offer = connection.session.on_batch(batch, frame, received_at_us=int(received_at * 1_000_000))
        changes = len(offer.sequences) if offer is not None else 0
        connection.batches += 1
        connection.changes += changes
        self._metrics.counts.received_changes += changes
        verdict = await self._intake.offer(offer) if offer is not None else None
        if verdict is not None:
            connection.newest_verdict = verdict
            # The bytes count against the budget until the batch is durable or refused.
            charged_bytes, connection.charged_bytes = connection.charged_bytes, 0
            verdict.add_done_callback(lambda _: connection.socket.release(charged_bytes))
            if offer is not None and offer.declared:
                _forget_declared_after(verdict, offer.declared, connection.session)
        position = Position(offer.epoch, offer.last_sequence) if offer is not None else None
        return PendingAck(number, changes, head.correlation_id, received_at, verdict, position)

    async def _on_debezium(self, batch: DebeziumBatch, connection: ClientConnection) -> ServerMessage | None:
        """Accept Debezium's events. The next frame is read after that, because a source's requests are serialized."""
        number = connection.session.on_debezium(batch)
        source = connection.session.source
        assert source is not None
        try:
            receipt = await self._debezium.accept(source, b"[" + b",".join(batch.events) + b"]", batch.headers)
        except DebeziumMalformed as error:
            raise ProtocolError(NackReason.INVALID_FORMAT.value, str(error), sequence_number=number) from error
        connection.batches += 1
        connection.changes += len(batch.events)
        verdict = receipt.verdict if receipt.verdict is not None else Duplicate(0)
        if isinstance(verdict, Durable):
            verdict = Durable(verdict.offset, receipt.fresh)
        changes, position = receipt.fresh + receipt.repeated, self._intake.durable_position(source)
        pending = PendingAck(number, changes, batch.correlation_id, connection.last_activity_at, None, position)
        return self._batches.reply(verdict, pending, connection)

    async def _on_connect(self, message: Connect, connection: ClientConnection) -> ServerMessage:
        refused = await self._intake.look_up_source(SourceId(message.source_do_id))
        if refused is not None:
            return self._batches.nack(refused, 0, message.correlation_id)
        known = self._intake.durable_position(SourceId(message.source_do_id))
        if known is not None and message.epoch < known.epoch:
            rule = f"epoch: expected at least {known.epoch}, got {message.epoch}"
            refused = Refused(NackReason.INVALID_SEQUENCE, rule, retry=False)
            nack = self._batches.nack(refused, 0, message.correlation_id)
            nack.epoch = known.epoch
            return nack
        source = connection.session.on_connect(message)
        for other in self._connections:
            if other.session.source == source:
                other.session.lease.is_revoked = other is not connection
        durable = self._intake.resume(source)
        connection.receipts.clear()
        connection.history = SequenceHistory()
        committed = self._feed.status.committed_position(source)
        return Status(
            timestamp=int(time.time() * 1_000),
            state=self.state,
            buffer=self.backlog.stats(),
            connected_sources=len({c.session.source for c in self._connections if c.session.source}),
            limits=Limits(max_message_size=self._config.frame_max_bytes, max_event_size=self._config.event_max_bytes),
            encodings=["json", "arrow"],
            epoch=message.epoch,
            last_durable_sequence=replies.sequence_in(durable, message.epoch),
            last_committed_sequence=replies.sequence_in(committed, message.epoch),
            last_flush_time=self.backlog.last_flush_time_ms,
            next_flush_time=self.backlog.next_flush_time_ms(),
            correlation_id=message.correlation_id,
        )

    def _start_flush(self, message: FlushRequest, connection: ClientConnection, tasks: asyncio.TaskGroup) -> None:
        if len(connection.flushes) >= FLUSHES_PER_CONNECTION:
            raise invalid(f"flush_request: {FLUSHES_PER_CONNECTION} are already running; wait for them")
        task = tasks.create_task(self._flush(message, connection), name="ws-flush")
        connection.flushes.add(task)
        task.add_done_callback(connection.flushes.discard)

    async def _flush(self, message: FlushRequest, connection: ClientConnection) -> None:
        try:
            if connection.newest_verdict is not None:  # a flush covers what the client sent before it
                await asyncio.wait([connection.newest_verdict])
            report = await self._feed.flush()
            reply = FlushResponse(int(time.time() * 1_000), report.to_json(), message.correlation_id)
            await connection.socket.send(encode_message(reply), text=True)
        except ConnectionClosed:
            logger.debug("client_disconnected_during_flush", extra={"source": connection.session.source})

    async def _send_replies(self, connection: ClientConnection) -> None:
        try:
            while (item := await connection.replies.get()) is not None:
                if isinstance(item, PendingAck):
                    # Cancelling the wait leaves the batch as it is.
                    verdict = await item.verdict if item.verdict is not None else None
                    await self._send(self._batches.reply(verdict, item, connection), connection)
                else:
                    await self._send(item, connection)
                if connection.owes_receipt:
                    await self._send(self._batches.take_receipt(connection), connection)
                if connection.closes_at_once:
                    break
            connection.closing = connection.closing or GOODBYE
            await self.admission.close(connection)
        except ConnectionClosed:
            logger.debug("client_disconnected_with_pending_replies", extra={"source": connection.session.source})

    async def _send(self, message: ServerMessage | None, connection: ClientConnection) -> None:
        allowance = connection.limiter.allowance(time.time())
        if allowance is not None and isinstance(message, Ack | Nack):
            replies.add_allowance(message, allowance)
        if message is not None:
            await connection.socket.send(encode_message(message), text=True)


def _correlation_of(message: AnyMessage) -> str | None:
    return message.head.correlation_id if isinstance(message, ArrowFrame) else message.correlation_id


def _forget_declared_after(verdict: asyncio.Future[Verdict], declared: str, session: Session) -> None:
    """Forget a declaration once a batch that carries it is durable."""

    def note(done: asyncio.Future[Verdict]) -> None:
        if not done.cancelled() and isinstance(done.result(), Durable):
            session.declarations.on_durable(declared)

    verdict.add_done_callback(note)
