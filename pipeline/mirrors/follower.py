r"""One table's mirror, from wherever it stands to where the table is. Owns its stream and what ends and restarts it.

    start --> no marker, or its snapshot expired --> merge the whole table as of now --+
      ^  \--> marker ---------------------------------------------------------------> stream, a merge per batch
      |                                                                                    |
      +---- columns changed (same checkpoint) / place lost (new checkpoint, from the marker)

The mirror's marker is the last word on what is in; the checkpoint only saves looking. So a checkpoint that is lost, or
whose snapshot has expired, or that is ahead of a mirror that was rolled back, is left behind for a new one.
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

from lakefeed.pipeline.consumers import register
from lakefeed.pipeline.errors import PipelineError
from lakefeed.pipeline.maintenance import expire
from lakefeed.pipeline.maintenance.plan import CONSUMER_SNAPSHOTS_MAX
from lakefeed.pipeline.mirrors.marker import Follow, Marker, ReadAll, Wait, completed_snapshot, load_lineage, plan_start
from lakefeed.pipeline.mirrors.merge import (
    Merged,
    Seen,
    look_at_mirror,
    merge_changes,
    set_marker_property,
    two_applications,
)
from lakefeed.pipeline.mirrors.settings import MirrorNames, MirrorSettings
from lakefeed.pipeline.mirrors.table import (
    Layout,
    load_built_key,
    load_marker,
    load_origin,
    plan_layout,
    prepare_mirror,
)
from lakefeed.pipeline.mirrors.tombstones import Tombstones
from lakefeed.pipeline.spark.failures import message_of
from lakefeed.pipeline.spark.tables import read_as_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.types import StructType


# --- pipeline.mirrors.registration ------------------------------------------------------------------------------------
#
# A mirror as a consumer of its change table. Owns that it is one for as long as it reads, whatever that takes.
#
# A registration lasts for some days. One that is made before a whole table is read is renewed until that is done, lest
# expiry passes it, and the stream that begins there has lost its beginning. Trouble with it is logged and harms nobody:
# a
# mirror of a table that cannot be tagged is better than none.


_log = logging.getLogger(__name__)

# A registration is a commit to the change table: often enough for expiry to let go of what is merged.
REGISTER_EVERY_S = 60.0
# The end waits so long for a registration that is under way.
_JOIN_S = 60.0


class Registration:
    """The consumer that one mirror is."""

    def __init__(self, spark: SparkSession, names: MirrorNames) -> None:
        self._spark = spark
        self._names = names

    def note(self, snapshot: int) -> None:
        """Say that all up to a snapshot is read; where it was said before, that the mirror is still there."""
        try:
            register(self._spark, self._names.table_sql, self._names.consumer, snapshot)
        except Exception as error:  # noqa: BLE001 - see above
            _log.warning("mirror_not_noted", extra={"table": str(self._names.table), "reason": message_of(error)})

    @contextmanager
    def kept(self, snapshot: int) -> Iterator[None]:
        """Register at a snapshot, and again and again while the block lasts."""
        from pyspark import InheritableThread  # noqa: PLC0415 - optional, as all of Spark

        self.note(snapshot)
        ended = threading.Event()

        def renew() -> None:
            while not ended.wait(REGISTER_EVERY_S):
                self.note(snapshot)

        thread = InheritableThread(target=renew, name=f"registration-{self._names.mirror}", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(_JOIN_S)


# --- pipeline.mirrors.follower ----------------------------------------------------------------------------------------


# Old tombstones and old versions are looked for some times within the age at which they are, so that few are over it.
_TIDY_PER_AGE = 4
_TIDY_EVERY_LEAST_S = 60.0
_TIDY_EVERY_MOST_S = 3600.0
# How often the end of a stream, or a wish to stop, is looked for.
_POLL_S = 0.5
# A batch that is being merged is waited for so long when the application stops; cut off, it would be merged again.
_STOP_TIMEOUT_S = 60.0


class _End(enum.Enum):
    FINISHED = "finished"
    COLUMNS_CHANGED = "columns changed"
    PLACE_LOST = "place lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowOptions:
    """What all mirrors of an application share."""

    checkpoints: str
    interval_s: float
    run: str
    slots: threading.Semaphore
    stopping: threading.Event
    on_merge: Callable[[MirrorNames, Merged], None]


class Follower:
    """Keeps one mirror. Used by one thread; the stream calls back on another, one batch at a time."""

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
        self._copied: Marker | None = None
        self._stream_id = ""
        self._merges = 0
        self._registered_at = -REGISTER_EVERY_S
        # Mirrors of one application do not all tidy up at once, nor never where they start again too often.
        self._tidied_at = time.monotonic() - random.uniform(0.0, tidy_every_s(settings))  # noqa: S311 - jitter
        self._registration = Registration(spark, names)
        self._end = _End.FINISHED
        self._failure: BaseException | None = None

    @property
    def has_merged(self) -> bool:
        """Whether this follower has merged anything yet."""
        return self._merges > 0

    def run(self, *, once: bool) -> None:
        """Follow the table: until its present end, or until the application stops."""
        # The stream's thread takes over the pool, so that tables share Spark by turns and not by who came first.
        self._spark.sparkContext.setLocalProperty("spark.scheduler.pool", str(self._names.mirror))
        merges_when_lost = -1
        while not self._options.stopping.is_set():
            end = self._go_on(once=once)
            if end is _End.PLACE_LOST:
                merges = self._marker.merges if self._marker else 0
                if merges == merges_when_lost and self._failure is not None:
                    raise self._failure
                merges_when_lost = merges
                self._stream_id = uuid.uuid4().hex
            elif end is _End.FINISHED and once:
                break
        self._note_progress(now=True)
        if once:
            self._tidy()

    def _go_on(self, *, once: bool) -> _End:
        """Do the next thing from where the mirror stands."""
        lineage = load_lineage(self._spark, self._names.table_sql)
        self._marker = self._load_marker()
        start = plan_start(lineage, self._marker)
        if isinstance(start, Wait):
            if not once:
                self._options.stopping.wait(self._options.interval_s)
            return _End.FINISHED
        if isinstance(start, ReadAll):
            self._warn_if_again()
            self._read_all(start.snapshot)
            return _End.COLUMNS_CHANGED  # not finished: the stream comes next
        return self._stream(start, once=once)

    def _load_marker(self) -> Marker | None:
        return load_marker(self._spark, self._names) if load_built_key(self._spark, self._names) else None

    # -- the whole table

    def _warn_if_again(self) -> None:
        """Tell of a table that this application has read whole, only to find that the stream cannot begin there."""
        if self._marker is not None and self._marker.run == self._options.run and self._marker.batch < 0:
            reason = (
                "its snapshot expired while the table was read as a whole: raise the table's "
                f"{CONSUMER_SNAPSHOTS_MAX}, or have snapshots expire later"
            )
            facts = {"table": str(self._names.table), "snapshot": self._marker.snapshot, "reason": reason}
            _log.warning("mirror_reads_all_again", extra=facts)

    def _read_all(self, snapshot: int) -> None:
        # What is being read must not expire meanwhile, nor what is committed behind it: the stream begins there.
        with self._registration.kept(snapshot):
            self._merge_all(snapshot)

    def _merge_all(self, snapshot: int) -> None:
        changes = read_as_of(self._spark, self._names.table_sql, snapshot)
        present = self._spark.table(self._names.table_sql).schema
        self._prepare(self._spark, changes.schema)
        merges = self._marker.merges if self._marker else 0
        self._stream_id = uuid.uuid4().hex
        marker = Marker(snapshot=snapshot, stream=self._stream_id, batch=-1, run=self._options.run, merges=merges + 1)
        _log.info("mirror_reads_all", extra={"table": str(self._names.table), "snapshot": snapshot})
        try:
            with self._options.slots:
                self._merge(changes, marker, look_at_mirror(self._spark, self._names))
        except Exception:
            # Spark plans a statement with the columns of that moment, and fails where they no longer fit the first.
            if not self._has_changed(self._spark, present):
                raise
            _log.info("mirror_reads_again", extra={"table": str(self._names.table), "reason": "columns changed"})

    def _has_changed(self, spark: SparkSession, schema: StructType) -> bool:
        return bool(spark.table(self._names.table_sql).schema != schema)

    def _prepare(self, spark: SparkSession, schema: StructType) -> None:
        layout = plan_layout(schema, self._settings, built_key=load_built_key(spark, self._names))
        origin = load_origin(spark, self._names)
        prepare_mirror(spark, self._names, layout, self._settings, origin=origin)
        self._layout = layout
        self._tombstones = Tombstones(self._names, layout, settings=self._settings, origin=origin)
        self._tombstones.load(spark)

    # -- the stream

    def _stream(self, start: Follow, *, once: bool) -> _End:
        assert self._marker is not None
        self._stream_id = self._stream_id or self._marker.stream
        changes = (
            self._spark.readStream.option("stream-from-timestamp", start.from_ms)
            .option("streaming-max-files-per-micro-batch", self._settings.batch_max_files)
            .option("streaming-max-rows-per-micro-batch", self._settings.batch_max_rows)
            .table(self._names.table_sql)
        )
        self._prepare(self._spark, changes.schema)
        self._end, self._failure = _End.FINISHED, None
        trigger = {"availableNow": True} if once else {"processingTime": f"{self._options.interval_s} seconds"}
        writer = changes.writeStream.queryName(f"{self._names.mirror} {self._options.run}")
        query = (
            writer.foreachBatch(lambda batch, number: self._take(batch, number, changes.schema))
            .option("checkpointLocation", self._checkpoint())
            .trigger(**trigger)
            .start()
        )
        return self._await(query)

    def _checkpoint(self) -> str:
        return f"{self._options.checkpoints.rstrip('/')}/{self._names.mirror}/{self._stream_id}"

    def _await(self, query: StreamingQuery) -> _End:
        try:
            while not query.awaitTermination(_POLL_S):  # type: ignore[arg-type] # fractions are fine
                if self._options.stopping.is_set():
                    self._stop(query)
                    return _End.FINISHED
                self._note_progress()
        except Exception as error:  # noqa: BLE001 - whatever ended the stream, it is judged here
            if self._end is _End.COLUMNS_CHANGED:
                return self._end
            if self._failure is not None and self._end is _End.FINISHED:
                raise self._failure from None  # a merge failed: what the stream says of it is only longer
            reason = message_of(error)
            _log.warning("mirror_place_lost", extra={"table": str(self._names.table), "reason": reason})
            self._failure = self._failure or error
            return _End.PLACE_LOST
        finally:
            query.stop()
        return self._end

    def _stop(self, query: StreamingQuery) -> None:
        deadline = time.monotonic() + _STOP_TIMEOUT_S
        while query.isActive and query.status["isTriggerActive"] and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        query.stop()

    # -- one batch, on the stream's thread

    def _take(self, batch: DataFrame, number: int, schema: StructType) -> None:
        try:
            with self._options.slots:
                self._merge_batch(batch, number, schema)
        except BaseException as error:
            self._failure = error
            if self._end is _End.FINISHED and self._has_changed(batch.sparkSession, schema):
                self._end = _End.COLUMNS_CHANGED
            raise

    def _merge_batch(self, batch: DataFrame, number: int, schema: StructType) -> None:
        spark = batch.sparkSession
        if self._has_changed(spark, schema):
            # The batch was read with the columns of before, and may lack what its files have.
            raise PipelineError(f"columns changed: table={self._names.table}")
        seen = look_at_mirror(spark, self._names)  # before the marker: what comes in between is noticed by the merge
        marker = load_marker(spark, self._names)
        self._check_marker(marker, number)
        assert marker is not None
        snapshot = self._batch_end(spark, number, marker)
        moved = Marker(
            snapshot=snapshot,
            stream=self._stream_id,
            batch=number,
            run=self._options.run,
            merges=marker.merges + 1,
        )
        self._merge(batch, moved, seen)

    def _check_marker(self, marker: Marker | None, number: int) -> None:
        known = self._marker
        if marker is None or (marker.stream == self._stream_id and number > marker.batch + 1):
            # The checkpoint is ahead of the mirror, which was rolled back or made anew.
            self._end = _End.PLACE_LOST
            raise PipelineError(f"the mirror is behind its checkpoint: mirror={self._names.mirror}")
        if known is not None and marker != known and marker.run != self._options.run:
            raise two_applications(str(self._names.mirror))

    def _batch_end(self, spark: SparkSession, number: int, marker: Marker) -> int:
        """Find the last snapshot that the batch completes; Spark wrote its offset down before the batch began."""
        written = spark.read.text(f"{self._checkpoint()}/offsets/{number}").collect()
        offset = json.loads(written[-1][0])
        lineage = load_lineage(spark, self._names.table_sql)
        found = completed_snapshot(lineage, int(offset["snapshot_id"]), int(offset["position"]))
        return marker.snapshot if found is None else found

    def _merge(self, changes: DataFrame, marker: Marker, seen: Seen) -> None:
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
            seen=seen,
        )
        self._marker = marker
        self._merges += 1
        seconds = round(time.monotonic() - started, 3)
        facts = {"rows": merged.rows, "keys": merged.keys, "deletes": merged.deletes, "snapshot": marker.snapshot}
        _log.info("mirror_merged", extra={"table": str(self._names.table), **facts, "seconds": seconds})
        self._options.on_merge(self._names, merged)

    # -- now and then

    def _note_progress(self, *, now: bool = False) -> None:
        """Register as a consumer, copy the marker and tidy up, where that is due."""
        moment = time.monotonic()
        if self._marker is None or (not now and moment - self._registered_at < REGISTER_EVERY_S):
            return
        self._registered_at = moment
        self._registration.note(self._marker.snapshot)
        self._try("copy the marker", self._copy_marker)
        if not now and moment - self._tidied_at >= tidy_every_s(self._settings):
            self._maybe_tidy(moment)

    def _copy_marker(self) -> None:
        if self._marker is not None and self._marker != self._copied:
            set_marker_property(self._spark, self._names.mirror_sql, self._marker)
            self._copied = self._marker

    def _maybe_tidy(self, moment: float) -> None:
        """Tidy up if no merge of this or another table is kept waiting for it; else soon."""
        if self._options.slots.acquire(blocking=False):
            try:
                self._tidied_at = moment
                self._tidy()
            finally:
                self._options.slots.release()

    def _tidy(self) -> None:
        """Forget old tombstones, and old versions of both tables: each merge leaves one, of whole files."""
        stones = self._tombstones
        if stones is None or self._marker is None:
            return
        self._try("purge tombstones", lambda: stones.purge(self._spark, now=time.time()))
        for table in (self._names.mirror_sql, self._names.tombstones_sql):
            self._try(f"expire {table}", partial(self._maybe_expire, table))

    def _maybe_expire(self, table: str) -> None:
        # One look saves the others nearly always, where a mirror is merged often.
        oldest = self._spark.sql(f"SELECT unix_millis(min(committed_at)) FROM {table}.snapshots").collect()[0][0]
        if oldest is not None and time.time() - oldest / 1000 > self._settings.snapshot_age_s:
            expire(self._spark, table)

    def _try(self, what: str, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001 - none of it is worth the mirror's life; it is tried again
            facts = {"table": str(self._names.table), "what": what, "reason": message_of(error)}
            _log.warning("mirror_upkeep_failed", extra=facts)


def tidy_every_s(settings: MirrorSettings) -> float:
    """Tell how often a mirror that runs is tidied up."""
    return max(_TIDY_EVERY_LEAST_S, min(_TIDY_EVERY_MOST_S, settings.snapshot_age_s / _TIDY_PER_AGE))
