"""Keeps a streaming query registered as a consumer. Owns when: at once, at most every minute, and at the end.

A query's progress names the last snapshot of each batch that is finished and in its checkpoint:

    progress -> sources[0] -> endOffset -> {"snapshot_id": ..., "position": ..., ...}

A thread beside the query looks at it; whatever goes wrong here is logged and tried again, and never harms the query.
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
from lakefeed.pipeline.spark.failures import message_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery


_log = logging.getLogger(__name__)

# A registration is a commit to the table's metadata: often enough to let go of old snapshots soon.
EVERY_S = 60.0
# How soon the end of a query is noticed.
_POLL_S = 1.0
# How long the end waits for a registration that is under way.
_JOIN_S = 60.0


def finished_snapshot(progress: Mapping[str, Any] | None, *, source: int = 0) -> int | None:
    """Read from a query's progress up to which snapshot it has finished; None before its first batch.

    `source` is the number of the table among those that the query reads.
    """
    if progress is None or source >= len(progress["sources"]):
        return None
    offset = progress["sources"][source]["endOffset"]
    if isinstance(offset, str):
        offset = _parsed(offset)
    found = offset.get("snapshot_id") if isinstance(offset, Mapping) else None
    return None if found is None or int(found) < 0 else int(found)


def _parsed(offset: str) -> Any:
    try:
        return json.loads(offset)
    except ValueError:
        return ast.literal_eval(offset)  # PySpark 4 gives the offset as Python would print it


def follow(
    query: StreamingQuery,
    *,
    spark: SparkSession,
    table: str,
    name: str,
    source: int = 0,
    every_s: float = EVERY_S,
    max_age: timedelta = MAX_AGE_DEFAULT,
) -> Follower:
    """Register a streaming query as a consumer of a table, again and again, until the block ends.

    `table` is the name as SQL has it, `source` the number of the table among those that the query reads.
    """
    return Follower(query, spark=spark, table=table, name=name, source=source, every_s=every_s, max_age=max_age)


class Follower:
    """A thread that registers a query for as long as the block lasts."""

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
        self._facts = {"table": table, "consumer": name}
        self._table = table
        self._name = name
        self._source = source
        self._every_s = every_s
        self._max_age = max_age
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"consumer-{name}", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Register once more and stop looking. The query goes on if it still runs."""
        self._ended.set()
        self._thread.join(_JOIN_S)
        self._register()

    def _run(self) -> None:
        self._try(self._hold)
        due = time.monotonic()
        while not self._ended.wait(min(_POLL_S, self._every_s)):
            if time.monotonic() >= due and self._register():
                due = time.monotonic() + self._every_s

    def _register(self) -> bool:
        """Register what is finished; tell whether there was something to look at."""
        return self._try(self._register_finished)

    def _hold(self) -> bool:
        return hold(self._spark, self._table, self._name, max_age=self._max_age)

    def _register_finished(self) -> bool:
        snapshot_id = finished_snapshot(self._query.lastProgress, source=self._source)
        if snapshot_id is None:
            return False
        if register(self._spark, self._table, self._name, snapshot_id, max_age=self._max_age):
            _log.info("consumer_registered", extra={**self._facts, "snapshot": snapshot_id})
        return True

    def _try(self, action: Callable[[], bool]) -> bool:
        """Do something that must not harm the query; what went wrong counts as done, and is tried again in its time."""
        try:
            return action()
        except Exception as error:  # noqa: BLE001 - the query must not end for it, whatever Spark says
            reason = message_of(error).partition("\n")[0]
            _log.warning("consumer_not_registered", extra={**self._facts, "reason": reason})
            return True
