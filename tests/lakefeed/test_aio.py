"""Building blocks for asyncio: parallel calls, single flight, keyed locks."""

from __future__ import annotations

import asyncio

import pytest

from lakefeed.aio import KeyedLocks, SingleFlight, map_parallel
from lakefeed.contract.errors import TooManyWaiting

# -- parallel calls


async def test_parallel_calls_are_bounded_and_their_results_in_order():
    running: set[int] = set()

    async def act(item: int) -> int:
        running.add(item)
        assert len(running) <= 3
        await asyncio.sleep(0)
        running.remove(item)
        return -item

    assert await map_parallel(act, range(10), at_once=3) == [-item for item in range(10)]


async def test_failed_parallel_call_is_raised_after_all_have_ended():
    ended: list[int] = []

    async def act(item: int) -> None:
        if item == 0:
            raise ValueError("broken")
        await asyncio.sleep(0)
        ended.append(item)

    with pytest.raises(ValueError, match="broken"):
        await map_parallel(act, range(3), at_once=3)
    assert ended == [1, 2]


# -- single flight


class Call:
    """A call that runs until the gate opens; counts how often it was started and cancelled."""

    def __init__(self, error: Exception | None = None) -> None:
        self.gate = asyncio.Event()
        self.running = asyncio.Event()
        self.error = error
        self.started = 0
        self.cancelled = 0

    async def __call__(self) -> str:
        self.started += 1
        self.running.set()
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.error is not None:
            raise self.error
        return f"outcome {self.started}"


async def ask(flights: SingleFlight[str], call: Call, count: int) -> list[asyncio.Task[str]]:
    """Start callers, and wait until they wait."""
    callers = [asyncio.create_task(flights.run("key", call)) for _ in range(count)]
    await call.running.wait()
    return callers


async def cancel(task: asyncio.Task[str]) -> None:
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


async def test_callers_share_the_running_call_and_the_next_caller_starts_another():
    flights, call = SingleFlight[str]("test"), Call()
    callers = await ask(flights, call, 5)
    call.gate.set()
    assert await asyncio.gather(*callers) == ["outcome 1"] * 5
    assert await flights.run("key", call) == "outcome 2"


async def test_error_goes_to_all_waiting_callers_and_to_no_later_one():
    flights, call = SingleFlight[str]("test"), Call(ValueError("broken"))
    callers = await ask(flights, call, 5)
    call.gate.set()
    assert [type(each) for each in await asyncio.gather(*callers, return_exceptions=True)] == [ValueError] * 5
    assert call.started == 1
    call.error = None
    assert await flights.run("key", call) == "outcome 2"


async def test_call_survives_the_caller_that_started_it():
    flights, call = SingleFlight[str]("test"), Call()
    first, *others = await ask(flights, call, 3)
    await cancel(first)
    call.gate.set()
    assert await asyncio.gather(*others) == ["outcome 1"] * 2
    assert (call.started, call.cancelled) == (1, 0)


async def test_call_without_waiting_callers_is_cancelled_and_the_next_caller_starts_another():
    flights, call = SingleFlight[str]("test"), Call()
    for task in await ask(flights, call, 3):
        await cancel(task)
    call.running.clear()
    (again,) = await ask(flights, call, 1)
    assert call.cancelled == 1
    call.gate.set()
    assert await again == "outcome 2"


async def test_calls_of_different_keys_do_not_wait_for_each_other():
    flights, slow, quick = SingleFlight[str]("test"), Call(), Call()
    quick.gate.set()
    (waiting,) = await ask(flights, slow, 1)
    assert await flights.run("other", quick) == "outcome 1"
    await cancel(waiting)


@pytest.mark.parametrize("error", [None, ValueError("broken")])
async def test_nothing_is_kept_of_calls_that_have_ended(error: Exception | None):
    flights, call = SingleFlight[str]("test"), Call(error)
    call.gate.set()
    await asyncio.gather(flights.run("key", call), return_exceptions=True)
    assert flights._flights == {}


# -- keyed locks


async def test_waiting_for_a_key_is_bounded_and_a_cancelled_caller_leaves_the_queue():
    locks = KeyedLocks(waiting_max=1)
    order: list[str] = []
    release = asyncio.Event()

    async def work(name: str) -> None:
        async with locks.hold("key"):
            order.append(name)
            await release.wait()

    async with asyncio.TaskGroup() as group:
        group.create_task(work("first"))
        second = group.create_task(work("second"))
        await asyncio.sleep(0)
        with pytest.raises(TooManyWaiting):
            await work("third")
        second.cancel()
        await asyncio.sleep(0)
        group.create_task(work("fourth"))
        release.set()
    assert order == ["first", "fourth"]
    assert locks._locks == {}
