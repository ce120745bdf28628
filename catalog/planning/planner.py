"""Planner: runs scan plans and keeps them for their clients, within limits.

    running -> ready | failed        any -> removed: cancelled, unused for its lifetime, or evicted when it is spent

A plan is spent when a client has fetched all of its pages. It stays until memory is needed, because a response may
have been lost. Plans live in this process only: another process, or this one after a restart, responds that the plan
does not exist, and the client plans again.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

import orjson

from lakefeed.catalog.config import CatalogConfig
from lakefeed.catalog.errors import CatalogError, NoSuchPlan, NoSuchPlanTask, TooManyPlans, Unplannable, error_model
from lakefeed.catalog.json_fields import JsonObject, parse_count
from lakefeed.catalog.names import TableId
from lakefeed.catalog.planning.tasks import (
    PlanRequest,
    PreparedScan,
    Scan,
    bind_scan,
    keep_manifests,
    prepare_scan,
    read_deletes,
    read_page,
)
from lakefeed.catalog.service.versions import Versions
from lakefeed.contract.errors import LakefeedError
from lakefeed.iceberg.manifests import Entry, Manifest, list_manifests


@dataclass(slots=True)
class ScanPlan:
    """One plan. It is running until it has a prepared scan or a failure."""

    plan_id: str
    table: TableId
    used_at: float
    prepared: PreparedScan | None = None
    failure: LakefeedError | None = None
    unread_pages: set[int] = field(default_factory=set)

    @property
    def is_running(self) -> bool:
        """Return whether the plan is neither ready nor failed."""
        return self.prepared is None and self.failure is None

    def page_number(self, text: str) -> int:
        """Read the number of a page.

        Raises: NoSuchPlan.
        """
        pages = () if self.prepared is None else self.prepared.pages
        number = parse_count(text)
        if number is None or number >= len(pages):
            raise NoSuchPlan(f"Plan has no such page: {self.plan_id}")
        return number

    @property
    def held_files(self) -> int:
        """Return how many manifests and delete files the plan holds in memory."""
        return 0 if self.prepared is None else self.prepared.held_files


class ScanPlans:
    """Plans by id, the least recently used first. The clock is in seconds."""

    def __init__(self, *, plans_max: int, held_max_files: int, lifetime_s: float, clock: Callable[[], float]) -> None:
        self._plans_max = plans_max
        self._held_max_files = held_max_files
        self._lifetime_s = lifetime_s
        self._clock = clock
        self._plans: OrderedDict[str, ScanPlan] = OrderedDict()
        self._held_files = 0

    def add(self, plan_id: str, table: TableId) -> ScanPlan:
        """Add a running plan.

        Raises: TooManyPlans.
        """
        self._remove_expired()
        if len(self._plans) >= self._plans_max and not self._evict_spent():
            raise TooManyPlans(f"Too many scan plans, at most {self._plans_max}")
        plan = self._plans[plan_id] = ScanPlan(plan_id, table, self._clock())
        return plan

    def finish(self, plan: ScanPlan, prepared: PreparedScan) -> None:
        """Make a plan ready, if its files fit in memory. A plan that was removed meanwhile stays removed.

        Raises: TooManyPlans; Unplannable if it does not fit even alone.
        """
        if prepared.held_files > self._held_max_files:
            raise Unplannable(f"Too many manifests and delete files to plan: {prepared.held_files}")
        while self._held_files + prepared.held_files > self._held_max_files:
            if not self._evict_spent():
                raise TooManyPlans(f"Scan plans hold too many files, at most {self._held_max_files}")
        if plan.plan_id in self._plans:
            plan.prepared = prepared
            plan.unread_pages = set(range(len(prepared.pages)))
            self._held_files += prepared.held_files

    def find(self, plan_id: str, table: TableId) -> ScanPlan:
        """Return a plan of a table, and mark it as used.

        Raises: NoSuchPlan.
        """
        self._remove_expired()
        plan = self._plans.get(plan_id)
        if plan is None or plan.table != table:
            raise NoSuchPlan(f"Plan does not exist: {plan_id}")
        plan.used_at = self._clock()
        self._plans.move_to_end(plan_id)
        return plan

    def remove(self, plan_id: str) -> None:
        """Remove a plan, if it exists."""
        plan = self._plans.pop(plan_id, None)
        if plan is not None:
            self._held_files -= plan.held_files

    def _remove_expired(self) -> None:
        oldest = self._clock() - self._lifetime_s
        while self._plans and (first := next(iter(self._plans.values()))).used_at < oldest:
            self.remove(first.plan_id)

    def _evict_spent(self) -> bool:
        """Remove the least recently used spent plan; return whether there was one."""
        for plan in self._plans.values():
            if not plan.is_running and not plan.unread_pages:
                self.remove(plan.plan_id)
                return True
        return False


# Decoding holds the GIL for most of its time: more threads would only compete with the event loop.
_THREADS = 2
# Plans and pages in progress, most of them waiting for storage; each has its manifests in memory.
_AT_WORK_MAX = 8
# Files of one plan that are read concurrently; an object store serves as many in the time of one.
_READS_AT_ONCE = 8

_logger = logging.getLogger(__name__)

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Planner:
    """Plans scans of the warehouse's tables. The clock is in seconds."""

    def __init__(self, versions: Versions, config: CatalogConfig, *, clock: Callable[[], float]) -> None:
        self._versions = versions
        self._files = versions.files.storage
        self._config = config
        self._plans = ScanPlans(
            plans_max=config.plans_max,
            held_max_files=config.plans_held_max_files,
            lifetime_s=config.plan_lifetime_s,
            clock=clock,
        )
        self._running: dict[str, asyncio.Task[None]] = {}
        self._executor = ThreadPoolExecutor(_THREADS, thread_name_prefix="catalog-planning")
        self._slots = asyncio.Semaphore(_AT_WORK_MAX)

    async def close(self) -> None:
        """Cancel running plans and stop the threads."""
        running = list(self._running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await asyncio.to_thread(self._executor.shutdown)

    async def plan(self, table: TableId, request: PlanRequest, *, wait_s: float) -> bytes:
        """Plan a scan and return its first page; only its id, if it takes longer than `wait_s`.

        Cancelling removes the plan, and so does a failure, because no client knows its id yet.

        Raises: NoSuchTable, BadRequest, ValidationFailed, LocationForbidden, FileMissing, TooManyPlans, Unplannable.
        """
        stored = await self._versions.files.load(await self._versions.locate(table))
        scan = bind_scan(request, stored.document)
        plan = self._plans.add(self._versions.new_uuid(), table)
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
        except (LakefeedError, asyncio.CancelledError):
            self._cancel(plan)
            raise

    async def fetch(self, table: TableId, plan_id: str) -> bytes:
        """Return the state of a plan, and its first page if it is ready.

        Raises: NoSuchTable, NoSuchPlan, FileMissing, Unplannable.
        """
        await self._versions.locate(table)
        plan = self._plans.find(plan_id, table)
        if plan.is_running:
            return orjson.dumps({"status": "submitted"})
        if plan.failure is not None:
            model = error_model(plan.failure)
            error = {"message": str(plan.failure), "type": model.type, "code": model.status}
            return orjson.dumps({"status": "failed", "error": error})
        return await self._first_page(plan, {"status": "completed"})

    async def cancel(self, table: TableId, plan_id: str) -> None:
        """Cancel a plan and release its memory.

        Raises: NoSuchTable, NoSuchPlan.
        """
        await self._versions.locate(table)
        self._cancel(self._plans.find(plan_id, table))

    async def fetch_tasks(self, table: TableId, plan_task: str) -> bytes:
        """Return one page of a plan.

        Raises: NoSuchTable, NoSuchPlanTask, FileMissing, Unplannable.
        """
        await self._versions.locate(table)
        plan_id, _, number = plan_task.rpartition("/")
        try:
            plan = self._plans.find(plan_id, table)
            return await self._page(plan, plan.page_number(number), {})
        except NoSuchPlan as error:
            raise NoSuchPlanTask(f"Plan task does not exist: {plan_task:.100}") from error

    def _cancel(self, plan: ScanPlan) -> None:
        self._plans.remove(plan.plan_id)
        task = self._running.get(plan.plan_id)
        if task is not None:
            task.cancel()

    async def _first_page(self, plan: ScanPlan, head: JsonObject) -> bytes:
        assert plan.prepared is not None, "a plan that has not failed is ready"
        if not plan.prepared.pages:
            return orjson.dumps({**head, "file-scan-tasks": []})
        later = [f"{plan.plan_id}/{number}" for number in range(1, len(plan.prepared.pages))]
        return await self._page(plan, 0, head, later)

    async def _page(self, plan: ScanPlan, number: int, head: JsonObject, later: Sequence[str] = ()) -> bytes:
        prepared = plan.prepared
        assert prepared is not None, "only pages of a plan that is ready are asked for"
        async with self._slots:
            locations = [part.manifest.location for part in prepared.pages[number]]
            bodies = [body async for _, body in self._read(locations)]
            response, is_enough = await self._run(_encode_page, prepared, number, bodies=bodies, head=head, later=later)
        plan.unread_pages = set() if is_enough else plan.unread_pages - {number}
        return response

    async def _prepare(self, plan: ScanPlan, scan: Scan) -> None:
        """Prepare the scan of a plan, and make the plan ready or failed."""
        try:
            async with self._slots:
                prepared = await self._prepare_scan(scan)
            self._plans.finish(plan, prepared)
        except LakefeedError as error:
            plan.failure = error
        except Exception:
            _logger.exception("plan_failed", extra={"table": str(plan.table), "plan": plan.plan_id})
            plan.failure = CatalogError("Internal server error")

    async def _prepare_scan(self, scan: Scan) -> PreparedScan:
        listed: dict[str, Manifest] = {}  # the lists of several snapshots share most of their manifests
        async for location, body in self._read(scan.manifest_lists):
            listed |= {m.location: m for m in await self._run(list_manifests, body, location)}
            self._check_size(listed, "manifests")
        manifests = await self._run(keep_manifests, scan, list(listed.values()))
        # Files of an append scan are read as they were added: deletes of later snapshots do not apply.
        with_deletes = {m.location: m for m in manifests if m.holds_deletes and scan.added_by is None}
        deletes: list[Entry] = []
        async for location, body in self._read(list(with_deletes)):
            deletes += await self._run(read_deletes, scan, body, with_deletes[location])
            self._check_size(deletes, "delete files")
        data = [manifest for manifest in manifests if not manifest.holds_deletes]
        return await self._run(prepare_scan, scan, data, deletes, self._config.plan_page_files)

    def _check_size(self, held: Sized, what: str) -> None:
        if len(held) > self._config.plans_held_max_files:
            raise Unplannable(f"Too many {what} to plan: more than {self._config.plans_held_max_files}")

    async def _read(self, locations: Sequence[str]) -> AsyncIterator[tuple[str, bytes]]:
        """Read files in order, several at once. Clients wrote their locations, so these are checked."""
        for first in range(0, len(locations), _READS_AT_ONCE):
            batch = locations[first : first + _READS_AT_ONCE]
            for location in batch:
                self._versions.confinement.check(location)
            reads = (self._files.read(location, max_bytes=self._config.metadata_max_bytes) for location in batch)
            for location, body in zip(batch, await asyncio.gather(*reads), strict=True):
                yield location, body

    async def _run(self, work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Run work in a thread. Cancelling this does not stop the thread."""
        call = functools.partial(work, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._executor, call)


def _encode_page(
    prepared: PreparedScan, number: int, *, bodies: Sequence[bytes], head: JsonObject, later: Sequence[str]
) -> tuple[bytes, bool]:
    """Return the body of a page, and whether the client needs no other page."""
    page = read_page(prepared, prepared.pages[number], bodies)
    response: JsonObject = {**head, "file-scan-tasks": page.tasks}
    if page.deletes:
        response["delete-files"] = page.deletes
    if later and not page.is_enough:
        response["plan-tasks"] = later
    return orjson.dumps(response), page.is_enough
