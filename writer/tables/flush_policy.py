"""Flush policy: when a table is flushed, and into how many files. Pure.

A table is flushed at the first of

    changes     rows                    >= flush_max_changes
    bytes       Arrow bytes             >= flush_max_bytes
    size        bytes on disk, expected >= target_file_bytes, times the partitions that the last flush had
    age         age of the oldest row   >= flush_max_age_s
    freshness   age of the oldest row   >= the interval below, with freshness_target_s set

The interval follows the arrival rate: it is as long as it takes to collect a file worth a commit (small_file_bytes),
but never so long that the oldest row gets older than flush_max_age_s, nor shorter than the target requires:

    interval = clamp(small_file_bytes / bytes a second,  freshness_target_s - time of a flush,  flush_max_age_s)

A busy table is committed within the target, and a slow one writes fewer, larger files. Flushes are also requested for
memory (the largest buffer of all tables), for a source's new epoch, by clients, and at shutdown.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lakefeed.writer.config import WriterConfig
from lakefeed.writer.tables.pending import FlushReason, TableBuffer

# Of Parquet to Arrow, before the first flush: change rows with zstd are between 0.1 and 0.3.
FIRST_FILE_RATIO = 0.2
# Weight of earlier flushes with each that follows; large ones count more than small ones anyway.
DECAY = 0.5
# However slow flushes are, half of the target is left to collect rows: else a slow store would get ever more files.
FRESHNESS_SHARE_MIN = 0.5
# Younger buffers hold one batch, from which no rate follows.
RATE_AGE_MIN_S = 1.0


@dataclass(frozen=True, slots=True)
class Threshold:
    """A limit and how far it is filled, in the limit's unit; `grows_per_s` is the present rate."""

    reason: FlushReason
    filled: float
    limit: float
    grows_per_s: float

    @property
    def is_reached(self) -> bool:
        """Whether the limit is reached."""
        return self.filled >= self.limit

    @property
    def in_s(self) -> float:
        """Seconds until it is reached at the present rate."""
        if self.is_reached:
            return 0.0
        return (self.limit - self.filled) / self.grows_per_s if self.grows_per_s else float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushRecord:
    """A committed flush."""

    reason: FlushReason
    finished_at: float
    seconds: float
    rows: int
    arrow_bytes: int
    file_bytes: int
    files: int
    partitions: int


class FlushPolicy:
    """The policy of one table, with what it has learned from flushes."""

    def __init__(self, config: WriterConfig) -> None:
        self._config = config
        self._arrow_bytes = 0.0
        self._file_bytes = 0.0
        self._flush_s = 0.0
        self.last: FlushRecord | None = None

    def due(self, buffer: TableBuffer, *, now: float) -> FlushReason | None:
        """Return why the buffer should be flushed now, or None."""
        if not buffer.rows:
            return None
        return next((each.reason for each in self.thresholds(buffer, now=now) if each.is_reached), None)

    def next_flush(self, buffer: TableBuffer, *, now: float) -> Threshold | None:
        """Return the threshold that comes first at the present rate; None while nothing is buffered."""
        if not buffer.rows:
            return None
        return min(self.thresholds(buffer, now=now), key=lambda each: each.in_s)

    def thresholds(self, buffer: TableBuffer, *, now: float) -> Iterator[Threshold]:
        """Yield all thresholds as they are filled now."""
        age_s = now - buffer.oldest_at if buffer.rows else 0.0
        rated_s = max(age_s, RATE_AGE_MIN_S)
        file_bytes = buffer.bytes * self.file_ratio
        partitions = self.last.partitions if self.last else 1
        sizes = (
            (FlushReason.CHANGES, buffer.rows, self._config.flush_max_changes),
            (FlushReason.BYTES, buffer.bytes, self._config.flush_max_bytes),
            (FlushReason.SIZE, file_bytes, self._config.target_file_bytes * max(1, partitions)),
        )
        for reason, filled, limit in sizes:
            yield Threshold(reason, filled, limit, filled / rated_s)
        interval_s = self._interval_s(file_bytes, age_s=rated_s)
        is_shorter = interval_s < self._config.flush_max_age_s
        yield Threshold(FlushReason.FRESHNESS if is_shorter else FlushReason.AGE, age_s, interval_s, 1.0)

    def _interval_s(self, file_bytes: float, *, age_s: float) -> float:
        """Return the age at which the oldest row is flushed, by the formula in the module's header."""
        config = self._config
        target_s = config.freshness_target_s
        if not target_s:
            return config.flush_max_age_s
        shortest_s = max(target_s - self._flush_s, target_s * FRESHNESS_SHARE_MIN)
        if file_bytes < config.small_file_bytes:
            worthwhile_s = age_s * config.small_file_bytes / file_bytes if file_bytes else float("inf")
            shortest_s = max(shortest_s, worthwhile_s)
        return min(shortest_s, config.flush_max_age_s)

    @property
    def file_ratio(self) -> float:
        """Bytes on disk per byte of Arrow, learned from flushes so far."""
        # Above 1 only in files so small that their footers outweigh the rows: larger ones do not follow it.
        return min(1.0, self._file_bytes / self._arrow_bytes) if self._arrow_bytes else FIRST_FILE_RATIO

    def files_for(self, arrow_bytes: int) -> int:
        """Return into how many files the rows of one partition are cut, so that they are near the target size."""
        return max(1, round(arrow_bytes * self.file_ratio / self._config.target_file_bytes))

    def record(self, flush: FlushRecord) -> None:
        """Learn from a committed flush."""
        if flush.rows:
            self._arrow_bytes = self._arrow_bytes * DECAY + flush.arrow_bytes
            self._file_bytes = self._file_bytes * DECAY + flush.file_bytes
            is_first = self.last is None
            self._flush_s = flush.seconds if is_first else (self._flush_s + flush.seconds) * DECAY
        self.last = flush

    def explain(self, buffer: TableBuffer, *, now: float) -> dict[str, Any]:
        """Explain why the last flush happened, and when and why the next will."""
        coming = self.next_flush(buffer, now=now)
        return {
            "bufferedRows": buffer.rows,
            "bufferedBytes": buffer.bytes,
            "next": None if coming is None else {"reason": coming.reason.value, "inSeconds": round(coming.in_s, 3)},
            "last": _explain_last(self.last, now=now),
            "thresholds": [
                {
                    "reason": each.reason.value,
                    "filled": round(each.filled, 3),
                    "limit": round(each.limit, 3),
                    "growsPerSecond": round(each.grows_per_s, 3),
                }
                for each in self.thresholds(buffer, now=now)
            ],
            "fileBytesPerArrowByte": round(self.file_ratio, 4),
            "flushSeconds": round(self._flush_s, 3),
        }


def _explain_last(last: FlushRecord | None, *, now: float) -> dict[str, Any] | None:
    if last is None:
        return None
    return {
        "reason": last.reason.value,
        "secondsAgo": round(now - last.finished_at, 3),
        "seconds": round(last.seconds, 3),
        "rows": last.rows,
        "arrowBytes": last.arrow_bytes,
        "fileBytes": last.file_bytes,
        "files": last.files,
        "partitions": last.partitions,
    }
