"""All mirrors of one application. Owns their threads: one per table, each failing alone.

Tables share Spark by fair turns; at most `parallel_tables` merge at a time. With `once` a table that fails is reported
at the end. Otherwise it is tried again after a pause that grows, for as long as the application runs; `failures` has
those that failed and have not merged since.

One application owns a mirror. Of two, the first that finds the other's commit since its own last one, or since its
batch was begun, stops for good (merge.py says what that leaves open); of merges that meet, Iceberg refuses one.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lakefeed.contract.errors import LakefeedError
from lakefeed.pipeline.mirrors.follower import Follower, FollowOptions
from lakefeed.pipeline.mirrors.marker import Marker, Version, load_lineage
from lakefeed.pipeline.mirrors.merge import Merged, TwoApplications
from lakefeed.pipeline.mirrors.settings import MirrorConfig, MirrorNames, mirror_names
from lakefeed.pipeline.mirrors.table import is_of, load_marker, load_origin
from lakefeed.pipeline.spark.failures import is_spark_error, message_of
from lakefeed.pipeline.spark.tables import TableName, exists, properties

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


# --- pipeline.mirrors.runner ------------------------------------------------------------------------------------------


_log = logging.getLogger(__name__)

RETRY_FIRST_S = 5.0
RETRY_MAX_S = 300.0
# How often the threads are looked at; nothing waits for it.
_POLL_S = 0.5


class MirrorRun:
    """One application's mirrors, from start to end."""

    def __init__(
        self,
        spark: SparkSession,
        catalog: str,
        tables: Sequence[TableName],
        config: MirrorConfig,
        *,
        on_merge: Callable[[MirrorNames, Merged], None] = lambda _names, _merged: None,
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
            on_merge=self._note_merge,
        )

    def stop(self) -> None:
        """Ask all tables to finish their batch and end."""
        self._stopping.set()

    def run(self, *, once: bool) -> Mapping[str, str]:
        """Keep all mirrors; the tables that failed, with the reason."""
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

    def _keep(self, table: TableName, once: bool) -> None:
        pause_s = RETRY_FIRST_S
        while not self._stopping.is_set():
            names = mirror_names(table, self._config.settings_of(str(table)), self._catalog)
            follower = Follower(self._spark, names, self._config.settings_of(str(table)), self._options)
            try:
                follower.run(once=once)
            except Exception as error:  # noqa: BLE001 - a table's boundary: the others go on
                self._report(table, error)
                if once or isinstance(error, TwoApplications):
                    return
                self._stopping.wait(pause_s)
                pause_s = min(RETRY_MAX_S, pause_s * 2) if not follower.has_merged else RETRY_FIRST_S
            else:
                if once:
                    return

    def _note_merge(self, names: MirrorNames, merged: Merged) -> None:
        self.failures.pop(str(names.table), None)
        self._on_merge(names, merged)

    def _report(self, table: TableName, error: Exception) -> None:
        foreseen = isinstance(error, LakefeedError) or is_spark_error(error)
        self.failures[str(table)] = _reason(error)
        facts = {"table": str(table), "reason": self.failures[str(table)]}
        _log.error("mirror_failed", extra=facts, exc_info=None if foreseen else error)


def _reason(error: Exception) -> str:
    if isinstance(error, LakefeedError):
        return str(error)
    if not is_spark_error(error):
        return f"{type(error).__name__}: {error}"
    # What failed in a task or in another thread is at the end of the causes.
    java = getattr(error, "java_exception", None) or getattr(error, "_origin", None)
    while java is not None and java.getCause() is not None:
        java = java.getCause()
    cause = "" if java is None else str(java.toString()).partition("\n")[0]
    message = message_of(error)
    return message if not cause or cause in message else f"{message}: {cause}"


# --- pipeline.mirrors.status ------------------------------------------------------------------------------------------
#
# Where mirrors stand. Owns reading that, for people and for scripts.


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorStatus:
    """One mirror; None where there is none of this table yet, or where its snapshot has expired."""

    table: str
    mirror: str
    mode: str
    snapshot: int | None
    snapshots_behind: int | None
    seconds_behind: float | None
    rows_behind: int | None


def load_status(
    spark: SparkSession, catalog: str, tables: Sequence[TableName], config: MirrorConfig
) -> list[MirrorStatus]:
    """Look at the mirror of each table."""
    return [_status_of(spark, catalog, table, config) for table in tables]


def _status_of(spark: SparkSession, catalog: str, table: TableName, config: MirrorConfig) -> MirrorStatus:
    settings = config.settings_of(str(table))
    names = mirror_names(table, settings, catalog)
    marker = None
    if exists(spark, names.mirror_sql) and is_of(properties(spark, names.mirror_sql), load_origin(spark, names)):
        marker = load_marker(spark, names)
    behind = missing(load_lineage(spark, names.table_sql), marker)
    return MirrorStatus(
        table=str(table),
        mirror=str(names.mirror),
        mode=settings.mode.value,
        snapshot=marker.snapshot if marker else None,
        snapshots_behind=None if behind is None else len(behind),
        seconds_behind=None if behind is None else seconds_between(behind),
        rows_behind=None if behind is None else sum(map(_rows, behind)),
    )


def missing(lineage: Sequence[Version], marker: Marker | None) -> list[Version] | None:
    """List the snapshots that a mirror has still to merge, newest first; None if that is not known."""
    ids = [version.snapshot_id for version in lineage]
    if marker is None or marker.snapshot not in ids:
        return None
    newer = lineage[: ids.index(marker.snapshot)]
    return [version for version in newer if version.operation == "append"]


def seconds_between(behind: Sequence[Version]) -> float:
    """Tell how long the oldest change that is not merged waits, measured by the table's own newest snapshot."""
    return max(0.0, (behind[0].committed_ms - behind[-1].committed_ms) / 1000) if behind else 0.0


def _rows(version: Version) -> int:
    return int(version.summary.get("added-records", "0"))
