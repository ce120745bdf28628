"""The data plane without sockets: real sessions, dedup, intake, receipts and log, and a book of what must be true.

Connections are queues: frames that were sent but not read, answers that are due but not sent. What is durable is read
back from the log after every step; what was durable once is never different later, nor gone before it is given up.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import tempfile
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client import CollectorRegistry

from lakefeed.contract.changes import Position
from lakefeed.contract.errors import WalFailed
from lakefeed.ingest.config import IngestConfig
from lakefeed.ingest.errors import ProtocolError
from lakefeed.ingest.intake.intake import Intake
from lakefeed.ingest.metrics import IngestMetrics
from lakefeed.ingest.protocol.messages import AckLevel, Connect, decode_message
from lakefeed.ingest.protocol.offers import Duplicate, Durable, Refused, Verdict
from lakefeed.ingest.protocol.session import Session
from lakefeed.ingest.websocket.replies import Receipts
from lakefeed.writer.wal.payload import Frame, decode_frame
from lakefeed.writer.wal.tail import Tail
from tests.model.disk import ModelDisk, Turns, open_log
from tests.model.sources import Answer, Source, sequences_of

EVENT_MAX_BYTES = 1024 * 1024

# Few enough that sources find no room for what was refused of them.
GAPS_MAX_IN_ALL = 6

# What survives a crash is the journal's matter, so the files themselves need no disk.
MEMORY = Path("/dev/shm")

_METRICS = IngestMetrics(CollectorRegistry())


@dataclass(frozen=True, slots=True)
class Pending:
    """A batch that was read and has no answer yet; without a verdict to wait for it holds no change."""

    number: int
    verdict: asyncio.Future[Verdict] | None
    position: Position | None


@dataclass(slots=True)
class Wire:
    """One connection, seen from the service."""

    source: Source
    session: Session
    unread: deque[bytes] = field(default_factory=deque)
    due: deque[Pending | Answer] = field(default_factory=deque)
    unheard: deque[Answer] = field(default_factory=deque)
    receipts: Receipts = field(default_factory=Receipts)
    expected: list[tuple[int, Position]] = field(default_factory=list)


class Service:
    """One service that dies and comes back, and the book of its log."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._strides = {source.name: source.stride for source in sources}
        self._loop = asyncio.new_event_loop()
        self._root = Path(tempfile.mkdtemp(prefix="model", dir=MEMORY if MEMORY.is_dir() else None))
        self._runs = 0
        self.history: list[Frame] = []
        self.durable: dict[tuple[str, int], int] = {}
        self.committed_offset = 0
        self.wires: list[Wire] = []
        self._open(ModelDisk(self._root / "0"))

    def close(self) -> None:
        self._end()
        self._loop.close()
        shutil.rmtree(self._root)

    # -- a life

    def _open(self, disk: ModelDisk) -> None:
        self.disk = disk
        self.turns = Turns()
        self.log = open_log(disk, self.turns)
        self.intake = Intake(self.log, config=IngestConfig(), metrics=_METRICS)
        self.intake._dedup._refused.max_total = GAPS_MAX_IN_ALL
        self._tail = Tail(self.log, self.log.first_offset)
        assert self.log.first_offset <= self.committed_offset, "what is not committed was given up"
        self._running = self._loop.create_task(self.intake.run())
        self._settle()

    def _end(self) -> None:
        """End the intake and the log in order; whatever the disk held back happens now."""
        self.intake.close()
        self.turns.let_go()
        self._tail.close()
        self._loop.run_until_complete(self._running_ends())

    async def _running_ends(self) -> None:
        await self._running
        try:
            await self.log.close()
        except WalFailed:
            assert self.disk.sync_fails

    def crash(self, *, part: float, power_loss: int | None, clean: bool) -> None:
        """Die at some moment of what is still to happen, or end in order, and start again on what is left."""
        start, end = self.disk.moment(), 0
        self.wires.clear()
        if clean:
            self._end()
            end = start = self.disk.moment()
        else:
            self.intake.close()
            self.turns.let_go()
            self._wait_until_idle()
            end = self.disk.moment()
            self._end()
        self._runs += 1
        left = self.disk.crash(
            self._root / str(self._runs),
            moment=start + round((end - start) * part),
            power_loss=None if power_loss is None else random.Random(power_loss),
        )
        shutil.rmtree(self.disk.directory)
        self._open(left)

    def hold_disk(self, held: bool) -> None:
        """Let the disk do nothing for now, or everything that it was held back from."""
        self.turns.held = held
        if not held:
            self.turns.let_go()
            self._settle()

    def _settle(self) -> None:
        """Let everything happen that can, and read back what became durable."""
        self._wait_until_idle()
        self._read_log()

    def _wait_until_idle(self) -> None:
        self._loop.run_until_complete(_until_idle())

    # -- connections

    def connect(self, source: Source, *, ack_level: AckLevel) -> tuple[Wire, int | None]:
        """Open a connection and bind it; with it, where to resume."""
        wire = Wire(source, Session(event_max_bytes=EVENT_MAX_BYTES))
        wire.session.on_connect(Connect(source_do_id=source.name, epoch=source.epoch, ack_level=ack_level))
        self.wires.append(wire)
        for other in self.wires:
            if other.source is source:
                other.session.lease.is_revoked = other is not wire
        mark = self.intake.resume(source.name)
        self._settle()
        durable = self.durable.get((source.name, source.epoch), 0) - 1
        resume_at = mark.sequence if mark is not None and mark.epoch == source.epoch else None
        assert resume_at == (durable * source.stride if durable >= 0 else None)
        return wire, durable if durable >= 0 else None

    def open(self, source: Source) -> Wire:
        """Open a connection on which the source does not connect, so that those before it still count."""
        session = Session(event_max_bytes=EVENT_MAX_BYTES, default_source=source.name, epoch=source.epoch)
        self.wires.append(Wire(source, session))
        return self.wires[-1]

    def read(self, wire: Wire, *, sheds: bool = False) -> None:
        """Read the next frame of a connection; a service under load sheds it before the intake sees it."""
        body = wire.unread.popleft()
        session = wire.session
        try:
            message = decode_message(body)
            number = session.number_of(message)
            offer = session.on_batch(message, body, received_at_us=1)
        except ProtocolError as error:
            if error.sequence_number is not None:
                session.on_malformed(error.sequence_number)
            wire.due.append(Answer("nack", error.sequence_number or 0))
            return
        if offer is None:
            wire.due.append(Pending(number, None, None))
        elif sheds:
            self.intake.block_behind(offer)
            session.on_refused(number)
            wire.due.append(Answer("nack", number))
        else:
            verdict = self._loop.run_until_complete(self.intake.offer(offer))
            last = offer.last_sequence // wire.source.stride
            wire.due.append(Pending(number, verdict, Position(offer.epoch, last)))
            self._settle()

    def answer(self, wire: Wire) -> None:
        """Send the answers that are due, in the order of the batches."""
        while wire.due:
            item = wire.due[0]
            if isinstance(item, Pending):
                if item.verdict is not None and not item.verdict.done():
                    return
                verdict = None if item.verdict is None else item.verdict.result()
                answer = self._answer_to(verdict, item, wire)
            else:
                answer = item
            if answer is not None:
                wire.unheard.append(answer)
            wire.due.popleft()

    def _answer_to(self, verdict: Verdict | None, pending: Pending, wire: Wire) -> Answer | None:
        if isinstance(verdict, Refused):
            wire.session.on_refused(pending.number)
            return Answer("nack", pending.number)
        if pending.position is not None:
            assert isinstance(verdict, Durable | Duplicate)
            durable = self.durable.get((wire.source.name, pending.position.epoch), 0)
            assert pending.position.sequence < durable, "ack before its changes are in the log"
            if wire.session.ack_level is None:
                return Answer("ack", pending.number)
            wire.receipts.expect(pending.number, pending.position)
            wire.expected.append((pending.number, pending.position))
            if wire.session.ack_level == "committed":
                self._maybe_send_receipt(wire)
                return None
        return Answer("ack", pending.number)

    # -- behind the log

    def commit(self, part: float) -> None:
        """Commit some more of what is durable, tell the clients, and give up what is committed."""
        end = self.log.durable_end
        self.committed_offset += round((end - self.committed_offset) * part)
        for wire in self.wires:
            self._maybe_send_receipt(wire)
        trim = self._loop.create_task(self.log.trim(self.committed_offset))
        self._settle()
        if not self.turns.held:
            assert trim.done()

    def _maybe_send_receipt(self, wire: Wire) -> None:
        committed = self._committed_position(wire.source)
        due = wire.receipts.take_due(committed)
        if due is None:
            return
        assert committed is not None
        told = [position for number, position in wire.expected if number <= due.number]
        assert max(told) <= committed, "receipt before the commit"
        wire.expected = [(number, position) for number, position in wire.expected if number > due.number]
        wire.unheard.append(Answer("persisted", due.number))

    def _committed_position(self, source: Source) -> Position | None:
        frames = (frame for frame in self.history[: self.committed_offset] if frame.source == source.name)
        return max((Position(frame.epoch, frame.last_sequence // source.stride) for frame in frames), default=None)

    # -- what must be true

    def _read_log(self) -> None:
        """Read what is new in the log, or read again since the last start, and compare it with the book."""
        while records := self._tail.read(until=self.log.durable_end, max_bytes=64 * 1024):
            for record in records:
                frame = decode_frame(record.payload)
                if record.offset < len(self.history):
                    assert frame == self.history[record.offset], "what was durable has changed"
                else:
                    self._note(frame)
        assert self.log.durable_end == len(self.history), "what was durable is gone"

    def _note(self, frame: Frame) -> None:
        newest = max((epoch for source, epoch in self.durable if source == frame.source), default=0)
        assert frame.epoch >= newest, "epochs run backwards"
        end = self.durable.get((frame.source, frame.epoch), 0)
        stride = self._strides[frame.source]
        new = [sequence for sequence in sequences_of(frame.body) if sequence > frame.after_sequence]
        expected = [index * stride for index in range(end, end + len(new))]
        assert new == expected, f"not once and in order, or over a gap: {new} after {end - 1} times {stride}"
        assert (frame.after_sequence, frame.last_sequence) == ((end - 1) * stride if end else -1, new[-1])
        self.durable[frame.source, frame.epoch] = end + len(new)
        self.history.append(frame)


async def _until_idle() -> None:
    """Wait until nothing is left to do but wait: there are no timers here, and no threads."""
    ready = asyncio.get_running_loop()._ready
    await asyncio.sleep(0)
    while ready:  # noqa: ASYNC110 - nobody could set an event
        await asyncio.sleep(0)
