"""Sources that this node's log does not know: how often the tables are asked, and what holds until they answer."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest
from prometheus_client import CollectorRegistry

from lakefeed.contract.changes import Position, SourceId
from lakefeed.contract.errors import CatalogUnavailable
from lakefeed.ingest.config import IngestConfig
from lakefeed.ingest.intake.intake import Intake
from lakefeed.ingest.intake.sources import RESUME_MAX_AGE_S, ResumePositions
from lakefeed.ingest.metrics import IngestMetrics
from lakefeed.ingest.protocol.offers import Durable, NackReason, Refused
from lakefeed.writer.wal.log import FileLog
from tests.ingest.offers import offer_of
from tests.ingest.running_intake import DEADLINE_S, SMALL_LOG, RunningIntake

SHOP = SourceId("shop")


class Tables:
    """Stands for all tables of a catalog."""

    def __init__(self, marks: Mapping[SourceId, Position]) -> None:
        self.marks = marks
        self.looks = 0
        self.now = 0.0
        self.is_down = False

    async def load(self) -> Mapping[SourceId, Position]:
        self.looks += 1
        await asyncio.sleep(0)
        if self.is_down:
            raise CatalogUnavailable("catalog cannot be reached")
        return self.marks

    def positions(self) -> ResumePositions:
        return ResumePositions(self.load, clock=lambda: self.now)


async def test_one_look_serves_all_that_come_while_it_is_young():
    tables = Tables({SHOP: Position(0, 5)})
    positions = tables.positions()
    found = await asyncio.gather(*(positions.find(SourceId(name)) for name in ("shop", "other", "shop")))
    assert (found, tables.looks) == ([Position(0, 5), None, Position(0, 5)], 1)
    tables.now += RESUME_MAX_AGE_S + 1
    tables.marks = {SHOP: Position(0, 9)}
    assert (await positions.find(SHOP), tables.looks) == (Position(0, 9), 2)


async def test_failed_read_of_the_tables_is_repeated_for_the_next_source():
    tables = Tables({SHOP: Position(0, 5)})
    positions, tables.is_down = tables.positions(), True
    for _ in range(2):
        try:
            await positions.find(SHOP)
        except CatalogUnavailable:
            continue
        raise AssertionError("nobody knows yet where the source stands")
    tables.is_down = False
    assert (await positions.find(SHOP), tables.looks) == (Position(0, 5), 3)


class Node:
    """An intake at work on a new log, beside tables that may know more."""

    def __init__(self, directory, tables: Tables) -> None:
        self.log = FileLog.open(directory, SMALL_LOG)
        registry = CollectorRegistry()
        self.intake = Intake(
            self.log, config=IngestConfig(), metrics=IngestMetrics(registry), resume_positions=tables.positions()
        )
        self.running = RunningIntake(self.log, self.intake, registry)

    async def __aenter__(self) -> RunningIntake:
        self._task = asyncio.create_task(self.intake.run())
        return self.running

    async def __aexit__(self, *_: object) -> None:
        self.intake.close()
        async with asyncio.timeout(DEADLINE_S):
            await self._task
        await self.log.close()


async def test_source_resumes_where_the_tables_have_it_and_then_from_its_own_log(tmp_path):
    async with Node(tmp_path, Tables({SHOP: Position(0, 40)})) as running:
        assert await running.intake.look_up_source(SHOP) is None
        assert running.intake.resume(SHOP) == Position(0, 40)
        assert running.intake.durable_position(SHOP) is None, "nothing of it is in this log"
        assert isinstance(*await running.verdicts(offer_of(41, 42)), Durable)
        assert running.intake.resume(SHOP) == Position(0, 42)


async def test_change_below_the_tables_marks_is_logged_because_a_table_may_lack_it(tmp_path):
    async with Node(tmp_path, Tables({SHOP: Position(0, 40)})) as running:
        assert await running.verdicts(offer_of(30, 31)) == [Durable(0, 2)]


async def test_epoch_that_is_over_in_the_tables_is_refused_also_of_a_source_that_never_connects(tmp_path):
    async with Node(tmp_path, Tables({SHOP: Position(3, 40)})) as running:
        (refused,) = await running.verdicts(offer_of(41, epoch=2))
        assert refused == Refused(NackReason.INVALID_SEQUENCE, "epoch is over: epoch=2 known=3", retry=False)
        assert isinstance(*await running.verdicts(offer_of(1, epoch=3)), Durable)


@pytest.mark.xfail(strict=True, reason="a source that the log knows is not looked up in the tables")
async def test_epoch_that_another_node_ended_is_refused_also_of_a_source_that_this_node_knows(tmp_path):
    tables = Tables({})
    async with Node(tmp_path, tables) as running:
        assert isinstance(*await running.verdicts(offer_of(1)), Durable)
        tables.marks, tables.now = {SHOP: Position(1, 5)}, RESUME_MAX_AGE_S + 1
        (refused,) = await running.verdicts(offer_of(2))
        assert isinstance(refused, Refused)


async def test_while_the_tables_cannot_be_asked_a_new_source_waits_and_nothing_overtakes_its_batch(tmp_path):
    tables = Tables({})
    async with Node(tmp_path, tables) as running:
        assert isinstance(*await running.verdicts(offer_of(1, source="known")), Durable)
        tables.is_down, tables.now = True, RESUME_MAX_AGE_S + 1
        (refused,) = await running.verdicts(offer_of(1, 2))
        assert isinstance(refused, Refused)
        assert (refused.reason, refused.retry) == (NackReason.INTERNAL_ERROR, True)
        assert isinstance(*await running.verdicts(offer_of(2, source="known")), Durable), "others go on"
        tables.is_down = False
        assert isinstance(*await running.verdicts(offer_of(3)), Refused), "it would pass over the one that was refused"
        assert isinstance(*await running.verdicts(offer_of(1, 2)), Durable)


async def test_tables_are_read_again_for_a_change_that_is_neither_in_the_log_nor_on_its_way_there(tmp_path):
    tables = Tables({})
    async with Node(tmp_path, tables) as running:
        in_flight = [offer_of(1), *(offer_of(each + 1, previous=each) for each in range(1, 9))]
        assert all(isinstance(each, Durable) for each in await running.verdicts(*in_flight))
        assert tables.looks == 1, "only because the source was new"
        tables.marks = {SHOP: Position(0, 12)}
        (refused,) = await running.verdicts(offer_of(14, previous=13))
        assert isinstance(refused, Refused)
        assert (refused.reason, refused.last_durable_sequence, tables.looks) == (NackReason.MISSING_CHANGES, 12, 2)
        assert isinstance(*await running.verdicts(offer_of(13, 14, previous=12)), Durable)
        assert tables.looks == 2
        tables.marks = {SHOP: Position(1, 3)}
        (refused,) = await running.verdicts(offer_of(16, previous=15))
        assert isinstance(refused, Refused)
        assert refused.message == "epoch is over: epoch=0 known=1"


async def test_while_the_tables_cannot_be_asked_for_the_change_before_a_batch_it_has_to_wait(tmp_path):
    tables = Tables({})
    async with Node(tmp_path, tables) as running:
        assert isinstance(*await running.verdicts(offer_of(1)), Durable)
        tables.marks, tables.is_down = {SHOP: Position(0, 10)}, True
        assert isinstance(*await running.verdicts(offer_of(2, previous=1)), Durable)
        (refused,) = await running.verdicts(offer_of(11, previous=10))
        assert isinstance(refused, Refused)
        assert (refused.reason, refused.retry) == (NackReason.INTERNAL_ERROR, True)
        tables.is_down = False
        assert isinstance(*await running.verdicts(offer_of(11, previous=10)), Durable)


async def test_one_read_of_the_tables_serves_all_that_ask_before_it_begins():
    tables = Tables({SHOP: Position(0, 5)})
    positions = tables.positions()

    async def ask(now: float) -> None:
        tables.now = now
        await positions.refresh()

    async def tick() -> None:
        tables.now = 5.0  # when the second read begins

    await asyncio.gather(ask(1.0), ask(2.0), ask(3.0), tick())
    assert tables.looks == 2
