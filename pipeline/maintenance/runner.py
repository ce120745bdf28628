"""One maintenance run over the tables of a catalog: table by table, step by step.

Each step is planned just before it runs: a rewrite can take hours, in which consumers register and writers commit. A
step or table that fails is reported, and the others go on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from lakefeed.contract.properties import COMMIT_RETRIES, COMMIT_RETRY_MAX_WAIT_MS, UPKEEP_PROPERTIES
from lakefeed.pipeline.maintenance.plan import (
    MaintenanceConfig,
    MaintenanceSettings,
    SharedLocation,
    Step,
    TableFacts,
    TablePlan,
    TableSizes,
    check_location_is_own,
    directories_of,
    plan_table,
)
from lakefeed.pipeline.maintenance.steps import StepResult, load_facts, run_step
from lakefeed.pipeline.spark.failures import first_line, spark_errors
from lakefeed.pipeline.spark.tables import (
    TableIdentifier,
    all_tables,
    location_of,
    properties,
    set_properties,
    table_names,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


_log = logging.getLogger(__name__)

# Tables with a property of this prefix are ours: change tables, the quarantine, mirrors.
_OWN_PREFIX = "lakefeed."

# What the writer sets on new tables: Iceberg's default of four retries is soon used up beside a busy writer.
COMMIT_RETRY_PROPERTIES = {key: UPKEEP_PROPERTIES[key] for key in (COMMIT_RETRIES, COMMIT_RETRY_MAX_WAIT_MS)}

OnStep = Callable[[TableIdentifier, Step], object]


@dataclass(frozen=True, slots=True)
class TableReport:
    """What was found, planned and done for a table; `problem` if its facts could not be loaded."""

    table: TableIdentifier
    plan: TablePlan | None = None
    before: TableSizes | None = None
    after: TableSizes | None = None
    results: Sequence[StepResult] = ()
    problem: str | None = None

    @property
    def problems(self) -> list[str]:
        """Return everything that went wrong."""
        found = [f"{result.step.value}: {result.problem}" for result in self.results if result.problem]
        return [*([self.problem] if self.problem else []), *found]


@dataclass(slots=True)
class Maintenance:
    """One run."""

    spark: SparkSession
    catalog: str
    config: MaintenanceConfig
    only: frozenset[Step] = frozenset(Step)
    is_dry_run: bool = False
    clock: Callable[[], float] = time.time
    _directories: dict[TableIdentifier, Sequence[str]] = field(default_factory=dict, init=False)

    def choose_tables(self) -> list[TableIdentifier]:
        """Return our tables: change tables, the quarantine and mirrors, without those that settings skip."""
        return [
            name
            for name, own in all_tables(self.spark, self.catalog).items()
            if any(key.startswith(_OWN_PREFIX) for key in own) and not self.config.settings_of(str(name)).skip
        ]

    def settings_of(self, name: TableIdentifier) -> MaintenanceSettings:
        """Return a table's settings, limited to the steps of this run."""
        settings = self.config.settings_of(str(name))
        return replace(settings, run=tuple(step for step in Step if step in settings.run and step in self.only))

    def run(self, names: Iterable[TableIdentifier], *, on_step: OnStep = lambda *_: None) -> list[TableReport]:
        """Maintain tables, one by one."""
        reports = []
        for name in names:
            try:
                reports.append(self._run_steps(name, on_step))
            except spark_errors() as error:
                reports.append(TableReport(name, problem=_log_failure(name, error)))
        return reports

    def _run_steps(self, name: TableIdentifier, on_step: OnStep) -> TableReport:
        settings = self.settings_of(name)
        first_plan, facts = self._plan(name, settings)
        if not self.is_dry_run and COMMIT_RETRIES not in facts.properties:
            set_properties(self.spark, name.sql(self.catalog), COMMIT_RETRY_PROPERTIES)
        before, plan = facts.sizes, first_plan
        results: list[StepResult] = []
        for step in settings.run:
            on_step(name, step)
            try:
                if results and not self.is_dry_run and step is not Step.ORPHANS:  # orphans depend on their age alone
                    plan, facts = self._plan(name, settings)
                result = self._run_step(name, step, plan=plan, facts=facts) if plan.has(step) else None
            except spark_errors() as error:
                result = StepResult(step, problem=_log_failure(name, error, step=step.value))
            results += [result] if result is not None else []
        after: TableSizes | None = before
        problem = None
        if results and not self.is_dry_run:
            try:
                after = self._plan(name, settings)[1].sizes
            except spark_errors() as error:
                after, problem = None, _log_failure(name, error)  # what was done is reported nevertheless
        _log.info(
            "table_maintained",
            extra={
                "table": str(name),
                "before": asdict(before),
                "after": asdict(after) if after else None,
                "steps": {result.step.value: dict(result.counts) for result in results},
            },
        )
        return TableReport(name, first_plan, before, after, results, problem)

    def _plan(self, name: TableIdentifier, settings: MaintenanceSettings) -> tuple[TablePlan, TableFacts]:
        facts = load_facts(self.spark, name.sql(self.catalog), target_file_bytes=settings.target_file_bytes)
        return plan_table(facts, settings, now_ms=int(self.clock() * 1000)), facts

    def _run_step(self, name: TableIdentifier, step: Step, *, plan: TablePlan, facts: TableFacts) -> StepResult | None:
        """Run a step. A dry run only searches for orphans, which nothing else can count."""
        location = ""
        if step is Step.ORPHANS:
            try:
                location = check_location_is_own(name, self._load_directories())
            except SharedLocation as error:
                return StepResult(step, problem=str(error))
        elif self.is_dry_run:
            return None
        return run_step(
            self.spark,
            name.sql(self.catalog),
            step,
            plan=plan,
            facts=facts,
            settings=self.settings_of(name),
            location=location,
            is_dry_run=self.is_dry_run,
        )

    def _load_directories(self) -> Mapping[TableIdentifier, Sequence[str]]:
        """Load the directories of all tables that exist now; those known from an earlier call are not read again."""
        known, self._directories = self._directories, {}
        for name in table_names(self.spark, self.catalog):
            try:
                self._directories[name] = known.get(name) or directories_of(
                    location_of(self.spark, name.sql(self.catalog)), properties(self.spark, name.sql(self.catalog))
                )
            except spark_errors() as error:
                _log.warning("table_location_unknown", extra={"table": str(name), "reason": first_line(error)})
                self._directories[name] = ()
        return self._directories


def _log_failure(name: TableIdentifier, error: BaseException, **facts: Any) -> str:
    problem = first_line(error)
    _log.error("maintenance_failed", extra={"table": str(name), **facts, "reason": problem})
    return problem
