"""A source that keeps its own book: what it has sent, what was acked, and where the service told it to resume.

The n-th change of a source is a pure function of the source and n, so what must be in the tables follows from two
numbers per source: changes [0, acked) must be there, and nothing beyond [0, sent) may be.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import zlib
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import orjson
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidMessage

TABLES = ("users", "sales.orders", "events")

# Sequences have holes, as those of real sources do.
SEQUENCE_STEP = 3
# From time to time rows bring another column, so that kills also meet a table whose schema is changing.
EXTRA_COLUMN_EVERY = 1_000
EXTRA_COLUMNS = tuple(f"extra_{number}" for number in range(1, 21))
FIRST_TIMESTAMP_MS = 1_794_787_200_000
DAY_MS = 86_400_000

WINDOW_BATCHES = 8
BATCH_MAX_CHANGES = 160
RESEND_MAX_CHANGES = 400
PAUSE_MAX_S = 0.03
ANSWER_TIMEOUT_S = 240.0
RETRY_S = 0.01

_LOST_CONNECTION = (OSError, ConnectionClosed, InvalidHandshake, InvalidMessage, EOFError)


def sequence_of(index: int) -> int:
    """The sequence of a source's n-th change."""
    return 1 + index * SEQUENCE_STEP


def count_up_to(sequence: int | None) -> int:
    """How many changes of a source have this sequence or a lower one."""
    return 0 if sequence is None else (sequence - 1) // SEQUENCE_STEP + 1


def table_of(source: str, index: int) -> str:
    return TABLES[_mix(source, index) % len(TABLES)]


def operation_of(source: str, index: int) -> str:
    return ("INSERT", "UPDATE", "DELETE")[_mix(source, index) // 7 % 3]


def timestamp_ms_of(source: str, index: int) -> int:
    """Two days take turns, so that a flush writes several partitions."""
    return FIRST_TIMESTAMP_MS + _mix(source, index) // 29 % 2 * DAY_MS + index


def row_of(source: str, index: int) -> dict[str, Any]:
    """The row that the table must show for a source's n-th change."""
    mix = _mix(source, index)
    row = {
        "id": mix * 1_000_003,
        "name": f"{source} {index} żółć \U0001f426",
        "score": mix / 1024,
        "place": {"city": f"city-{mix % 97}", "floor": mix % 13},
        "note": None if mix % 5 == 0 else f"note {mix}",
    }
    extra = EXTRA_COLUMNS[: index // EXTRA_COLUMN_EVERY][-1:]
    return row | dict.fromkeys(extra, mix % 1000)


def _mix(source: str, index: int) -> int:
    return zlib.crc32(f"{source}:{index}".encode())


def _event(source: str, index: int) -> dict[str, Any]:
    operation = operation_of(source, index)
    row = row_of(source, index)
    images = {"INSERT": {"after": row}, "UPDATE": {"before": row | {"note": "old"}, "after": row}}
    return {
        "sequence": sequence_of(index),
        "timestamp": timestamp_ms_of(source, index),
        "operation": operation,
        "table": table_of(source, index),
        "rowId": f"{source}/{index}",
        **images.get(operation, {"before": row}),
    }


@dataclass(frozen=True, slots=True)
class _Batch:
    number: int
    first: int
    stop: int

    def frame(self, source: str) -> bytes:
        return orjson.dumps(
            {
                "type": "cdc_batch",
                "sourceDoId": source,
                "sequenceNumber": self.number,
                "firstEventSequence": sequence_of(self.first),
                "lastEventSequence": sequence_of(self.stop - 1),
                "previousSequence": sequence_of(self.first - 1) if self.first else None,
                "events": [_event(source, index) for index in range(self.first, self.stop)],
            }
        )


@dataclass(slots=True)
class Tally:
    """What happened on the way, to be printed."""

    sessions: int = 0
    resends: int = 0
    duplicates: int = 0
    nacks: int = 0
    durable_without_ack: int = 0
    close_code: int | None = None


@dataclass(slots=True)
class Sender:
    """One source: connects, resumes, pipelines batches, and begins again whenever the connection is lost."""

    source: str
    rng: random.Random
    up: asyncio.Event
    batch_max_changes: int = BATCH_MAX_CHANGES
    sent: int = 0
    acked: int = 0
    tally: Tally = field(default_factory=Tally)
    _finishing: bool = False

    def finish(self) -> None:
        """Begin no new change; `run` returns when everything that was ever sent is acked."""
        self._finishing = True

    async def run(self, url: str) -> None:
        """Send until told to finish."""
        while not (self._finishing and self.acked >= self.sent):
            await self.up.wait()
            try:
                async with connect(url, compression=None, close_timeout=1.0) as socket:
                    await self._session(socket)
            except* _LOST_CONNECTION as lost:
                self._note_close(lost)
                await asyncio.sleep(RETRY_S)

    def _note_close(self, lost: BaseExceptionGroup) -> None:
        error = lost.exceptions[0]
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, ConnectionClosed) and error.rcvd is not None:
            self.tally.close_code = error.rcvd.code

    async def _session(self, socket: ClientConnection) -> None:
        start = await self._resume(socket)
        in_flight: deque[_Batch] = deque()
        window = asyncio.Semaphore(WINDOW_BATCHES)
        async with asyncio.TaskGroup() as tasks:
            receiver = tasks.create_task(self._receive(socket, in_flight, window))
            await self._send(socket, start, in_flight=in_flight, window=window)
            receiver.cancel()

    async def _resume(self, socket: ClientConnection) -> int:
        """Ask where to go on; sometimes go on earlier than that, from the middle of what is durable."""
        await socket.send(orjson.dumps({"type": "connect", "sourceDoId": self.source}), text=True)
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            status = orjson.loads(await socket.recv())
        assert status["type"] == "status", status
        durable = count_up_to(status.get("lastDurableSequence"))
        assert self.acked <= durable <= self.sent, f"resume point is wrong: durable={durable} book={self}"
        self.tally.sessions += 1
        self.tally.durable_without_ack += durable - self.acked
        self.acked = durable
        return self._maybe_earlier(durable, one_in=3)

    def _maybe_earlier(self, index: int, *, one_in: int) -> int:
        if self.rng.randrange(one_in):
            return index
        self.tally.resends += 1
        return max(0, index - self.rng.randint(1, RESEND_MAX_CHANGES))

    async def _send(
        self, socket: ClientConnection, position: int, *, in_flight: deque[_Batch], window: asyncio.Semaphore
    ) -> None:
        number = 0
        while not (self._finishing and position >= self.sent):
            await window.acquire()
            first = self._maybe_earlier(position, one_in=10)
            stop = max(first, position) + self.rng.randint(1, self.batch_max_changes)
            batch = _Batch(number, first, min(stop, first + 2 * self.batch_max_changes))
            in_flight.append(batch)
            self.sent = max(self.sent, batch.stop)  # before the send: it may arrive even if the send fails
            await socket.send(batch.frame(self.source), text=True)
            number, position = number + 1, max(position, batch.stop)
            await asyncio.sleep(self.rng.uniform(0, PAUSE_MAX_S))  # sets the pace
        for _ in range(WINDOW_BATCHES):
            await window.acquire()

    async def _receive(self, socket: ClientConnection, in_flight: deque[_Batch], window: asyncio.Semaphore) -> None:
        while True:
            answer = orjson.loads(await socket.recv())
            if answer["type"] == "nack":
                await self._on_nack(socket, answer)
                return
            if answer["status"] == "persisted":
                continue
            batch = in_flight.popleft()
            assert answer["sequenceNumber"] == batch.number, f"acks are out of order: {answer} for {batch}"
            self.tally.duplicates += answer["status"] == "duplicate"
            self.acked = max(self.acked, batch.stop)
            window.release()

    async def _on_nack(self, socket: ClientConnection, nack: dict[str, Any]) -> None:
        """Begin again at the resume point; what is refused for good must not happen here."""
        assert nack["shouldRetry"], nack
        self.tally.nacks += 1
        await asyncio.sleep(nack.get("retryDelayMs", 0) / 1_000)
        with contextlib.suppress(*_LOST_CONNECTION):
            await socket.close()
        raise ConnectionAbortedError("refused, to be sent again")
