"""Plans scans: reads manifests, keeps plans, makes their pages. Owns the threads that decode and the running plans.

Plans live in this process alone: a client that asks another process, or this one after a restart, is told that its
plan does not exist, and plans again.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import AsyncIterator, Callable, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

import orjson

from catalog.config import CatalogConfig
from catalog.errors import CatalogError, NoSuchPlan, NoSuchPlanTask, Unplannable
from catalog.fields import JsonObject
from catalog.names import TableId
from catalog.planning.manifests import Entry, Manifest, decode_manifest_list
from catalog.planning.pages import PreparedScan, keep_manifests, prepare_scan, read_deletes, read_page
from catalog.planning.plans import Plan, Plans
from catalog.planning.requests import PlanRequest, Scan, bind_scan
from catalog.storage import Files
from catalog.tables import Tables
from catalog.versions import Versions

# Decoding holds Python's lock for most of its time: more threads would only take turns with the event loop.
_THREADS = 2
# Plans and pages that are worked on at once, most of them waiting for storage; each has its manifests in memory.
_AT_WORK_MAX = 8
# Files of one plan that are read at once; an object store answers as many in the time of one.
_READS_AT_ONCE = 8

_logger = logging.getLogger(__name__)

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Planner:
    """Scan planning for the tables of the one warehouse. The clock comes from outside, in seconds."""

    def __init__(
        self,
        tables: Tables,
        versions: Versions,
        files: Files,
        config: CatalogConfig,
        *,
        clock: Callable[[], float],
    ) -> None:
        self._tables = tables
        self._confinement = versions.confinement
        self._new_id = versions.new_uuid
        self._files = files
        self._config = config
        self._plans = Plans(
            plans_max=config.plans_max,
            held_max_files=config.plans_held_max_files,
            lifetime_s=config.plan_lifetime_s,
            clock=clock,
        )
        self._running: dict[str, asyncio.Task[None]] = {}
        self._executor = ThreadPoolExecutor(_THREADS, thread_name_prefix="catalog-planning")
        self._slots = asyncio.Semaphore(_AT_WORK_MAX)

    async def close(self) -> None:
        """Give up the plans that are running and end the threads."""
        running = list(self._running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await asyncio.to_thread(self._executor.shutdown)

    async def plan(self, table: TableId, request: PlanRequest, *, wait_s: float) -> bytes:
        """Plan a scan and answer with its first page; or with its id alone, if it takes longer than `wait_s`.

        Cancelling gives the plan up, as does a failure: nobody knows its id yet.

        Raises: NoSuchTable, BadRequest, ValidationFailed, Forbidden, FileMissing, TooManyPlans, Unplannable.
        """
        stored = await self._tables.load(await self._tables.locate(table))
        scan = bind_scan(request, stored.document)
        plan = self._plans.add(self._new_id(), table)
        task = asyncio.create_task(self._prepare(plan, scan), name=f"catalog-plan-{plan.plan_id}")
        self._running[plan.plan_id] = task
        task.add_done_callback(lambda _: self._running.pop(plan.plan_id, None))
        try:
            await asyncio.wait([task], timeout=wait_s)
            if plan.is_running:
                return orjson.dumps({"status": "submitted", "plan-id": plan.plan_id})
            if plan.failure is not None:
                raise plan.failure
            return await self._first_page(plan, {"status": "completed", "plan-id": plan.plan_id})
        except (CatalogError, asyncio.CancelledError):
            self._give_up(plan)
            raise

    async def fetch(self, table: TableId, plan_id: str) -> bytes:
        """Answer with what has become of a plan, and with its first page if it is ready.

        Raises: NoSuchTable, NoSuchPlan, FileMissing, Unplannable.
        """
        await self._tables.locate(table)
        plan = self._plans.find(plan_id, table)
        if plan.is_running:
            return orjson.dumps({"status": "submitted"})
        if plan.failure is not None:
            error = {"message": str(plan.failure), "type": plan.failure.type, "code": plan.failure.status}
            return orjson.dumps({"status": "failed", "error": error})
        return await self._first_page(plan, {"status": "completed"})

    async def cancel(self, table: TableId, plan_id: str) -> None:
        """Give up a plan and what it holds.

        Raises: NoSuchTable, NoSuchPlan.
        """
        await self._tables.locate(table)
        self._give_up(self._plans.find(plan_id, table))

    async def fetch_tasks(self, table: TableId, plan_task: str) -> bytes:
        """Answer with one page of a plan.

        Raises: NoSuchTable, NoSuchPlanTask, FileMissing, Unplannable.
        """
        await self._tables.locate(table)
        plan_id, _, number = plan_task.rpartition("/")
        try:
            plan = self._plans.find(plan_id, table)
            return await self._page(plan, plan.page_number(number), {})
        except NoSuchPlan as error:
            raise NoSuchPlanTask(f"Plan task does not exist: {plan_task:.100}") from error

    def _give_up(self, plan: Plan) -> None:
        self._plans.remove(plan.plan_id)
        task = self._running.get(plan.plan_id)
        if task is not None:
            task.cancel()

    async def _first_page(self, plan: Plan, head: JsonObject) -> bytes:
        assert plan.prepared is not None, "a plan that has not failed is ready"
        if not plan.prepared.pages:
            return orjson.dumps({**head, "file-scan-tasks": []})
        later = [_plan_task(plan, number) for number in range(1, len(plan.prepared.pages))]
        return await self._page(plan, 0, head, later)

    async def _page(self, plan: Plan, number: int, head: JsonObject, later: Sequence[str] = ()) -> bytes:
        prepared = plan.prepared
        assert prepared is not None, "only pages of a plan that is ready are asked for"
        async with self._slots:
            locations = [part.manifest.location for part in prepared.pages[number]]
            bodies = [body async for _, body in self._read(locations)]
            answer, is_enough = await self._run(_show_page, prepared, number, bodies=bodies, head=head, later=later)
        plan.unread_pages = set() if is_enough else plan.unread_pages - {number}
        return answer

    async def _prepare(self, plan: Plan, scan: Scan) -> None:
        """Find the manifests and delete files of a scan, and make its plan ready or failed."""
        try:
            async with self._slots:
                prepared = await self._prepare_scan(scan)
            self._plans.finish(plan, prepared)
        except CatalogError as error:
            plan.failure = error
        except Exception:
            _logger.exception("plan_failed", extra={"table": str(plan.table), "plan": plan.plan_id})
            plan.failure = CatalogError("Internal server error")

    async def _prepare_scan(self, scan: Scan) -> PreparedScan:
        manifests = await self._run(keep_manifests, scan, await self._list_manifests(scan))
        # What appends added is read as it was added: deletes of later snapshots are none of it.
        with_deletes = {m.location: m for m in manifests if m.holds_deletes and scan.added_by is None}
        deletes: list[Entry] = []
        async for location, body in self._read(list(with_deletes)):
            deletes += await self._run(read_deletes, scan, body, with_deletes[location])
            self._check_size(deletes, "delete files")
        data = [manifest for manifest in manifests if not manifest.holds_deletes]
        return await self._run(prepare_scan, scan, data, deletes, self._config.plan_page_files)

    async def _list_manifests(self, scan: Scan) -> list[Manifest]:
        """Read the manifest lists of a scan; lists of several snapshots have most of their manifests in common."""
        listed: dict[str, Manifest] = {}
        async for location, body in self._read(scan.manifest_lists):
            listed |= {m.location: m for m in await self._run(decode_manifest_list, body, location)}
            self._check_size(listed, "manifests")
        return list(listed.values())

    def _check_size(self, held: Sized, what: str) -> None:
        if len(held) > self._config.plans_held_max_files:
            raise Unplannable(f"Too many {what} to plan: more than {self._config.plans_held_max_files}")

    async def _read(self, locations: Sequence[str]) -> AsyncIterator[tuple[str, bytes]]:
        """Read files in order, several at once. Where they are is what clients wrote: it is checked here."""
        for first in range(0, len(locations), _READS_AT_ONCE):
            batch = locations[first : first + _READS_AT_ONCE]
            for location in batch:
                self._confinement.check(location)
            reads = (self._files.read(location, max_bytes=self._config.metadata_max_bytes) for location in batch)
            for location, body in zip(batch, await asyncio.gather(*reads), strict=True):
                yield location, body

    async def _run(self, work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Do what takes long in a thread. Cancelling leaves the thread to its own end."""
        call = functools.partial(work, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._executor, call)


def _plan_task(plan: Plan, number: int) -> str:
    return f"{plan.plan_id}/{number}"


def _show_page(
    prepared: PreparedScan, number: int, *, bodies: Sequence[bytes], head: JsonObject, later: Sequence[str]
) -> tuple[bytes, bool]:
    """Write a page as an answer, and tell whether the client needs no other one."""
    page = read_page(prepared, prepared.pages[number], bodies)
    answer: JsonObject = {**head, "file-scan-tasks": page.tasks}
    if page.deletes:
        answer["delete-files"] = page.deletes
    if later and not page.is_enough:
        answer["plan-tasks"] = later
    return orjson.dumps(answer), page.is_enough
