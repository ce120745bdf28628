"""WebSocket connections. Owns each connection's tasks and the order of its answers; what to answer is replies.py's.

Per connection two tasks: the reader turns frames into answers-to-be and queues them; the sender awaits them in that
order and sends. So acks keep the order of their batches while many batches are in flight, and a client that does not
read its answers stops being read itself once the queue is full. A flush is answered on the side when it is done.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed

from lakefeed.contract.changes import Position, SourceId
from lakefeed.ingest.admission.auth import Auth, choose_subprotocol
from lakefeed.ingest.admission.limits import BUFFER_OVERFLOW, FAILED, GOODBYE, SHUTTING_DOWN
from lakefeed.ingest.config import IngestConfig
from lakefeed.ingest.debezium.events import DebeziumMalformed
from lakefeed.ingest.errors import ProtocolError
from lakefeed.ingest.intake.debezium import DebeziumIntake
from lakefeed.ingest.intake.intake import Intake
from lakefeed.ingest.metrics import IngestMetrics
from lakefeed.ingest.protocol.batch import AnyBatch, head_of
from lakefeed.ingest.protocol.messages import (
    Ack,
    Connect,
    DebeziumBatch,
    Disconnect,
    FlushRequest,
    Heartbeat,
    Nack,
    ServerMessage,
    decode_message,
    encode_message,
    open_arrow_frame,
)
from lakefeed.ingest.protocol.offers import Duplicate, Durable, Refused, Verdict
from lakefeed.ingest.protocol.session import Session, State
from lakefeed.ingest.websocket import replies
from lakefeed.ingest.websocket.client import BatchAnswers, BufferView, Connection, PendingAck
from lakefeed.ingest.websocket.handshake import CLOSE_TIMEOUT_S, AnyMessage, Gatekeeper
from lakefeed.ingest.websocket.socket import BudgetedConnection, connections_with, raise_open_files_limit
from lakefeed.writer.tables.feed import Feed
from lakefeed.writer.wire.arrow_frame import ArrowFrame, is_arrow_frame
from lakefeed.writer.wire.json_batch import BatchHead

logger = logging.getLogger(__name__)

PATH = "/ws"

# Frames that websockets reads ahead of us, per connection; more only adds memory, since the intake is the real queue.
READ_AHEAD_FRAMES = 2

# A client that asks for more flushes than this at once gains nothing: each covers everything durable.
FLUSHES_PER_CONNECTION = 4

# Connections that the system keeps for us until we accept them: all clients may come back at once after a restart.
LISTEN_BACKLOG = 1024

# How often load is measured and clients are looked at that keep us waiting; a close may be late by this.
WATCH_INTERVAL_S = 0.5

# Pings that a live client answers within the heartbeat timeout, so that a lost one does not end it.
PINGS_PER_TIMEOUT = 3
PING_INTERVAL_DEFAULT_S = 20.0

# Smaller messages are read before there is room in the intake: heartbeats and questions need none. Larger ones wait
# for it first, because what a batch becomes when it is read takes several times its bytes.
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
        metrics: IngestMetrics,
    ) -> None:
        self._intake = intake
        self._feed = feed
        self._debezium = debezium
        self._config = config
        self._metrics = metrics
        self.gatekeeper = Gatekeeper(PATH, config=config, auth=auth, metrics=metrics)
        self.buffer = BufferView(feed, intake)
        self._batches = BatchAnswers(
            feed, self.buffer, resend_max_batches=config.in_flight_max_batches, metrics=metrics
        )
        self._connections: set[Connection] = set()
        self._recovered_offset = feed.log_status()["durableEnd"]

    @property
    def state(self) -> str:
        """What the service is at: takes nothing, still reads what the last one left, takes changes, or sees nobody."""
        if self._feed.log_status()["failed"] or self._intake.problems(now=time.monotonic()):
            return "error"
        if self._feed.applied_offset < self._recovered_offset:
            return "recovering"
        return "receiving" if self._connections else "idle"

    @property
    def last_flush_time_ms(self) -> int | None:
        """When something was last committed; None if nothing was since the start."""
        return self._batches.last_flush_time_ms

    def connections(self) -> list[Connection]:
        """Show the open connections."""
        return list(self._connections)

    @asynccontextmanager
    async def listen(self, listener: socket.socket) -> AsyncIterator[None]:
        """Accept connections until the block ends; then close them with 1001."""
        raise_open_files_limit(self._config.connections_max)
        async with serve(
            self._serve,
            sock=listener,
            process_request=self.gatekeeper.door.on_request,
            process_response=self.gatekeeper.door.on_response,
            select_subprotocol=lambda _, offered: choose_subprotocol(offered),
            create_connection=connections_with(
                self.gatekeeper.budget,
                connections_max=self._config.connections_max,
                may_be_packed=self._config.compression,
            ),
            ping_interval=self._config.heartbeat_timeout_s / PINGS_PER_TIMEOUT or PING_INTERVAL_DEFAULT_S,
            ping_timeout=None,  # who does not answer is found by `run_watch`, and told so with 4000
            close_timeout=CLOSE_TIMEOUT_S,
            backlog=LISTEN_BACKLOG,
            compression="deflate" if self._config.compression else None,
            max_size=self._config.frame_max_bytes,
            max_queue=READ_AHEAD_FRAMES,
        ) as server:
            yield
            server.close(code=SHUTTING_DOWN.code, reason=SHUTTING_DOWN.reason)
            await self._wait_closed(server)

    async def _wait_closed(self, server: Server) -> None:
        """Wait for the clients' goodbyes; who does not read ours is cut off."""
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S + WATCH_INTERVAL_S):
                await server.wait_closed()
        except TimeoutError:
            for connection in self._connections:
                connection.gate.client.transport.abort()
            await server.wait_closed()

    async def run_watch(self) -> None:
        """Measure load, and end connections that keep us waiting too long."""
        async with asyncio.TaskGroup() as closings:
            while True:
                await asyncio.sleep(WATCH_INTERVAL_S)
                self.gatekeeper.measure_load(
                    longest_wait_s=self._intake.longest_wait_s(time.time()), log_utilization=self.buffer.utilization()
                )
                for gate in self.gatekeeper.find_overdue([connection.gate for connection in self._connections]):
                    closings.create_task(self.gatekeeper.close(gate), name="ws-close")

    async def run_receipts(self) -> None:
        """Tell connected clients what is committed, after every commit."""
        seen = 0
        while True:
            seen = await self._feed.wait_for_commit(seen)
            self._batches.note_commit()
            for connection in self._connections:
                self._maybe_send_receipt(connection)

    def _maybe_send_receipt(self, connection: Connection) -> None:
        if connection.answers.full():
            connection.owes_receipt = True  # the sender, which is behind, looks again
        elif (receipt := self._batches.take_receipt(connection)) is not None:
            connection.answers.put_nowait(receipt)

    async def _serve(self, client: ServerConnection) -> None:
        assert isinstance(client, BudgetedConnection)
        now = time.time()
        gate = self.gatekeeper.gate_of(client)
        connection = Connection(
            session=Session(event_max_bytes=self._config.event_max_bytes, default_source=gate.slot.source),
            gate=gate,
            connected_at=now,
            last_activity_at=now,
            answers=asyncio.Queue(self._config.in_flight_max_batches),
        )
        self._connections.add(connection)
        self._metrics.connections.inc()
        try:
            async with asyncio.TaskGroup() as tasks:
                sender = tasks.create_task(self._send_answers(connection), name="ws-sender")
                reader = tasks.create_task(self._read_frames(client, connection, tasks), name="ws-reader")
                # Once the sender has given up, nobody drains the queue that the reader may be waiting for.
                sender.add_done_callback(lambda _: reader.cancel())
        except ExceptionGroup:
            logger.exception("connection_failed", extra={"source": connection.session.source})
            gate.closing = FAILED
            await self.gatekeeper.close(gate)
        finally:
            self._connections.discard(connection)
            self._metrics.connections.dec()

    async def _read_frames(self, client: BudgetedConnection, connection: Connection, tasks: asyncio.TaskGroup) -> None:
        try:
            while connection.session.state is not State.ENDED and connection.gate.closing is None:
                frame = await client.recv(decode=False)
                connection.charged_bytes = client.take_charge()
                try:
                    if frame == b"ping":  # outside the JSON protocol, for the simplest of clients
                        await self._on_ping(connection)
                    else:
                        await self._on_frame(frame, connection, tasks)
                finally:
                    client.give_back(connection.charged_bytes)
            if connection.flushes:  # asked for before the goodbye, so answered before it
                await asyncio.wait(connection.flushes)
        except ConnectionClosed as end:
            self.gatekeeper.note_ended(connection.gate, end)
            logger.debug("client_gone", extra={"source": connection.session.source})
        finally:
            connection.session.end()
            client.discard_unread()
            for task in connection.flushes:
                task.cancel()
        await connection.answers.put(None)

    async def _on_frame(self, frame: bytes, connection: Connection, tasks: asyncio.TaskGroup) -> None:
        connection.last_activity_at = time.time()
        self._metrics.received_bytes.inc(len(frame))
        if len(frame) > ROOM_FIRST_BYTES and not self.gatekeeper.sheds(connection.gate):
            await self._intake.wait_for_room()
        message: AnyMessage | None = None
        try:
            message = self._decode(frame)
            answer = await self._on_message(message, frame, connection, tasks)
        except ProtocolError as error:
            answer = self._on_protocol_error(error, message, connection)
        if answer is not None:
            await connection.answers.put(answer)
        if connection.owes_receipt:  # where there was no other answer, the sender would not look
            self._maybe_send_receipt(connection)

    def _decode(self, frame: bytes) -> AnyMessage:
        if is_arrow_frame(frame):
            return open_arrow_frame(frame, frame_max_bytes=self._config.frame_max_bytes)
        return decode_message(frame)

    async def _on_message(
        self, message: AnyMessage, frame: bytes, connection: Connection, tasks: asyncio.TaskGroup
    ) -> PendingAck | ServerMessage | None:
        """Do what a message asks for; gives its answer, unless that comes on the side or not at all."""
        received_at = connection.last_activity_at
        refusal = self.gatekeeper.admit(message, connection.gate, size_bytes=len(frame), now=received_at)
        match message:
            case _ if refusal is not None:
                return self._refuse(message, refusal, connection, frame)
            case BatchHead() | ArrowFrame():
                return await self._on_batch(message, frame, connection, received_at)
            case DebeziumBatch():
                return await self._on_debezium(message, connection, received_at)
            case Connect():
                return await self._on_connect(message, connection)
            case Heartbeat():
                connection.pending_events = message.pending_events
                return replies.pong(message, now=received_at)
            case FlushRequest():
                self._start_flush(message, connection, tasks)
            case Disconnect():
                connection.session.end()
        return None

    def _on_protocol_error(
        self, error: ProtocolError, message: AnyMessage | None, connection: Connection
    ) -> ServerMessage:
        if message is not None:
            error.correlation_id = _correlation_of(message)
        if error.sequence_number is not None:
            connection.session.on_malformed(error.sequence_number)
        connection.gate.on_protocol_error(error)
        self._metrics.counts.nacks[error.reason] += 1
        return replies.protocol_nack(error, now=time.time())

    async def _on_ping(self, connection: Connection) -> None:
        refusal = self.gatekeeper.admit(Heartbeat(), connection.gate, size_bytes=0, now=time.time())
        if refusal is None:
            await connection.gate.client.send("pong")
        else:
            await connection.answers.put(self._refuse(Heartbeat(), refusal, connection, b""))

    def _refuse(self, message: AnyMessage, refusal: Refused, connection: Connection, frame: bytes) -> ServerMessage:
        """Refuse what is over a limit. A batch is expected again, and nothing of its source may overtake it."""
        now = time.time()
        number = 0
        if isinstance(message, BatchHead | ArrowFrame):
            number = connection.session.number_of(head_of(message))
            offer = connection.session.on_batch(message, frame, received_at_us=int(now * 1_000_000))
            if offer is not None:
                self._intake.hold(offer)
            connection.session.on_refused(number)
        elif isinstance(message, DebeziumBatch):
            number = connection.session.on_debezium(message)
            connection.session.on_refused(number)
        self._metrics.counts.nacks[refusal.reason.value] += 1
        return replies.refusal_nack(refusal, number, _correlation_of(message), now=now)

    async def _on_batch(self, batch: AnyBatch, frame: bytes, connection: Connection, received_at: float) -> PendingAck:
        head = head_of(batch)
        number = connection.session.number_of(head)
        offer = connection.session.on_batch(batch, frame, received_at_us=int(received_at * 1_000_000))
        changes = len(offer.sequences) if offer is not None else 0
        connection.batches += 1
        connection.changes += changes
        self._metrics.counts.received_changes += changes
        verdict = await self._intake.offer(offer) if offer is not None else None
        if verdict is not None:
            connection.newest_verdict = verdict
            self._give_back_after(verdict, connection)
            if offer is not None and offer.declared:
                _note_declared(verdict, offer.declared, connection.session)
        position = Position(offer.epoch, offer.last_sequence) if offer is not None else None
        return PendingAck(number, changes, head.correlation_id, received_at, verdict, position)

    def _give_back_after(self, verdict: asyncio.Future[Verdict], connection: Connection) -> None:
        """Hold a batch's bytes against the budget until it is durable or refused."""
        client, charged_bytes = connection.gate.client, connection.charged_bytes
        connection.charged_bytes = 0
        verdict.add_done_callback(lambda _: client.give_back(charged_bytes))

    async def _on_debezium(
        self, batch: DebeziumBatch, connection: Connection, received_at: float
    ) -> ServerMessage | None:
        """Take Debezium's events; the next frame is read after that, because a source's requests come in turn."""
        number = connection.session.on_debezium(batch)
        source = connection.session.source
        assert source is not None
        try:
            receipt = await self._debezium.take(source, b"[" + b",".join(batch.events) + b"]", batch.headers)
        except DebeziumMalformed as error:
            raise replies.malformed_debezium(error, number) from error
        connection.batches += 1
        connection.changes += len(batch.events)
        verdict = receipt.verdict if receipt.verdict is not None else Duplicate(0)
        if isinstance(verdict, Durable):
            verdict = Durable(verdict.offset, receipt.fresh)
        pending = PendingAck(number, receipt.fresh + receipt.repeated, batch.correlation_id, received_at, None)
        return self._batches.answer(verdict, pending, connection, position=self._intake.durable_position(source))

    async def _on_connect(self, message: Connect, connection: Connection) -> ServerMessage:
        unmet = await self._intake.meet(SourceId(message.source_do_id))
        if unmet is not None:
            self._metrics.counts.nacks[unmet.reason.value] += 1
            return replies.refusal_nack(unmet, 0, message.correlation_id, now=time.time())
        known = self._intake.durable_position(SourceId(message.source_do_id))
        if known is not None and message.epoch < known.epoch:
            raise replies.stale_epoch(message.epoch, known.epoch)
        source = connection.session.on_connect(message)
        for other in self._connections:
            if other.session.source == source:
                other.session.line.is_cut = other is not connection
        durable = self._intake.resume(source)
        self._batches.begin(connection, source, durable)
        return replies.status(
            message,
            durable=durable,
            committed=self._feed.committed_position(source),
            service=self._describe(),
            limits=replies.limits(self._config),
            now=time.time(),
        )

    def _describe(self) -> replies.Service:
        return replies.Service(
            state=self.state,
            buffer=self.buffer.stats(),
            connected_sources=len({c.session.source for c in self._connections if c.session.source}),
            last_flush_ms=self.last_flush_time_ms,
            next_flush_ms=self.buffer.next_flush_time_ms(),
        )

    def _start_flush(self, message: FlushRequest, connection: Connection, tasks: asyncio.TaskGroup) -> None:
        if len(connection.flushes) >= FLUSHES_PER_CONNECTION:
            raise replies.too_many_flushes(FLUSHES_PER_CONNECTION)
        task = tasks.create_task(self._flush(message, connection), name="ws-flush")
        connection.flushes.add(task)
        task.add_done_callback(connection.flushes.discard)

    async def _flush(self, message: FlushRequest, connection: Connection) -> None:
        try:
            if connection.newest_verdict is not None:  # a flush covers what the client sent before it
                await asyncio.wait([connection.newest_verdict])
            report = await self._feed.flush()
            answer = replies.flush_response(message, report.to_json(), now=time.time())
            await connection.gate.client.send(encode_message(answer), text=True)
        except ConnectionClosed:
            logger.debug("flush_requester_gone", extra={"source": connection.session.source})

    async def _send_answers(self, connection: Connection) -> None:
        try:
            while (item := await connection.answers.get()) is not None:
                message = await self._batches.resolve(item, connection) if isinstance(item, PendingAck) else item
                await self._send(message, connection)
                if connection.owes_receipt:
                    await self._send(self._batches.take_receipt(connection), connection)
                if connection.gate.closing is BUFFER_OVERFLOW:  # found out here, while the reader waits for a frame
                    break
            await self._say_goodbye(connection)
        except ConnectionClosed:
            logger.debug("client_gone_before_its_answers", extra={"source": connection.session.source})

    async def _send(self, message: ServerMessage | None, connection: Connection) -> None:
        allowance = connection.gate.messages.allowance(time.time())
        if allowance is not None and isinstance(message, Ack | Nack):
            replies.add_allowance(message, allowance)
        if message is not None:
            await connection.gate.client.send(encode_message(message), text=True)

    async def _say_goodbye(self, connection: Connection) -> None:
        connection.gate.closing = connection.gate.closing or GOODBYE
        await self.gatekeeper.close(connection.gate)


def _correlation_of(message: AnyMessage) -> str | None:
    return message.head.correlation_id if isinstance(message, ArrowFrame) else message.correlation_id


def _note_declared(verdict: asyncio.Future[Verdict], declared: str, session: Session) -> None:
    """Send a declaration no more once a batch that carries it is durable."""

    def note(done: asyncio.Future[Verdict]) -> None:
        if not done.cancelled() and isinstance(done.result(), Durable):
            session.declarations.on_durable(declared)

    verdict.add_done_callback(note)
