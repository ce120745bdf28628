"""One run: a world of nodes, sources, catalog and store, drawn from a seed, with faults, until it is quiet again.

draw the world --> faults for a while --> heal everything --> sources finish, nodes flush --> checks
                                                          --> restart all nodes, flush --> checks again
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import random
import shutil
import tempfile
import traceback
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
from yarl import URL

from lakefeed.catalog.store.store import StoreContents
from lakefeed.contract.errors import CatalogUnavailable, CommitUnknown
from lakefeed.ingest.config import Config, IngestConfig, ServerConfig
from lakefeed.storage.config import StorageConfig
from lakefeed.writer.config import IcebergConfig, LogConfig, WriterConfig
from lakefeed.writer.wal.directory import is_disk_full
from tests.simulation.catalog import WAREHOUSE, Catalog
from tests.simulation.lake import Lake
from tests.simulation.loop import Stuck, VirtualLoop, virtual_time
from tests.simulation.network import Conditions, HttpRequest, HttpResponse, Network, Process
from tests.simulation.node import Node, simulated_seams
from tests.simulation.operators import Operator
from tests.simulation.scenarios import Fault
from tests.simulation.sources import Change, HttpSource, RowSource, Source, Surroundings, WebSocketSource
from tests.simulation.storage import Objects

KIB = 1024

# How long everything may take once all is well; far longer than every backoff.
QUIET_MAX_S = 600.0

# What survives a crash is the journal's matter, so the files themselves need no disk.
MEMORY = Path("/dev/shm")

MOVING = frozenset({Fault.MOVES, Fault.MOVES_UNACKED, Fault.ROWS_MOVE})

TABLES = ("users", "orders", "sales.items")


class _TinyLog(LogConfig):
    """Settings below what a service would be allowed: rotations, trims and full logs within a few batches."""

    def __post_init__(self) -> None:
        """Check nothing."""


@dataclass(slots=True)
class Run:
    """The outcome of a seed: what went wrong, and what happened."""

    seed: int
    faults: frozenset[Fault]
    problems: list[str] = field(default_factory=list)
    trace: list[str] = field(default_factory=list)
    commits: int = 0
    steps: int = 0
    virtual_s: float = 0.0
    echo: Callable[[str], object] = lambda _: None


def run_seed(
    seed: int,
    allowed: Iterable[Fault],
    *,
    required: Iterable[Fault] = (),
    echo: Callable[[str], object] = lambda _: None,
) -> Run:
    """Run one seed. It draws some of the `allowed` faults, and has all of the `required` ones."""
    chance = random.Random(seed)
    drawn = frozenset(fault for fault in sorted(allowed, key=lambda each: each.name) if chance.random() < 0.4)
    run = Run(seed, drawn | frozenset(required), echo=echo)
    directory = Path(tempfile.mkdtemp(prefix="simulation", dir=MEMORY if MEMORY.is_dir() else None))
    try:
        with virtual_time(seed) as loop, simulated_seams():
            world = World(run, loop, chance, directory)
            try:
                loop.run_until_complete(world.live())
            except Stuck as stuck:
                run.problems.append(f"stuck: {stuck}")
            run.steps, run.virtual_s, run.commits = loop.steps, loop.time(), world.lake.commits
    finally:
        shutil.rmtree(directory)
    return run


def describe(run: Run) -> str:
    """Return the command that replays a run, and its problems."""
    faults = ",".join(sorted(fault.name for fault in run.faults))
    problems = "\n  ".join(run.problems[:10])
    return f"python -m tests.simulation {run.seed} --faults {faults}\n  {problems}"


class World:
    """Everything of one run."""

    def __init__(self, run: Run, loop: VirtualLoop, chance: random.Random, directory: Path) -> None:
        self.run = run
        self.loop = loop
        self.chance = chance
        self.faults = run.faults
        self.network = Network(random.Random(f"network {run.seed}"))
        self.objects = Objects(random.Random(f"store {run.seed}"))
        self.lake = Lake(self.objects)
        self.catalog = Catalog(self.objects, self.lake)
        names = ("a", "b", "c")[: chance.choice((2, 2, 3) if MOVING & self.faults else (1, 2, 2, 3))]
        self.nodes = [self._node(name, directory) for name in names]
        self.sources = [self._source(f"s{number}") for number in range(chance.randint(1, 3))]
        self.operator = Operator(
            self.network, lambda: self.catalog.process, self.objects, random.Random(f"operator {run.seed}")
        )
        self.me = Process("client", contextvars.copy_context())
        self.backup: StoreContents | None = None
        self.is_healed = False

    def trace(self, text: str) -> None:
        """Note what happens, for whoever replays the seed."""
        line = f"{self.loop.time() - 1000:8.3f} {text}"
        self.run.trace.append(line)
        self.run.echo(line)

    def report(self, problem: str) -> None:
        """Note what must not happen."""
        self.trace(f"PROBLEM {problem}")
        self.run.problems.append(problem)

    # -- the world that a seed draws

    def _node(self, name: str, directory: Path) -> Node:
        chance = self.chance
        config = Config(
            server=ServerConfig(data_dir=str(directory / f"data-{name}"), node_id=name, shutdown_deadline_s=5.0),
            ingest=IngestConfig(frame_max_bytes=4 * KIB, event_max_bytes=2 * KIB, message_rate_per_s=0.0),
            log=_TinyLog(segment_max_bytes=16 * KIB, max_bytes=chance.choice((64, 256)) * KIB),
            writer=WriterConfig(
                flush_max_age_s=chance.choice((0.5, 2.0, 8.0)),
                flush_check_interval_s=0.5,
                flush_max_changes=chance.choice((5, 50)),
                partition="none",
                ledger=False,
                transactions=Fault.TRANSACTIONS in self.faults,
            ),
            iceberg=IcebergConfig(uri="http://catalog"),
            storage=StorageConfig(warehouse=WAREHOUSE),
        )
        return Node(name, config, directory=directory, network=self.network, catalog=self.catalog, objects=self.objects)

    def _source(self, name: str) -> Source:
        chance = self.chance
        around = Surroundings(
            self.nodes, self.network, self.lake, random.Random(f"{name} {self.run.seed}"), self.report, self.trace
        )
        tables = chance.sample(TABLES, chance.randint(1, 3))
        is_rows = {Fault.ROWS, Fault.ROWS_MOVE} & self.faults and chance.random() < 0.5
        is_http = Fault.HTTP in self.faults and chance.random() < 0.4
        moves = bool({Fault.MOVES, Fault.MOVES_UNACKED} & self.faults)
        pause_max_s = chance.choice((0.2, 0.5, 2.0))
        if is_rows or self.faults == {Fault.ROWS_MOVE}:
            rows = _changes(name, 0, chance.randint(10, 60), tables, chance)
            return RowSource(name, rows, around, moves=Fault.ROWS_MOVE in self.faults, pause_max_s=pause_max_s)
        epochs = chance.randint(1, 3) if Fault.EPOCHS in self.faults else 1
        kind: type[WebSocketSource | HttpSource] = HttpSource if is_http else WebSocketSource
        source = kind(
            name,
            [_changes(name, epoch, chance.randint(10, 60), tables, chance) for epoch in range(epochs)],
            around,
            keeps_all=Fault.MOVES_UNACKED not in self.faults,
            moves=moves,
            pause_max_s=pause_max_s,
        )
        if isinstance(source, WebSocketSource) and chance.random() < 0.2:
            source.ack_level = "committed"
        return source

    # -- the run

    async def live(self) -> None:
        """Live through all phases."""
        try:
            await self.catalog.start()
            for node in self.nodes:
                self._start(node)
            sending = [self.loop.create_task(source.run()) for source in self.sources]
            watching = self.loop.create_task(self._watch())
            await self._inject_faults()
            await self._heal()
            await self._become_quiet(sending)
            self._check("after the run")
            for node in self.nodes:
                node.kill(power_loss=None)
                self._start(node)
            self.trace("all nodes restarted")
            await self._flush_all()
            self._check("after a restart")
            watching.cancel()
        finally:
            await self._clean_up()

    async def _clean_up(self) -> None:
        for node in self.nodes:
            await node.clean_up()
        await self.catalog.clean_up()
        await self.network.close()
        own = asyncio.current_task()
        others = [task for task in asyncio.all_tasks() if task is not own]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _inject_faults(self) -> None:
        conditions = self.network.conditions
        if Fault.NETWORK in self.faults:
            share = self.chance.choice((0.02, 0.1))
            conditions.lost = conditions.response_lost = conditions.duplicated = share
            conditions.delay_max_s = self.chance.choice((0.01, 0.1))
        actions = [action for fault, action in self._actions().items() if fault in self.faults]
        until = self.loop.time() + self.chance.uniform(5.0, 30.0)
        while self.loop.time() < until:
            await asyncio.sleep(self.chance.random() * 3.0)
            if actions:
                await self.chance.choice(actions)()

    def _actions(self) -> dict[Fault, Callable[[], Awaitable[object]]]:
        return {
            Fault.KILL: self._kill,
            Fault.POWER: self._lose_power,
            Fault.STOP: self._stop,
            Fault.PARTITION: self._cut_off,
            Fault.CATALOG: self._kill_catalog,
            Fault.STORE: self._fail_store,
            Fault.DISK: self._fill_disk,
            Fault.CLOCK: self._set_clock,
            Fault.COMPACT: lambda: self._operate(self.operator.compact),
            Fault.EXPIRE: lambda: self._operate(self.operator.expire),
            Fault.ROLLBACK: lambda: self._operate(self.operator.roll_back),
            Fault.DROP: lambda: self._operate(self.operator.drop),
            Fault.MARKER: lambda: self._operate(self.operator.remove_marker),
            Fault.RESTORE: self._back_up_or_restore,
        }

    # -- faults

    def _later(self, delay_s: float, action: Callable[[], object]) -> None:
        """Do something later, unless the world is healed by then."""
        self.loop.call_later(delay_s, lambda: None if self.is_healed else action())

    def _start(self, node: Node) -> None:
        if not node.is_up:
            self.trace(f"{node.name}: starts")
            node.start()

    async def _kill(self) -> None:
        node = self.chance.choice(self.nodes)
        # After a number of turns of the loop, so that every await is a place to die.
        self.loop.at_step(self.chance.randint(1, 400), lambda: self._kill_now(node, None))

    async def _lose_power(self) -> None:
        node, chance = self.chance.choice(self.nodes), random.Random(self.chance.random())
        self.loop.at_step(self.chance.randint(1, 400), lambda: self._kill_now(node, chance))

    def _kill_now(self, node: Node, power_loss: random.Random | None) -> None:
        if node.is_up and not self.is_healed:
            self.trace(f"{node.name}: killed, power_loss={power_loss is not None}")
            node.kill(power_loss=power_loss)
            self._later(self.chance.choice((0.0, 1.0, 10.0)), lambda: self._start(node))

    async def _stop(self) -> None:
        node = self.chance.choice(self.nodes)
        if node.is_up:
            self.trace(f"{node.name}: stops")
            await node.stop()
            self.trace(f"{node.name}: stopped")
            self._start(node)

    async def _cut_off(self) -> None:
        link = frozenset((self.chance.choice(self.nodes).name, "catalog"))
        self.trace(f"cut: {sorted(link)}")
        self.network.conditions.cut.add(link)
        self._later(self.chance.uniform(0.5, 15.0), lambda: self.network.conditions.cut.discard(link))

    async def _kill_catalog(self) -> None:
        self.trace("catalog: killed")
        self.catalog.kill()
        await asyncio.sleep(self.chance.choice((0.0, 0.5, 5.0)))
        await self.catalog.start()
        self.trace("catalog: started")

    async def _fail_store(self) -> None:
        share = self.chance.choice((0.2, 1.0))
        self.trace(f"store fails: {share}")
        self.objects.fault = lambda: self.objects.chance.random() < share
        self._later(self.chance.uniform(0.5, 8.0), self._heal_store)

    def _heal_store(self) -> None:
        self.objects.fault = lambda: False

    async def _fill_disk(self) -> None:
        node = self.chance.choice(self.nodes)
        disk = node.disk
        self.trace(f"{node.name}: disk is full")
        disk.no_room = True
        self._later(self.chance.uniform(0.5, 5.0), lambda: setattr(disk, "no_room", False))

    async def _set_clock(self) -> None:
        node = self.chance.choice(self.nodes)
        node.clock.error_s = self.chance.choice((-86_400.0, -10.0, 0.0, 10.0, 86_400.0))
        self.trace(f"{node.name}: clock is off by {node.clock.error_s}")

    async def _operate(self, operation: Callable[[], Awaitable[str]]) -> None:
        self.trace(f"operator: {await operation()}")

    async def _back_up_or_restore(self) -> None:
        if self.backup is None or self.chance.random() < 0.3:
            self.backup = await self.catalog.back_up()
            self.trace("catalog: backed up")
            return
        for node in self.nodes:
            node.kill(power_loss=None)
        self.catalog.kill()
        await asyncio.sleep(1.0)
        await self.catalog.restore(self.backup)
        await self.catalog.start()
        self.trace("catalog: restored from the backup, nodes were down")
        for node in self.nodes:
            self._start(node)

    # -- becoming quiet

    async def _heal(self) -> None:
        self.is_healed = True
        self.network.conditions = Conditions()
        self._heal_store()
        if self.catalog.process is None:
            await self.catalog.start()
        for node in self.nodes:
            node.disk.no_room = False
            self._start(node)
        self.trace("healed")

    async def _watch(self) -> None:
        """Restart processes that ended by themselves, as a supervisor does, and report ends that are not expected."""
        while True:
            await asyncio.sleep(1.0)
            for node in self.nodes:
                life = node.life
                if life is not None and not node.is_up:
                    if life.failure is not None and not _is_outage(life.failure):
                        self.report(f"{node.name} ended by itself: {_texts(life.failure)}")
                    node.kill(power_loss=None)
                    self._start(node)
            if not self.is_healed and self.chance.random() < 0.2:
                await self._ask_status(self.chance.choice(self.nodes))

    async def _become_quiet(self, sending: list[asyncio.Task[None]]) -> None:
        _, pending = await asyncio.wait(sending, timeout=QUIET_MAX_S)
        for task in sending:
            if task in pending:
                self.report(f"a source is stuck: {self.sources[sending.index(task)].name}")
            else:
                task.result()
        await self._flush_all()

    async def _flush_all(self) -> None:
        for node in self.nodes:
            await self._flush(node)

    async def _flush(self, node: Node) -> None:
        """Flush a node until it has committed everything."""
        response: Any = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(QUIET_MAX_S):
                while response is None or response.status != 200:
                    await asyncio.sleep(1.0)
                    response = await self._ask(node, "POST", "/flush") or response
        if response is None or response.status != 200:
            self.report(f"{node.name} is stuck: {'no answer' if response is None else response.body[:600]!r}")

    async def _ask(self, node: Node, method: str, path: str) -> HttpResponse | None:
        try:
            async with asyncio.timeout(200.0):
                return await self.network.request(self.me, node.server, HttpRequest(method, URL(path), {}, b""))
        except (ConnectionError, TimeoutError):
            return None

    # -- what must be true

    async def _ask_status(self, node: Node) -> None:
        if not node.is_serving or node.life is None or node.life.app is None:
            return
        # Not through the network: what it says must be true at the moment it says it.
        asking = node.life.start(node.life.handle(HttpRequest("GET", URL("/status"), {}, b"")))
        await asyncio.wait([asking])
        if asking.cancelled() or asking.result().status != 200:
            return
        response = asking.result()
        by_name = {source.name: source for source in self.sources}
        for told in orjson.loads(response.body)["sources"]:
            source, committed = by_name[told["sourceDoId"]], told["lastCommittedSequence"]
            if committed is not None and committed >= 0:
                lacking = [uid for uid in source.uids_below(told["epoch"], committed) if not self.lake.has(uid)]
                if lacking:
                    self.report(f"/status of {node.name} is not true: {told}, not committed: {lacking[:5]}")

    def _check(self, when: str) -> None:
        """Every promised change is committed once, in order; a row without a number at most as often as it was sent."""
        self.trace(f"check {when}")
        for source in self.sources:
            missing = source.missing(self.lake)
            if missing:
                self.report(f"lost {when}: {source.name}: {len(missing)} promised changes, {missing[:5]}")
        # The network may deliver a request twice, and rows without numbers are then accepted twice.
        copies = 2 if Fault.NETWORK in self.faults else 1
        rows = (source for source in self.sources if isinstance(source, RowSource))
        attempts = {uid: copies * count for source in rows for uid, count in source.attempts.items()}
        for uid, tables in sorted(self.lake.committed.items()):
            if len(tables) > attempts.get(uid, 1):
                self.report(f"duplicated {when}: {uid} in {tables}")
                break
        for problem in self.lake.problems[:3]:
            self.report(f"{when}: {problem}")


def _changes(source: str, epoch: int, count: int, tables: list[str], chance: random.Random) -> list[Change]:
    stride, padding = chance.choice((1, 1, 3)), "x" * chance.choice((0, 300, 900))
    return [
        Change(f"{source}:{epoch}:{number:03}", chance.choice(tables), number * stride, padding)
        for number in range(count)
    ]


def _is_outage(error: BaseException) -> bool:
    """Return whether a process could not start because of the catalog or a full disk; a supervisor starts it again."""
    if isinstance(error, BaseExceptionGroup):
        return all(map(_is_outage, error.exceptions))
    is_full = isinstance(error, OSError) and is_disk_full(error)
    return is_full or isinstance(error, CatalogUnavailable | CommitUnknown)


def _texts(error: BaseException) -> list[str]:
    if isinstance(error, BaseExceptionGroup):
        return [text for each in error.exceptions for text in _texts(each)]
    return ["".join(traceback.format_exception(error))[-600:]]
