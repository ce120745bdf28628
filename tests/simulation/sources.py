"""Sources: clients that number their changes, over WebSocket and HTTP, and clients whose rows the service numbers.

Fake: the clients themselves, written to the rules of docs/protocol.md. A source keeps a book of what it was promised: a
change is durable if it was acked, or if a status reply named a resume point at or above it.

`keeps_all` says what a source can send again: everything, or only what was not acked. Each batch names the change
before it. A node that lacks this change refuses the batch. The source then resumes where the node says, or goes to
other nodes until it meets one that has the change.
"""

from __future__ import annotations

import asyncio
import functools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson
from yarl import URL

from tests.simulation.lake import Lake
from tests.simulation.network import ClientSocket, Disconnected, HttpRequest, HttpResponse, Network, Process
from tests.simulation.node import Node

REPLY_MAX_S = 20.0
REQUEST_MAX_S = 60.0
WINDOW_BATCHES = 4
BATCH_MAX_CHANGES = 6
BATCH_MAX_BYTES = 3_000

# How often a source that moves leaves after a reply.
MOVE_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class Change:
    """One change; its uid is in the row, so that it is found wherever it went."""

    uid: str
    table: str
    sequence: int
    # Long enough that the log begins new segments, and trims old ones, within a run.
    padding: str = ""

    def row(self) -> dict[str, Any]:
        return {"uid": self.uid, "pad": self.padding}

    def event(self) -> dict[str, Any]:
        return {"sequence": self.sequence, "operation": "INSERT", "table": self.table, "after": self.row()}


@dataclass(slots=True)
class Surroundings:
    """What a source knows of the world; `report` takes what must not happen."""

    nodes: Sequence[Node]
    network: Network
    lake: Lake
    chance: random.Random
    report: Callable[[str], None]
    trace: Callable[[str], None]


class Source(Protocol):
    """What the world and the checks need of a source."""

    name: str

    async def run(self) -> None:
        """Send everything; returns once all of it was promised."""

    def missing(self, lake: Lake) -> list[str]:
        """Return what was promised and is not committed."""

    def uids_below(self, epoch: int, sequence: int) -> list[str]:
        """Return the changes up to a position; empty for a source without numbers of its own."""


@dataclass(slots=True)
class NumberedSource:
    """Changes of one source in their order, and how many of each epoch were promised."""

    name: str
    epochs: list[list[Change]]
    around: Surroundings
    keeps_all: bool
    moves: bool
    pause_max_s: float
    promised: list[int] = field(default_factory=list)
    epoch: int = 0
    node: Node | None = None

    def __post_init__(self) -> None:
        self.promised = [0] * len(self.epochs)

    @property
    def changes(self) -> list[Change]:
        return self.epochs[self.epoch]

    @property
    def is_done(self) -> bool:
        return self.promised[self.epoch] == len(self.changes)

    async def run(self) -> None:
        for epoch in range(len(self.epochs)):
            self.epoch = epoch
            while not self.is_done:
                try:
                    await self._converse(self._choose_node())
                except (ConnectionError, TimeoutError) as error:
                    self.around.trace(f"{self.name}: {type(error).__name__} {error}")
                await asyncio.sleep(self.around.chance.random() * self.pause_max_s)
            # A later epoch ends this one in the tables: a source that may go to another node must wait for its commits.
            while self.moves and self.missing(self.around.lake):  # noqa: ASYNC110 - virtual time
                await asyncio.sleep(1.0)

    async def _converse(self, node: Node) -> None:
        raise NotImplementedError

    def _choose_node(self) -> Node:
        if self.node is None or (self.moves and self.around.chance.random() < 0.7):
            self.node = self.around.chance.choice(self.around.nodes)
            self.around.trace(f"{self.name}: goes to {self.node.name}")
        return self.node

    def _cut(self, start: int) -> int:
        """Return where the batch that begins here ends."""
        return min(len(self.changes), start + self.around.chance.randint(1, _most(self.changes)))

    def _previous(self, start: int) -> int | None:
        """Return the sequence of the change before the batch that begins here."""
        return self.changes[start - 1].sequence if start else None

    def _resume(self, message: dict[str, Any]) -> int:
        """Return the first change after the resume point of a reply."""
        return sum(change.sequence <= message.get("lastDurableSequence", -1) for change in self.changes)

    def _promise(self, end: int) -> None:
        self.promised[self.epoch] = max(self.promised[self.epoch], end)

    def missing(self, lake: Lake) -> list[str]:
        pairs = zip(self.epochs, self.promised, strict=True)
        return [change.uid for changes, count in pairs for change in changes[:count] if not lake.has(change.uid)]

    def uids_below(self, epoch: int, sequence: int) -> list[str]:
        earlier = [change.uid for changes in self.epochs[:epoch] for change in changes]
        return earlier + [change.uid for change in self.epochs[epoch] if change.sequence <= sequence]

    def _check_committed(self, epoch: int, sequence: int, what: str) -> None:
        lacking = [uid for uid in self.uids_below(epoch, sequence) if not self.around.lake.has(uid)]
        if lacking:
            self.around.report(f"{what} is not true: {self.name} up to {sequence}, not committed: {lacking[:5]}")


@dataclass(slots=True)
class WebSocketSource(NumberedSource):
    """Connects, resumes from the status reply, keeps a few batches in flight."""

    ack_level: str = "durable"

    async def _converse(self, node: Node) -> None:
        ends: dict[int, int] = {}
        socket = node.connect(self.name, functools.partial(self._check_claims, ends, self.epoch))
        if socket is None:
            raise Disconnected("nothing listens")
        try:
            await self._send_all(socket, ends)
        finally:
            socket.give_up()

    async def _send_all(self, socket: ClientSocket, ends: dict[int, int]) -> None:
        chance = self.around.chance
        following = await self._connect(socket)
        in_flight: dict[int, int] = {}
        number = 0
        while not self.is_done:
            while len(in_flight) < WINDOW_BATCHES and following < len(self.changes):
                end = self._cut(following)
                socket.send(self._batch(number, following, end))
                in_flight[number] = ends[number] = end
                following, number = end, number + 1
                await asyncio.sleep(chance.random() * self.pause_max_s)
            reply = await _reply(socket)
            if reply["type"] == "nack":
                raise Disconnected(f"nack {reply}")
            if reply["type"] == "ack":
                self._on_ack(reply, in_flight)
            if self.moves and chance.random() < MOVE_SHARE:
                return
            if chance.random() < 0.03:
                socket.lose()

    async def _connect(self, socket: ClientSocket) -> int:
        """Connect and return the first change to send."""
        message = {"type": "connect", "sourceDoId": self.name, "epoch": self.epoch, "ackLevel": self.ack_level}
        socket.send(orjson.dumps(message))
        status = await _reply(socket)
        if status["type"] != "status":
            raise Disconnected(f"connect refused: {status}")
        resume = self._resume(status)
        self.around.trace(f"{self.name}: resumes at {resume} of {len(self.changes)}, promised {self.promised}")
        start = resume if self.keeps_all else max(resume, self.promised[self.epoch])
        self._promise(resume)
        return start

    def _batch(self, number: int, first: int, end: int) -> bytes:
        events = [change.event() for change in self.changes[first:end]]
        numbers = {"sequenceNumber": number, "previousSequence": self._previous(first)}
        return orjson.dumps({"type": "cdc_batch", **numbers, "events": events})

    def _on_ack(self, ack: dict[str, Any], in_flight: dict[int, int]) -> None:
        number = ack["sequenceNumber"]
        covered = [each for each in in_flight if each <= number] if ack["status"] == "persisted" else [number]
        for each in covered:
            if each in in_flight:
                self._promise(in_flight.pop(each))

    def _check_claims(self, ends: dict[int, int], epoch: int, body: bytes) -> None:
        """Check that what a node calls committed is in the tables."""
        message = orjson.loads(body)
        if message["type"] == "status" and message.get("lastCommittedSequence") is not None:
            self._check_committed(epoch, message["lastCommittedSequence"], "status reply")
        if message["type"] == "ack" and message["status"] == "persisted":
            last = self.epochs[epoch][ends[message["sequenceNumber"]] - 1]
            self._check_committed(epoch, last.sequence, "receipt")


async def _reply(socket: ClientSocket) -> dict[str, Any]:
    async with asyncio.timeout(REPLY_MAX_S):
        reply: dict[str, Any] = orjson.loads(await socket.recv())
        return reply


@dataclass(slots=True)
class HttpSource(NumberedSource):
    """Posts one batch after the other and repeats what was not answered, perhaps cut differently."""

    async def _converse(self, node: Node) -> None:
        process = Process(self.name, copy_context())
        start = self.promised[self.epoch]
        while start < len(self.changes):
            end = self._cut(start)
            events = [change.event() for change in self.changes[start:end]]
            body = orjson.dumps({"type": "cdc_batch", "previousSequence": self._previous(start), "events": events})
            url = URL("/cdc").with_query(source=self.name, epoch=str(self.epoch))
            response = await _post(self.around, process, node, url, body, {"Content-Type": "application/json"})
            if response.status == 409 and self.keeps_all:
                refusal = orjson.loads(response.body)
                if refusal["reason"] == "missing_changes":
                    self.around.trace(f"{self.name}: {refusal}")
                    start = self._resume(refusal)
                    continue
            if response.status != 200:
                raise Disconnected(f"{response.status} {response.body[:200]!r}")
            self._promise(end)
            start = end
            await asyncio.sleep(self.around.chance.random() * self.pause_max_s)
            if self.moves and self.around.chance.random() < MOVE_SHARE:
                return


def _most(changes: Sequence[Change]) -> int:
    """Return how many changes of this size a batch takes."""
    return min(BATCH_MAX_CHANGES, BATCH_MAX_BYTES // (len(changes[0].padding) + 100))


async def _post(
    around: Surroundings, process: Process, node: Node, url: URL, body: bytes, headers: dict[str, str]
) -> HttpResponse:
    async with asyncio.timeout(REQUEST_MAX_S):
        return await around.network.request(process, node.server, HttpRequest("POST", url, headers, body))


@dataclass(slots=True)
class RowSource:
    """Rows without numbers, as NDJSON. A request without an answer is sent again, so its rows may be there twice."""

    name: str
    rows: list[Change]
    around: Surroundings
    moves: bool
    pause_max_s: float
    acked: set[str] = field(default_factory=set)
    attempts: Counter[str] = field(default_factory=Counter)

    async def run(self) -> None:
        process = Process(self.name, copy_context())
        node = self.around.chance.choice(self.around.nodes)
        start = 0
        while start < len(self.rows):
            if self.moves and self.around.chance.random() < 0.4:
                node = self.around.chance.choice(self.around.nodes)
                self.around.trace(f"{self.name}: goes to {node.name}")
            rows = self.rows[start : start + self.around.chance.randint(1, _most(self.rows))]
            rows = [row for row in rows if row.table == rows[0].table]
            url = URL("/cdc").with_query(source=self.name, table=rows[0].table)
            body = b"\n".join(orjson.dumps({"id": row.sequence, **row.row()}) for row in rows)
            self.attempts.update(row.uid for row in rows)
            try:
                response = await _post(self.around, process, node, url, body, {"Content-Type": "application/x-ndjson"})
            except (ConnectionError, TimeoutError):
                response = HttpResponse(0, b"")
            self.around.trace(f"{self.name}: {rows[0].uid} + {len(rows)}: {response.status} {response.body[-120:]!r}")
            if response.status == 200:
                self.acked.update(row.uid for row in rows)
                start += len(rows)
            await asyncio.sleep(self.around.chance.random() * self.pause_max_s)

    def missing(self, lake: Lake) -> list[str]:
        return [uid for uid in sorted(self.acked) if not lake.has(uid)]

    def uids_below(self, _epoch: int, _sequence: int) -> list[str]:
        return []
