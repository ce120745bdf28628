"""Work that is done once for all who ask for it at the same time."""

from __future__ import annotations

import asyncio

import pytest

from lakefeed.aio import SharedWork


class Work:
    """Work that goes on until it is let to end; counts how often it was begun, and given up."""

    def __init__(self, error: Exception | None = None) -> None:
        self.gate = asyncio.Event()
        self.started = asyncio.Event()
        self.error = error
        self.begun = 0
        self.given_up = 0

    async def __call__(self) -> str:
        self.begun += 1
        self.started.set()
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.given_up += 1
            raise
        if self.error is not None:
            raise self.error
        return f"outcome {self.begun}"


async def ask(shared: SharedWork[str], work: Work, count: int) -> list[asyncio.Task[str]]:
    """Let so many ask, and wait until they wait."""
    asking = [asyncio.create_task(shared.outcome("it", work)) for _ in range(count)]
    await work.started.wait()
    return asking


async def cancel(task: asyncio.Task[str]) -> None:
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


async def test_outcome_is_that_of_one_work_for_all_who_ask_meanwhile_and_a_new_one_after_it():
    shared, work = SharedWork[str]("test"), Work()
    asking = await ask(shared, work, 5)
    work.gate.set()
    assert await asyncio.gather(*asking) == ["outcome 1"] * 5
    assert await shared.outcome("it", work) == "outcome 2"


async def test_error_goes_to_all_who_wait_and_to_nobody_after_them():
    shared, work = SharedWork[str]("test"), Work(ValueError("broken"))
    asking = await ask(shared, work, 5)
    work.gate.set()
    assert [type(each) for each in await asyncio.gather(*asking, return_exceptions=True)] == [ValueError] * 5
    assert work.begun == 1
    work.error = None
    assert await shared.outcome("it", work) == "outcome 2"


async def test_work_goes_on_for_the_others_when_who_began_it_leaves():
    shared, work = SharedWork[str]("test"), Work()
    first, *others = await ask(shared, work, 3)
    await cancel(first)
    work.gate.set()
    assert await asyncio.gather(*others) == ["outcome 1"] * 2
    assert (work.begun, work.given_up) == (1, 0)


async def test_work_that_nobody_waits_for_any_more_is_given_up_and_begun_anew_by_the_next():
    shared, work = SharedWork[str]("test"), Work()
    for task in await ask(shared, work, 3):
        await cancel(task)
    work.started.clear()
    (again,) = await ask(shared, work, 1)
    assert work.given_up == 1
    work.gate.set()
    assert await again == "outcome 2"


async def test_works_about_different_things_do_not_wait_for_each_other():
    shared, slow, quick = SharedWork[str]("test"), Work(), Work()
    quick.gate.set()
    (waiting,) = await ask(shared, slow, 1)
    assert await shared.outcome("other", quick) == "outcome 1"
    await cancel(waiting)


@pytest.mark.parametrize("error", [None, ValueError("broken")])
async def test_nothing_is_kept_of_work_that_has_ended(error: Exception | None):
    shared, work = SharedWork[str]("test"), Work(error)
    work.gate.set()
    await asyncio.gather(shared.outcome("it", work), return_exceptions=True)
    assert shared._running == {}
