"""The intake on a real log: groups, verdicts after the sync, a full log and a broken one, and what a restart knows."""

from __future__ import annotations

import asyncio
import errno
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from lakefeed.contract.changes import Position, SourceId
from lakefeed.ingest.config import IngestConfig
from lakefeed.ingest.intake.intake import FULL_SHOWN_S, GROUP_MAX_BYTES, Intake
from lakefeed.ingest.metrics import IngestMetrics
from lakefeed.ingest.protocol.offers import Duplicate, Durable, NackReason, Refused, SourceLease
from lakefeed.settings import MIB
from lakefeed.writer.config import LogConfig
from lakefeed.writer.wal.log import FileLog
from tests.fakes import FaultyFilesystem, HeldFilesystem
from tests.ingest.offers import offer_of
from tests.ingest.running_intake import DEADLINE_S, LARGE, SMALL_LOG, fill_log, run_ready_tasks, running_intake, until

SHOP = SourceId("shop")

# Syncs while a group becomes durable: its own and that of one before it, and those of a spare that is just prepared.
GROUP_SYNCS_MAX = 10


def loop_time() -> float:
    return asyncio.get_running_loop().time()


# -- the way of an offer


async def test_offer_becomes_durable_with_what_admission_decided_about_it(tmp_path):
    async with running_intake(tmp_path) as running:
        assert await running.verdicts(offer_of(1, 2, 3)) == [Durable(0, 3)]
        assert await running.verdicts(offer_of(2, 3, 4)) == [Durable(1, 1)]
        first, second = running.frames()
        assert (first.source, first.epoch, first.after_sequence, first.last_sequence) == ("shop", 0, -1, 3)
        assert (second.after_sequence, second.last_sequence) == (3, 4)
        assert first.body == offer_of(1, 2, 3).body
        assert running.intake.durable_position(SHOP) == Position(0, 4)


async def test_duplicate_is_not_written_again(tmp_path):
    async with running_intake(tmp_path) as running:
        await running.verdicts(offer_of(1, 2))
        assert await running.verdicts(offer_of(1, 2)) == [Duplicate(2)]
        assert len(running.frames()) == 1
        assert running.metric("lakefeed_ingest_durable_changes_total") == 2
        assert running.metric("lakefeed_ingest_duplicate_changes_total") == 2


async def test_verdict_comes_after_the_sync_and_never_before(tmp_path):
    files = HeldFilesystem()
    async with running_intake(tmp_path, files=files) as running:
        await running.verdicts(offer_of(1))
        files.open_gate.clear()
        begun = files.begun
        (verdict,) = await running.offer(offer_of(2))
        await until(lambda: files.begun > begun)
        assert not verdict.done()
        assert running.intake.durable_position(SHOP) == Position(0, 1)
        files.open_gate.set()
        async with asyncio.timeout(DEADLINE_S):
            assert await verdict == Durable(1, 1)


async def test_offers_that_gather_during_a_sync_share_the_next_one(tmp_path):
    files = HeldFilesystem()
    async with running_intake(tmp_path, files=files) as running:
        await running.verdicts(offer_of(0))
        before = files.syncs
        files.open_gate.clear()
        verdicts = await running.offer(*(offer_of(number) for number in range(1, 501)))
        files.open_gate.set()
        async with asyncio.timeout(DEADLINE_S):
            results = await asyncio.gather(*verdicts)
        assert results == [Durable(number, 1) for number in range(1, 501)]
        assert files.syncs - before <= GROUP_SYNCS_MAX


async def test_offers_of_many_sources_share_a_group(tmp_path):
    files = HeldFilesystem()
    async with running_intake(tmp_path, files=files) as running:
        await running.verdicts(offer_of(0))
        before = files.syncs
        files.open_gate.clear()
        verdicts = await running.offer(*(offer_of(1, source=f"source-{number}") for number in range(100)))
        files.open_gate.set()
        async with asyncio.timeout(DEADLINE_S):
            results = await asyncio.gather(*verdicts)
        assert all(isinstance(result, Durable) for result in results)
        assert files.syncs - before <= GROUP_SYNCS_MAX
        assert len(running.intake.sources()) == 101


async def test_groups_fit_a_log_with_small_segments(tmp_path):
    files = HeldFilesystem()
    log_config = LogConfig(segment_max_bytes=MIB, max_bytes=16 * MIB)
    async with running_intake(tmp_path, log_config=log_config, files=files) as running:
        assert running.log.group_max_bytes < GROUP_MAX_BYTES
        await running.verdicts(offer_of(0))
        files.open_gate.clear()
        verdicts = await running.offer(*(offer_of(number, padding=LARGE) for number in range(1, 21)))
        files.open_gate.set()
        async with asyncio.timeout(DEADLINE_S):
            assert all(isinstance(verdict, Durable) for verdict in await asyncio.gather(*verdicts))


async def test_groups_of_many_small_offers_with_long_names_fit_the_log(tmp_path):
    files = HeldFilesystem()
    async with running_intake(tmp_path, files=files) as running:
        await running.verdicts(offer_of(0))
        files.open_gate.clear()
        name = "\N{OLD ITALIC LETTER A}" * 255  # four bytes each
        verdicts = await running.offer(*(offer_of(number, source=name) for number in range(700)))
        files.open_gate.set()
        async with asyncio.timeout(DEADLINE_S):
            assert all(isinstance(verdict, Durable) for verdict in await asyncio.gather(*verdicts))


# -- bounds


async def test_more_sources_than_a_segments_head_can_name_are_refused_and_the_others_go_on(tmp_path):
    async with running_intake(tmp_path, log_config=LogConfig(segment_max_bytes=MIB, max_bytes=16 * MIB)) as running:
        names = [f"{number:03}" + "\N{OLD ITALIC LETTER A}" * 252 for number in range(600)]
        verdicts = await running.verdicts(*(offer_of(1, source=name) for name in names))
        assert isinstance(verdicts[0], Durable)
        assert isinstance(verdicts[-1], Refused)
        for number in range(2, 12):  # several segments, each with a head
            assert isinstance(*await running.verdicts(offer_of(number, source=names[0], padding=LARGE)), Durable)


async def test_full_queue_makes_the_next_offer_wait_until_there_is_room(tmp_path):
    files = HeldFilesystem()
    config = IngestConfig(queue_max_bytes=2_000)
    async with running_intake(tmp_path, files=files, config=config) as running:
        await running.verdicts(offer_of(0))
        files.open_gate.clear()
        (being_synced,) = await running.offer(offer_of(1))
        await until(lambda: not running.intake._queue)
        queued = await running.offer(offer_of(2, padding=2_000))
        waiting = asyncio.create_task(running.intake.offer(offer_of(3)))
        await run_ready_tasks()
        assert not waiting.done()
        files.open_gate.set()
        async with asyncio.timeout(DEADLINE_S):
            assert [await each for each in (being_synced, *queued, await waiting)] == [
                Durable(1, 1),
                Durable(2, 1),
                Durable(3, 1),
            ]


async def test_room_for_some_lets_in_no_more_than_the_queue_holds(tmp_path):
    files = HeldFilesystem()
    config = IngestConfig(queue_max_bytes=2_000)
    async with running_intake(tmp_path, files=files, config=config) as running:
        await running.verdicts(offer_of(0))
        files.open_gate.clear()
        await running.offer(offer_of(1))
        await until(lambda: not running.intake._queue)
        waiting = [
            asyncio.create_task(running.intake.offer(offer_of(number, padding=1_500))) for number in range(2, 30)
        ]
        await run_ready_tasks()
        largest = len(offer_of(29, padding=1_500).body)
        assert running.intake._queue_bytes < config.queue_max_bytes + largest
        files.open_gate.set()
        async with asyncio.timeout(DEADLINE_S):
            for task in waiting:
                assert isinstance(await (await task), Durable | Refused)


async def test_cancelled_wait_for_room_queues_nothing(tmp_path):
    files = HeldFilesystem()
    async with running_intake(tmp_path, files=files, config=IngestConfig(queue_max_bytes=100)) as running:
        await running.verdicts(offer_of(0))
        files.open_gate.clear()
        await running.offer(offer_of(1))
        await until(lambda: not running.intake._queue)
        await running.offer(offer_of(2))
        waiting = asyncio.create_task(running.intake.offer(offer_of(3)))
        await run_ready_tasks()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        files.open_gate.set()
        assert await running.verdicts(offer_of(2)) == [Duplicate(2)]
        assert [frame.last_sequence for frame in running.frames()] == [0, 1, 2]


async def test_cancelled_verdict_affects_no_other_offer(tmp_path):
    files = HeldFilesystem()
    async with running_intake(tmp_path, files=files) as running:
        await running.verdicts(offer_of(0))
        files.open_gate.clear()
        given_up, kept = await running.offer(offer_of(1), offer_of(2))
        given_up.cancel()
        files.open_gate.set()
        async with asyncio.timeout(DEADLINE_S):
            assert await kept == Durable(2, 1)
        assert running.intake.durable_position(SHOP) == Position(0, 2)


async def test_close_drains_what_was_offered(tmp_path):
    files = HeldFilesystem()
    async with running_intake(tmp_path, files=files) as running:
        await running.verdicts(offer_of(0))
        files.open_gate.clear()
        verdicts = await running.offer(*(offer_of(number) for number in range(1, 50)))
        running.intake.close()
        files.open_gate.set()
    assert [verdict.result() for verdict in verdicts] == [Durable(number, 1) for number in range(1, 50)]


# -- a log that is full or broken


async def test_full_log_refuses_with_a_delay_and_takes_the_batch_after_a_trim(tmp_path):
    async with running_intake(tmp_path) as running:
        await fill_log(running)
        refused = offer_of(1, 2, padding=LARGE)
        (verdict,) = await running.verdicts(refused)
        assert isinstance(verdict, Refused)
        assert (verdict.reason, verdict.retry) == (NackReason.BUFFER_FULL, True)
        assert verdict.retry_delay_ms is not None
        assert running.intake.durable_position(SHOP) is None
        await running.log.trim(running.log.durable_end)
        assert isinstance(*await running.verdicts(refused), Durable)


async def test_batches_behind_a_refused_one_are_refused_until_it_returns(tmp_path):
    async with running_intake(tmp_path) as running:
        await running.verdicts(offer_of(1))
        await fill_log(running)
        large, next_one, one_more = offer_of(2, padding=LARGE), offer_of(3), offer_of(4)
        assert isinstance(*await running.verdicts(large), Refused)
        await running.log.trim(running.log.durable_end)
        for early in await running.verdicts(next_one, one_more):
            assert isinstance(early, Refused)
            assert (early.reason, early.retry) == (NackReason.INVALID_SEQUENCE, True)
        assert running.intake.durable_position(SHOP) == Position(0, 1)
        verdicts = await running.verdicts(large, next_one, one_more)
        assert [isinstance(verdict, Durable) for verdict in verdicts] == [True, True, True]


async def test_copy_of_a_batch_that_the_full_log_refuses_is_no_duplicate(tmp_path):
    async with running_intake(tmp_path) as running:
        await fill_log(running)
        offer = offer_of(1, padding=LARGE)
        verdicts = await running.verdicts(offer, offer)
        assert [isinstance(verdict, Refused) for verdict in verdicts] == [True, True]


async def test_small_batch_may_still_fit_a_log_that_refused_a_large_one(tmp_path):
    async with running_intake(tmp_path) as running:
        await fill_log(running)
        assert isinstance(*await running.verdicts(offer_of(1, source="small")), Durable)


async def test_source_that_connects_anew_resumes_from_what_is_durable(tmp_path):
    async with running_intake(tmp_path) as running:
        await running.verdicts(offer_of(1))
        await fill_log(running)
        await running.verdicts(offer_of(2, padding=LARGE))
        assert running.intake.resume(SHOP) == Position(0, 1)
        await running.log.trim(running.log.durable_end)
        assert isinstance(*await running.verdicts(offer_of(5)), Durable)


async def test_what_an_old_connection_left_in_the_queue_does_not_overtake_a_refused_batch(tmp_path):
    files = HeldFilesystem()
    async with running_intake(tmp_path, files=files) as running:
        await running.verdicts(offer_of(1))
        await fill_log(running)
        refused = offer_of(2, padding=LARGE)
        assert isinstance(*await running.verdicts(refused), Refused)
        await running.log.trim(running.log.durable_end)
        files.open_gate.clear()
        await running.offer(offer_of(1, source="other"))  # is being written while the next one waits
        await until(lambda: not running.intake._queue)
        (left_behind,) = await running.offer(offer_of(3))
        assert running.intake.resume(SHOP) == Position(0, 1)
        files.open_gate.set()
        async with asyncio.timeout(DEADLINE_S):
            assert isinstance(await left_behind, Refused)
        assert isinstance(*await running.verdicts(refused), Durable)
        assert [frame.last_sequence for frame in running.frames() if frame.source == "shop"][-1:] == [2]


async def test_broken_log_refuses_everything_and_says_so(tmp_path):
    files = FaultyFilesystem()
    async with running_intake(tmp_path, files=files) as running:
        await running.verdicts(offer_of(1))
        files.fail("sync", errno.EIO)
        for offer in (offer_of(2), offer_of(2), offer_of(1, source="other")):
            (verdict,) = await running.verdicts(offer)
            assert isinstance(verdict, Refused)
            assert (verdict.reason, verdict.retry) == (NackReason.INTERNAL_ERROR, True)
        assert await running.verdicts(offer_of(1)) == [Duplicate(1)]
        assert running.intake.durable_position(SHOP) == Position(0, 1)


# -- restarts


async def test_marks_are_rebuilt_from_the_newest_segments_records(tmp_path):
    async with running_intake(tmp_path) as running:
        await running.verdicts(offer_of(1, 2), offer_of(7, source="b", epoch=3))
    async with running_intake(tmp_path) as running:
        assert running.intake.sources() == {"shop": Position(0, 2), "b": Position(3, 7)}
        assert await running.verdicts(offer_of(1, 2), offer_of(2, 3)) == [Duplicate(2), Durable(2, 1)]


async def test_marks_survive_the_trim_of_every_record_of_their_source(tmp_path):
    async with running_intake(tmp_path) as running:
        await running.verdicts(offer_of(1, 2))
        await fill_log(running)
        await running.log.trim(running.log.durable_end)
        assert all(frame.source != "shop" for frame in running.frames())
    async with running_intake(tmp_path) as running:
        assert running.intake.durable_position(SHOP) == Position(0, 2)
        assert await running.verdicts(offer_of(1, 2)) == [Duplicate(2)]


async def test_every_waiting_offer_gets_a_verdict_when_the_intake_fails(tmp_path, monkeypatch):
    log = FileLog.open(tmp_path, SMALL_LOG)

    async def fail(*_: object, **__: object) -> int:
        raise RuntimeError("a defect of ours")

    monkeypatch.setattr(log, "append", fail)
    intake = Intake(log, config=IngestConfig(), metrics=IngestMetrics(CollectorRegistry()))
    try:
        verdicts = [await intake.offer(offer_of(1)), await intake.offer(offer_of(2))]
        with pytest.raises(RuntimeError, match="a defect of ours"):
            await intake.run()
        verdicts.append(await intake.offer(offer_of(3)))
        async with asyncio.timeout(DEADLINE_S):
            refused = [await verdict for verdict in verdicts]
    finally:
        await log.close()
    assert [(verdict.reason, verdict.retry) for verdict in refused] == [(NackReason.SHUTTING_DOWN, True)] * 3


async def test_no_other_client_takes_the_numbers_of_an_adapters_source(tmp_path):
    async with running_intake(tmp_path) as work:
        (adapter,) = await work.offer(replace(offer_of(1), adapter_state="state"))
        assert isinstance(await adapter, Durable)
        (other,) = await work.offer(offer_of(2))
        refused = await other
        assert isinstance(refused, Refused)
        assert not refused.retry
        (adapter,) = await work.offer(replace(offer_of(2), adapter_state="next state"))
        assert isinstance(await adapter, Durable)
        assert work.intake.adapter_states.get(SHOP) == "next state"


# -- connections that their source has left


async def test_offers_of_a_revoked_connection_are_refused_and_block_no_other(tmp_path):
    async with running_intake(tmp_path) as running:
        await running.verdicts(offer_of(1))
        left = replace(offer_of(3), lease=SourceLease(is_revoked=True))
        (verdict,) = await running.verdicts(left)
        assert isinstance(verdict, Refused)
        assert (verdict.reason, verdict.retry) == (NackReason.INVALID_SEQUENCE, False)
        running.intake.block_behind(left)
        assert isinstance(*await running.verdicts(replace(offer_of(5), lease=SourceLease())), Durable)


async def test_connection_whose_refused_batch_finds_no_room_accepts_nothing_until_its_source_connects(tmp_path):
    files = HeldFilesystem()
    async with running_intake(tmp_path, files=files) as running:
        running.intake._dedup._refused.max_total = 0
        lease = SourceLease()
        files.open_gate.clear()
        begun = files.begun
        (writing,) = await running.offer(replace(offer_of(1), lease=lease))
        await until(lambda: files.begun > begun)
        (waiting,) = await running.offer(replace(offer_of(2), lease=lease))
        running.intake.block_behind(replace(offer_of(3), lease=lease))
        (behind,) = await running.offer(replace(offer_of(4), lease=lease))
        files.open_gate.set()
        async with asyncio.timeout(DEADLINE_S):
            assert isinstance(await writing, Durable)
            assert isinstance(await waiting, Refused), "what waited could be behind it, for all that is known"
            assert isinstance(await behind, Refused)
        assert running.intake.resume(SHOP) == Position(0, 1)
        lease.is_revoked = False
        assert isinstance(*await running.verdicts(replace(offer_of(2, 3, 4), lease=lease)), Durable)


async def test_nothing_overtakes_a_batch_that_was_shed_while_those_before_it_were_being_written(tmp_path):
    files = HeldFilesystem()
    async with running_intake(tmp_path, files=files) as running:
        await running.verdicts(offer_of(0))
        files.open_gate.clear()
        (before,) = await running.offer(offer_of(1))
        running.intake.block_behind(offer_of(1, 2, 3))  # shed at the door: only 2 and 3 will be missing
        (behind,) = await running.offer(offer_of(4))
        files.open_gate.set()
        async with asyncio.timeout(DEADLINE_S):
            assert isinstance(await before, Durable)
            assert isinstance(await behind, Refused)
        assert isinstance(*await running.verdicts(offer_of(1, 2, 3)), Durable)
        assert isinstance(*await running.verdicts(offer_of(4)), Durable)


async def test_what_was_taken_back_does_not_count_as_coming_before_a_batch_that_is_shed(tmp_path):
    files = HeldFilesystem()
    async with running_intake(tmp_path, files=files) as running:
        running.intake.block_behind(offer_of(0))
        files.open_gate.clear()
        begun = files.begun
        (writing,) = await running.offer(offer_of(0))
        await until(lambda: files.begun > begun)
        (taken_back,) = await running.offer(offer_of(0, 3))
        running.intake.resume(SHOP)  # it connects anew, so that what waits is refused
        running.intake.block_behind(offer_of(0, 3))  # shed on a third connection
        (behind,) = await running.offer(offer_of(6))
        files.open_gate.set()
        async with asyncio.timeout(DEADLINE_S):
            assert isinstance(await writing, Durable)
            assert isinstance(await taken_back, Refused)
            assert isinstance(await behind, Refused)


async def test_full_log_is_a_problem_until_it_accepts_a_batch_or_no_batch_comes_for_a_while(tmp_path):
    async with running_intake(tmp_path) as running:
        assert running.intake.problems(now=loop_time()) == []
        await fill_log(running)
        (problem,) = running.intake.problems(now=loop_time())
        assert problem.startswith("batches are refused: log has used up its budget")
        assert running.intake.problems(now=loop_time() + 2 * FULL_SHOWN_S) == []
        await running.log.trim(running.log.durable_end)
        await running.verdicts(offer_of(1))
        assert running.intake.problems(now=loop_time()) == []
