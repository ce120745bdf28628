"""Measures the catalog: `python -m tests.bench.catalog`. Loads, conditional loads, commits and lists a second.

The server runs as `lakefeed catalog serve` in a process of its own, the client here with as little work as possible.
Beside it runs a bare server (bare_catalog.py) that only does what no catalog can do without; figures are compared with
that one's of the same run, because machines differ and are noisy.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import click
import orjson
import psutil
from rich.console import Console
from rich.table import Table

from tests.lakefeed_process import LAKEFEED
from tests.postgres_server import postgres_server
from tests.service_process import free_ports

START_TIMEOUT_S = 30.0
READERS = 4
WRITERS = 8
LISTED_NAMES = 1_000
# Then a writer goes on to the next table, so that a figure is of tables of one age.
COMMITS_PER_TABLE = 100
# More than any server here commits: tables enough for the time are made before the clock starts.
COMMITS_PER_S_MAX = 1_200
# Snapshots that are added at once where nobody measures.
SNAPSHOTS_PER_COMMIT = 10
OLD_SNAPSHOTS = 1_000
# Times that a server and the floor take turns in a measurement.
ROUNDS = 4
PRINTED_CHARS = 124

# Of a commit's answer a writer needs nothing: it says so, as our own does.
_PREFER = "Prefer: return=minimal\r\n"


class Client:
    """One connection that sends prepared requests and reads answers by their length alone."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._head = b""

    async def ask(self, request: bytes) -> tuple[int, bytes]:
        self._writer.write(request)
        self._head = await self._reader.readuntil(b"\r\n\r\n")
        status = int(self._head[9:12])
        length = self.header(b"content-length") if status != 304 else None
        return status, await self._reader.readexactly(int(length)) if length else b""

    def header(self, name: bytes) -> bytes | None:
        """A header of the last answer; its name in lower case."""
        start = self._head.lower().find(b"\r\n" + name + b":")
        if start < 0:
            return None
        value = start + len(name) + 3
        return self._head[value : self._head.index(b"\r\n", value)].strip()

    def close(self) -> None:
        self._writer.close()


@contextlib.asynccontextmanager
async def connected(port: int, count: int) -> AsyncIterator[list[Client]]:
    clients = [Client(*await asyncio.open_connection("127.0.0.1", port, limit=2**26)) for _ in range(count)]
    try:
        yield clients
    finally:
        for client in clients:
            client.close()


def request(method: str, path: str, body: object = None, headers: str = "") -> bytes:
    data = b"" if body is None else orjson.dumps(body)
    head = f"{method} {path} HTTP/1.1\r\nHost: bench\r\n{headers}Content-Length: {len(data)}\r\n"
    return f"{head}Content-Type: application/json\r\n\r\n".encode() + data


@dataclass(frozen=True, slots=True)
class Figure:
    """One measurement: how many a second, and what each cost the server."""

    name: str
    per_s: float
    cpu_ms: float
    floor: Figure | None = None


Work: TypeAlias = Callable[[Client, int], object]


@dataclass(slots=True)
class _Sum:
    """What was done in the rounds so far."""

    done: int = 0
    elapsed_s: float = 0.0
    cpu_s: float = 0.0

    def figure(self, name: str, floor: Figure | None = None) -> Figure:
        return Figure(name, self.done / self.elapsed_s, self.cpu_s / self.done * 1_000, floor)


class Bench:
    """A server under measurement."""

    def __init__(self, port: int, process: psutil.Process, *, seconds: float) -> None:
        self.port = port
        self.seconds = seconds
        self._process = process

    async def measure(self, name: str, clients: int, work: Work) -> Figure:
        """Let so many clients work, one request after the other, for the time."""
        total = _Sum()
        await self._add_round(total, clients, work, self.seconds)
        return total.figure(name)

    async def measure_beside(self, floor: Bench, name: str, clients: int, *, work: Work, bare: Work) -> Figure:
        """Measure by turns with the floor: what else the machine does meanwhile then hits both alike."""
        ours, bares = _Sum(), _Sum()
        for _ in range(ROUNDS):
            await floor._add_round(bares, clients, bare, self.seconds / ROUNDS)
            await self._add_round(ours, clients, work, self.seconds / ROUNDS)
        return ours.figure(name, bares.figure("bare"))

    async def measure_by_turns(self, floor: Bench, name: str, *, work: Work, bare: Work) -> Figure:
        """Measure one client by turns with the floor, request by request, and tell what the median of the times makes.

        One writer mostly waits for the disk. What others do to it hits both alike, and the median leaves the worst out.
        """
        times: dict[Bench, list[float]] = {self: [], floor: []}
        cpu_before = {bench: bench._cpu_s() for bench in times}
        deadline = time.perf_counter() + 2 * self.seconds
        async with connected(self.port, 1) as (ours,), connected(floor.port, 1) as (theirs,):
            while time.perf_counter() < deadline:
                for bench, client, ask in ((floor, theirs, bare), (self, ours, work)):
                    started = time.perf_counter()
                    await ask(client, 0)
                    times[bench].append(time.perf_counter() - started)
        ours_figure, bare_figure = (
            Figure(name, 1 / statistics.median(taken), (bench._cpu_s() - cpu_before[bench]) / len(taken) * 1_000)
            for bench, taken in times.items()
        )
        return replace(ours_figure, floor=bare_figure)

    async def _add_round(self, total: _Sum, clients: int, work: Work, seconds: float) -> None:
        async with connected(self.port, clients) as opened:
            await asyncio.gather(*(work(client, number) for number, client in enumerate(opened)))  # warm
            cpu_before, started = self._cpu_s(), time.perf_counter()
            deadline = started + seconds

            async def repeat(client: Client, number: int) -> int:
                done = 0
                while time.perf_counter() < deadline:
                    await work(client, number)
                    done += 1
                return done

            total.done += sum(await asyncio.gather(*(repeat(client, number) for number, client in enumerate(opened))))
            total.elapsed_s += time.perf_counter() - started
            total.cpu_s += self._cpu_s() - cpu_before

    def _cpu_s(self) -> float:
        times = self._process.cpu_times()
        return times.user + times.system


TABLE_BODY = {
    "schema": {
        "type": "struct",
        "fields": [{"id": n, "name": f"column_{n}", "type": "string", "required": False} for n in range(1, 16)],
    }
}


def append_body(snapshot_id: int, sequence: int, parent: int | None) -> dict[str, Any]:
    """A commit as a writer of changes makes it."""
    snapshot: dict[str, object] = {
        "snapshot-id": snapshot_id,
        "sequence-number": sequence,
        "timestamp-ms": int(time.time() * 1_000),
        "manifest-list": f"s3://warehouse/db/table/metadata/snap-{snapshot_id}-0-00000000-0000-0000-0000-000000000000.avro",
        "summary": {
            "operation": "append",
            "added-data-files": "1",
            "added-records": "1000",
            "added-files-size": "100000",
            "total-records": str(sequence * 1_000),
            "total-data-files": str(sequence),
        },
        "schema-id": 0,
    }
    if parent is not None:
        snapshot["parent-snapshot-id"] = parent
    return {
        "requirements": [{"type": "assert-ref-snapshot-id", "ref": "main", "snapshot-id": parent}],
        "updates": [
            {"action": "add-snapshot", "snapshot": snapshot},
            {"action": "set-snapshot-ref", "ref-name": "main", "type": "branch", "snapshot-id": snapshot_id},
        ],
    }


class Writer:
    """Appends to one table, one snapshot after the other."""

    def __init__(self, table: str) -> None:
        self._path = f"/v1/namespaces/db/tables/{table}"
        self._sequence = 0
        self.conflicts = 0

    async def append(self, client: Client, count: int = 1) -> None:
        bodies = [append_body(number + 1, number + 1, number or None) for number in self._next(count)]
        body = {
            "requirements": bodies[0]["requirements"],
            "updates": [update for each in bodies for update in each["updates"]],
        }
        status, answer = await client.ask(request("POST", self._path, body, _PREFER))
        assert status == 200, answer
        self._sequence += count

    def _next(self, count: int) -> range:
        return range(self._sequence, self._sequence + count)

    async def append_contended(self, client: Client, number: int) -> None:
        """Append to a table that others append to as well: look, commit, and look again after a conflict."""
        while True:
            _, answer = await client.ask(request("GET", f"{self._path}?snapshots=refs"))
            metadata = orjson.loads(answer)["metadata"]
            main = metadata["refs"].get("main", {}).get("snapshot-id")
            snapshot_id = time.time_ns() // WRITERS * WRITERS + number
            body = append_body(snapshot_id, metadata["last-sequence-number"] + 1, main)
            status, _ = await client.ask(request("POST", self._path, body, _PREFER))
            if status == 200:
                return
            assert status == 409
            self.conflicts += 1


async def make_table(client: Client, name: str, snapshots: int) -> Writer:
    status, answer = await client.ask(request("POST", "/v1/namespaces/db/tables", {"name": name, **TABLE_BODY}))
    assert status == 200, answer
    writer = Writer(name)
    for done in range(0, snapshots, SNAPSHOTS_PER_COMMIT):
        await writer.append(client, min(SNAPSHOTS_PER_COMMIT, snapshots - done))
    return writer


async def run(bench: Bench, floor: Bench, only: str | None) -> list[Figure]:
    figures: list[Figure] = []
    async with connected(bench.port, 1) as (client,):
        await client.ask(request("POST", "/v1/namespaces", {"namespace": ["db"]}))
        for snapshots in (1, 100, OLD_SNAPSHOTS) if only in (None, "loads") else ():
            await make_table(client, f"t{snapshots}", snapshots)
            figures += await measure_loads(bench, floor, client, snapshots)
        if only in (None, "commits"):
            figures += await measure_commits(bench, floor, client)
        if only in (None, "lists"):
            figures += await measure_lists(bench, client)
    return figures


async def measure_loads(bench: Bench, floor: Bench, client: Client, snapshots: int) -> list[Figure]:
    path, name = f"/v1/namespaces/db/tables/t{snapshots}", f"load, {snapshots:,} snapshots"
    _, answer = await client.ask(request("GET", path))
    tag = (client.header(b"etag") or b"").decode()
    plain, bare = request("GET", path), request("GET", f"/load/{len(answer)}")
    found = [
        await bench.measure_beside(
            floor, f"{name}, plain", READERS, work=lambda each, _: each.ask(plain), bare=lambda each, _: each.ask(bare)
        )
    ]
    kinds = {
        "gzip": request("GET", path, headers="Accept-Encoding: gzip\r\n"),
        "refs": request("GET", f"{path}?snapshots=refs"),
        "304": request("GET", path, headers=f"If-None-Match: {tag}\r\n"),
    }
    status, _ = await client.ask(kinds["304"])
    assert status == 304, tag
    for kind, sent in kinds.items():
        found.append(await bench.measure(f"{name}, {kind}", READERS, lambda each, _, sent=sent: each.ask(sent)))
    return found


async def measure_commits(bench: Bench, floor: Bench, client: Client) -> list[Figure]:
    writers = [await make_table(client, f"own_{number}", 0) for number in range(WRITERS)]
    shared = await make_table(client, "shared", 0)
    return [
        await measure_one_writer(bench, floor, client, start=0),
        await measure_one_writer(bench, floor, client, start=OLD_SNAPSHOTS),
        await bench.measure(
            f"commit, {WRITERS} writers, a table each", WRITERS, lambda each, n: writers[n].append(each)
        ),
        await measure_contended(bench, shared),
    ]


async def measure_contended(bench: Bench, shared: Writer) -> Figure:
    """Commit from several clients to one table: of those that saw one version, one wins and the others look again."""
    figure = await bench.measure(f"commit, {WRITERS} writers, one table", WRITERS, shared.append_contended)
    lost = shared.conflicts / (figure.per_s * bench.seconds)
    return replace(figure, name=f"{figure.name}, {lost:.1f} lost for each")


async def measure_one_writer(bench: Bench, floor: Bench, client: Client, *, start: int) -> Figure:
    """Commit a hundred times to a table, then to the next of the same age; the floor writes one of the mean age."""
    count = 1 + int(bench.seconds * COMMITS_PER_S_MAX) // COMMITS_PER_TABLE
    writers = [await make_table(client, f"from_{start}_{number}", start) for number in range(count)]
    turns = (writer for writer in writers for _ in range(COMMITS_PER_TABLE))
    await make_table(client, f"mean_{start}", start + COMMITS_PER_TABLE // 2)
    await show_floor(floor, client, f"mean_{start}")
    name = f"commit, 1 writer, {start:,} to {start + COMMITS_PER_TABLE:,} snapshots"
    return await bench.measure_by_turns(floor, name, work=lambda each, _: next(turns).append(each), bare=commit_bare)


async def show_floor(floor: Bench, client: Client, table: str) -> None:
    """Give the bare server the document of a table, for the commits that follow."""
    _, answer = await client.ask(request("GET", f"/v1/namespaces/db/tables/{table}"))
    async with connected(floor.port, 1) as (other,):
        status, refusal = await other.ask(request("PUT", "/document", orjson.loads(answer)["metadata"]))
        assert status == 204, refusal


async def commit_bare(client: Client, _number: int) -> None:
    status, answer = await client.ask(request("POST", "/commit", {}))
    assert status == 200, answer


async def measure_lists(bench: Bench, client: Client) -> list[Figure]:
    await client.ask(request("POST", "/v1/namespaces", {"namespace": ["many"]}))
    for number in range(LISTED_NAMES):
        body = {"name": f"table_{number:04}", **TABLE_BODY}
        await client.ask(request("POST", "/v1/namespaces/many/tables", body))
    sent = request("GET", "/v1/namespaces/many/tables")
    return [await bench.measure(f"list of {LISTED_NAMES:,} tables", READERS, lambda each, _: each.ask(sent))]


@contextlib.contextmanager
def running(command: list[str], port: int, directory: Path, settings: dict[str, str]) -> Iterator[psutil.Process]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("LAKEFEED_")} | settings
    with (directory / "server.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=directory, env=environment)
    try:
        _wait_for(port, process)
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(START_TIMEOUT_S)


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    async def answers() -> bool:
        try:
            async with connected(port, 1):
                return True
        except OSError:
            return False

    deadline = time.monotonic() + START_TIMEOUT_S
    while not asyncio.run(answers()):
        assert process.poll() is None, "the server ended"
        assert time.monotonic() < deadline, "the server did not start"
        time.sleep(0.05)


@click.command(help=__doc__)
@click.option("--only", type=click.Choice(["loads", "commits", "lists"]), help="Measure these alone.")
@click.option("--seconds", default=2.0, show_default=True, help="Length of each measurement.")
@click.option("--store", type=click.Choice(["sqlite", "postgres"]), default="sqlite", show_default=True)
def main(only: str | None, seconds: float, store: str) -> None:
    port, floor_port = free_ports(2)
    repository = Path(__file__).parents[2]
    with contextlib.ExitStack() as stack:
        make_database = stack.enter_context(postgres_server()) if store == "postgres" else lambda: ""
        home, bare_home = (Path(stack.enter_context(tempfile.TemporaryDirectory())) for _ in range(2))
        settings = {"LAKEFEED_CATALOG_DATABASE": make_database()}
        serve = [LAKEFEED, "catalog", "serve", f"--http-port={port}", "--log-level=warning"]
        server = stack.enter_context(running(serve, port, home, settings))
        bare = [sys.executable, "-m", "tests.bench.bare_catalog", str(bare_home), str(floor_port)]
        floor = stack.enter_context(running(bare, floor_port, bare_home, {"PYTHONPATH": str(repository)}))
        benches = (Bench(port, server, seconds=seconds), Bench(floor_port, floor, seconds=seconds))
        figures = asyncio.run(run(*benches, only))
    _print(figures, store)


def _print(figures: list[Figure], store: str) -> None:
    table = Table(title=f"catalog on {store}")
    for heading in ("", "per second", "CPU ms", "bare: per second", "bare: CPU ms", "share"):
        table.add_column(heading, justify="left" if not heading else "right", no_wrap=True)
    for figure in figures:
        floor = figure.floor
        beside = (
            ("", "", "")
            if floor is None
            else (f"{floor.per_s:,.0f}", f"{floor.cpu_ms:.2f}", f"{figure.per_s / floor.per_s:.2f}")
        )
        table.add_row(figure.name, f"{figure.per_s:,.0f}", f"{figure.cpu_ms:.2f}", *beside)
    # At a fixed width: a terminal of 80 characters, or none at all, would cut the columns.
    Console(width=PRINTED_CHARS).print(table)


if __name__ == "__main__":
    main()
