"""One maintenance run over the tables of a catalog: table by table, step by step, by Iceberg's procedures.

Each step is planned just before it runs: a rewrite can take hours, in which consumers register and writers commit. A
step or table that fails is reported, and the others go on.

A rewrite that conflicts with another commit is rejected as a whole and changes nothing: Iceberg retries the commit a
few times, then the step runs again. A commit with an unknown outcome is not retried, because it could happen twice; the
next run plans from the state that it finds.

Tables are names in SQL with the catalog first: `lake`.`sales`.`orders`. Timestamps name their zone,
because Spark would read them in the zone of the session.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from lakefeed.contract.properties import COMMIT_RETRIES, COMMIT_RETRY_MAX_WAIT_MS, UPKEEP_PROPERTIES
from lakefeed.pipeline.consumers.registry import load_history
from lakefeed.pipeline.maintenance.plan import (
    LARGE_SHARE,
    SMALL_SHARE,
    MaintenanceConfig,
    MaintenanceSettings,
    PartitionFiles,
    SharedLocation,
    Step,
    TableFacts,
    TablePlan,
    TableSizes,
    check_location_is_own,
    directories_of,
    plan_table,
)
from lakefeed.pipeline.spark.failures import first_line, retry_on_conflict, spark_errors
from lakefeed.pipeline.spark.tables import (
    TableIdentifier,
    all_tables,
    location_of,
    properties,
    set_properties,
    table_names,
    text_literal,
)

if TYPE_CHECKING:
    from pyspark.sql import Row, SparkSession


_log = logging.getLogger(__name__)

# Tables with a property of this prefix are ours: change tables, the quarantine, mirrors.
_OWN_PREFIX = "lakefeed."

# What the writer sets on new tables: Iceberg's default of four retries is soon used up beside a busy writer.
COMMIT_RETRY_PROPERTIES = {key: UPKEEP_PROPERTIES[key] for key in (COMMIT_RETRIES, COMMIT_RETRY_MAX_WAIT_MS)}

OnStep = Callable[[TableIdentifier, Step], object]

SORT_ORDER = "sort-order"

# Values of the column `content`.
_DATA = 0
_POSITION_DELETES = 1

# A larger rewrite is committed in parts, so that a failure does not lose all of it.
PARTS_FROM_BYTES = 8 << 30
PARTS_MAX = 10

# Columns of a procedure's result that are reported, and their names in the report.
_REPORTED: Mapping[Step, Mapping[str, str]] = {
    Step.COMPACT: {
        "rewritten_data_files_count": "files_rewritten",
        "added_data_files_count": "files_added",
        "rewritten_bytes_count": "bytes_rewritten",
        "failed_data_files_count": "files_failed",
        "removed_delete_files_count": "delete_files_removed",
    },
    Step.DELETES: {
        "rewritten_delete_files_count": "files_rewritten",
        "added_delete_files_count": "files_added",
        "rewritten_bytes_count": "bytes_rewritten",
    },
    Step.MANIFESTS: {"rewritten_manifests_count": "manifests_rewritten", "added_manifests_count": "manifests_added"},
    Step.EXPIRE: {
        "deleted_data_files_count": "data_files_deleted",
        "deleted_position_delete_files_count": "delete_files_deleted",
        "deleted_manifest_files_count": "manifests_deleted",
        "deleted_manifest_lists_count": "manifest_lists_deleted",
    },
}

_EXPIRY_ONLY = MaintenanceSettings(run=(Step.EXPIRE,))


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step did: its counts, or the problem that stopped it."""

    step: Step
    seconds: float = 0.0
    counts: Mapping[str, Any] = field(default_factory=dict)
    problem: str | None = None


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
                if not plan.has(step):
                    continue
                result = self._run_step(name, step, plan=plan, facts=facts, settings=settings)
            except spark_errors() as error:
                result = StepResult(step, problem=_log_failure(name, error, step=step.value))
            if result is not None:
                results.append(result)
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

    def _run_step(
        self, name: TableIdentifier, step: Step, *, plan: TablePlan, facts: TableFacts, settings: MaintenanceSettings
    ) -> StepResult | None:
        """Run a step; its failure is part of the result. A dry run only searches for orphans, to count them."""
        if self.is_dry_run and step is not Step.ORPHANS:
            return None
        table = name.sql(self.catalog)
        match step:
            case Step.COMPACT:
                assert plan.compaction is not None
                statement = rewrite_data_files(table, settings, facts, rewrite_bytes=plan.compaction.bytes)
            case Step.DELETES:
                statement = rewrite_position_delete_files(table, settings)
            case Step.MANIFESTS:
                statement = rewrite_manifests(table)
            case Step.EXPIRE:
                assert plan.expiry is not None
                statement = expire_snapshots(table, older_than_ms=plan.expiry.older_than_ms)
            case Step.ORPHANS:
                assert plan.orphans_before_ms is not None
                try:
                    location = check_location_is_own(name, self._load_directories())
                except SharedLocation as error:
                    return StepResult(step, problem=str(error))
                statement = remove_orphan_files(
                    table, older_than_ms=plan.orphans_before_ms, location=location, is_dry_run=self.is_dry_run
                )
        started = time.monotonic()
        try:
            rows = retry_on_conflict(lambda: self.spark.sql(statement).collect(), what=f"{step.value} {table}")
        except Exception as error:  # noqa: BLE001 - a step's boundary
            problem = _log_failure(name, error, step=step.value)
            return StepResult(step, time.monotonic() - started, problem=problem)
        return StepResult(step, time.monotonic() - started, _counts(step, rows))

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


def _counts(step: Step, rows: list[Row]) -> dict[str, Any]:
    if step is Step.ORPHANS:
        return {"orphans": len(rows)}
    result = rows[0].asDict()
    return {name: result[column] for column, name in _REPORTED[step].items() if column in result}


# -- facts: from metadata tables only, no data file is opened


def load_facts(spark: SparkSession, table: str, *, target_file_bytes: int) -> TableFacts:
    """Load a table's facts."""
    history = load_history(spark, table)
    partitions = _load_partitions(spark, table, target_file_bytes)
    data = [row for row in partitions if row["content"] == _DATA]
    sizes = TableSizes(
        data_files=sum(row["files"] for row in data),
        data_bytes=sum(row["bytes"] for row in data),
        small_files=sum(row["small_files"] for row in data),
        delete_files=sum(row["files"] for row in partitions if row["content"] != _DATA),
        manifests=spark.sql(f"SELECT count(*) FROM {table}.manifests").collect()[0][0],
        snapshots=len(history.moments),
    )
    return TableFacts(
        properties=properties(spark, table),
        sizes=sizes,
        wrong_sizes=[
            PartitionFiles(row["wrong_files"], row["wrong_bytes"], row["wrong_largest"])
            for row in data
            if row["wrong_files"]
        ],
        position_deletes=sum(row["files"] for row in partitions if row["content"] == _POSITION_DELETES),
        history=history,
    )


def _load_partitions(spark: SparkSession, table: str, target_file_bytes: int) -> list[Row]:
    """Count the files of each partition: all, the small ones, and those that a rewrite would take."""
    least, most = int(target_file_bytes * SMALL_SHARE), int(target_file_bytes * LARGE_SHARE)
    # A table that was never partitioned has no such column.
    is_partitioned = "partition" in spark.table(f"{table}.files").columns
    key = "content, spec_id, cast(partition AS string)" if is_partitioned else "content, spec_id"
    size, is_wrong = "file_size_in_bytes", f"(file_size_in_bytes < {least} OR file_size_in_bytes > {most})"
    return spark.sql(
        f"SELECT content, count(*) AS files, sum({size}) AS bytes, count_if({size} < {least}) AS small_files, "
        f"count_if({is_wrong}) AS wrong_files, sum(if({is_wrong}, {size}, 0)) AS wrong_bytes, "
        f"max(if({is_wrong}, {size}, 0)) AS wrong_largest FROM {table}.files GROUP BY {key}"
    ).collect()


# -- for jobs that own a table and maintain it between their own writes


def expire(spark: SparkSession, table: str, *, clock: Callable[[], float] = time.time) -> int:
    """Remove a table's snapshots beyond its own limits, with the files that only they use, and return their number.

    `table` is its name in SQL. As with `lakefeed maintain`, what consumers need stays, and the newest snapshot that
    wrote rows. Writers are not disturbed.
    """
    # Expiry is planned by snapshots alone, without the files.
    facts = TableFacts(properties(spark, table), load_history(spark, table))
    plan = plan_table(facts, _EXPIRY_ONLY, now_ms=int(clock() * 1000)).expiry
    if plan is None:
        return 0
    statement = expire_snapshots(table, older_than_ms=plan.older_than_ms)
    retry_on_conflict(lambda: spark.sql(statement).collect(), what=f"expire {table}")
    return plan.snapshots


# -- SQL of the procedures


def rewrite_data_files(table: str, settings: MaintenanceSettings, facts: TableFacts, *, rewrite_bytes: int) -> str:
    """Return the SQL of a compaction: in the configured order, else in the table's sort order, else unsorted."""
    arguments = {"table": text_literal(table)}
    if settings.zorder:
        arguments |= {"strategy": "'sort'", "sort_order": text_literal(f"zorder({', '.join(settings.zorder)})")}
    elif settings.sort:
        arguments |= {"strategy": "'sort'", "sort_order": text_literal(settings.sort)}
    elif SORT_ORDER in facts.properties:
        arguments |= {"strategy": "'sort'"}
    options = {
        "target-file-size-bytes": str(settings.target_file_bytes),
        "min-input-files": str(settings.min_input_files),
    }
    if facts.sizes.delete_files:
        options["remove-dangling-deletes"] = "true"
    if rewrite_bytes > PARTS_FROM_BYTES:
        options |= {"partial-progress.enabled": "true", "partial-progress.max-commits": str(PARTS_MAX)}
    return _call(table, "rewrite_data_files", {**arguments, "options": _map(options)})


def rewrite_position_delete_files(table: str, settings: MaintenanceSettings) -> str:
    """Return the SQL of a rewrite of small position-delete files."""
    options = {"min-input-files": str(settings.min_input_files)}
    return _call(table, "rewrite_position_delete_files", {"table": text_literal(table), "options": _map(options)})


def rewrite_manifests(table: str) -> str:
    """Return the SQL of a rewrite of small manifests, without the cache, which would hold all entries in memory."""
    return _call(table, "rewrite_manifests", {"table": text_literal(table), "use_caching": "false"})


def expire_snapshots(table: str, *, older_than_ms: int) -> str:
    """Return the SQL of an expiry of snapshots. The minimum number to keep is a property of the table."""
    arguments = {"table": text_literal(table), "older_than": timestamp_sql(older_than_ms), "stream_results": "true"}
    return _call(table, "expire_snapshots", arguments)


def remove_orphan_files(table: str, *, older_than_ms: int, location: str, is_dry_run: bool) -> str:
    """Return the SQL of a removal of unreferenced files. Object stores are listed by the table's own file access."""
    arguments = {
        "table": text_literal(table),
        "older_than": timestamp_sql(older_than_ms),
        "dry_run": str(is_dry_run).lower(),
        "prefix_listing": str(not location.startswith(("file:", "hdfs:", "/"))).lower(),
    }
    return _call(table, "remove_orphan_files", arguments)


def timestamp_sql(ms: int) -> str:
    """Return a timestamp as SQL, to the millisecond."""
    at = datetime.fromtimestamp(ms // 1000, UTC)
    return f"TIMESTAMP '{at:%Y-%m-%d %H:%M:%S}.{ms % 1000:03d} UTC'"


def _call(table: str, procedure: str, arguments: Mapping[str, str]) -> str:
    catalog = table.partition(".")[0]
    return f"CALL {catalog}.system.{procedure}({', '.join(f'{key} => {value}' for key, value in arguments.items())})"


def _map(options: Mapping[str, str]) -> str:
    return f"map({', '.join(f'{text_literal(key)}, {text_literal(value)}' for key, value in options.items())})"
