"""The client process: builds its frames, waits for the word, sends, and reports what it saw.

Runs apart from the server and from whoever prints, so that the server's processor time is the server's alone. Talks to
its parent over a pipe:

    client -> "built" after each share of frames, then READY      parent -> GO
    client -> acked changes as they come, then one Outcome per phase
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TypeAlias

import orjson
from websockets.asyncio.client import ClientConnection, connect

from tests.bench.workload import Stream, build_frames

READY = "ready"
GO = "go"
REPORT_CHANGES = 50_000
ANSWER_TIMEOUT_S = 120.0

Frames: TypeAlias = Sequence[tuple[int, bytes]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One measured run: a stream per connection, as fast as the window allows or at a fixed rate in all."""

    streams: Sequence[Stream]
    window_frames: int
    changes_per_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the client saw. Latencies are per frame; at a fixed rate they count from when the frame was due."""

    changes: int
    sent_bytes: int
    acked_after_s: float
    committed_after_s: float
    ack_latencies_s: Sequence[float]
    client_cpu_s: float
    build_cpu_s: float


def run_client(url: str, phases: Sequence[Phase], pipe: Connection) -> None:
    """Run the phases one after the other, each when the parent says so."""
    for phase in phases:
        cpu_before_s = time.process_time()
        frames = [_build(stream, pipe) for stream in phase.streams]
        build_cpu_s = time.process_time() - cpu_before_s
        pipe.send(READY)
        assert pipe.recv() == GO
        pipe.send(asyncio.run(_run_phase(url, phase, frames, build_cpu_s=build_cpu_s, pipe=pipe)))


def _build(stream: Stream, pipe: Connection) -> Frames:
    frames = []
    unreported = 0
    for changes, frame in build_frames(stream):
        frames.append((changes, frame))
        unreported += changes
        if unreported >= REPORT_CHANGES:
            pipe.send(unreported)
            unreported = 0
    pipe.send(unreported)
    return frames


async def _run_phase(
    url: str, phase: Phase, frames: Sequence[Frames], *, build_cpu_s: float, pipe: Connection
) -> Outcome:
    sockets = [await _open(url, stream.source) for stream in phase.streams]
    rate = None if phase.changes_per_s is None else phase.changes_per_s / len(sockets)
    cpu_before_s = time.process_time()
    started = time.perf_counter()
    lanes = [
        _Lane(
            socket,
            own,
            window_frames=phase.window_frames,
            changes_per_s=rate,
            # At a fixed rate the connections take turns; frames that are due together would wait for each other.
            first_due=started + index * own[0][0] / phase.changes_per_s if phase.changes_per_s else started,
            pipe=pipe,
        )
        for index, (socket, own) in enumerate(zip(sockets, frames, strict=True))
    ]
    await asyncio.gather(*(lane.run() for lane in lanes))
    acked_after_s = time.perf_counter() - started
    await _flush(sockets[0])
    committed_after_s = time.perf_counter() - started
    client_cpu_s = time.process_time() - cpu_before_s
    for socket in sockets:
        await socket.close()
    return Outcome(
        changes=sum(stream.changes for stream in phase.streams),
        sent_bytes=sum(len(frame) for own in frames for _, frame in own),
        acked_after_s=acked_after_s,
        committed_after_s=committed_after_s,
        ack_latencies_s=[latency for lane in lanes for latency in lane.latencies_s],
        client_cpu_s=client_cpu_s,
        build_cpu_s=build_cpu_s,
    )


async def _open(url: str, source: str) -> ClientConnection:
    socket = await connect(url, compression=None, max_size=None)
    await socket.send(orjson.dumps({"type": "connect", "sourceDoId": source}), text=True)
    await _receive(socket, "status")
    return socket


async def _flush(socket: ClientConnection) -> None:
    await socket.send(orjson.dumps({"type": "flush_request"}), text=True)
    answer = await _receive(socket, "flush_response")
    assert answer["result"]["success"], answer


async def _receive(socket: ClientConnection, kind: str) -> dict:
    async with asyncio.timeout(ANSWER_TIMEOUT_S):
        while True:
            answer = orjson.loads(await socket.recv())
            if answer["type"] == "ack" and answer["status"] == "persisted":
                continue
            assert answer["type"] == kind, answer
            return answer


class _Lane:
    """One connection's frames on their way."""

    def __init__(
        self,
        socket: ClientConnection,
        frames: Frames,
        *,
        window_frames: int,
        changes_per_s: float | None,
        first_due: float,
        pipe: Connection,
    ) -> None:
        self.latencies_s: list[float] = []
        self._socket = socket
        self._frames = frames
        self._changes_per_s = changes_per_s
        self._first_due = first_due
        self._pipe = pipe
        self._window = asyncio.Semaphore(window_frames)
        self._in_flight: deque[tuple[float, int]] = deque()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._send())
            tasks.create_task(self._take_acks())

    async def _send(self) -> None:
        due = self._first_due
        for changes, frame in self._frames:
            await self._window.acquire()
            if self._changes_per_s is None:
                due = time.perf_counter()
            else:
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
            self._in_flight.append((due, changes))
            await self._socket.send(frame, text=frame.startswith(b"{"))
            if self._changes_per_s is not None:
                due += changes / self._changes_per_s

    async def _take_acks(self) -> None:
        unreported = 0
        for _ in self._frames:
            answer = await _receive(self._socket, "ack")
            assert answer["status"] in ("ok", "buffered"), answer
            due, changes = self._in_flight.popleft()
            self.latencies_s.append(time.perf_counter() - due)
            self._window.release()
            unreported += changes
            if unreported >= REPORT_CHANGES:
                self._pipe.send(unreported)
                unreported = 0
        self._pipe.send(unreported)
