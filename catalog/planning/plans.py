"""The scan plans that this process holds for clients. Core: owns their number, their size and their end.

    running -> ready | failed        each -> gone: cancelled, unused for its time, or in the way when it is spent

A plan is spent when a client has had all of its pages. It stays, as an answer may have got lost, until room is needed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from catalog.errors import CatalogError, NoSuchPlan, TooManyPlans, Unplannable
from catalog.fields import parse_count
from catalog.names import TableId
from catalog.planning.pages import PreparedScan


@dataclass(slots=True)
class Plan:
    """One plan. It is running as long as it has neither a prepared scan nor a failure."""

    plan_id: str
    table: TableId
    used_at: float
    prepared: PreparedScan | None = None
    failure: CatalogError | None = None
    unread_pages: set[int] = field(default_factory=set)

    @property
    def is_running(self) -> bool:
        """Tell whether nothing has come of it yet."""
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
        """Count what it holds in memory, in descriptions of manifests and delete files."""
        return 0 if self.prepared is None else self.prepared.held_files


class Plans:
    """Plans by id, those unused for the longest time first. The clock comes from outside, in seconds."""

    def __init__(self, *, plans_max: int, held_max_files: int, lifetime_s: float, clock: Callable[[], float]) -> None:
        self._plans_max = plans_max
        self._held_max_files = held_max_files
        self._lifetime_s = lifetime_s
        self._clock = clock
        self._plans: OrderedDict[str, Plan] = OrderedDict()
        self._held_files = 0

    def add(self, plan_id: str, table: TableId) -> Plan:
        """Begin a plan.

        Raises: TooManyPlans.
        """
        self._forget_expired()
        if len(self._plans) >= self._plans_max and not self._forget_spent():
            raise TooManyPlans(f"Too many scan plans are under way, at most {self._plans_max}")
        plan = self._plans[plan_id] = Plan(plan_id, table, self._clock())
        return plan

    def finish(self, plan: Plan, prepared: PreparedScan) -> None:
        """Make a plan ready, if there is room for what it holds. One that is gone meanwhile stays so.

        Raises: TooManyPlans; Unplannable if it would not fit even alone.
        """
        if prepared.held_files > self._held_max_files:
            raise Unplannable(f"Too many manifests and delete files to plan: {prepared.held_files}")
        while self._held_files + prepared.held_files > self._held_max_files:
            if not self._forget_spent():
                raise TooManyPlans(f"Scan plans under way hold too many files, at most {self._held_max_files}")
        if plan.plan_id in self._plans:
            plan.prepared = prepared
            plan.unread_pages = set(range(len(prepared.pages)))
            self._held_files += prepared.held_files

    def find(self, plan_id: str, table: TableId) -> Plan:
        """Return a plan of a table, which counts as a use of it.

        Raises: NoSuchPlan.
        """
        self._forget_expired()
        plan = self._plans.get(plan_id)
        if plan is None or plan.table != table:
            raise NoSuchPlan(f"Plan does not exist: {plan_id}")
        plan.used_at = self._clock()
        self._plans.move_to_end(plan_id)
        return plan

    def remove(self, plan_id: str) -> None:
        """Forget a plan; one that is gone already is fine."""
        plan = self._plans.pop(plan_id, None)
        if plan is not None:
            self._held_files -= plan.held_files

    def _forget_expired(self) -> None:
        oldest = self._clock() - self._lifetime_s
        while self._plans and (first := next(iter(self._plans.values()))).used_at < oldest:
            self.remove(first.plan_id)

    def _forget_spent(self) -> bool:
        """Forget the spent plan that is unused for the longest time; tell whether there was one."""
        for plan in self._plans.values():
            if not plan.is_running and not plan.unread_pages:
                self.remove(plan.plan_id)
                return True
        return False
