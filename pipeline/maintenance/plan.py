"""What of a table's maintenance is worth doing, and where it must stop. Core: facts in, plan out.

    compact      partitions with enough files of a wrong size, by the rule of Iceberg's own planner; files with deletes
    deletes      position deletes of a format 2 table, when there are some
    manifests    when there are several times as many as would do
    expire       what is older than the age or beyond the largest number, but see below
    orphans      always looked for

Expiry stops at the oldest of these on `main`, and keeps all that follow:

    the snapshot that the slowest consumer has finished (unless it was last heard of too long ago)
    the newest snapshot that wrote rows: jobs keep in its summary how far they have come
    the newest `history.expire.min-snapshots-to-keep`, which Iceberg sees to itself

Where `main` has an age of its own (`max-snapshot-age-ms` of the branch), Iceberg goes by that and by nothing that it is
told, so it could not be stopped: such a table's snapshots are left alone.
"""

from __future__ import annotations

import dataclasses
import posixpath
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from lakefeed.contract.consumers import MAIN, History, Moment
from lakefeed.pipeline.consumers.registry import load_history
from lakefeed.pipeline.errors import PipelineError
from lakefeed.pipeline.maintenance.settings import MaintenanceSettings, Step
from lakefeed.pipeline.spark.tables import properties

if TYPE_CHECKING:
    from pyspark.sql import Row, SparkSession


# --- pipeline.maintenance.sizes ---------------------------------------------------------------------------------------
#
# What a plan knows of a table, as plain values. Core: facts.py reads them.


# As Iceberg's own planner has it: a file of this share of the target size is neither small nor large.
SMALL_SHARE = 0.75
LARGE_SHARE = 1.8


@dataclass(frozen=True, slots=True)
class PartitionFiles:
    """The data files of a partition whose size is wrong: those too small, and those too large."""

    count: int
    bytes: int
    largest_bytes: int


@dataclass(frozen=True, slots=True)
class Sizes:
    """A table in numbers, to be held against those from before."""

    data_files: int
    data_bytes: int
    small_files: int
    delete_files: int
    manifests: int
    snapshots: int

    def to_json(self) -> dict[str, int]:
        """Give the numbers by name."""
        return dataclasses.asdict(self)


@dataclass(frozen=True, slots=True)
class TableFacts:
    """All that a plan needs to know of a table."""

    properties: Mapping[str, str]
    sizes: Sizes
    wrong_sizes: Sequence[PartitionFiles]
    position_deletes: int
    history: History


# --- pipeline.maintenance.planning ------------------------------------------------------------------------------------


GC_ENABLED = "gc.enabled"
FORMAT_VERSION = "format-version"
MAX_AGE_MS = "history.expire.max-snapshot-age-ms"
MIN_SNAPSHOTS = "history.expire.min-snapshots-to-keep"
SNAPSHOTS_MAX = "lakefeed.snapshots-max"
CONSUMER_SNAPSHOTS_MAX = "lakefeed.consumer-snapshots-max"

# Iceberg's defaults, and the writer's.
_MAX_AGE_DEFAULT_MS = 5 * 86_400_000
_MIN_SNAPSHOTS_DEFAULT = 1
_CONSUMER_SNAPSHOTS_MAX_DEFAULT = 10_000

# Formats from here on have deletion vectors, which belong to one data file each: nothing is to be joined.
_FORMAT_WITHOUT_POSITION_DELETES = 3
# Manifests are kept at about this size, so that so many entries share one.
_FILES_PER_MANIFEST = 10_000
_MANIFESTS_TOO_MANY = 4


# What Iceberg calls a snapshot that only puts rows into other files.
_REWRITE = "replace"


@dataclass(frozen=True, slots=True)
class Compaction:
    """Files that are to be rewritten, and about how many will be in their place."""

    files: int
    bytes: int
    files_after: int


@dataclass(frozen=True, slots=True)
class Expiry:
    """Snapshots before `older_than_ms` go, about so many. `held_by`: consumers that keep more than the limits would."""

    older_than_ms: int
    snapshots: int
    held_by: Sequence[str] = ()
    passed_over: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class TablePlan:
    """What is to be done; None, False: nothing is worth it. `left_out` gives the reason of steps that must not be."""

    compaction: Compaction | None = None
    deletes: bool = False
    manifests: bool = False
    expiry: Expiry | None = None
    orphans_before_ms: int | None = None
    left_out: Mapping[Step, str] | None = None

    def has(self, step: Step) -> bool:
        """Tell whether a step has something to do."""
        return {
            Step.COMPACT: self.compaction is not None,
            Step.DELETES: self.deletes,
            Step.MANIFESTS: self.manifests,
            Step.EXPIRE: self.expiry is not None,
            Step.ORPHANS: self.orphans_before_ms is not None,
        }[step]


def plan_table(facts: TableFacts, settings: MaintenanceSettings, *, now_ms: int) -> TablePlan:
    """Plan the maintenance of one table."""
    steps = set(settings.run)
    left_out = {step: reason for step, reason in _forbidden(facts).items() if step in steps}
    steps -= left_out.keys()
    return TablePlan(
        compaction=plan_compaction(facts, settings) if Step.COMPACT in steps else None,
        deletes=Step.DELETES in steps and _has_position_deletes(facts, settings),
        manifests=Step.MANIFESTS in steps and _has_many_manifests(facts, settings),
        expiry=plan_expiry(facts, settings, now_ms=now_ms) if Step.EXPIRE in steps else None,
        orphans_before_ms=now_ms - int(settings.orphan_age_s * 1000) if Step.ORPHANS in steps else None,
        left_out=left_out,
    )


def _forbidden(facts: TableFacts) -> dict[Step, str]:
    """Find the steps that must not be, with the reason."""
    if facts.properties.get(GC_ENABLED, "true").lower() == "false":
        reason = f"the table's {GC_ENABLED} is false"
        return {Step.EXPIRE: reason, Step.ORPHANS: reason}
    own_ms = next((ref.max_snapshot_age_ms for ref in facts.history.refs if ref.name == MAIN), None)
    if own_ms is not None:
        reason = f"branch {MAIN} has an age of its own, by which Iceberg goes whoever still reads: {own_ms} ms"
        return {Step.EXPIRE: reason}
    return {}


def plan_compaction(facts: TableFacts, settings: MaintenanceSettings) -> Compaction | None:
    """Add up the partitions that are worth a rewrite; None if none is."""
    target = settings.target_file_bytes
    chosen = [
        files
        for files in facts.wrong_sizes
        if files.largest_bytes > target * LARGE_SHARE
        or (files.count > 1 and (files.count >= settings.min_input_files or files.bytes > target))
    ]
    if not chosen and not facts.sizes.delete_files:  # which files have many deletes, only Iceberg's planner can tell
        return None
    return Compaction(
        files=sum(files.count for files in chosen),
        bytes=sum(files.bytes for files in chosen),
        files_after=sum(-(-files.bytes // target) for files in chosen),
    )


def _has_position_deletes(facts: TableFacts, settings: MaintenanceSettings) -> bool:
    version = _number(facts.properties, FORMAT_VERSION, 2)
    return version < _FORMAT_WITHOUT_POSITION_DELETES and facts.position_deletes >= settings.min_input_files


def _has_many_manifests(facts: TableFacts, settings: MaintenanceSettings) -> bool:
    sizes = facts.sizes
    enough = 1 + (sizes.data_files + sizes.delete_files) // _FILES_PER_MANIFEST
    return sizes.manifests >= max(settings.min_manifests, _MANIFESTS_TOO_MANY * enough)


def plan_expiry(facts: TableFacts, settings: MaintenanceSettings, *, now_ms: int) -> Expiry | None:
    """Decide how far snapshots expire; None if none would."""
    chain = facts.history.main_chain()
    if not chain:
        return None
    limit_ms = _limit_ms(chain, facts.properties, settings, now_ms)
    most = _number(facts.properties, CONSUMER_SNAPSHOTS_MAX, _CONSUMER_SNAPSHOTS_MAX_DEFAULT)
    holders, passed_over, cut_ms = [], [], limit_ms
    for consumer in facts.history.consumers():
        depth = consumer.snapshots_behind
        if depth is None or depth >= most or consumer.is_over(now_ms):
            passed_over.append(consumer.name)
        elif (since_ms := _oldest_ms(chain[: depth + 1])) < limit_ms:
            holders.append(consumer.name)
            cut_ms = min(cut_ms, since_ms)
    depth = next((position for position, moment in enumerate(chain) if moment.operation != _REWRITE), 0)
    cut_ms = min(cut_ms, _oldest_ms(chain[: depth + 1]))
    expired = _count_expired(facts, chain, cut_ms)
    return Expiry(cut_ms, expired, tuple(holders), tuple(passed_over)) if expired else None


def _limit_ms(
    chain: Sequence[Moment], properties: Mapping[str, str], settings: MaintenanceSettings, now_ms: int
) -> int:
    """Find where history ends by the table's limits: by age and, as the writer does it, by number.

    A snapshot's age counts from when the next one took its place: somebody may have begun to read it until then.
    """
    age_ms = int(settings.history_s * 1000) or _number(properties, MAX_AGE_MS, _MAX_AGE_DEFAULT_MS)
    most = _number(properties, SNAPSHOTS_MAX, 0)
    by_number_ms = _oldest_ms(chain[:most]) if 0 < most < len(chain) else 0
    behind = next((at for at, moment in enumerate(chain) if moment.committed_ms <= now_ms - age_ms), None)
    by_age_ms = 0 if behind is None else _oldest_ms(chain[: behind + 1])
    return max(by_age_ms, by_number_ms)


def _oldest_ms(chain: Sequence[Moment]) -> int:
    """Give the earliest time: it may go back a little from one snapshot to the next."""
    return min(moment.committed_ms for moment in chain)


def _count_expired(facts: TableFacts, chain: Sequence[Moment], cut_ms: int) -> int:
    """Count the snapshots that Iceberg will remove; of other branches all are taken to stay."""
    least = max(1, _number(facts.properties, MIN_SNAPSHOTS, _MIN_SNAPSHOTS_DEFAULT))
    held = {ref.snapshot_id for ref in facts.history.refs if ref.name != MAIN}
    for position, moment in enumerate(chain):
        if position >= least and moment.committed_ms < cut_ms:
            break
        held.add(moment.snapshot_id)
    return sum(m.snapshot_id not in held and m.committed_ms < cut_ms for m in facts.history.moments)


def _number(properties: Mapping[str, str], name: str, default: int) -> int:
    """Read a whole number; what is none counts as not set."""
    text = properties.get(name, "")
    return int(text) if text.isascii() and text.isdecimal() else default


# --- pipeline.maintenance.locations -----------------------------------------------------------------------------------
#
# Where tables lie. Core: owns telling whether a table has its directory for itself.
#
# Orphan removal takes every file below a table's location that this table does not name. Where two tables share one, by
# two names of one table, by a location inside another or by a path for new files that leads there, the files of one are
# orphans to the other. Where it is not known of all tables where they lie, none can be said to be alone.


# Where a table's new files go, if not below its location. The last two are old names of the first.
WRITE_PATHS = ("write.data.path", "write.metadata.path", "write.object-storage.path", "write.folder-storage.path")

# Schemes of one and the same store, by the name that they get here.
_SAME_STORE = {"s3a": "s3", "s3n": "s3", "abfss": "abfs", "wasbs": "wasb"}
_FILE = "file"

_NAMED_MAX = 10

_Name = TypeVar("_Name", bound=Hashable)


class SharedLocation(PipelineError):
    """Files of another table lie below this one's location, or may: nothing there may be taken for an orphan."""


def places_of(location: str, properties: Mapping[str, str]) -> tuple[str, ...]:
    """List the directories of a table: its location, and where else it puts new files."""
    return (location, *(properties[key] for key in WRITE_PATHS if properties.get(key)))


def check_location_is_own(name: _Name, places: Mapping[_Name, Sequence[str]]) -> str:
    """Give a table's location. `places` has the directories of all tables, the location first, none if not known.

    Raises: SharedLocation.
    """
    unknown = [each for each, at in places.items() if not at]
    if unknown or name not in places:
        raise SharedLocation(f"not removed, it is not known where all tables lie: tables={_listed(unknown or [name])}")
    own = _directory(places[name][0])
    shared = [
        each for each, at in places.items() if each != name and any(_directory(place).startswith(own) for place in at)
    ]
    if shared:
        raise SharedLocation(f"not removed, files of other tables lie there: location={own} tables={_listed(shared)}")
    return places[name][0]


def _listed(names: Sequence[object]) -> str:
    shown = sorted(map(str, names))
    return ", ".join(shown[:_NAMED_MAX]) + (" ..." if len(shown) > _NAMED_MAX else "")


def _directory(location: str) -> str:
    """Spell a location so that one is a prefix of another exactly if it contains it.

    `file:///x`, `file:/x` and `/x` are one; so are `s3://b/x`, `s3a://b/x` and `s3n://b/x`.
    """
    scheme, colon, path = location.partition(":")
    if not colon or "/" in scheme:
        scheme, path = _FILE, location
    scheme = scheme.lower()
    if scheme == _FILE:
        path = posixpath.normpath(f"/{path.removeprefix('//localhost').strip('/')}")
    return f"{_SAME_STORE.get(scheme, scheme)}:{path.rstrip('/')}/"


# --- pipeline.maintenance.facts ---------------------------------------------------------------------------------------
#
# What a table is made of: its files by partition, manifests, snapshots, properties. Owns reading it through Spark.
#
# Iceberg's metadata tables only: no data file is opened.


_DATA = 0
_POSITION_DELETES = 1


def load_facts(spark: SparkSession, table: str, *, target_file_bytes: int) -> TableFacts:
    """Read a table's facts. `table` is its name as SQL has it."""
    history = load_history(spark, table)
    partitions = _load_partitions(spark, table, target_file_bytes)
    data = [row for row in partitions if row["content"] == _DATA]
    sizes = Sizes(
        data_files=sum(row["files"] for row in data),
        data_bytes=sum(row["bytes"] for row in data),
        small_files=sum(row["small_files"] for row in data),
        delete_files=sum(row["files"] for row in partitions if row["content"] != _DATA),
        manifests=spark.sql(f"SELECT count(*) FROM {table}.manifests").collect()[0][0],
        snapshots=len(history.moments),
    )
    return TableFacts(
        properties=properties(spark, table),
        sizes=sizes,
        wrong_sizes=[
            PartitionFiles(row["wrong_files"], row["wrong_bytes"], row["wrong_largest"])
            for row in data
            if row["wrong_files"]
        ],
        position_deletes=sum(row["files"] for row in partitions if row["content"] == _POSITION_DELETES),
        history=history,
    )


def _load_partitions(spark: SparkSession, table: str, target_file_bytes: int) -> list[Row]:
    """Count the files of each partition: all, the small ones, and those that a rewrite would take up."""
    least, most = int(target_file_bytes * SMALL_SHARE), int(target_file_bytes * LARGE_SHARE)
    # A table that was never partitioned has no such column.
    is_partitioned = "partition" in spark.table(f"{table}.files").columns
    key = "content, spec_id, cast(partition AS string)" if is_partitioned else "content, spec_id"
    size, is_wrong = "file_size_in_bytes", f"(file_size_in_bytes < {least} OR file_size_in_bytes > {most})"
    return spark.sql(
        f"SELECT content, count(*) AS files, sum({size}) AS bytes, count_if({size} < {least}) AS small_files, "
        f"count_if({is_wrong}) AS wrong_files, sum(if({is_wrong}, {size}, 0)) AS wrong_bytes, "
        f"max(if({is_wrong}, {size}, 0)) AS wrong_largest FROM {table}.files GROUP BY {key}"
    ).collect()
