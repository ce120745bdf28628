"""How a table's partitions, sort order and properties follow its settings. Owns the request; committer sends it.

A table remembers, as properties, the settings that its layout was last made from:

    lakefeed.partition, lakefeed.sort      equal to the setting      nothing to do, whatever others made of it since
                                           other than the setting    the setting was changed: evolve
                                           missing                   somebody else's table: left alone, unless a section
                                                                     of the configuration speaks of it

So a layout that an engine has altered on purpose is not altered back at the next start. Evolving writes nothing anew:
files that are there keep their spec and order, and readers join both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from writer.commit_plan import Request
from writer.iceberg.partitions import PartitionSpec, parse_partition, same_partitioning, spec_to_json, with_known_ids
from writer.iceberg.sort_orders import UNSORTED, SortOrder, order_to_json, parse_sort
from writer.iceberg.table_state import TableState
from writer.iceberg.terms import PartitionRejected, SortRejected
from writer.table_settings import TableSettings
from writer.types import Schema

PARTITION_PROPERTY = "lakefeed.partition"
SORT_PROPERTY = "lakefeed.sort"

_LATEST = -1  # what the same request adds


@dataclass(frozen=True, slots=True)
class NewLayout:
    """What a table is created with."""

    spec: PartitionSpec
    order: SortOrder
    properties: Mapping[str, str]


@dataclass(slots=True)
class LayoutPlan:
    """What to commit, if anything, and why a setting cannot be followed."""

    requirements: list[Mapping[str, Any]] = field(default_factory=list)
    updates: list[Mapping[str, Any]] = field(default_factory=list)
    properties: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def problem(self) -> str | None:
        """Say why settings cannot be followed, or None."""
        return "; ".join(self.problems) or None

    def request_for(self, state: TableState) -> Request | None:
        """Build the request, or None if there is nothing to commit."""
        if not self.updates and not self.properties:
            return None
        requirements = ({"type": "assert-table-uuid", "uuid": state.uuid}, *self.requirements)
        properties = {"action": "set-properties", "updates": self.properties}
        return Request(requirements, (*self.updates, *([properties] if self.properties else [])))


def plan_new_layout(schema: Schema, settings: TableSettings) -> NewLayout:
    """Decide how a new table is laid out. A sort order whose columns have not come yet waits for them.

    Raises:
        PartitionRejected: a partition's column has not come yet, or has another type.
    """
    config = settings.config
    properties = {PARTITION_PROPERTY: config.partition, **settings.properties}
    order = UNSORTED
    try:
        order = parse_sort(config.sort, schema)
        properties[SORT_PROPERTY] = config.sort
    except SortRejected:
        properties[SORT_PROPERTY] = ""  # another than the setting: each flush looks whether it can be followed now
    return NewLayout(parse_partition(config.partition, schema), order, properties)


def plan_layout(state: TableState, settings: TableSettings) -> LayoutPlan:
    """Decide how a table's layout has to change; one that cannot be changed as wished is left as it is."""
    plan = LayoutPlan()
    if _has_changed(state, settings, key="partition", property_name=PARTITION_PROPERTY):
        _plan_partition(plan, state, settings.config.partition)
    if _has_changed(state, settings, key="sort", property_name=SORT_PROPERTY):
        _plan_sort(plan, state, settings.config.sort)
    changed = {name: value for name, value in settings.properties.items() if state.properties.get(name) != value}
    plan.properties.update(changed)
    return plan


def _has_changed(state: TableState, settings: TableSettings, *, key: str, property_name: str) -> bool:
    followed = state.properties.get(property_name)
    if followed is None:
        return key in settings.given
    return bool(followed != getattr(settings.config, key))


def _plan_partition(plan: LayoutPlan, state: TableState, text: str) -> None:
    try:
        spec = parse_partition(text, state.schema)
    except PartitionRejected as error:
        plan.problems.append(str(error))
        return
    plan.properties[PARTITION_PROPERTY] = text
    if same_partitioning(spec, state.spec):
        return
    spec = with_known_ids(spec, state.specs, last_field_id=state.last_partition_id)
    plan.requirements += [
        {"type": "assert-default-spec-id", "default-spec-id": state.spec.spec_id},
        {"type": "assert-last-assigned-partition-id", "last-assigned-partition-id": state.last_partition_id},
    ]
    plan.updates += [
        {"action": "add-spec", "spec": spec_to_json(spec)},
        {"action": "set-default-spec", "spec-id": _LATEST},
    ]


def _plan_sort(plan: LayoutPlan, state: TableState, text: str) -> None:
    try:
        order = parse_sort(text, state.schema)
    except SortRejected as error:
        plan.problems.append(str(error))
        return
    plan.properties[SORT_PROPERTY] = text
    if order.fields == state.sort_order.fields:
        return
    plan.requirements.append(
        {"type": "assert-default-sort-order-id", "default-sort-order-id": state.sort_order.order_id}
    )
    plan.updates += [
        {"action": "add-sort-order", "sort-order": order_to_json(order)},
        {"action": "set-default-sort-order", "sort-order-id": _LATEST},
    ]
