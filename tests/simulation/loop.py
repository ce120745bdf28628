"""Virtual time: an event loop whose clock jumps to the next timer, and everything else that makes a run repeatable.

Fake: the clock, thread pools (jobs run on the loop, after a virtual delay), random numbers and ids. No thread is
started and nothing sleeps. Real: asyncio's tasks, futures, locks and their order.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import random
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from unittest import mock

from lakefeed.writer.commit.committer import Committer
from lakefeed.writer.commit.fencing import Fence

# The wall clock at the start of a run.
START_S = 1_794_800_000.0

# What a job of a thread pool takes.
JOB_MAX_S = 0.003


@dataclass(slots=True)
class MachineClock:
    """How far the wall clock of one machine is off."""

    error_s: float = 0.0


# The clock of the machine that the running task belongs to.
machine_clock: ContextVar[MachineClock] = ContextVar("machine_clock")

_RIGHT = MachineClock()


class Stuck(AssertionError):
    """No task can ever continue."""


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop that never waits."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        self.steps = 0
        self._chance = chance
        self._now = 1_000.0
        self._selector = self
        self._due: list[tuple[int, int, Callable[[], object]]] = []
        self._order = itertools.count()

    def time(self) -> float:
        return self._now

    def select(self, timeout: float | None) -> tuple[()]:
        """Advance the clock to the next timer."""
        if timeout is None:
            raise Stuck("no task is ready and no timer is set")
        self._now += timeout
        return ()

    def at_step(self, steps: int, action: Callable[[], object]) -> None:
        """Call something after so many turns of the loop: between any two awaits, unlike a timer."""
        heapq.heappush(self._due, (self.steps + steps, next(self._order), action))

    def run_in_executor(self, _executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """Run a job on the loop, after a while. As in a thread, it runs even if nothing waits for it any more."""
        done: asyncio.Future[Any] = self.create_future()

        def work() -> None:
            try:
                result = func(*args)
            except Exception as error:  # noqa: BLE001 - the caller gets it
                if not done.done():
                    done.set_exception(error)
            else:
                if not done.done():
                    done.set_result(result)

        self.call_later(self._chance.random() * JOB_MAX_S, work)
        return done

    def _run_once(self) -> None:
        super()._run_once()  # type: ignore[misc]
        self.steps += 1
        while self._due and self._due[0][0] <= self.steps:
            heapq.heappop(self._due)[2]()

    def _process_events(self, _events: object) -> None:
        """Do nothing: there are no sockets."""

    def _write_to_self(self) -> None:
        """Do nothing: there is no other thread to wake the loop."""


class StepExecutor:
    """Stands in for a thread pool of one thread: jobs in order, each after a virtual delay."""

    def __init__(self, *_args: object, **_options: object) -> None:
        self._loop = asyncio.get_running_loop()
        self._free_at = 0.0

    def submit(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()

        def run() -> None:
            try:
                done.set_result(work(*args, **kwargs))
            except Exception as error:  # noqa: BLE001 - the caller gets it
                done.set_exception(error)

        took_s = random.random() * JOB_MAX_S + 1e-6
        self._free_at = max(self._free_at, self._loop.time()) + took_s
        self._loop.call_at(self._free_at, run)
        return done

    def shutdown(self, *_args: object, **_options: object) -> None:
        """End; what was submitted still runs."""

    def __enter__(self) -> StepExecutor:
        return self

    def __exit__(self, *_: object) -> None:
        """End."""


@contextlib.contextmanager
def virtual_time(seed: int) -> Iterator[VirtualLoop]:
    """Replace clocks, random numbers and ids by those of a seed while the block runs."""
    chance = random.Random(f"product {seed}")
    loop = VirtualLoop(random.Random(f"jobs {seed}"))

    def wall_clock() -> float:
        return START_S + loop.time() + machine_clock.get(_RIGHT).error_s

    kept = random.getstate()
    random.seed(seed)
    with contextlib.ExitStack() as patches:
        patch = mock.patch
        for patched in (
            patch.object(time, "time", wall_clock),
            patch.object(time, "time_ns", lambda: int(wall_clock() * 1e9)),
            patch.object(time, "monotonic", loop.time),
            patch.object(random, "SystemRandom", lambda: chance),
            patch("secrets.randbits", chance.getrandbits),
            patch.object(uuid, "uuid4", lambda: uuid.UUID(int=chance.getrandbits(128), version=4)),
            # Defaults that were bound when the modules were imported.
            patch.dict(Committer.__init__.__kwdefaults__, clock=wall_clock),
            patch.dict(Fence.__init__.__kwdefaults__, clock=wall_clock),
            patch("lakefeed.writer.wal.log.ThreadPoolExecutor", StepExecutor),
            patch("lakefeed.ingest.service.ThreadPoolExecutor", StepExecutor),
            # Reads files of the environment at every start of a node.
            patch("importlib.metadata.version", lambda _: "simulated"),
        ):
            patches.enter_context(patched)
        try:
            yield loop
        finally:
            random.setstate(kept)
            loop.close()
