"""Registry of consumers: set, find and drop their tags by Spark SQL. lakefeed.contract.consumers defines the tags.

Setting a tag is a commit to the table's metadata that leaves `main` unchanged, so it never disturbs the writer. Spark
rejects it if any other commit comes in between; it is then retried.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING

from lakefeed.contract.consumers import (
    MAX_AGE_DEFAULT,
    Consumer,
    History,
    Moment,
    Ref,
    needs_renewal,
    retain_minutes,
    tag_of,
)
from lakefeed.contract.errors import ConsumerError
from lakefeed.pipeline.spark.failures import retry_on_conflict
from lakefeed.pipeline.spark.sql import quoted

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


# An attempt takes some tenths of a second, in which a busy table may get another commit.
ATTEMPTS_MAX = 8


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


def consumers(spark: SparkSession, table: str) -> list[Consumer]:
    """Return the consumers of a table, by name, with how far behind each one is."""
    return load_history(spark, table).consumers()


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
