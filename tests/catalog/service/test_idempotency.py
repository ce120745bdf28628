"""Idempotency keys by themselves, on every store: waiting, races, and expiry."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from lakefeed.catalog.config import CatalogConfig
from lakefeed.catalog.errors import AlreadyExists, Unprocessable
from lakefeed.catalog.names import Pointer, TableId
from lakefeed.catalog.service.idempotency import Idempotency
from lakefeed.catalog.store.outcomes import RequestOutcome
from lakefeed.catalog.store.store import Store

T = TableId(("db",), "t")


def idempotency(store: Store, *, now_ms: int = 0, **settings: Any) -> Idempotency:
    return Idempotency(store, CatalogConfig(**settings), clock_ms=lambda: now_ms)


async def replay(outcome: RequestOutcome) -> str:
    return outcome.refusal.message if outcome.refusal else outcome.location


class Creation:
    """A request that creates a table when the test releases it."""

    def __init__(self, store: Store, location: str) -> None:
        self._store = store
        self._location = location
        self.begun = asyncio.Event()
        self.gate = asyncio.Event()

    async def __call__(self) -> str:
        self.begun.set()
        await self.gate.wait()
        await self._store.create_entry(T, Pointer(self._location))
        return self._location


async def test_a_request_under_a_key_in_work_waits_for_the_first(store: Store):
    both, first, second = idempotency(store), Creation(store, "one"), Creation(store, "two")
    second.gate.set()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(both.run_once("k", "f", handle=first, replay=replay))]
        await first.begun.wait()
        tasks.append(group.create_task(both.run_once("k", "f", handle=second, replay=replay)))
        await asyncio.sleep(0)
        first.gate.set()
    assert [task.result() for task in tasks] == ["one", "one"]
    assert not second.begun.is_set()


async def test_of_two_processes_under_one_key_the_later_rolls_back_and_returns_the_earlier_outcome(store: Store):
    requests = [Creation(store, "one"), Creation(store, "two")]
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(idempotency(store).run_once("k", "f", handle=request, replay=replay))
            for request in requests
        ]
        for request in requests:
            await request.begun.wait()
        requests[1].gate.set()
        await tasks[1]
        requests[0].gate.set()
    assert [task.result() for task in tasks] == ["two", "two"]
    assert await store.load_pointer(T) == Pointer("two")


async def test_outcomes_are_deleted_after_their_lifetime_and_never_before(store: Store):
    for at_ms, key in ((0, "old"), (5_000, "new")):
        with pytest.raises(AlreadyExists):
            await idempotency(store, now_ms=at_ms).run_once(key, "f", handle=_refuse, replay=replay)
    await idempotency(store, now_ms=10_000, idempotency_lifetime_s=10).sweep()
    assert [await store.load_outcome(key) is not None for key in ("old", "new")] == [True, True]
    await idempotency(store, now_ms=10_001, idempotency_lifetime_s=10).sweep()
    assert [await store.load_outcome(key) is not None for key in ("old", "new")] == [False, True]


async def test_oldest_outcomes_beyond_the_limit_are_deleted(store: Store, caplog):
    for number in range(5):
        with pytest.raises(AlreadyExists):
            await idempotency(store, now_ms=number).run_once(f"{number}", "f", handle=_refuse, replay=replay)
    await idempotency(store, now_ms=5, idempotency_keys_max=2).sweep()
    assert [await store.load_outcome(f"{number}") is not None for number in range(5)] == [False] * 3 + [True] * 2
    assert "idempotency_keys_expired_early" in caplog.text


async def _refuse() -> str:
    raise AlreadyExists("Table already exists: db.t" + "x" * 10_000)


async def test_message_of_a_recorded_error_is_cut(store: Store):
    with pytest.raises(AlreadyExists):
        await idempotency(store).run_once("k", "f", handle=_refuse, replay=replay)
    repeated = await idempotency(store).run_once("k", "f", handle=_refuse, replay=replay)
    assert repeated.startswith("Table already exists: db.t")
    assert len(repeated) == 2_000
    with pytest.raises(Unprocessable):
        await idempotency(store).run_once("k", "other", handle=_refuse, replay=replay)
