"""Problems of a table that is not committed: the reason from the first failure on, and none if all is well."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from lakefeed.backoff import Backoff
from lakefeed.writer.commit import committer, expiry
from tests.fakes import CatalogFault, FlakyCatalog
from tests.writer.conftest import Lake
from tests.writer.feeding import read_sequences, running_feed, shop, wait_for


@pytest.mark.parametrize("fault", [CatalogFault.CONFLICT, CatalogFault.SLOW_DOWN, CatalogFault.ERROR_BEFORE])
async def test_a_commit_that_is_retried_is_reported_with_its_reason_before_it_has_failed(
    tmp_path: Path, local_lake: Lake, fault: CatalogFault, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(committer, "BACKOFF", Backoff(3600.0, 3600.0))
    async with (
        FlakyCatalog(local_lake.catalog_url) as catalog,
        running_feed(tmp_path, local_lake, catalog_url=catalog.url) as running,
    ):
        await running.append(range(1, 3))
        await running.flush()
        catalog.commit_faults.append(fault)
        await running.append(range(3, 5))
        await wait_for(lambda: running.feed.status.buffer_status()["eventCount"] == 2)
        flush = asyncio.create_task(running.feed.flush())
        await wait_for(lambda: running.status("default.users")["problem"] is not None)
        status = running.status("default.users")
        (problem,) = running.feed.status.problems(now=time.monotonic() + 1, stalled_after_s=0.5)
        flush.cancel()
    assert fault.value.partition(",")[0] in status["problem"]
    assert status["failedAttempts"] == 0, "the attempt has not failed yet"
    assert problem.endswith(f"reason={status['problem']}")


async def test_rows_that_are_not_due_are_no_problem_however_long_they_may_wait(
    tmp_path: Path, local_lake: Lake
) -> None:
    async with running_feed(tmp_path, local_lake, flush_max_age_s=300.0) as running:
        await running.append(range(1, 3))
        await wait_for(lambda: [table.pending.buffer.rows for table in running.feed.tables.values()] == [2])
        now = time.monotonic()
        assert running.feed.status.problems(now=now + 290, stalled_after_s=120) == []
        assert not running.feed.status.is_stalled(now=now + 419, stalled_after_s=120)
        (problem,) = running.feed.status.problems(now=now + 421, stalled_after_s=120)
        assert problem.startswith("table is not committed: table=default.users seconds=42")
        assert running.feed.status.is_stalled(now=now + 421, stalled_after_s=120)


async def test_an_unexpected_error_between_flushes_ends_nothing(
    tmp_path: Path, local_lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expiry, "LOOK_EVERY_SNAPSHOTS", 1)

    def fail(*_: object, **__: object) -> None:
        raise KeyError("snapshots")

    monkeypatch.setattr(expiry, "plan_expiry", fail)
    async with running_feed(tmp_path, local_lake) as running:
        for number in range(1, 4):
            await running.append(range(number, number + 1))
            await running.flush()
        assert running.status("default.users")["problem"] is None
    assert read_sequences(local_lake) == shop(1, 2, 3)


async def test_a_store_that_does_not_answer_while_old_metadata_is_deleted_holds_up_no_rows(
    tmp_path: Path, local_lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expiry, "LOOK_EVERY_SNAPSHOTS", 2)
    monkeypatch.setattr(committer, "EXPIRY_MAX_S", 0.05)
    stuck: list[str] = []

    async def never(location: str) -> None:
        stuck.append(location)
        await asyncio.Event().wait()

    properties = {"lakefeed.snapshots-max": "1", "history.expire.min-snapshots-to-keep": "1"}
    async with running_feed(tmp_path, local_lake, tables={"default.users": {"properties": properties}}) as running:
        monkeypatch.setattr(type(running.store), "delete", lambda _, location: never(location))
        for number in range(1, 6):
            await running.append(range(number, number + 1))
            await running.flush()
    assert stuck
    assert read_sequences(local_lake) == shop(1, 2, 3, 4, 5)
