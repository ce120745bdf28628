"""What goes wrong outside of us: a full, broken or slow disk under the log, and frames of every kind of nonsense.

Nothing that was acked is lost, whoever did nothing wrong is not disturbed, and all goes on when the fault is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import psutil
import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from lakefeed.ingest.service import Addresses, serving
from lakefeed.writer.wal.directory import Filesystem
from tests.clients import open_pyiceberg
from tests.crash.senders import Sender
from tests.crash.table_checks import check_tables, load_contents
from tests.fakes import FaultyFilesystem, HeldFilesystem
from tests.ingest.conftest import small_config
from tests.ingest.ws_client import DEADLINE_S, WsClient, connected, insert
from tests.integration.mutations import mutated_frame
from tests.seeds import choose_count, choose_seed
from tests.service_process import ServiceProcess, service_process

pytestmark = pytest.mark.integration

MIB = 1024 * 1024

# A segment's worth, so that full disks are met where segments are begun as well as where they are written.
LARGE = "x" * 100_000
BATCHES_MAX = 30


@contextlib.asynccontextmanager
async def serving_on(files: Filesystem, data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Addresses]:
    """The whole service, its log on this filesystem."""
    monkeypatch.setattr("lakefeed.writer.wal.log.Filesystem", lambda: files)
    async with serving(small_config(data_dir)) as addresses:
        yield addresses


async def readiness(addresses: Addresses) -> tuple[int, list[str]]:
    async with aiohttp.ClientSession() as http, http.get(f"{addresses.http_url}/health/ready") as answer:
        return answer.status, (await answer.json())["problems"]


async def flush(addresses: Addresses) -> None:
    async with aiohttp.ClientSession() as http, http.post(f"{addresses.http_url}/flush") as answer:
        assert (await answer.json())["success"]


async def committed(addresses: Addresses) -> list[int]:
    """Commit everything durable and read the sequences back."""
    await flush(addresses)
    return await asyncio.to_thread(_read_sequences, addresses.http_url)


def _read_sequences(catalog_url: str) -> list[int]:
    with contextlib.closing(open_pyiceberg(catalog_url)) as catalog:
        return sorted(catalog.load_table("default.users").scan().to_arrow()["_cdc_sequence"].to_pylist())


async def push_until_refused(client: WsClient, *, first: int) -> tuple[int, dict]:
    """Push large batches of one change each; the first sequence that was refused, and how."""
    for sequence in range(first, first + BATCHES_MAX):
        answer = await client.batch(sequence, events=[insert(sequence, after={"id": sequence, "blob": LARGE})])
        if answer["type"] == "nack":
            return sequence, answer
    raise AssertionError("nothing was refused")


# -- the disk under the log


@pytest.mark.parametrize("operation", ["write", "allocate"])
async def test_full_disk_refuses_batches_until_there_is_room_and_loses_no_ack(tmp_path, monkeypatch, operation):
    files = FaultyFilesystem()
    async with (
        serving_on(files, tmp_path, monkeypatch) as addresses,
        connected(addresses.ws_url) as client,
        connected(addresses.ws_url, source="other") as other,
    ):
        assert (await client.batch(0))["status"] == "ok"
        files.fail(operation, errno.ENOSPC)
        refused, nack = await push_until_refused(client, first=1)
        assert (nack["reason"], nack["shouldRetry"]) == ("buffer_full", True)
        assert nack["retryDelayMs"] > 0
        status, problems = await readiness(addresses)
        assert (status, len(problems)) == (503, 1)
        assert "disk is full" in problems[0]
        assert (await other.request("heartbeat"))["type"] == "pong"
        assert await committed(addresses) == list(range(refused)), "what was acked is committed meanwhile"

        files.heal()
        assert (await client.batch(refused))["status"] == "ok"
        assert await readiness(addresses) == (200, [])
        assert await committed(addresses) == list(range(refused + 1))


async def test_failing_disk_refuses_everything_until_a_restart_and_loses_no_ack(tmp_path, monkeypatch):
    files = FaultyFilesystem()
    async with serving_on(files, tmp_path, monkeypatch) as addresses, connected(addresses.ws_url) as client:
        for sequence in range(5):
            assert (await client.batch(sequence))["status"] == "ok"
        files.fail("sync", errno.EIO)
        for _ in range(2):
            nack = await client.batch(5)
            assert (nack["type"], nack["reason"], nack["shouldRetry"]) == ("nack", "internal_error", True)
        files.heal()
        assert (await client.batch(5))["reason"] == "internal_error", "nobody knows what the disk holds"
        status, problems = await readiness(addresses)
        assert status == 503
        assert problems[0].startswith("log has failed: ")
        assert await committed(addresses) == list(range(5)), "what was acked is committed nevertheless"
    async with (
        serving_on(Filesystem(), tmp_path, monkeypatch) as addresses,
        connected(addresses.ws_url, None) as client,
    ):
        resume_at = (await client.request("connect", sourceDoId="shop"))["lastDurableSequence"]
        assert resume_at in (4, 5)
        for sequence in range(resume_at + 1, 8):
            assert (await client.batch(sequence))["status"] == "ok"
        assert await readiness(addresses) == (200, [])
        assert await committed(addresses) == list(range(8))


async def test_slow_sync_makes_acks_late_and_disturbs_nothing_else(tmp_path, monkeypatch):
    files = HeldFilesystem()
    async with (
        serving_on(files, tmp_path, monkeypatch) as addresses,
        connected(addresses.ws_url) as client,
        connected(addresses.ws_url, source="other") as other,
    ):
        for sequence in range(3):
            assert (await client.batch(sequence))["status"] == "ok"
        files.open_gate.clear()
        try:
            await client.send_batch(3)
            assert (await other.request("heartbeat"))["type"] == "pong"
            status = await other.request("connect", sourceDoId="other")
            assert status["type"] == "status"
            assert await readiness(addresses) == (200, [])
            assert await committed(addresses) == [0, 1, 2], "what is durable is committed meanwhile"
        finally:
            files.open_gate.set()
        assert (await client.receive())["status"] == "ok"
        assert await committed(addresses) == [0, 1, 2, 3]


async def test_batch_on_a_connection_that_its_source_has_left_does_not_overtake_a_refused_one(tmp_path, monkeypatch):
    files = FaultyFilesystem()
    async with serving_on(files, tmp_path, monkeypatch) as addresses, connected(addresses.ws_url) as left:
        assert (await left.batch(0))["status"] == "ok"
        files.fail("write", errno.ENOSPC)
        assert (await left.batch(1))["reason"] == "buffer_full"
        files.heal()
        async with connected(addresses.ws_url) as client:
            late = await left.batch(2)
            assert (late["reason"], late["shouldRetry"]) == ("invalid_sequence", False)
            for sequence in (1, 2):
                assert (await client.batch(sequence))["status"] == "ok"
        assert await committed(addresses) == [0, 1, 2]


# -- nonsense

HOSTILE_CLIENTS = 4
FRAMES_PER_CONNECTION = 50

SETTINGS = {
    "ingest.frame_max_bytes": "256KiB",
    "ingest.event_max_bytes": "64KiB",
    "log.segment_max_bytes": "8MiB",
    "log.max_bytes": "64MiB",
    "writer.flush_max_age_s": 2,
    "writer.flush_max_bytes": "4MiB",
    "writer.buffer_max_bytes": "16MiB",
}

# What memory may grow by while it happens: buffers, code that is loaded when first used, what allocators keep.
GROWTH_MAX_BYTES = 200 * MIB


async def test_mutated_frames_are_all_answered_and_disturb_no_other_client(tmp_path):
    rng, up = random.Random(choose_seed("FUZZ_SEED", 1)), asyncio.Event()
    up.set()
    frames = choose_count("FUZZ_FRAMES", 4_000)
    other_client = Sender("other_client", random.Random(rng.random()), up, batch_max_changes=20)
    with service_process(tmp_path, SETTINGS) as service:
        await asyncio.to_thread(service.start)
        before_bytes = _resident_bytes(service)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(other_client.run(service.ws_url))
            hostile_clients = [
                HostileClient(f"hostile-{number}", random.Random(rng.random())) for number in range(HOSTILE_CLIENTS)
            ]
            async with asyncio.TaskGroup() as hostile_tasks:
                for hostile in hostile_clients:
                    hostile_tasks.create_task(hostile.run(service, frames // HOSTILE_CLIENTS))
            growth_bytes = _resident_bytes(service) - before_bytes
            print(f"memory: before={before_bytes / MIB:.0f} MiB growth={growth_bytes / MIB:.0f} MiB")
            other_client.finish()
        assert service.is_running, service.log_text()
        assert growth_bytes < GROWTH_MAX_BYTES
        print(
            {name: sum(hostile.tally[name] for hostile in hostile_clients) for name in sorted(hostile_clients[0].tally)}
        )
        await asyncio.to_thread(service.flush)
        assert service.get("/health")["problems"] == []
        tables = await asyncio.to_thread(load_contents, service.http_url)
        check_tables(tables, [other_client])
        assert other_client.acked == other_client.sent > 0
        assert "Traceback" not in service.log_text()


def _resident_bytes(service: ServiceProcess) -> int:
    return psutil.Process(service.pid).memory_info().rss


class HostileClient:
    """A client that sends mutated frames, each followed by a heartbeat: what comes before its pong is the answer."""

    def __init__(self, name: str, rng: random.Random) -> None:
        self.tally = {"acks": 0, "nacks": 0, "others": 0, "closed": 0}
        self._name = name
        self._rng = rng
        self._connections = 0
        self._flushes_owed = 0

    async def run(self, service: ServiceProcess, frames: int) -> None:
        """Send so many frames, on as many connections as that takes."""
        while frames > 0:
            headers = {"X-Client-ID": f"{self._name}-{self._connections + 1}"}
            async with connect(service.ws_url, compression=None, max_size=None, additional_headers=headers) as socket:
                frames -= await self._talk(socket, min(frames, FRAMES_PER_CONNECTION))

    async def _talk(self, socket: ClientConnection, frames: int) -> int:
        """Send frames until they are all answered or the connection is closed; how many had their fate."""
        self._flushes_owed = 0
        self._connections += 1
        for number in range(frames):
            frame, is_text = mutated_frame(self._rng, f"{self._name}-{self._connections}", number * 5)
            try:
                await socket.send(frame, text=is_text)
                await socket.send(json.dumps({"type": "heartbeat", "correlationId": f"after {number}"}))
                await self._hear_until_pong(socket, number, frame)
            except ConnectionClosed as closed:
                if closed.rcvd is None:
                    raise AssertionError(f"cut off without a close code by {frame[:200]!r}") from closed
                self.tally["closed"] += 1
                return number + 1
        while self._flushes_owed:
            await self._receive(socket)
        return frames

    async def _hear_until_pong(self, socket: ClientConnection, number: int, frame: bytes) -> None:
        """Hear the answer; only that to a flush may come later."""
        answered = False
        while (answer := await self._receive(socket)).get("correlationId") != f"after {number}":
            answered = answered or answer["type"] != "flush_response"
        if not answered:
            assert b"flush_request" in frame, f"no answer to {frame[:200]!r}"
            self._flushes_owed += 1

    async def _receive(self, socket: ClientConnection) -> dict:
        """Hear something that is not a receipt."""
        while True:
            async with asyncio.timeout(DEADLINE_S):
                answer = json.loads(await socket.recv())
            self._flushes_owed -= answer["type"] == "flush_response"
            if answer.get("status") != "persisted":
                self.tally[{"ack": "acks", "nack": "nacks"}.get(answer["type"], "others")] += 1
                return answer
