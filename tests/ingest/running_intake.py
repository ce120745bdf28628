"""A running intake on a real log, for tests of the intake and of its callers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from prometheus_client import CollectorRegistry

from lakefeed.ingest.config import IngestConfig
from lakefeed.ingest.intake.intake import Intake
from lakefeed.ingest.metrics import IngestMetrics
from lakefeed.ingest.protocol.offers import NackReason, Offer, Refused, Verdict
from lakefeed.settings import MIB
from lakefeed.writer.config import LogConfig
from lakefeed.writer.wal.directory import Filesystem
from lakefeed.writer.wal.log import FileLog
from lakefeed.writer.wal.payload import Frame, decode_frame
from lakefeed.writer.wal.tail import Tail
from tests.ingest.offers import offer_of

DEADLINE_S = 60.0
SMALL_LOG = LogConfig(segment_max_bytes=MIB, max_bytes=2 * MIB)

# Three rows of this size fill one group of a small log.
LARGE = 150_000


class RunningIntake:
    """An intake that runs on a log in a directory."""

    def __init__(self, log: FileLog, intake: Intake, registry: CollectorRegistry) -> None:
        self.log = log
        self.intake = intake
        self._registry = registry

    async def offer(self, *offers: Offer) -> list[asyncio.Future[Verdict]]:
        return [await self.intake.offer(offer) for offer in offers]

    async def verdicts(self, *offers: Offer) -> list[Verdict]:
        async with asyncio.timeout(DEADLINE_S):
            return [await future for future in await self.offer(*offers)]

    def frames(self) -> list[Frame]:
        tail = Tail(self.log, self.log.first_offset)
        try:
            frames = []
            while records := tail.read(until=self.log.durable_end, max_bytes=MIB):
                frames += [decode_frame(record.payload) for record in records]
            return frames
        finally:
            tail.close()

    def metric(self, name: str) -> float:
        value = self._registry.get_sample_value(name)
        assert value is not None
        return value


@asynccontextmanager
async def running_intake(
    directory: Path,
    *,
    log_config: LogConfig = SMALL_LOG,
    config: IngestConfig | None = None,
    files: Filesystem | None = None,
    tracks_transactions: bool = False,
) -> AsyncIterator[RunningIntake]:
    log = FileLog.open(directory, log_config, files=files)
    registry = CollectorRegistry()
    try:
        intake = Intake(
            log,
            config=config or IngestConfig(),
            metrics=IngestMetrics(registry),
            tracks_transactions=tracks_transactions,
        )
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(intake.run())
            yield RunningIntake(log, intake, registry)
            intake.close()
    finally:
        await log.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110 - what is waited for happens in a thread
            await asyncio.sleep(0.001)


async def run_ready_tasks() -> None:
    """Let every task run that is ready."""
    for _ in range(20):
        await asyncio.sleep(0)


async def fill_log(running: RunningIntake, *, source: str = "filler") -> int:
    """Offer large batches until the log is full; return the number of batches that fit."""
    taken = 0
    while True:
        (verdict,) = await running.verdicts(offer_of(taken + 1, source=source, padding=LARGE))
        if isinstance(verdict, Refused):
            assert verdict.reason is NackReason.BUFFER_FULL
            return taken
        taken += 1
