"""A transaction is in all of its tables or in none, whenever the process is killed, and in all of them in the end.

After each kill, a catalog of the test's own reads what the process left, before the next process starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidMessage

from lakefeed.catalog.app import build_catalog
from lakefeed.catalog.config import CatalogConfig, Warehouse
from lakefeed.ingest.service import DATABASE_NAME
from lakefeed.storage.config import StorageConfig
from tests.clients import open_pyiceberg
from tests.crash.crash_points import CRASH_POINTS, crash_at
from tests.crash.runs import SETTINGS, rounds
from tests.service_process import ServiceProcess, service_process
from tests.serving import serve_in_thread

pytestmark = pytest.mark.crash

PART = "transaction"
# The changes of each transfer, in the order in which they are sent.
TABLES = ("accounts", "ledger", "accounts", "audit")
WHOLE = Counter(TABLES)
CRASH_TIMEOUT_S = 240.0
RANDOM_KILLS = 5
KILL_WITHIN_S = 0.5

_LOST = (OSError, ConnectionClosed, InvalidHandshake, InvalidMessage, EOFError)


@dataclass(slots=True)
class Bank:
    """A source that sends transfers, each in one batch or in several, and resumes where the service tells it to."""

    rng: random.Random
    up: asyncio.Event = field(default_factory=asyncio.Event)
    sent: int = 0
    acked: int = 0
    is_finishing: bool = False

    async def run(self, url: str) -> None:
        while not (self.is_finishing and self.acked >= self.sent):
            await self.up.wait()
            try:
                async with connect(url, compression=None, close_timeout=1.0) as socket:
                    await self._session(socket)
            except _LOST:
                await asyncio.sleep(0.01)

    async def _session(self, socket: ClientConnection) -> None:
        status = await _ask(socket, {"type": "connect", "sourceDoId": "bank"})
        self.acked = position = status.get("lastDurableSequence", 0)
        # A transfer that has begun is sent to its end.
        while not (self.is_finishing and position >= self.sent and position % len(TABLES) == 0):
            size = self.rng.randint(1, 2 * len(TABLES))
            events = [_event(number) for number in range(position + 1, position + 1 + size)]
            self.sent = max(self.sent, position + size)
            answer = await _ask(socket, {"type": "cdc_batch", "sourceDoId": "bank", "events": events})
            assert answer["type"] == "ack", answer
            self.acked = position = position + size


async def _ask(socket: ClientConnection, message: dict[str, Any]) -> dict[str, Any]:
    await socket.send(orjson.dumps(message), text=True)
    while (answer := orjson.loads(await socket.recv())).get("status") == "persisted":
        pass
    return answer


def _event(number: int) -> dict[str, Any]:
    transfer, part = divmod(number - 1, len(TABLES))
    return {
        "sequence": number,
        "operation": "INSERT",
        "table": TABLES[part],
        "rowId": str(number),
        "after": {"transfer": transfer},
        "metadata": {"transaction": {"id": f"t{transfer}", "end": part == len(TABLES) - 1}},
    }


def read_transfers(catalog_url: str) -> dict[int, Counter[str]]:
    """Count the changes of each transfer in each table."""
    found: dict[int, Counter[str]] = {}
    with contextlib.closing(open_pyiceberg(catalog_url)) as catalog:
        for table in WHOLE:
            name = f"default.{table}"
            if catalog.table_exists(name):
                for transfer in catalog.load_table(name).scan(selected_fields=("transfer",)).to_arrow()["transfer"]:
                    found.setdefault(transfer.as_py(), Counter())[table] += 1
    return found


@contextlib.contextmanager
def catalog_of(data_dir: Path) -> Iterator[str]:
    app = web.Application()
    warehouse = Warehouse(StorageConfig(warehouse=f"file://{data_dir}/warehouse"))
    app.add_subapp("/v1", build_catalog(CatalogConfig(), warehouse, data_dir / DATABASE_NAME))
    with serve_in_thread(app) as url:
        yield url


def check_whole(service: ServiceProcess) -> int:
    """Return how many transfers are committed; none may be committed in part."""
    with catalog_of(service.data_dir) as url:
        transfers = read_transfers(url)
    assert {transfer: parts for transfer, parts in transfers.items() if parts != WHOLE} == {}
    return len(transfers)


async def test_no_transaction_is_ever_committed_in_part(tmp_path):
    for directory, rng in rounds(tmp_path):
        settings = SETTINGS | {"writer.transactions": True, "writer.flush_max_changes": 20}
        bank = Bank(random.Random(rng.random()))
        with service_process(directory, settings) as service:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(bank.run(service.ws_url))
                for name in CRASH_POINTS[PART]:
                    await crash(service, name, bank, rng)
                for _ in range(RANDOM_KILLS):
                    await kill_at_random(service, bank, rng)
                bank.is_finishing = True
                await asyncio.to_thread(service.start)
                bank.up.set()
            await asyncio.to_thread(service.flush)
            status = await asyncio.to_thread(service.get, "/status")
            transfers = await asyncio.to_thread(read_transfers, service.http_url)
            metrics = await asyncio.to_thread(service.get_text, "/metrics")
        assert status["problems"] == []
        assert sorted(transfers) == list(range(bank.acked // len(TABLES)))
        assert all(parts == WHOLE for parts in transfers.values())
        assert "lakefeed_writer_split_transactions_total{" not in metrics, "nothing was given up"


async def crash(service: ServiceProcess, name: str, bank: Bank, rng: random.Random) -> None:
    crashing = functools.partial(crash_at, PART, name, rng.randint(1, CRASH_POINTS[PART][name].calls_max))
    await asyncio.to_thread(service.start, crashing)
    bank.up.set()
    status = await asyncio.to_thread(service.wait_for_exit, CRASH_TIMEOUT_S)
    bank.up.clear()
    assert status == -signal.SIGKILL, service.log_text()
    print(f"killed at {name}: transfers={await asyncio.to_thread(check_whole, service)}")


async def kill_at_random(service: ServiceProcess, bank: Bank, rng: random.Random) -> None:
    await asyncio.to_thread(service.start)
    bank.up.set()
    await asyncio.sleep(rng.uniform(0, KILL_WITHIN_S))  # the moment of the kill
    service.kill()
    bank.up.clear()
    print(f"killed: transfers={await asyncio.to_thread(check_whole, service)}")
