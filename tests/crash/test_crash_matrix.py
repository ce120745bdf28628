"""Promise 1 and 2 at every step that leaves something behind: the process is killed exactly there, and nothing is lost.

The steps are those of dying_service.py. Those of one part are died at one after the other on the same data, each by a
process that first had to go on from what the death before it left; sources push, and push again, all the while.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import re
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.crash.dying_service import COUNTED_FROM_THE_START, STEPS, command, last_words
from tests.crash.runs import SETTINGS, rounds
from tests.crash.senders import BATCH_MAX_CHANGES, TABLES, Sender
from tests.crash.table_checks import check_tables, load_contents
from tests.service_process import ServiceProcess, service_process

pytestmark = pytest.mark.crash

PROMISES = Path(__file__).parents[2] / "docs" / "invariants.md"

# How long a process may take to come to its step.
STEP_TIMEOUT_S = 60.0

# Segments have to be filled for the steps of the log; the others are met with few changes as well.
FILLING_PARTS = ("rotation", "trim")
FEW_CHANGES = 40

# So little memory that a table which stands still for a second has to give up its rows.
LITTLE_MEMORY = {
    "writer.flush_max_bytes": "64KiB",
    "writer.buffer_max_bytes": "256KiB",
    "writer.flush_max_changes": 5_000,
}

# Each start finds another setting than the tables have followed.
PARTITIONS = ("day(_cdc_timestamp)", "bucket[4](_cdc_row_id)", "none")

# So short a history that nearly every look finds old snapshots.
SHORT_HISTORY = """
[tables."*"]
properties = { "lakefeed.snapshots-max" = "2", "history.expire.min-snapshots-to-keep" = "1" }
"""


@pytest.mark.parametrize("part", STEPS)
async def test_death_at_any_step_loses_nothing_and_doubles_nothing(tmp_path, part):
    for directory, rng in rounds(tmp_path):
        await _die_at_every_step(directory, part, rng)


async def _die_at_every_step(directory: Path, part: str, rng: random.Random) -> None:
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
                await _make_tables(service, senders)
            for name in STEPS[part]:
                service.settings = next(settings)
                await _die_at(service, part, name, rng=rng, senders=senders)
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
    """Give the settings of one start after the other."""
    for partition in itertools.cycle(PARTITIONS):
        own = {
            "eviction": LITTLE_MEMORY,
            "layout": {"writer.partition": partition},
            "together": {"writer.transactions": True},
        }
        yield SETTINGS | own.get(part, {})


async def _make_tables(service: ServiceProcess, senders: Sequence[Sender]) -> None:
    """Leave tables behind, so that the next start finds them as they were made."""
    up = senders[0].up
    await asyncio.to_thread(service.start)
    up.set()
    async with asyncio.timeout(STEP_TIMEOUT_S):
        while len((await asyncio.to_thread(service.flush))["tables"]) < len(TABLES):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    up.clear()
    service.kill()


async def _die_at(
    service: ServiceProcess, part: str, name: str, *, rng: random.Random, senders: Sequence[Sender]
) -> None:
    up = senders[0].up
    dying = command(part, name, rng.randint(1, STEPS[part][name].calls_max))
    if part == "start":
        await _push_and_kill(service, senders)
        service.spawn(dying)
    elif part in COUNTED_FROM_THE_START:
        service.spawn(dying)  # it may die before it is ready
        up.set()
    else:
        await asyncio.to_thread(service.start, dying)
        up.set()
    status = await asyncio.to_thread(service.wait_for_exit, STEP_TIMEOUT_S)
    up.clear()
    assert status == -signal.SIGKILL, service.log_text()
    assert last_words(part, name) in service.log_text()


async def _push_and_kill(service: ServiceProcess, senders: Sequence[Sender]) -> None:
    """Leave a log behind that the next start has to recover."""
    up, before = senders[0].up, [sender.acked for sender in senders]
    await asyncio.to_thread(service.start)
    up.set()
    async with asyncio.timeout(STEP_TIMEOUT_S):
        while any(sender.acked == acked for sender, acked in zip(senders, before, strict=True)):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    up.clear()
    service.kill()


def test_promises_list_every_step():
    text = PROMISES.read_text(encoding="utf-8").partition("\n## Where the process is killed\n")[2]
    listed = re.findall(r"^- (\w+): (.+)$", text, flags=re.MULTILINE)
    assert listed == [(part, name) for part, steps in STEPS.items() for name in steps]
