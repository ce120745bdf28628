"""Stopping in order: SIGTERM under load, and a second service on a data directory that is in use."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from pyiceberg.table import StaticTable

from tests.crash.senders import TABLES, Sender
from tests.crash.table_checks import Contents, check_tables, load_contents, read_table
from tests.service_process import service_process

pytestmark = pytest.mark.crash

# Nothing flushes by itself before the signal, so that what is committed afterwards was committed by the shutdown.
SETTINGS = {"writer.flush_max_age_s": 3_600, "server.shutdown_deadline_s": 30}
ENOUGH_CHANGES = 3_000


async def test_sigterm_under_load_closes_clients_with_1001_commits_what_was_acked_and_exits_0(tmp_path):
    up = asyncio.Event()
    up.set()
    senders = [Sender(name, random.Random(number), up) for number, name in enumerate(("shop-1", "shop-2"))]
    with service_process(tmp_path, SETTINGS) as service:
        await asyncio.to_thread(service.start_installed)
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(sender.run(service.ws_url)) for sender in senders]
            await _until_acked(senders, ENOUGH_CHANGES)
            service.signal_stop()
            status = await asyncio.to_thread(service.wait_for_exit)
            for task in running:
                task.cancel()
        assert status == 0, service.log_text()
        assert [sender.tally.close_code for sender in senders] == [1001, 1001]
        check_tables(_read_without_service(service.data_dir), senders)

        service.start()
        service.flush()
        check_tables(load_contents(service.http_url), senders)


async def test_second_service_on_a_data_directory_in_use_ends_with_a_clear_message(tmp_path):
    with service_process(tmp_path) as first, service_process(tmp_path) as second:
        await asyncio.to_thread(first.start)
        second.spawn()
        assert await asyncio.to_thread(second.wait_for_exit) != 0
        assert "log is in use by another process" in first.log_text()
        assert "Traceback" not in first.log_text()
        assert first.get("/health")["status"] == "ready"


async def _until_acked(senders, changes: int) -> None:
    async with asyncio.timeout(240):
        while min(sender.acked for sender in senders) < changes:  # noqa: ASYNC110  (two clients count up)
            await asyncio.sleep(0.01)


def _read_without_service(data_dir: Path) -> list[Contents]:
    return [read_table(name, StaticTable.from_metadata(str(_newest_metadata(data_dir, name)))) for name in TABLES]


def _newest_metadata(data_dir: Path, source_table: str) -> Path:
    name = source_table.rpartition(".")[2]
    found = (data_dir / "warehouse").glob(f"**/{name}*/metadata/*.metadata.json")
    return max(found, key=lambda path: path.name)
