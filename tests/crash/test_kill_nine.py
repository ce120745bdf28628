"""Guarantees 1 and 2: every acked change is in the tables once and in order after `kill -9` at random moments."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

import pytest

from tests.crash.runs import SETTINGS, rounds
from tests.crash.senders import Sender
from tests.crash.table_checks import check_tables, load_contents
from tests.service_process import ServiceProcess, service_process

pytestmark = pytest.mark.crash

KILLS = 25
# Half of the kills fall anywhere in this time after the service is ready.
KILL_WITHIN_S = 0.9
# The others follow within this time a step that leaves a file behind: a segment of the log begun or recycled, a data
# file not yet in a manifest, a manifest or a list not yet committed, metadata perhaps not yet the table's.
KILL_AFTER_FILES = ("*.wal", "*.parquet", "*.avro", "*.metadata.json")
KILL_AFTER_FILE_WITHIN_S = 0.03
FILE_TIMEOUT_S = 10.0
# One start in this many is itself killed, while it recovers from the kill before.
KILL_START_ONE_IN = 5
# A start takes about a tenth of a second.
KILL_START_WITHIN_S = 0.2


async def test_acked_changes_are_in_the_tables_exactly_once_and_in_order_after_kills_at_any_moment(tmp_path):
    for directory, rng in rounds(tmp_path):
        await _kill_again_and_again(directory, rng)


async def _kill_again_and_again(directory: Path, rng: random.Random) -> None:
    up = asyncio.Event()
    stays, leaves = (Sender(name, random.Random(rng.random()), up) for name in ("shop-1", "shop-2"))
    with service_process(directory, SETTINGS) as service:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(stays.run(service.ws_url))
            leaving = tasks.create_task(leaves.run(service.ws_url))
            for _ in range(KILLS):
                await _run_and_kill(service, rng, up)
            leaving.cancel()  # its last batches were sent and never acked: they may be in the tables or not
            stays.finish()
            await asyncio.to_thread(service.start)
            up.set()
        await asyncio.to_thread(service.flush)
        tables = await asyncio.to_thread(load_contents, service.http_url)
        _print_tally(tables, (stays, leaves))
        assert service.get("/status")["problems"] == []
    assert stays.acked == stays.sent
    check_tables(tables, (stays, leaves))


async def _run_and_kill(service: ServiceProcess, rng: random.Random, up: asyncio.Event) -> None:
    if rng.randrange(KILL_START_ONE_IN) == 0:
        service.spawn()
        await asyncio.sleep(rng.uniform(0, KILL_START_WITHIN_S))  # the moment of the kill
        service.kill()
    await asyncio.to_thread(service.start)
    up.set()
    if rng.randrange(2):
        await asyncio.sleep(rng.uniform(0, KILL_WITHIN_S))  # the moment of the kill
    else:
        await asyncio.to_thread(_wait_for_new_file, service.data_dir, rng.choice(KILL_AFTER_FILES))
        await asyncio.sleep(rng.uniform(0, KILL_AFTER_FILE_WITHIN_S))
    up.clear()
    service.kill()


def _wait_for_new_file(directory: Path, pattern: str) -> None:
    """Wait until a file of this kind appears; a service that is too slow for it is killed all the same."""
    before = set(directory.rglob(pattern))
    deadline = time.monotonic() + FILE_TIMEOUT_S
    while time.monotonic() < deadline and before.issuperset(directory.rglob(pattern)):
        time.sleep(0.001)


def _print_tally(tables, senders) -> None:
    for sender in senders:
        print(f"{sender.source}: sent={sender.sent} acked={sender.acked} {sender.tally}")
    for table in tables:
        print(f"{table.source_table}: rows={table.rows.num_rows} snapshots={len(table.snapshots)}")
