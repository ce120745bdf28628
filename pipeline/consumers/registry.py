"""Registry of consumers: set, find and drop their tags by Spark SQL, and keep a running query registered.

lakefeed.contract.consumers defines the tags. Setting one is a commit to the table's metadata that leaves `main`
unchanged, so it never disturbs the writer. Spark rejects it if any other commit comes in between; it is then retried.

A query's progress names the last snapshot of each batch that is finished and recorded in its checkpoint:

    progress -> sources[0] -> endOffset -> {"snapshot_id": ..., "position": ..., ...}

`follow` reads it in a thread beside the query: at its start, at most every minute, and at its end. Errors of this
thread are logged and retried, and never affect the query.
"""

from __future__ import annotations

import ast
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from lakefeed.contract.consumers import (
    MAX_AGE_DEFAULT,
    History,
    Moment,
    Ref,
    needs_renewal,
    retain_minutes,
    tag_of,
)
from lakefeed.contract.errors import ConsumerError
from lakefeed.pipeline.spark.failures import first_line, retry_on_conflict
from lakefeed.pipeline.spark.tables import quoted

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery


_log = logging.getLogger(__name__)

# An attempt takes some tenths of a second, in which a busy table may get another commit.
ATTEMPTS_MAX = 8

# A registration is a commit to the table's metadata: often enough for old snapshots to expire soon.
REGISTER_EVERY_S = 60.0
# How soon the end of the block is noticed.
_POLL_S = 1.0
# How long the end waits for a running registration.
_JOIN_TIMEOUT_S = 60.0


def register(
    spark: SparkSession,
    table: str,
    name: str,
    snapshot_id: int,
    *,
    max_age: timedelta = MAX_AGE_DEFAULT,
    may_go_back: bool = False,
) -> bool:
    """Record that a consumer has finished a snapshot of a table, and return whether the tag was set.

    Expiry keeps this snapshot and all later ones for `max_age` from now on. A consumer moves back to an earlier
    snapshot only if `may_go_back`. Repeated calls with the same snapshot are cheap, and renew the registration.

    Raises:
        ConsumerError: the table no longer has the snapshot, or the name is not valid for a tag.
    """
    tag = tag_of(name)
    present = {ref.name: ref for ref in _load_refs(spark, table)}.get(tag)
    wanted = {snapshot_id, *([present.snapshot_id] if present else [])}
    moments = {moment.snapshot_id: moment.committed_ms for moment in _load_moments(spark, table, only=wanted)}
    if snapshot_id not in moments:
        raise ConsumerError(
            f"the table has no such snapshot, it may have expired: table={table} snapshot={snapshot_id}"
        )
    at_ms, now_ms = moments[snapshot_id], int(time.time() * 1000)
    if present is not None and present.snapshot_id in moments:
        if moments[present.snapshot_id] > at_ms and not may_go_back:
            return False
        stays = present.snapshot_id == snapshot_id
        if stays and not needs_renewal(present, snapshot_ms=at_ms, now_ms=now_ms, max_age=max_age):
            return False
    minutes = retain_minutes(snapshot_ms=at_ms, now_ms=now_ms, max_age=max_age)
    version = f"AS OF VERSION {snapshot_id} RETAIN {minutes} MINUTES"
    statement = f"ALTER TABLE {table} CREATE OR REPLACE TAG {quoted(tag)} {version}"
    retry_on_conflict(lambda: spark.sql(statement), what=f"register {name} of {table}", attempts_max=ATTEMPTS_MAX)
    return True


def hold(spark: SparkSession, table: str, name: str, *, max_age: timedelta = MAX_AGE_DEFAULT) -> bool:
    """Register a new consumer at the table's oldest snapshot, where a stream without a checkpoint begins.

    Call it before the query starts, so that everything which the query will read is kept. A consumer that is already
    registered is not moved. Return whether the tag was set.

    Raises:
        ConsumerError: snapshots expire faster than they can be tagged, or the name is not valid for a tag.
    """
    tag = tag_of(name)
    for is_last in (False, False, True):
        history = load_history(spark, table)
        chain = history.main_chain()
        if not chain or any(ref.name == tag for ref in history.refs):
            return False
        try:
            return register(spark, table, name, chain[-1].snapshot_id, max_age=max_age)
        except ConsumerError:  # the snapshot has expired in between
            if is_last:
                raise
    raise AssertionError("the last attempt returns or raises")


def drop(spark: SparkSession, table: str, name: str) -> bool:
    """Drop a consumer, and return whether it existed."""
    tag = tag_of(name)
    if not any(ref.name == tag for ref in _load_refs(spark, table)):
        return False
    statement = f"ALTER TABLE {table} DROP TAG IF EXISTS {quoted(tag)}"
    retry_on_conflict(lambda: spark.sql(statement), what=f"drop {name} of {table}", attempts_max=ATTEMPTS_MAX)
    return True


def load_history(spark: SparkSession, table: str) -> History:
    """Load a table's refs and the commit times of its snapshots."""
    return History(_load_refs(spark, table), _load_moments(spark, table))


def _load_refs(spark: SparkSession, table: str) -> list[Ref]:
    columns = "name, type, snapshot_id, max_reference_age_in_ms, max_snapshot_age_in_ms"
    rows = spark.sql(f"SELECT {columns} FROM {table}.refs").collect()
    return [Ref(*row) for row in rows]


def _load_moments(spark: SparkSession, table: str, *, only: set[int] | None = None) -> list[Moment]:
    # Times as numbers, because PySpark would convert timestamps to the driver's zone.
    which = "" if only is None else f" WHERE snapshot_id IN ({', '.join(map(str, sorted(only)))})"
    columns = "snapshot_id, parent_id, unix_millis(committed_at), operation"
    return [Moment(*row) for row in spark.sql(f"SELECT {columns} FROM {table}.snapshots{which}").collect()]


# -- a running query


@contextmanager
def follow(
    query: StreamingQuery,
    *,
    spark: SparkSession,
    table: str,
    name: str,
    source: int = 0,
    every_s: float = REGISTER_EVERY_S,
    max_age: timedelta = MAX_AGE_DEFAULT,
) -> Iterator[None]:
    """Keep a streaming query registered as a consumer of a table until the block ends.

    `table` is its name in SQL, `source` its index among the tables that the query reads. A query that is still running
    at the end of the block goes on.
    """

    def register_finished() -> bool:
        """Register what is finished, and return whether the query has finished anything."""
        snapshot_id = finished_snapshot(query.lastProgress, source=source)
        if snapshot_id is None:
            return False
        if register(spark, table, name, snapshot_id, max_age=max_age):
            _log.info("consumer_registered", extra={"table": table, "consumer": name, "snapshot": snapshot_id})
        return True

    def attempt(action: Callable[[], bool]) -> bool:
        """Run an action and log its error. A failed action counts as done, so that it is retried after `every_s`."""
        try:
            return action()
        except Exception as error:  # noqa: BLE001 - the query must go on, whatever Spark raises
            facts = {"table": table, "consumer": name, "reason": first_line(error)}
            _log.warning("consumer_registration_failed", extra=facts)
            return True

    stopping = threading.Event()

    def run() -> None:
        attempt(lambda: hold(spark, table, name, max_age=max_age))
        due = time.monotonic()
        while not stopping.wait(min(_POLL_S, every_s)):
            if time.monotonic() >= due and attempt(register_finished):
                due = time.monotonic() + every_s

    thread = threading.Thread(target=run, name=f"consumer-{name}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join(_JOIN_TIMEOUT_S)
        attempt(register_finished)


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
