"""The plans that a process holds: their end by time, by number and by size."""

from __future__ import annotations

import pytest

from lakefeed.catalog.errors import NoSuchPlan, TooManyPlans, Unplannable
from lakefeed.catalog.names import TableId
from lakefeed.catalog.planning.expressions import Columns
from lakefeed.catalog.planning.planner import ScanPlan, ScanPlans
from lakefeed.catalog.planning.tasks import PreparedScan, bind_scan, parse_plan_request, prepare_scan
from lakefeed.iceberg.manifests import Manifest
from tests.catalog.documents import new_table


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


TABLE = TableId(("db",), "t")
LIFETIME_S = 60.0


def manifests(count: int, files: int = 1) -> list[Manifest]:
    return [Manifest(f"m{number}", False, 0, 1, 1, files, None, None) for number in range(count)]


def prepared(count: int, *, page_files: int = 1) -> PreparedScan:
    scan = bind_scan(parse_plan_request({}), new_table())
    return prepare_scan(scan, manifests(count), [], page_files)


def make_plans(clock: Clock, *, plans_max: int = 10, held_max_files: int = 10) -> ScanPlans:
    return ScanPlans(plans_max=plans_max, held_max_files=held_max_files, lifetime_s=LIFETIME_S, clock=clock)


def add_ready(plans: ScanPlans, plan_id: str, count: int) -> ScanPlan:
    plan = plans.add(plan_id, TABLE)
    plans.finish(plan, prepared(count))
    return plan


def test_plan_ends_when_it_is_unused_for_its_time():
    clock = Clock()
    plans = make_plans(clock)
    plans.add("a", TABLE)
    plans.add("b", TABLE)
    clock.now += LIFETIME_S
    plans.find("a", TABLE)
    clock.now += 1
    assert plans.find("a", TABLE).is_running
    with pytest.raises(NoSuchPlan, match="Plan does not exist: b"):
        plans.find("b", TABLE)


def test_only_spent_plans_are_evicted():
    plans = make_plans(Clock(), plans_max=2)
    add_ready(plans, "unread", 2)
    spent = add_ready(plans, "spent", 2)
    with pytest.raises(TooManyPlans):
        plans.add("third", TABLE)
    spent.unread_pages.clear()
    plans.add("third", TABLE)
    assert plans.find("unread", TABLE)
    with pytest.raises(NoSuchPlan):
        plans.find("spent", TABLE)


def test_what_all_plans_hold_together_is_bounded():
    plans = make_plans(Clock(), held_max_files=10)
    first = add_ready(plans, "first", 5)
    with pytest.raises(TooManyPlans):
        add_ready(plans, "second", 5)
    plans.remove(first.plan_id)
    add_ready(plans, "third", 5)
    with pytest.raises(Unplannable):
        add_ready(plans, "fourth", 10)


def test_plan_that_was_cancelled_while_it_ran_holds_nothing():
    plans = make_plans(Clock(), held_max_files=10)
    plan = plans.add("a", TABLE)
    plans.remove("a")
    plans.finish(plan, prepared(9))
    assert add_ready(plans, "b", 9).held_files == 10, "all the room is there for another"


@pytest.mark.parametrize(
    ("counts", "page_files", "expected"),
    [
        ([1, 1, 1], 2, [[(0, 1), (0, 1)], [(0, 1)]]),
        ([5], 2, [[(0, 2)], [(2, 4)], [(4, 5)]]),
        ([1, 2], 2, [[(0, 1)], [(0, 2)]]),
        ([None, 1], 2, [[(0, None)], [(0, 1)]]),
        ([], 2, []),
    ],
)
def test_pages_hold_every_entry_once_and_no_more_than_allowed(counts, page_files, expected):
    listed = [Manifest(f"m{n}", False, 0, 1, 1, count, None, None) for n, count in enumerate(counts)]
    scan = bind_scan(parse_plan_request({}), new_table())
    pages = prepare_scan(scan, listed, [], page_files).pages
    assert [[(part.first, part.end) for part in page] for page in pages] == expected


def test_pages_are_short_where_the_filter_is_long():
    long = {"type": "in", "term": "v", "values": ["x" * 1000] * 4000}
    scan = bind_scan(parse_plan_request({"filter": long}), new_table())
    pages = prepare_scan(scan, manifests(3, files=100), [], 10_000).pages
    assert len(pages) > 10


def test_names_that_differ_by_case_only_are_ambiguous_without_regard_to_it():
    schema = new_table()["schemas"][0]
    twice = {**schema, "fields": [*schema["fields"], {"id": 9, "name": "ID", "type": "long", "required": False}]}
    assert Columns(twice, case_sensitive=True).named("ID").field_id == 9
    with pytest.raises(Exception, match="ambiguous"):
        Columns(twice, case_sensitive=False).named("Id")
