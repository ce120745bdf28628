"""Guarantees 1 and 2 at every crash point: the process is killed exactly there, and nothing is lost or duplicated.

The crash points of one part follow each other on the same data. Each process first recovers what the last one left,
while sources push and resend.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import random
import re
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.crash.crash_points import COUNTED_FROM_THE_START, CRASH_POINTS, crash_at, crash_message
from tests.crash.runs import SETTINGS, rounds
from tests.crash.senders import BATCH_MAX_CHANGES, TABLES, Sender
from tests.crash.table_checks import check_tables, load_contents
from tests.service_process import ServiceProcess, service_process

pytestmark = pytest.mark.crash

GUARANTEES = Path(__file__).parents[2] / "docs" / "invariants.md"

# A limit for processes that never reach their crash point.
CRASH_TIMEOUT_S = 240.0

# The crash points of the log need full segments; the others are reached with few changes as well.
FILLING_PARTS = ("rotation", "trim")
FEW_CHANGES = 40

# So little memory that a table that cannot be written for a second is evicted.
LITTLE_MEMORY = {
    "writer.flush_max_bytes": "64KiB",
    "writer.buffer_max_bytes": "256KiB",
    "writer.flush_max_changes": 5_000,
}

# Each start has another setting than the one before.
PARTITIONS = ("day(_cdc_timestamp)", "bucket[4](_cdc_row_id)", "none")

# Nearly every look for old snapshots finds some.
SHORT_HISTORY = """
[tables."*"]
properties = { "lakefeed.snapshots-max" = "2", "history.expire.min-snapshots-to-keep" = "1" }
"""


@pytest.mark.parametrize("part", CRASH_POINTS)
async def test_sigkill_at_any_crash_point_loses_and_duplicates_nothing(tmp_path, part):
    for directory, rng in rounds(tmp_path):
        await _crash_at_every_point(directory, part, rng)


async def _crash_at_every_point(directory: Path, part: str, rng: random.Random) -> None:
    up = asyncio.Event()
    changes = BATCH_MAX_CHANGES if part in FILLING_PARTS else FEW_CHANGES
    senders = [
        Sender(name, random.Random(rng.random()), up, batch_max_changes=changes) for name in ("shop-1", "shop-2")
    ]
    (directory / "lakefeed.toml").write_text(SHORT_HISTORY if part == "expiry" else "")
    settings = _settings_of_starts(part)
    with service_process(directory, next(settings)) as service:
        async with asyncio.TaskGroup() as tasks:
            for sender in senders:
                tasks.create_task(sender.run(service.ws_url))
            if part == "layout":
                await _create_tables(service, senders)
            for name in CRASH_POINTS[part]:
                service.settings = next(settings)
                await _crash_at(service, part, name, rng=rng, senders=senders)
            for sender in senders:
                sender.finish()
            service.settings = next(settings)
            await asyncio.to_thread(service.start)
            up.set()
        await asyncio.to_thread(service.flush)
        tables = await asyncio.to_thread(load_contents, service.http_url)
        assert service.get("/status")["problems"] == []
    assert [sender.acked for sender in senders] == [sender.sent for sender in senders]
    check_tables(tables, senders)


def _settings_of_starts(part: str) -> Iterator[dict[str, Any]]:
    """Yield the settings of each start."""
    for partition in itertools.cycle(PARTITIONS):
        own = {
            "eviction": LITTLE_MEMORY,
            "layout": {"writer.partition": partition},
            "transaction": {"writer.transactions": True},
        }
        yield SETTINGS | own.get(part, {})


async def _create_tables(service: ServiceProcess, senders: Sequence[Sender]) -> None:
    """Create the tables with the first setting."""
    up = senders[0].up
    await asyncio.to_thread(service.start)
    up.set()
    async with asyncio.timeout(CRASH_TIMEOUT_S):
        while len((await asyncio.to_thread(service.flush))["tables"]) < len(TABLES):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    up.clear()
    service.kill()


async def _crash_at(
    service: ServiceProcess, part: str, name: str, *, rng: random.Random, senders: Sequence[Sender]
) -> None:
    up = senders[0].up
    crashing = functools.partial(crash_at, part, name, rng.randint(1, CRASH_POINTS[part][name].calls_max))
    if part == "startup":
        await _push_and_kill(service, senders)
        service.spawn(crashing)
    elif part in COUNTED_FROM_THE_START:
        service.spawn(crashing)  # it may crash before it is ready
        up.set()
    else:
        await asyncio.to_thread(service.start, crashing)
        up.set()
    status = await asyncio.to_thread(service.wait_for_exit, CRASH_TIMEOUT_S)
    up.clear()
    assert status == -signal.SIGKILL, service.log_text()
    assert crash_message(part, name) in service.log_text()


async def _push_and_kill(service: ServiceProcess, senders: Sequence[Sender]) -> None:
    """Leave a log that the next start has to recover."""
    up, before = senders[0].up, [sender.acked for sender in senders]
    await asyncio.to_thread(service.start)
    up.set()
    async with asyncio.timeout(CRASH_TIMEOUT_S):
        while any(sender.acked == acked for sender, acked in zip(senders, before, strict=True)):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    up.clear()
    service.kill()


def test_guarantees_list_every_crash_point():
    text = GUARANTEES.read_text(encoding="utf-8").partition("\n## Where the process is killed\n")[2]
    listed = re.findall(r"^- (\w+): (.+)$", text, flags=re.MULTILINE)
    assert listed == [(part, name) for part, steps in CRASH_POINTS.items() for name in steps]
