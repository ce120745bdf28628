"""All mirrors of one application: one thread per table, each failing alone; and their status.

Tables share Spark fairly; at most `parallel_tables` merge at a time. With `once` a table that fails is reported at the
end. Otherwise it is retried with a growing delay for as long as the application runs; `failures` has the tables that
failed and have not merged since.

One application owns a mirror. Of two, the first that finds a commit of the other since its own last one, or since its
batch began, stops for good (merge.py says what this leaves open); of two merges at the same time Iceberg rejects one.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lakefeed.backoff import Backoff
from lakefeed.contract.errors import LakefeedError
from lakefeed.pipeline.errors import PipelineError
from lakefeed.pipeline.mirrors.follower import Follower, FollowOptions
from lakefeed.pipeline.mirrors.marker import ADDED_RECORDS, Marker, load_lineage, load_marker
from lakefeed.pipeline.mirrors.merge import ConcurrentMirror, MergeResult
from lakefeed.pipeline.mirrors.settings import MirrorConfig, MirrorNames, mirror_names
from lakefeed.pipeline.mirrors.table import is_of, load_origin
from lakefeed.pipeline.spark.failures import message_of, spark_errors
from lakefeed.pipeline.spark.tables import Snapshot, TableIdentifier, exists, properties

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


_log = logging.getLogger(__name__)

BACKOFF = Backoff(first_s=5.0, max_s=300.0)
# How often the threads are checked; nothing waits for it.
_POLL_S = 0.5


class MirrorRun:
    """The mirrors of one application, from start to end."""

    def __init__(
        self,
        spark: SparkSession,
        catalog: str,
        tables: Sequence[TableIdentifier],
        config: MirrorConfig,
        *,
        on_merge: Callable[[MirrorNames, MergeResult], None] = lambda _names, _result: None,
    ) -> None:
        self._spark = spark
        self._catalog = catalog
        self._tables = tables
        self._config = config
        self._on_merge = on_merge
        self._stopping = threading.Event()
        self.failures: dict[str, str] = {}
        self._options = FollowOptions(
            checkpoints=config.checkpoints,
            interval_s=config.interval_s,
            run=uuid.uuid4().hex,
            slots=threading.Semaphore(config.parallel_tables),
            stopping=self._stopping,
            on_merge=self._after_merge,
        )

    def stop(self) -> None:
        """Ask all tables to finish their batch and end."""
        self._stopping.set()

    def run(self, *, once: bool) -> Mapping[str, str]:
        """Keep all mirrors, and return the tables that failed with the reason."""
        from pyspark import InheritableThread  # noqa: PLC0415 - optional, as all of Spark

        threads = [
            InheritableThread(target=self._keep, args=(table, once), name=f"mirror-{table}", daemon=True)
            for table in self._tables
        ]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            for thread in threads:
                thread.join(_POLL_S / len(threads))
        return self.failures

    def _keep(self, table: TableIdentifier, once: bool) -> None:
        attempt = 1
        settings = self._config.settings_of(str(table))
        names = mirror_names(table, settings, self._catalog)
        while not self._stopping.is_set():
            follower = Follower(self._spark, names, settings, self._options)
            try:
                follower.run(once=once)
            except Exception as error:  # noqa: BLE001 - a table's boundary: the others go on
                self._report(table, error)
                if once or isinstance(error, ConcurrentMirror):
                    return
                self._stopping.wait(BACKOFF.limit_s(attempt))
                attempt = 1 if follower.has_merged else attempt + 1
            else:
                if once:
                    return

    def _after_merge(self, names: MirrorNames, merged: MergeResult) -> None:
        self.failures.pop(str(names.table), None)
        self._on_merge(names, merged)

    def _report(self, table: TableIdentifier, error: Exception) -> None:
        is_expected = isinstance(error, (PipelineError, *spark_errors()))
        self.failures[str(table)] = _reason(error)
        facts = {"table": str(table), "reason": self.failures[str(table)]}
        _log.error("mirror_failed", extra=facts, exc_info=None if is_expected else error)


def _reason(error: Exception) -> str:
    if isinstance(error, LakefeedError):
        return str(error)
    if not isinstance(error, spark_errors()):
        return f"{type(error).__name__}: {error}"
    # The failure of a task, or in another thread, is the last of the causes.
    java = getattr(error, "java_exception", None) or getattr(error, "_origin", None)
    while java is not None and java.getCause() is not None:
        java = java.getCause()
    cause = "" if java is None else str(java.toString()).partition("\n")[0]
    message = message_of(error)
    return message if not cause or cause in message else f"{message}: {cause}"


# -- status


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorStatus:
    """How far one mirror is behind; None if it does not exist yet, or if its snapshot has expired."""

    table: str
    mirror: str
    mode: str
    snapshot: int | None
    snapshots_behind: int | None
    seconds_behind: float | None
    rows_behind: int | None


def load_status(
    spark: SparkSession, catalog: str, tables: Sequence[TableIdentifier], config: MirrorConfig
) -> list[MirrorStatus]:
    """Load the status of each table's mirror."""
    found = []
    for table in tables:
        settings = config.settings_of(str(table))
        names = mirror_names(table, settings, catalog)
        marker = None
        if exists(spark, names.mirror_sql) and is_of(properties(spark, names.mirror_sql), load_origin(spark, names)):
            marker = load_marker(spark, names.mirror_sql)
        behind = unmerged(load_lineage(spark, names.table_sql), marker)
        status = MirrorStatus(
            table=str(table),
            mirror=str(names.mirror),
            mode=settings.mode.value,
            snapshot=marker.snapshot if marker else None,
            snapshots_behind=None if behind is None else len(behind),
            seconds_behind=None if behind is None else seconds_between(behind),
            rows_behind=None if behind is None else sum(int(each.summary.get(ADDED_RECORDS, "0")) for each in behind),
        )
        found.append(status)
    return found


def unmerged(snapshots: Sequence[Snapshot], marker: Marker | None) -> list[Snapshot] | None:
    """Return the snapshots that a mirror has not merged yet, newest first; None if that is unknown."""
    ids = [snapshot.snapshot_id for snapshot in snapshots]
    if marker is None or marker.snapshot not in ids:
        return None
    newer = snapshots[: ids.index(marker.snapshot)]
    return [snapshot for snapshot in newer if snapshot.operation == "append"]


def seconds_between(behind: Sequence[Snapshot]) -> float:
    """Return how long the oldest unmerged change has been waiting, relative to the table's newest snapshot."""
    return max(0.0, (behind[0].committed_ms - behind[-1].committed_ms) / 1000) if behind else 0.0
