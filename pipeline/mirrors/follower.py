r"""Follower of one change table: brings its mirror up to date and keeps it there.

    start --> no marker, or its snapshot has expired --> read the whole table --+
      ^  \--> marker ---------------------------------------------------------> stream, one merge per batch
      |                                                                              |
      +---- columns changed (same checkpoint) / checkpoint lost (new checkpoint, from the marker)

The mirror's marker decides what is merged; the checkpoint only saves reading. A checkpoint that is gone, whose snapshot
has expired, or that is ahead of a mirror which was rolled back, is replaced by a new one.

While it reads, the mirror is a registered consumer of its change table. The registration made before a full read is
renewed until the read is done, so that the snapshots after it do not expire before the stream starts. A failed
registration is logged and does not stop the mirror.
"""

from __future__ import annotations

import enum
import json
import logging
import random
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from lakefeed.contract.properties import CONSUMER_SNAPSHOTS_MAX
from lakefeed.pipeline.consumers.registry import register
from lakefeed.pipeline.errors import PipelineError
from lakefeed.pipeline.maintenance.runner import expire
from lakefeed.pipeline.mirrors.marker import (
    MARKER,
    Marker,
    ReadTable,
    StreamFrom,
    completed_snapshot,
    load_lineage,
    load_marker,
    plan_resume,
)
from lakefeed.pipeline.mirrors.merge import ConcurrentMirror, MergeResult, MirrorState, load_state, merge_changes
from lakefeed.pipeline.mirrors.settings import MirrorNames, MirrorSettings
from lakefeed.pipeline.mirrors.table import Layout, load_built_key, load_origin, plan_layout, prepare_mirror
from lakefeed.pipeline.mirrors.tombstones import Tombstones
from lakefeed.pipeline.spark.failures import message_of
from lakefeed.pipeline.spark.tables import read_as_of, set_properties

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.types import StructType


_log = logging.getLogger(__name__)

# A registration is a commit to the change table: often enough for merged snapshots to expire soon.
REGISTER_EVERY_S = 60.0
# How long the end of a full read waits for a running registration.
_JOIN_TIMEOUT_S = 60.0
# Expired tombstones and snapshots are removed several times within their maximum age, so that few exceed it.
_CLEANUPS_PER_AGE = 4
_CLEANUP_INTERVAL_MIN_S = 60.0
_CLEANUP_INTERVAL_MAX_S = 3600.0
# How often the end of a stream, or a request to stop, is checked.
_POLL_S = 0.5
# How long a stop waits for a running merge; if interrupted, the batch is merged again.
_STOP_TIMEOUT_S = 60.0


class _StreamEnd(enum.Enum):
    FINISHED = "finished"
    COLUMNS_CHANGED = "columns changed"
    CHECKPOINT_LOST = "checkpoint lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowOptions:
    """What all mirrors of an application share."""

    checkpoints: str
    interval_s: float
    run: str
    slots: threading.Semaphore
    stopping: threading.Event
    on_merge: Callable[[MirrorNames, MergeResult], None]


class Follower:
    """Keeps one mirror. Used by one thread; the stream calls back on another one, one batch at a time."""

    def __init__(
        self, spark: SparkSession, names: MirrorNames, settings: MirrorSettings, options: FollowOptions
    ) -> None:
        self._spark = spark
        self._names = names
        self._settings = settings
        self._options = options
        self._layout: Layout | None = None
        self._tombstones: Tombstones | None = None
        self._marker: Marker | None = None
        self._copied_marker: Marker | None = None
        self._stream_id = ""
        self.has_merged = False
        self._registered_at = -REGISTER_EVERY_S
        # At random, so that the mirrors of one application do not all clean up at once, nor never if they restart
        # often.
        self._cleaned_at = time.monotonic() - random.uniform(0.0, cleanup_interval_s(settings))  # noqa: S311 - jitter
        self._end = _StreamEnd.FINISHED
        self._failure: BaseException | None = None

    def run(self, *, once: bool) -> None:
        """Follow the table: until its present end if `once`, else until the application stops."""
        # The stream's thread inherits the pool, so that tables share Spark fairly.
        self._spark.sparkContext.setLocalProperty("spark.scheduler.pool", str(self._names.mirror))
        merges_when_lost = -1
        while not self._options.stopping.is_set():
            end = self._resume(once=once)
            if end is _StreamEnd.CHECKPOINT_LOST:
                merges = self._marker.merges if self._marker else 0
                if merges == merges_when_lost and self._failure is not None:
                    raise self._failure
                merges_when_lost = merges
                self._stream_id = uuid.uuid4().hex
            elif end is _StreamEnd.FINISHED and once:
                break
        self._report_progress(now=True)
        if once:
            self._clean_up()

    def _resume(self, *, once: bool) -> _StreamEnd:
        """Read the table or stream it, from the marker on."""
        snapshots = load_lineage(self._spark, self._names.table_sql)
        has_mirror = bool(load_built_key(self._spark, self._names))
        self._marker = load_marker(self._spark, self._names.mirror_sql) if has_mirror else None
        match plan_resume(snapshots, self._marker):
            case ReadTable(snapshot):
                self._read_table(snapshot)
                return _StreamEnd.COLUMNS_CHANGED  # not finished: the stream comes next
            case StreamFrom() as start:
                return self._stream(start, once=once)
        if not once:
            self._options.stopping.wait(self._options.interval_s)
        return _StreamEnd.FINISHED

    def _prepare(self, schema: StructType) -> None:
        """Create or alter the mirror and its tombstones for the columns of the change table."""
        layout = plan_layout(schema, self._settings, built_key=load_built_key(self._spark, self._names))
        origin = load_origin(self._spark, self._names)
        prepare_mirror(self._spark, self._names, layout, self._settings, origin=origin)
        self._layout = layout
        self._tombstones = Tombstones(self._names, layout, settings=self._settings, origin=origin)
        self._tombstones.load(self._spark)

    def _has_changed(self, spark: SparkSession, schema: StructType) -> bool:
        return bool(spark.table(self._names.table_sql).schema != schema)

    # -- the whole table

    def _read_table(self, snapshot: int) -> None:
        if self._marker is not None and self._marker.run == self._options.run and self._marker.batch < 0:
            # This application has read the whole table, but its snapshot expired before the stream began.
            reason = (
                "its snapshot expired while the whole table was read: raise the table's "
                f"{CONSUMER_SNAPSHOTS_MAX}, or let snapshots expire later"
            )
            _log.warning(
                "mirror_full_read_repeated",
                extra={"table": str(self._names.table), "snapshot": self._marker.snapshot, "reason": reason},
            )
        # Neither the snapshot that is read nor those after it, where the stream begins, may expire in the meantime.
        with self._registered(snapshot):
            changes = read_as_of(self._spark, self._names.table_sql, snapshot)
            present = self._spark.table(self._names.table_sql).schema
            self._prepare(changes.schema)
            merges = self._marker.merges if self._marker else 0
            self._stream_id = uuid.uuid4().hex
            run = self._options.run
            marker = Marker(snapshot=snapshot, stream=self._stream_id, batch=-1, run=run, merges=merges + 1)
            _log.info("mirror_full_read_started", extra={"table": str(self._names.table), "snapshot": snapshot})
            try:
                with self._options.slots:
                    self._merge(changes, marker, load_state(self._spark, self._names))
            except Exception:
                # Spark plans a statement with the columns of that moment, and fails if they no longer fit the first.
                if not self._has_changed(self._spark, present):
                    raise
                facts = {"table": str(self._names.table), "reason": "columns changed"}
                _log.info("mirror_full_read_restarted", extra=facts)

    @contextmanager
    def _registered(self, snapshot: int) -> Iterator[None]:
        """Register the mirror at a snapshot, and renew the registration until the block ends."""
        from pyspark import InheritableThread  # noqa: PLC0415 - optional, as all of Spark

        self._register(snapshot)
        done = threading.Event()

        def renew() -> None:
            while not done.wait(REGISTER_EVERY_S):
                self._register(snapshot)

        thread = InheritableThread(target=renew, name=f"registration-{self._names.mirror}", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join(_JOIN_TIMEOUT_S)

    # -- the stream

    def _stream(self, start: StreamFrom, *, once: bool) -> _StreamEnd:
        assert self._marker is not None
        self._stream_id = self._stream_id or self._marker.stream
        changes = (
            self._spark.readStream.option("stream-from-timestamp", start.from_ms)
            .option("streaming-max-files-per-micro-batch", self._settings.batch_max_files)
            .option("streaming-max-rows-per-micro-batch", self._settings.batch_max_rows)
            .table(self._names.table_sql)
        )
        self._prepare(changes.schema)
        self._end, self._failure = _StreamEnd.FINISHED, None
        trigger = {"availableNow": True} if once else {"processingTime": f"{self._options.interval_s} seconds"}
        writer = changes.writeStream.queryName(f"{self._names.mirror} {self._options.run}")
        query = (
            writer.foreachBatch(lambda batch, number: self._on_batch(batch, number, changes.schema))
            .option("checkpointLocation", self._checkpoint())
            .trigger(**trigger)
            .start()
        )
        return self._await(query)

    def _checkpoint(self) -> str:
        return f"{self._options.checkpoints.rstrip('/')}/{self._names.mirror}/{self._stream_id}"

    def _await(self, query: StreamingQuery) -> _StreamEnd:
        try:
            while not query.awaitTermination(_POLL_S):  # type: ignore[arg-type] # fractions are fine
                if self._options.stopping.is_set():
                    deadline = time.monotonic() + _STOP_TIMEOUT_S
                    while query.isActive and query.status["isTriggerActive"] and time.monotonic() < deadline:
                        time.sleep(_POLL_S)
                    return _StreamEnd.FINISHED
                self._report_progress()
        except Exception as error:  # noqa: BLE001 - whatever ended the stream is classified here
            if self._end is _StreamEnd.COLUMNS_CHANGED:
                return self._end
            if self._failure is not None and self._end is _StreamEnd.FINISHED:
                raise self._failure from None  # a merge failed: the stream's own error only repeats it
            reason = message_of(error)
            _log.warning("mirror_checkpoint_lost", extra={"table": str(self._names.table), "reason": reason})
            self._failure = self._failure or error
            return _StreamEnd.CHECKPOINT_LOST
        finally:
            query.stop()
        return self._end

    # -- one batch, on the stream's thread

    def _on_batch(self, batch: DataFrame, number: int, schema: StructType) -> None:
        try:
            with self._options.slots:
                self._merge_batch(batch, number, schema)
        except BaseException as error:
            self._failure = error
            if self._end is _StreamEnd.FINISHED and self._has_changed(batch.sparkSession, schema):
                self._end = _StreamEnd.COLUMNS_CHANGED
            raise

    def _merge_batch(self, batch: DataFrame, number: int, schema: StructType) -> None:
        spark = batch.sparkSession
        if self._has_changed(spark, schema):
            # The batch was read with the former columns, and may lack what its files have.
            raise PipelineError(f"columns changed: table={self._names.table}")
        state = load_state(spark, self._names)  # before the marker: the merge notices what is committed in between
        marker = load_marker(spark, self._names.mirror_sql)
        if marker is None or (marker.stream == self._stream_id and number > marker.batch + 1):
            # The mirror was rolled back or recreated.
            self._end = _StreamEnd.CHECKPOINT_LOST
            raise PipelineError(f"the checkpoint is ahead of the mirror: mirror={self._names.mirror}")
        if self._marker is not None and marker != self._marker and marker.run != self._options.run:
            raise ConcurrentMirror(str(self._names.mirror))
        merged = Marker(
            snapshot=self._last_snapshot(spark, number, marker),
            stream=self._stream_id,
            batch=number,
            run=self._options.run,
            merges=marker.merges + 1,
        )
        self._merge(batch, merged, state)

    def _last_snapshot(self, spark: SparkSession, number: int, marker: Marker) -> int:
        """Return the last snapshot that a batch completes, by the offset that Spark wrote before the batch began."""
        written = spark.read.text(f"{self._checkpoint()}/offsets/{number}").collect()
        offset = json.loads(written[-1][0])
        snapshots = load_lineage(spark, self._names.table_sql)
        found = completed_snapshot(snapshots, int(offset["snapshot_id"]), int(offset["position"]))
        return marker.snapshot if found is None else found

    def _merge(self, changes: DataFrame, marker: Marker, state: MirrorState) -> None:
        assert self._layout is not None
        assert self._tombstones is not None
        started = time.monotonic()
        merged = merge_changes(
            changes,
            names=self._names,
            layout=self._layout,
            settings=self._settings,
            tombstones=self._tombstones,
            marker=marker,
            state=state,
        )
        self._marker = marker
        self.has_merged = True
        seconds = round(time.monotonic() - started, 3)
        facts = {"rows": merged.rows, "keys": merged.keys, "deletes": merged.deletes, "snapshot": marker.snapshot}
        _log.info("mirror_merged", extra={"table": str(self._names.table), **facts, "seconds": seconds})
        self._options.on_merge(self._names, merged)

    # -- from time to time

    def _report_progress(self, *, now: bool = False) -> None:
        """Register as a consumer, copy the marker and clean up, each if it is due."""
        time_now = time.monotonic()
        if self._marker is None or (not now and time_now - self._registered_at < REGISTER_EVERY_S):
            return
        self._registered_at = time_now
        self._register(self._marker.snapshot)
        self._try("copy the marker", self._copy_marker)
        is_due = time_now - self._cleaned_at >= cleanup_interval_s(self._settings)
        # Only if no merge of this or another table would wait for it; else soon.
        if not now and is_due and self._options.slots.acquire(blocking=False):
            try:
                self._cleaned_at = time_now
                self._clean_up()
            finally:
                self._options.slots.release()

    def _register(self, snapshot: int) -> None:
        """Record that everything up to a snapshot is merged, or renew the registration there."""
        try:
            register(self._spark, self._names.table_sql, self._names.consumer, snapshot)
        except Exception as error:  # noqa: BLE001 - a mirror of a table that cannot be tagged is better than none
            facts = {"table": str(self._names.table), "reason": message_of(error)}
            _log.warning("mirror_registration_failed", extra=facts)

    def _copy_marker(self) -> None:
        if self._marker is not None and self._marker != self._copied_marker:
            set_properties(self._spark, self._names.mirror_sql, {MARKER: self._marker.to_text()})
            self._copied_marker = self._marker

    def _clean_up(self) -> None:
        """Remove old tombstones, and old snapshots of both tables: each merge leaves one, with whole files."""
        tombstones = self._tombstones
        if tombstones is None or self._marker is None:
            return
        self._try("purge tombstones", lambda: tombstones.purge(self._spark, now=time.time()))
        for table in (self._names.mirror_sql, self._names.tombstones_sql):
            self._try(f"expire {table}", partial(self._expire, table))

    def _expire(self, table: str) -> None:
        # If a mirror is merged often, this one query nearly always saves the others.
        oldest = self._spark.sql(f"SELECT unix_millis(min(committed_at)) FROM {table}.snapshots").collect()[0][0]
        if oldest is not None and time.time() - oldest / 1000 > self._settings.snapshot_age_s:
            expire(self._spark, table)

    def _try(self, what: str, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001 - no cleanup is worth the mirror; it is retried
            facts = {"table": str(self._names.table), "what": what, "reason": message_of(error)}
            _log.warning("mirror_cleanup_failed", extra=facts)


def cleanup_interval_s(settings: MirrorSettings) -> float:
    """Return the time between two cleanups of a running mirror."""
    return max(_CLEANUP_INTERVAL_MIN_S, min(_CLEANUP_INTERVAL_MAX_S, settings.snapshot_age_s / _CLEANUPS_PER_AGE))
