"""The object store breaks in every way while clients push: nothing is lost or doubled, and it ends without help."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.clients import S3Settings
from tests.fault_proxy import Answer, CutRequest, CutResponse, Fault, FaultProxy, Silence, Slow, fault_proxy
from tests.integration.outages import SETTINGS, named, pushing
from tests.s3_server import S3Server
from tests.service_process import ServiceProcess, service_process

pytestmark = pytest.mark.integration


@dataclass(frozen=True, slots=True)
class Lake:
    """A service, not yet started, whose files go through a proxy."""

    service: ServiceProcess
    proxy: FaultProxy
    s3: S3Settings


@pytest.fixture
def lake(tmp_path: Path, s3_server: S3Server) -> Iterator[Lake]:
    with (
        fault_proxy(s3_server.endpoint) as proxy,
        service_process(tmp_path, SETTINGS | s3_server.new_warehouse(endpoint=proxy.url)) as service,
    ):
        yield Lake(service, proxy, s3_server.settings)


# A table may be found at its own files, or at its commit, for which the catalog cannot write metadata either.
SOME_REASON = "reason=(?!None)"
# A table is paused when its retries have failed for long enough, on a slow machine at once.
NAMES_A_TABLE = "table is (not committed|paused): table="
# What goes wrong with every request, and what is told of it.
FAULTS: list[tuple[Fault, str]] = [
    (Answer(500), "500"),
    (Answer(503), "503"),
    (Answer(403), "403"),
    (Answer(500, forwarded=True), "500"),
    (CutRequest(), SOME_REASON),
    (CutResponse(), SOME_REASON),
    (Silence(), SOME_REASON),
]


async def test_any_fault_of_the_store_is_reported_and_ends_with_every_change_once(lake: Lake):
    async with pushing(lake.service, s3=lake.s3) as pushed:
        for fault, reason in FAULTS:
            with named(fault):
                lake.proxy.spoil(fault)
                problem = await pushed.wait_until_problem(reason)
                assert re.match(NAMES_A_TABLE, problem)
                lake.proxy.lift()
                await pushed.wait_until_recovered()


async def test_a_stopped_store_is_reported_and_used_again_after_its_restart(lake: Lake):
    async with pushing(lake.service, s3=lake.s3, has_small_buffers=True) as pushed:
        lake.proxy.stop()
        problem = await pushed.wait_until_problem("Could not connect")
        assert re.match(NAMES_A_TABLE, problem)
        await pushed.check_memory_while_changes_are_acked()
        lake.proxy.resume()


async def test_a_slow_store_makes_commits_slow_and_nothing_else(lake: Lake):
    async with pushing(lake.service, s3=lake.s3) as pushed:
        lake.proxy.spoil(Slow(delay_s=0.1, bytes_per_s=500_000))
        for _ in range(2):
            await pushed.wait_until_tables_commit()
        assert all(table["problem"] is None for table in (await pushed.status())["tables"])
        lake.proxy.lift()


async def test_single_faults_are_retried_and_not_reported(lake: Lake):
    async with pushing(lake.service, s3=lake.s3) as pushed:
        rules = [
            lake.proxy.spoil(fault, method="PUT", times=1)
            for fault in (Answer(503), CutRequest(), Answer(429), CutResponse())
        ]
        await pushed.wait_for(lambda _: all(rule.met for rule in rules))
        for _ in range(2):
            await pushed.wait_until_tables_commit()
        assert all(table["problem"] is None for table in (await pushed.status())["tables"])


async def test_one_table_that_the_store_refuses_leaves_the_others_as_they_are(lake: Lake):
    async with pushing(lake.service, s3=lake.s3) as pushed:
        lake.proxy.spoil(Answer(403), path="/default/users-")
        problem = await pushed.wait_until_problem("403")
        assert "table=default.users " in problem
        for _ in range(5):
            await pushed.wait_until_tables_commit("sales.orders", "default.events")
        tables = {table["table"]: table for table in (await pushed.status())["tables"]}
        assert "403" in tables["default.users"]["problem"]
        assert [tables[name]["problem"] for name in ("sales.orders", "default.events")] == [None, None]
        lake.proxy.lift()
