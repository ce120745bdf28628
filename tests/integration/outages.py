"""A service that is pushed to all the while something behind it is broken; what the outage tests share."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tests.clients import S3Settings
from tests.crash.senders import TABLES, Sender
from tests.crash.table_checks import check_tables, load_contents
from tests.service_process import ServiceProcess

WAIT_S = 240.0
POLL_S = 0.05
# Some thousand changes a second: more than enough to break, few enough that what was missed is made up for at once.
BATCH_MAX_CHANGES = 40

KIB = 1024
BUFFER_MAX_BYTES = 128 * KIB
# What was being decoded when they were full still arrives.
MEMORY_BOUND_BYTES = 4 * BUFFER_MAX_BYTES

# Flushes many times a second, gives up on a request soon, and calls a table late at once.
SETTINGS = {
    "server.stalled_after_s": 0.5,
    "writer.flush_max_age_s": 0.2,
    "writer.flush_check_interval_s": 0.05,
    "storage.request_timeout_s": 0.5,
    "catalog.storage_timeout_s": 1.0,
}
# An outage of a few seconds fills these buffers several times over.
SMALL_BUFFERS = {
    "writer.flush_max_bytes": f"{BUFFER_MAX_BYTES // KIB // 4}KiB",
    "writer.buffer_max_bytes": f"{BUFFER_MAX_BYTES // KIB}KiB",
}


@dataclass(slots=True)
class Pushed:
    """The running service, and the source that pushes to it."""

    service: ServiceProcess
    sender: Sender
    catalog_url: str
    s3: S3Settings | None

    async def status(self) -> dict[str, Any]:
        return await asyncio.to_thread(self.service.get, "/status")

    async def problems(self) -> list[str]:
        """What /health/ready complains of; empty if it is content."""
        return await asyncio.to_thread(_problems, self.service)

    async def wait_for(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Wait until /status fulfils a condition."""
        async with asyncio.timeout(WAIT_S):
            while not condition(status := await self.status()):  # noqa: ASYNC110 - another process has no event
                await asyncio.sleep(POLL_S)
            return status

    async def wait_until_tables_commit(self, *names: str) -> None:
        """Wait until each of these tables, or of all, has committed something more."""
        before = _commits(await self.status())
        await self.wait_for(
            lambda status: all(_commits(status).get(name, 0) > before.get(name, 0) for name in names or _table_names())
        )

    async def wait_until_problem(self, reason: str) -> str:
        """Wait until /health/ready fails and gives this reason; the problem as it says it."""
        async with asyncio.timeout(WAIT_S):
            while True:
                found = [problem for problem in await self.problems() if re.search(reason, problem)]
                if found:
                    return found[0]
                await asyncio.sleep(POLL_S)

    async def wait_until_recovered(self) -> None:
        """Wait until every table commits again and /health/ready has nothing to complain of."""
        await self.wait_until_tables_commit()
        async with asyncio.timeout(WAIT_S):
            while await self.problems():  # noqa: ASYNC110 - another process has no event
                await asyncio.sleep(POLL_S)

    async def check_memory_while_changes_are_acked(self) -> None:
        """Go on until more was acked than the buffers may hold, and look all the while whether they do."""
        acked_before, change_bytes = self.sender.acked, 0.0
        while (self.sender.acked - acked_before) * change_bytes < 1.1 * MEMORY_BOUND_BYTES:
            buffer = (await self.status())["buffer"]
            assert buffer["totalSizeBytes"] < MEMORY_BOUND_BYTES
            if buffer["eventCount"]:
                change_bytes = buffer["totalSizeBytes"] / buffer["eventCount"]
            await asyncio.sleep(POLL_S)

    async def check_recovery(self) -> None:
        """Wait until everything is committed without help, and compare all tables with the source's book."""
        await self.wait_for(lambda status: status["log"]["uncommittedRecords"] == 0)
        assert await self.problems() == []
        tables = await asyncio.to_thread(load_contents, self.catalog_url, s3=self.s3)
        assert self.sender.acked == self.sender.sent > 0
        check_tables(tables, [self.sender])


@contextlib.asynccontextmanager
async def pushing(
    service: ServiceProcess, *, catalog_url: str = "", s3: S3Settings | None = None, has_small_buffers: bool = False
) -> AsyncIterator[Pushed]:
    """Start the service and push to it while the block runs; then check that all that was acked is in the tables."""
    service.settings = {**service.settings, **(SMALL_BUFFERS if has_small_buffers else {})}
    up = asyncio.Event()
    up.set()
    sender = Sender("shop", random.Random(1), up, batch_max_changes=BATCH_MAX_CHANGES)
    await asyncio.to_thread(service.start)
    pushed = Pushed(service, sender, catalog_url or service.http_url, s3)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(sender.run(service.ws_url))
        await pushed.wait_until_tables_commit()
        yield pushed
        sender.finish()
    await pushed.check_recovery()


@contextlib.contextmanager
def named(fault: object) -> Iterator[None]:
    """Say with a failure which of several faults it came with."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"while the fault was {fault!r}")
        raise


def _table_names() -> list[str]:
    return [name if "." in name else f"default.{name}" for name in TABLES]


def _commits(status: dict[str, Any]) -> dict[str, int]:
    return {table["table"]: table["commits"] for table in status["tables"]}


def _problems(service: ServiceProcess) -> list[str]:
    try:
        with urllib.request.urlopen(f"{service.http_url}/health/ready", timeout=WAIT_S) as answer:
            return json.loads(answer.read())["problems"]
    except urllib.error.HTTPError as error:
        return json.loads(error.read())["problems"]
