"""Freshness of tables beside one that cannot be written: what they are given is committed as if it were not there."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.fakes import CatalogFault, FlakyCatalog
from tests.writer.conftest import Lake
from tests.writer.feeding import Running, read_sequences, running_feed, shop, wait_for

KIB = 1024
BATCH = 50

# One batch is some 14 KiB in memory: three batches are no flush by size, and thirteen fill it.
SMALL = {"flush_max_bytes": 48 * KIB, "buffer_max_bytes": 192 * KIB}
# Its first batch is a flush, so that all others gather behind the one that fails.
BAD = {"default.bad": {"flush_max_changes": BATCH}}


class Pushing:
    """Gives tables batches, one after the other, and knows what each was given."""

    def __init__(self, running: Running) -> None:
        self._running = running
        self._next = 0
        self.given: dict[str, list[int]] = {}

    async def give(self, *tables: str) -> None:
        for table in tables:
            sequences = range(self._next, self._next + BATCH)
            self._next += BATCH
            self.given.setdefault(table, []).extend(sequences)
            await self._running.append(sequences, table=table, row=lambda n: {"id": n, "text": "x" * 200})

    def check(self, lake: Lake) -> None:
        for table, sequences in self.given.items():
            assert read_sequences(lake, f"default.{table}") == shop(*sequences)


def refuse_bad(running: Running) -> None:
    running.store.broken = lambda location: "/bad-" in location


async def test_others_are_flushed_for_memory_though_a_failing_table_has_the_largest_buffer(
    tmp_path: Path, local_lake: Lake
) -> None:
    others = ("one", "two", "three", "four")
    async with running_feed(tmp_path, local_lake, tables=BAD, **SMALL) as running:
        refuse_bad(running)
        pushing = Pushing(running)
        await pushing.give(*["bad"] * 6)
        await wait_for(lambda: running.status("default.bad").get("state") == "paused")
        for _ in range(6):
            await pushing.give(*others)
        end = running.log.durable_end
        await wait_for(lambda: running.feed.applier.offset == end)
        assert running.status("default.bad")["committedRows"] == 0
        flushed = [running.status(f"default.{table}")["lastFlushReason"] for table in others]
        assert "memory" in flushed, "no client asked for it"
        running.store.broken = lambda _: False
        # Until its next retry the table is paused, and a flush would answer so.
        await wait_for(lambda: running.status("default.bad")["committedRows"] == 6 * BATCH)
        assert (await running.flush())["success"]
    pushing.check(local_lake)


async def test_other_tables_are_committed_by_age_however_long_a_table_fails(tmp_path: Path, local_lake: Lake) -> None:
    """The good table gets a batch in every round and is flushed by its age alone: no client asks for it."""
    rounds = 30
    async with running_feed(tmp_path, local_lake, flush_max_age_s=0.05, **SMALL) as running:
        refuse_bad(running)
        pushing = Pushing(running)
        for number in range(1, rounds + 1):
            await pushing.give("bad", "good")
            await wait_for(lambda number=number: running.status("default.good").get("committedRows") == number * BATCH)
            good, bad = running.status("default.good"), running.status("default.bad")
            assert good["oldestUncommittedSeconds"] is None
            assert good["lastFlushReason"] == "age"
            assert bad["oldestUncommittedSeconds"] > 0, "its first batch still waits"
        good, bad = running.status("default.good"), running.status("default.bad")
        assert (good["commits"], bad["commits"]) == (rounds, 0)
        assert bad["oldestUncommittedSeconds"] > bad["problemSeconds"] > 0
        running.store.broken = lambda _: False
        await wait_for(lambda: running.status("default.bad")["committedRows"] == rounds * BATCH)
    pushing.check(local_lake)


class Forbidding(FlakyCatalog):
    """A catalog in which a namespace may not be created, until the test allows it."""

    is_allowed = False

    def _next_fault(self, request, body: bytes) -> CatalogFault | None:
        is_creation = request.method == "POST" and request.path.endswith("/namespaces")
        if is_creation and not self.is_allowed and json.loads(body)["namespace"] == ["sales"]:
            return CatalogFault.FORBIDDEN
        return super()._next_fault(request, body)


@pytest.mark.parametrize("transactions", [False, True])
async def test_table_whose_namespace_is_missing_and_may_not_be_made_pauses_alone_with_its_reason(
    tmp_path: Path, local_lake: Lake, transactions: bool
) -> None:
    settings = {"flush_max_age_s": 0.05, "transactions": transactions}
    async with (
        Forbidding(local_lake.catalog_url) as catalog,
        running_feed(tmp_path, local_lake, catalog_url=catalog.url, **settings) as running,
    ):
        await running.append(range(1, 3), table="sales.orders")
        await wait_for(lambda: running.status("sales.orders").get("state") == "paused")
        await running.append(range(3, 5), table="good")
        await wait_for(lambda: running.status("default.good").get("committedRows") == 2)
        (problem,) = running.feed.status.problems(now=time.monotonic(), stalled_after_s=3600)
        assert problem.startswith("table is paused: table=sales.orders reason=")
        assert "403" in running.status("sales.orders")["problem"]
        catalog.is_allowed = True
        await wait_for(lambda: running.status("sales.orders")["committedRows"] == 2)
        assert running.feed.status.problems(now=time.monotonic(), stalled_after_s=3600) == []
    assert read_sequences(local_lake, "sales.orders") == shop(1, 2)
