"""Registration of a running streaming query: at its start, at most every minute, and at its end.

A query's progress names the last snapshot of each batch that is finished and recorded in its checkpoint:

    progress -> sources[0] -> endOffset -> {"snapshot_id": ..., "position": ..., ...}

A thread reads it beside the query. Its errors are logged and retried, and never affect the query.
"""

from __future__ import annotations

import ast
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from lakefeed.contract.consumers import MAX_AGE_DEFAULT
from lakefeed.pipeline.consumers.registry import hold, register
from lakefeed.pipeline.spark.failures import first_line

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery


_log = logging.getLogger(__name__)

# A registration is a commit to the table's metadata: often enough for old snapshots to expire soon.
EVERY_S = 60.0
# How soon the end of the block is noticed.
_POLL_S = 1.0
# How long the end waits for a running registration.
_JOIN_TIMEOUT_S = 60.0


def finished_snapshot(progress: Mapping[str, Any] | None, *, source: int = 0) -> int | None:
    """Return the last snapshot that a query has finished, from its progress; None before its first batch.

    `source` is the index of the table among those that the query reads.
    """
    if progress is None or source >= len(progress["sources"]):
        return None
    offset = progress["sources"][source]["endOffset"]
    if isinstance(offset, str):
        try:
            offset = json.loads(offset)
        except ValueError:
            offset = ast.literal_eval(offset)  # PySpark 4 returns the repr of a dict
    found = offset.get("snapshot_id") if isinstance(offset, Mapping) else None
    return None if found is None or int(found) < 0 else int(found)


def follow(
    query: StreamingQuery,
    *,
    spark: SparkSession,
    table: str,
    name: str,
    source: int = 0,
    every_s: float = EVERY_S,
    max_age: timedelta = MAX_AGE_DEFAULT,
) -> QueryFollower:
    """Keep a streaming query registered as a consumer of a table until the block ends.

    `table` is its name in SQL, `source` its index among the tables that the query reads.
    """
    return QueryFollower(query, spark=spark, table=table, name=name, source=source, every_s=every_s, max_age=max_age)


class QueryFollower:
    """A thread that registers a query's progress for as long as the block lasts."""

    def __init__(
        self,
        query: StreamingQuery,
        *,
        spark: SparkSession,
        table: str,
        name: str,
        source: int,
        every_s: float,
        max_age: timedelta,
    ) -> None:
        self._query = query
        self._spark = spark
        self._table = table
        self._name = name
        self._source = source
        self._every_s = every_s
        self._max_age = max_age
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"consumer-{name}", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Register a last time and stop. A query that is still running goes on."""
        self._stopping.set()
        self._thread.join(_JOIN_TIMEOUT_S)
        self._try(self._register)

    def _run(self) -> None:
        self._try(lambda: hold(self._spark, self._table, self._name, max_age=self._max_age))
        due = time.monotonic()
        while not self._stopping.wait(min(_POLL_S, self._every_s)):
            if time.monotonic() >= due and self._try(self._register):
                due = time.monotonic() + self._every_s

    def _register(self) -> bool:
        """Register what is finished, and return whether the query has finished anything."""
        snapshot_id = finished_snapshot(self._query.lastProgress, source=self._source)
        if snapshot_id is None:
            return False
        if register(self._spark, self._table, self._name, snapshot_id, max_age=self._max_age):
            _log.info(
                "consumer_registered", extra={"table": self._table, "consumer": self._name, "snapshot": snapshot_id}
            )
        return True

    def _try(self, action: Callable[[], bool]) -> bool:
        """Run an action and log its error. A failed action counts as done, so that it is retried after `every_s`."""
        try:
            return action()
        except Exception as error:  # noqa: BLE001 - the query must go on, whatever Spark raises
            facts = {"table": self._table, "consumer": self._name, "reason": first_line(error)}
            _log.warning("consumer_registration_failed", extra=facts)
            return True
