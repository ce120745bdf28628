"""Flushes that take long: those that get on are left to it, whatever others need; those that stand still are not."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

from tests.writer.conftest import Lake
from tests.writer.feeding import Running, read_sequences, running_feed, shop, wait_for

KIB = 1024

# One batch is some 15 KiB in memory, and four of them are a flush.
SMALL = {"flush_max_bytes": 48 * KIB, "buffer_max_bytes": 192 * KIB}
BATCH = 50
SLOW = ("slow_1", "slow_2")


@pytest.fixture(autouse=True)
def _soon_late(monkeypatch):
    monkeypatch.setattr("lakefeed.writer.tables.table.LAG_MAX_S", 0.2)


def is_slow(location: str) -> bool:
    return "/slow_" in location and location.endswith(".parquet")


class Source:
    """Gives each table batches of its own, and knows which."""

    def __init__(self, running: Running) -> None:
        self._running = running
        self._next = 0
        self.given: dict[str, list[int]] = {}

    async def give(self, table: str) -> None:
        sequences = range(self._next, self._next + BATCH)
        self._next += BATCH
        self.given.setdefault(table, []).extend(sequences)
        await self._running.append(sequences, table=table, row=lambda n: {"id": n, "text": "x" * 200})


def is_flushing(running: Running, table: str) -> bool:
    writer = running.feed.tables.get(f"default.{table}")
    return writer is not None and writer.is_flushing


def is_behind(running: Running, table: str) -> bool:
    return running.feed.tables[f"default.{table}"].state.is_behind


async def begin_two_slow_flushes(running: Running, source: Source) -> None:
    """Let two tables begin flushes that together hold more than half of the memory, and gather more."""
    for table in SLOW:
        for _ in range(4):  # with more, a full memory could start a flush of fewer
            await source.give(table)
        await wait_for(lambda table=table: is_flushing(running, table))
    for table in SLOW:
        for _ in range(2):
            await source.give(table)


async def push_to_others(running: Running, source: Source) -> None:
    """Push many times what memory holds, without asking for a flush."""
    for _ in range(40):
        await source.give("good")
    end = running.log.durable_end
    await wait_for(lambda: running.feed.applier.offset == end)


def check_tables(lake: Lake, source: Source) -> None:
    for table, sequences in source.given.items():
        assert read_sequences(lake, f"default.{table}") == shop(*sequences)


def files_of(lake: Lake, table: str) -> int:
    with contextlib.closing(lake.open_pyiceberg()) as catalog:
        return len(catalog.load_table(f"default.{table}").inspect.files())


async def test_slow_flushes_are_not_restarted_though_others_need_memory(
    tmp_path: Path, local_lake: Lake, monkeypatch
) -> None:
    monkeypatch.setattr("lakefeed.writer.tables.pending.STALLED_AFTER_S", 3600)
    async with running_feed(tmp_path, local_lake, **SMALL) as running:
        source = Source(running)
        running.store.slow = is_slow
        await begin_two_slow_flushes(running, source)
        await push_to_others(running, source)
        assert all(is_flushing(running, table) for table in SLOW)
        running.store.gate.set()
        assert (await running.flush())["success"]
        begun = [location for location in running.store.begun if is_slow(location)]
    check_tables(local_lake, source)
    assert len(begun) == sum(files_of(local_lake, table) for table in SLOW), "each file was written once"


async def test_other_tables_are_read_once_a_table_that_catches_up_gets_stuck(
    tmp_path: Path, local_lake: Lake, monkeypatch
) -> None:
    """A table gets stuck as time passes, and nothing else happens: no flush ends, and nothing is evicted."""
    monkeypatch.setattr("lakefeed.writer.tables.table.LAG_MAX_S", 3600)
    async with running_feed(tmp_path, local_lake, **SMALL | {"buffer_max_bytes": 448 * KIB}) as running:
        source = Source(running)
        running.store.slow = is_slow
        await begin_two_slow_flushes(running, source)
        for table in [*["slow_1"] * 4, *["slow_2"] * 12]:
            await source.give(table)
        end = running.log.durable_end
        await wait_for(lambda: running.feed.applier.offset == end)
        evicted = running.feed.tables["default.slow_2"]
        evicted.evict_waiting()
        await wait_for(lambda: evicted.pending.buffer.bytes >= SMALL["flush_max_bytes"])
        assert is_behind(running, "slow_2"), "it has read again what fits"
        await source.give("good")
        await asyncio.sleep(0.2)
        assert running.feed.applier.offset == end, "the live reader leaves memory to the table that catches up"
        monkeypatch.setattr("lakefeed.writer.tables.table.LAG_MAX_S", 0)
        await wait_for(lambda: running.feed.applier.offset == running.log.durable_end)
        running.store.gate.set()
        await wait_for(lambda: not is_behind(running, "slow_2"))
        assert (await running.flush())["success"]
    check_tables(local_lake, source)


async def test_stalled_flush_is_evicted_for_others_and_started_again(
    tmp_path: Path, local_lake: Lake, monkeypatch
) -> None:
    monkeypatch.setattr("lakefeed.writer.tables.pending.STALLED_AFTER_S", 0.2)
    monkeypatch.setattr("lakefeed.writer.tables.pending.SLOWEST_BYTES_PER_S", 1_000_000 * KIB)
    async with running_feed(tmp_path, local_lake, **SMALL) as running:
        source = Source(running)
        running.store.slow = is_slow
        await begin_two_slow_flushes(running, source)
        while sum(map(is_slow, running.store.begun)) <= len(SLOW):
            await push_to_others(running, source)
        running.store.gate.set()
        await wait_for(lambda: not any(is_behind(running, table) for table in SLOW))
        assert (await running.flush())["success"]
    check_tables(local_lake, source)
