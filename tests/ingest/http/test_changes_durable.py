"""/cdc: what is answered 2xx is in the log; a full log makes the answer late, a broken one an error."""

from __future__ import annotations

import asyncio
import errno

from lakefeed.ingest.http import changes
from tests.fakes import FaultyFilesystem, HeldFilesystem
from tests.ingest.http_ingest import serving_routes
from tests.ingest.running_intake import LARGE, fill_log, run_ready_tasks, until


async def test_answer_comes_after_the_sync_and_never_before(tmp_path):
    files = HeldFilesystem()
    async with serving_routes(tmp_path, files=files) as client:
        await client.batch(1)
        files.open_gate.clear()
        begun = files.begun
        answer = asyncio.create_task(client.batch(2))
        await until(lambda: files.begun > begun)
        await run_ready_tasks()
        assert not answer.done()
        files.open_gate.set()
        assert (await answer).status == 200


async def test_client_that_disconnects_affects_no_other_and_may_send_again(tmp_path):
    files = HeldFilesystem()
    async with serving_routes(tmp_path, files=files) as client:
        await client.batch(1)
        files.open_gate.clear()
        begun = files.begun
        gone = asyncio.create_task(client.batch(2, 3))
        await until(lambda: files.begun > begun)
        gone.cancel()
        await run_ready_tasks()
        again = asyncio.create_task(client.batch(2, 3))
        files.open_gate.set()
        assert (await again).document["lastDurableSequence"] == 3
        assert client.sequences() == [1, 2, 3]


async def test_full_log_makes_the_answer_late_and_it_is_a_200_once_there_is_room(tmp_path):
    async with serving_routes(tmp_path) as client:
        await fill_log(client.running)
        batch = asyncio.create_task(client.batch(1, 2, padding="x" * LARGE))
        rows = asyncio.create_task(client.rows({"id": 1, "name": "x" * LARGE}, source="rows"))
        await until(lambda: all(map(client.running.intake._dedup.is_blocked, ("shop", "rows"))))
        assert not batch.done()
        assert not rows.done()
        await client.running.log.trim(client.running.log.durable_end)
        accepted = [answer.document.get("eventsAccepted", answer) for answer in (await batch, await rows)]
        assert accepted == [2, 1]
        assert client.metric("lakefeed_ingest_received_changes_total") == 3


async def test_log_that_stays_full_is_a_503_that_says_to_try_again(tmp_path, monkeypatch):
    monkeypatch.setattr(changes, "WAIT_MAX_S", 0.0)
    async with serving_routes(tmp_path) as client:
        await fill_log(client.running)
        status, document = await client.batch(1, padding="x" * LARGE)
        assert (status, document["reason"], document["shouldRetry"]) == (503, "buffer_full", True)
        await client.running.log.trim(client.running.log.durable_end)
        assert (await client.batch(1, padding="x" * LARGE)).status == 200


async def test_batch_whose_client_is_gone_is_not_tried_again(tmp_path):
    async with serving_routes(tmp_path) as client:
        await fill_log(client.running)
        gone = asyncio.create_task(client.batch(1, padding="x" * LARGE))
        await until(lambda: client.running.intake._dedup.is_blocked("shop"))
        gone.cancel()
        await run_ready_tasks()
        await client.running.log.trim(client.running.log.durable_end)
        await asyncio.sleep(2 * changes.FULL_BACKOFF.first_s)  # as long as a try would have taken
        assert client.sequences() == []
        assert (await client.batch(1)).status == 200


async def test_broken_log_is_a_503(tmp_path):
    files = FaultyFilesystem()
    async with serving_routes(tmp_path, files=files) as client:
        await client.batch(1)
        files.fail("sync", errno.EIO)
        status, document = await client.batch(2)
        assert (status, document["reason"], document["shouldRetry"]) == (503, "internal_error", True)


async def test_batch_behind_one_that_was_refused_is_a_409_until_that_returns(tmp_path, monkeypatch):
    monkeypatch.setattr(changes, "WAIT_MAX_S", 0.0)
    async with serving_routes(tmp_path) as client:
        await fill_log(client.running)
        assert (await client.batch(1, padding="x" * LARGE)).status == 503
        status, document = await client.batch(2)
        assert (status, document["reason"], document["shouldRetry"]) == (409, "invalid_sequence", True)
        await client.running.log.trim(client.running.log.durable_end)
        assert [(await client.batch(number)).status for number in (1, 2)] == [200, 200]
