"""Maintenance of many tables, one after the other. Owns the order, and looking again between the steps.

Each step is planned on what the table is when its turn comes: a rewrite can take hours, in which consumers register and
writers commit. A step or table that fails is told, and the others go on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from lakefeed.pipeline.maintenance.plan import (
    SharedLocation,
    Sizes,
    TableFacts,
    TablePlan,
    check_location_is_own,
    load_facts,
    places_of,
    plan_table,
)
from lakefeed.pipeline.maintenance.settings import MaintenanceConfig, MaintenanceSettings, Step
from lakefeed.pipeline.maintenance.steps import StepResult, run_step
from lakefeed.pipeline.spark.failures import is_spark_error, message_of
from lakefeed.pipeline.spark.tables import TableName, all_tables, location_of, properties, table_names

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


_log = logging.getLogger(__name__)

_OURS = "lakefeed."

# What the writer gives to new tables too: Iceberg's own four tries are soon used up.
COMMIT_RETRIES = "commit.retry.num-retries"
PATIENCE = {COMMIT_RETRIES: "30", "commit.retry.max-wait-ms": "1000"}

OnStep = Callable[[TableName, Step], object]


@dataclass(frozen=True, slots=True)
class TableReport:
    """What was found of a table, planned and done; `problem` if not even that could be found out."""

    table: TableName
    plan: TablePlan | None = None
    before: Sizes | None = None
    after: Sizes | None = None
    results: Sequence[StepResult] = ()
    problem: str | None = None

    @property
    def problems(self) -> list[str]:
        """List what went wrong."""
        found = [f"{result.step.value}: {result.problem}" for result in self.results if result.problem]
        return [*([self.problem] if self.problem else []), *found]


@dataclass(slots=True)
class Maintenance:
    """One run over the tables of a catalog."""

    spark: SparkSession
    catalog: str
    config: MaintenanceConfig
    only: frozenset[Step] = frozenset(Step)
    is_dry_run: bool = False
    clock: Callable[[], float] = time.time
    _places: dict[TableName, Sequence[str]] = field(default_factory=dict, init=False)

    def choose_tables(self) -> list[TableName]:
        """Pick the tables of ours: change tables, the quarantine, mirrors; without those that are set to be skipped."""
        return [
            name
            for name, own in all_tables(self.spark, self.catalog).items()
            if any(key.startswith(_OURS) for key in own) and not self.config.settings_of(str(name)).skip
        ]

    def settings_of(self, name: TableName) -> MaintenanceSettings:
        """Give a table's settings, with the steps of this run only."""
        settings = self.config.settings_of(str(name))
        return replace(settings, run=tuple(step for step in Step if step in settings.run and step in self.only))

    def run(self, names: Iterable[TableName], *, on_step: OnStep = lambda *_: None) -> list[TableReport]:
        """Maintain tables, one by one."""
        return [self._maintain(name, on_step) for name in names]

    def _maintain(self, name: TableName, on_step: OnStep) -> TableReport:
        try:
            return self._run_steps(name, on_step)
        except Exception as error:
            if not is_spark_error(error):
                raise
            return TableReport(name, problem=_log_failed(name, error))

    def _run_steps(self, name: TableName, on_step: OnStep) -> TableReport:
        settings = self.settings_of(name)
        first_plan, facts = self._plan(name, settings)
        if not self.is_dry_run:
            self._ensure_patience(name, facts.properties)
        before, plan = facts.sizes, first_plan
        results: list[StepResult] = []
        for step in settings.run:
            on_step(name, step)
            try:
                if results and not self.is_dry_run and step is not Step.ORPHANS:  # which go by their age alone
                    plan, facts = self._plan(name, settings)
                result = self._run_step(name, step, plan=plan, facts=facts) if plan.has(step) else None
            except Exception as error:
                if not is_spark_error(error):
                    raise
                result = StepResult(step, problem=_log_failed(name, error, step=step.value))
            results += [result] if result is not None else []
        after, problem = (before, None) if self.is_dry_run or not results else self._look_again(name, settings)
        _log_done(name, before, after, results)
        return TableReport(name, first_plan, before, after, results, problem)

    def _look_again(self, name: TableName, settings: MaintenanceSettings) -> tuple[Sizes | None, str | None]:
        """Give what a table is now, or why that cannot be told; what was done is told in either case."""
        try:
            return self._plan(name, settings)[1].sizes, None
        except Exception as error:
            if not is_spark_error(error):
                raise
            return None, _log_failed(name, error)

    def _ensure_patience(self, name: TableName, own: Mapping[str, str]) -> None:
        """Let commits be tried often enough to get through beside a busy writer, unless the table has a say in it."""
        if COMMIT_RETRIES not in own:
            patience = ", ".join(f"'{key}' = '{value}'" for key, value in PATIENCE.items())
            self.spark.sql(f"ALTER TABLE {name.sql(self.catalog)} SET TBLPROPERTIES ({patience})")

    def _plan(self, name: TableName, settings: MaintenanceSettings) -> tuple[TablePlan, TableFacts]:
        facts = load_facts(self.spark, name.sql(self.catalog), target_file_bytes=settings.target_file_bytes)
        return plan_table(facts, settings, now_ms=int(self.clock() * 1000)), facts

    def _run_step(self, name: TableName, step: Step, *, plan: TablePlan, facts: TableFacts) -> StepResult | None:
        """Run a step; a dry run only looks for orphans, which nothing else can count."""
        location = ""
        if step is Step.ORPHANS:
            try:
                location = check_location_is_own(name, self._load_places())
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

    def _load_places(self) -> Mapping[TableName, Sequence[str]]:
        """Find out where the tables lie that there are now; of those that were found before, nothing is read again."""
        names = table_names(self.spark, self.catalog)
        self._places = {name: self._places.get(name) or self._places_of(name) for name in names}
        return self._places

    def _places_of(self, name: TableName) -> Sequence[str]:
        table = name.sql(self.catalog)
        try:
            return places_of(location_of(self.spark, table), properties(self.spark, table))
        except Exception as error:
            if not is_spark_error(error):
                raise
            reason = message_of(error).partition("\n")[0]
            _log.warning("location_unknown", extra={"table": str(name), "reason": reason})
            return ()


def _log_failed(name: TableName, error: BaseException, **facts: str) -> str:
    problem = message_of(error).partition("\n")[0] or type(error).__name__
    _log.error("maintenance_failed", extra={"table": str(name), **facts, "reason": problem})
    return problem


def _log_done(name: TableName, before: Sizes, after: Sizes | None, results: Sequence[StepResult]) -> None:
    steps: dict[str, Any] = {result.step.value: dict(result.told) for result in results}
    sizes = {"before": before.to_json(), "after": after.to_json() if after else None}
    facts = {"table": str(name), **sizes, "steps": steps}
    _log.info("table_maintained", extra=facts)
