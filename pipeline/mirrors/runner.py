"""All mirrors of one application. Owns their threads: one per table, each failing alone.

Tables share Spark by fair turns; at most `parallel_tables` merge at a time. With `once` a table that fails is reported
at the end. Otherwise it is tried again after a pause that grows, for as long as the application runs; `failures` has
those that failed and have not merged since.

One application owns a mirror. Of two, the first that finds the other's commit since its own last one, or since its
batch was begun, stops for good (ownership.py says what that leaves open); of merges that meet, Iceberg refuses one.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from pipeline.errors import PipelineError
from pipeline.mirrors.follower import Follower, FollowOptions
from pipeline.mirrors.merging import Merged
from pipeline.mirrors.names import MirrorNames, mirror_names
from pipeline.mirrors.ownership import TwoApplications
from pipeline.mirrors.settings import MirrorConfig
from pipeline.spark_errors import is_spark_error, message_of
from pipeline.tables import TableName

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

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
        foreseen = isinstance(error, PipelineError) or is_spark_error(error)
        self.failures[str(table)] = _reason(error)
        facts = {"table": str(table), "reason": self.failures[str(table)]}
        _log.error("mirror_failed", extra=facts, exc_info=None if foreseen else error)


def _reason(error: Exception) -> str:
    if isinstance(error, PipelineError):
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
