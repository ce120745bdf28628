"""Maintenance of a table: settings, facts, and what is worth doing. Pure: facts in, plan out.

    compact      partitions with enough files of a wrong size, by the rule of Iceberg's own planner; files with deletes
    deletes      position deletes of a format 2 table, if there are enough
    manifests    if there are several times as many as needed
    expire       snapshots beyond the maximum age or number, within the limits below
    orphans      always searched for

Expiry keeps the oldest of these on `main`, and everything after it:

    the snapshot that the slowest consumer has finished, unless its registration has expired
    the newest snapshot that wrote rows: jobs record their progress in its summary
    the newest `history.expire.min-snapshots-to-keep`, which Iceberg keeps by itself

If the branch `main` has a `max-snapshot-age-ms` of its own, Iceberg follows that and ignores what the procedure is
told. Expiry is skipped for such a table, because nothing could stop it at a consumer.

Orphan removal deletes every file below a table's location that the table does not reference. If two tables share a
directory, by two names of one table, by a location inside another or by a path for new files that leads there, the
files of one are orphans to the other. As long as the location of any table is unknown, no table counts as alone.
"""

from __future__ import annotations

import enum
import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lakefeed.contract.consumers import History, Moment
from lakefeed.contract.properties import (
    CONSUMER_SNAPSHOTS_MAX,
    CONSUMER_SNAPSHOTS_MAX_DEFAULT,
    GC_ENABLED,
    MAIN_BRANCH,
    SNAPSHOT_MAX_AGE_DEFAULT_MS,
    SNAPSHOT_MAX_AGE_MS,
    SNAPSHOTS_MAX,
    SNAPSHOTS_MIN,
    WRITE_DATA_PATH,
    WRITE_METADATA_PATH,
    is_enabled,
    read_number,
)
from lakefeed.pipeline.errors import PipelineError
from lakefeed.settings import MIB, Settings, check, narrowed, setting, table_settings

DAY_S = 86_400.0

# What Iceberg's own procedure insists on. The writer commits no file that waited for longer than half of it.
ORPHAN_AGE_LEAST_S = DAY_S

# The shares of Iceberg's own planner: a file between them, relative to the target size, is neither small nor large.
SMALL_SHARE = 0.75
LARGE_SHARE = 1.8

FORMAT_VERSION = "format-version"

# Iceberg's default, for tables that the writer has not created.
_SNAPSHOTS_MIN_DEFAULT = 1

# From this format on deletes are deletion vectors, one per data file: there is nothing to merge.
_FORMAT_WITHOUT_POSITION_DELETES = 3
# Entries of a manifest at its usual size.
_FILES_PER_MANIFEST = 10_000
_MANIFESTS_TOO_MANY = 4

# Iceberg's word for a snapshot that only moves rows into other files.
_REWRITE = "replace"

# Where a table's new files go, if not below its location. The last two are old names of the first.
WRITE_PATHS = (WRITE_DATA_PATH, WRITE_METADATA_PATH, "write.object-storage.path", "write.folder-storage.path")

# Schemes of the same store.
_SAME_STORE = {"s3a": "s3", "s3n": "s3", "abfss": "abfs", "wasbs": "wasb"}
_FILE = "file"

_NAMED_MAX = 10


# -- settings


class Step(enum.Enum):
    """What maintenance does to a table, in this order."""

    COMPACT = "compact"
    DELETES = "deletes"
    MANIFESTS = "manifests"
    EXPIRE = "expire"
    ORPHANS = "orphans"


@dataclass(frozen=True, slots=True, kw_only=True)
class MaintenanceSettings(Settings):
    """Settings of one table's maintenance."""

    run: tuple[Step, ...] = setting(tuple(Step), "Steps to run: compact, deletes, manifests, expire, orphans.")
    target_file_bytes: int = setting(
        128 * MIB, "Size that small files are merged to, in bytes. Use the writer's `target_file_bytes`.", minimum=MIB
    )
    min_input_files: int = setting(
        5, "Number of small files of a partition that are worth a rewrite. The newest partition still grows.", minimum=2
    )
    sort: str = setting(
        "", "Order of rewritten rows, such as `id desc, name`. Empty means the table's own order, if it has one."
    )
    zorder: tuple[str, ...] = setting((), "Columns by whose z-order rows are rewritten, in place of a sort order.")
    min_manifests: int = setting(
        20, "Number of manifests that are worth a rewrite. The writer merges its own by the hundred.", minimum=2
    )
    history_s: float = setting(
        0.0,
        "Age in seconds at which snapshots expire. 0 means the table's `history.expire.max-snapshot-age-ms`.",
        minimum=0,
    )
    orphan_age_s: float = setting(
        3 * DAY_S,
        "Age in seconds at which unreferenced files are removed, above the time of any write; at least a day.",
    )
    skip: bool = setting(
        False, "Skip tables when none are named. Set it for all tables, and unset it for some, or the reverse."
    )

    def check(self) -> None:
        """Check that no running write loses files, and that there is one order."""
        check(
            self.orphan_age_s >= ORPHAN_AGE_LEAST_S,
            f"orphan_age_s must be a day at least, so that no running write loses files: {self.orphan_age_s}",
        )
        check(not (self.sort and self.zorder), f"zorder replaces sort, give one of them: {self.sort}")


@dataclass(frozen=True, slots=True, kw_only=True)
class MaintenanceConfig(MaintenanceSettings):
    """Section [pipeline.maintenance]: settings of all tables, and `tables` for single ones."""

    tables: Mapping[str, Mapping[str, Any]] = table_settings(MaintenanceSettings, "Settings of single tables, by name.")

    def check(self) -> None:
        """Check the settings of every table."""
        MaintenanceSettings.check(self)
        for table in self.tables:
            try:
                self.settings_of(table)
            except ValueError as error:
                raise ValueError(f'tables."{table}".{error}') from error

    def settings_of(self, table: str) -> MaintenanceSettings:
        """Return a table's settings. Its own order replaces the section's, also one of the other kind."""
        own = dict(self.tables.get(table, {}))
        if "sort" in own:
            own.setdefault("zorder", ())
        elif "zorder" in own:
            own["sort"] = ""
        return narrowed(self, MaintenanceSettings, own)


# -- facts


@dataclass(frozen=True, slots=True)
class PartitionFiles:
    """The data files of one partition that are too small or too large."""

    count: int
    bytes: int
    largest_bytes: int


@dataclass(frozen=True, slots=True)
class TableSizes:
    """A table's counts, for the report before and after."""

    data_files: int = 0
    data_bytes: int = 0
    small_files: int = 0
    delete_files: int = 0
    manifests: int = 0
    snapshots: int = 0


@dataclass(frozen=True, slots=True)
class TableFacts:
    """Everything that a plan needs to know about a table."""

    properties: Mapping[str, str]
    history: History
    sizes: TableSizes = TableSizes()
    wrong_sizes: Sequence[PartitionFiles] = ()
    position_deletes: int = 0


# -- the plan


@dataclass(frozen=True, slots=True)
class Compaction:
    """Files to rewrite, and about how many replace them."""

    files: int
    bytes: int
    files_after: int


@dataclass(frozen=True, slots=True)
class Expiry:
    """Snapshots to remove: those before `older_than_ms`, about this many.

    `held_by` are the consumers for which more is kept than the limits ask for, `expired_consumers` those that are
    ignored.
    """

    older_than_ms: int
    snapshots: int = 0
    held_by: Sequence[str] = ()
    expired_consumers: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class TablePlan:
    """What to do; None or False where nothing is worth it. `skipped` has the reasons why steps must not run."""

    compaction: Compaction | None = None
    deletes: bool = False
    manifests: bool = False
    expiry: Expiry | None = None
    orphans_before_ms: int | None = None
    skipped: Mapping[Step, str] = field(default_factory=dict)

    def has(self, step: Step) -> bool:
        """Return whether a step has something to do."""
        return {
            Step.COMPACT: self.compaction is not None,
            Step.DELETES: self.deletes,
            Step.MANIFESTS: self.manifests,
            Step.EXPIRE: self.expiry is not None,
            Step.ORPHANS: self.orphans_before_ms is not None,
        }[step]


def plan_table(facts: TableFacts, settings: MaintenanceSettings, *, now_ms: int) -> TablePlan:
    """Plan the maintenance of one table."""
    forbidden: dict[Step, str] = {}
    own_ms = next((ref.max_snapshot_age_ms for ref in facts.history.refs if ref.name == MAIN_BRANCH), None)
    if own_ms is not None:
        reason = f"branch {MAIN_BRANCH} has its own max-snapshot-age-ms, by which Iceberg ignores consumers: {own_ms}"
        forbidden = {Step.EXPIRE: reason}
    if not is_enabled(facts.properties, GC_ENABLED):
        forbidden = dict.fromkeys((Step.EXPIRE, Step.ORPHANS), f"the table has {GC_ENABLED}=false")
    skipped = {step: reason for step, reason in forbidden.items() if step in settings.run}
    steps = set(settings.run) - skipped.keys()
    sizes = facts.sizes
    has_position_deletes = read_number(facts.properties, FORMAT_VERSION, 2) < _FORMAT_WITHOUT_POSITION_DELETES
    enough_manifests = 1 + (sizes.data_files + sizes.delete_files) // _FILES_PER_MANIFEST
    has_many_manifests = sizes.manifests >= max(settings.min_manifests, _MANIFESTS_TOO_MANY * enough_manifests)
    return TablePlan(
        compaction=plan_compaction(facts, settings) if Step.COMPACT in steps else None,
        deletes=Step.DELETES in steps and has_position_deletes and facts.position_deletes >= settings.min_input_files,
        manifests=Step.MANIFESTS in steps and has_many_manifests,
        expiry=plan_expiry(facts, settings, now_ms=now_ms) if Step.EXPIRE in steps else None,
        orphans_before_ms=now_ms - int(settings.orphan_age_s * 1000) if Step.ORPHANS in steps else None,
        skipped=skipped,
    )


def plan_compaction(facts: TableFacts, settings: MaintenanceSettings) -> Compaction | None:
    """Sum up the partitions that are worth a rewrite; None if none is."""
    target = settings.target_file_bytes
    chosen = [
        files
        for files in facts.wrong_sizes
        if files.largest_bytes > target * LARGE_SHARE
        or (files.count > 1 and (files.count >= settings.min_input_files or files.bytes > target))
    ]
    if not chosen and not facts.sizes.delete_files:  # only Iceberg's planner knows which files have many deletes
        return None
    return Compaction(
        files=sum(files.count for files in chosen),
        bytes=sum(files.bytes for files in chosen),
        files_after=sum(-(-files.bytes // target) for files in chosen),
    )


def plan_expiry(facts: TableFacts, settings: MaintenanceSettings, *, now_ms: int) -> Expiry | None:
    """Decide how far snapshots expire; None if none would."""
    chain = facts.history.main_chain()
    if not chain:
        return None
    limit_ms = _limit_ms(chain, facts.properties, settings, now_ms)
    most = read_number(facts.properties, CONSUMER_SNAPSHOTS_MAX, CONSUMER_SNAPSHOTS_MAX_DEFAULT)
    holders, expired_consumers, cut_ms = [], [], limit_ms
    for consumer in facts.history.consumers():
        depth = consumer.snapshots_behind
        if depth is None or depth >= most or consumer.is_expired(now_ms):
            expired_consumers.append(consumer.name)
        elif (since_ms := _oldest_ms(chain[: depth + 1])) < limit_ms:
            holders.append(consumer.name)
            cut_ms = min(cut_ms, since_ms)
    depth = next((position for position, moment in enumerate(chain) if moment.operation != _REWRITE), 0)
    cut_ms = min(cut_ms, _oldest_ms(chain[: depth + 1]))
    expired = _count_expired(facts, chain, cut_ms)
    return Expiry(cut_ms, expired, tuple(holders), tuple(expired_consumers)) if expired else None


def _limit_ms(
    chain: Sequence[Moment], properties: Mapping[str, str], settings: MaintenanceSettings, now_ms: int
) -> int:
    """Return where history ends by the table's limits: by age and, as in the writer, by number.

    A snapshot's age counts from the commit of the next one, because readers may open it until then.
    """
    age_ms = int(settings.history_s * 1000) or read_number(properties, SNAPSHOT_MAX_AGE_MS, SNAPSHOT_MAX_AGE_DEFAULT_MS)
    most = read_number(properties, SNAPSHOTS_MAX, 0)
    by_number_ms = _oldest_ms(chain[:most]) if 0 < most < len(chain) else 0
    behind = next((at for at, moment in enumerate(chain) if moment.committed_ms <= now_ms - age_ms), None)
    by_age_ms = 0 if behind is None else _oldest_ms(chain[: behind + 1])
    return max(by_age_ms, by_number_ms)


def _oldest_ms(chain: Sequence[Moment]) -> int:
    """Return the earliest commit time; clocks may run back a little from one snapshot to the next."""
    return min(moment.committed_ms for moment in chain)


def _count_expired(facts: TableFacts, chain: Sequence[Moment], cut_ms: int) -> int:
    """Count the snapshots that Iceberg will remove, assuming that other branches keep theirs."""
    least = max(1, read_number(facts.properties, SNAPSHOTS_MIN, _SNAPSHOTS_MIN_DEFAULT))
    held = {ref.snapshot_id for ref in facts.history.refs if ref.name != MAIN_BRANCH}
    for position, moment in enumerate(chain):
        if position >= least and moment.committed_ms < cut_ms:
            break
        held.add(moment.snapshot_id)
    return sum(m.snapshot_id not in held and m.committed_ms < cut_ms for m in facts.history.moments)


# -- orphans: whether a table has its directory to itself


class SharedLocation(PipelineError):
    """Another table has, or may have, files below this table's location: no file there counts as an orphan."""


def directories_of(location: str, properties: Mapping[str, str]) -> tuple[str, ...]:
    """Return the directories of a table: its location, and where else it writes new files."""
    return (location, *(properties[key] for key in WRITE_PATHS if properties.get(key)))


def check_location_is_own(name: object, directories: Mapping[Any, Sequence[str]]) -> str:
    """Return a table's location if no other table has files below it.

    `directories` has those of all tables, the location first; empty where they are unknown.

    Raises: SharedLocation.
    """
    unknown = [each for each, paths in directories.items() if not paths]
    if unknown or name not in directories:
        raise SharedLocation(
            f"not removed, the location of some tables is unknown: tables={_listed(unknown or [name])}"
        )
    own = _normalise(directories[name][0])
    shared = [
        each
        for each, paths in directories.items()
        if each != name and any(_normalise(path).startswith(own) for path in paths)
    ]
    if shared:
        raise SharedLocation(f"not removed, other tables have files there: location={own} tables={_listed(shared)}")
    return directories[name][0]


def _listed(names: Sequence[object]) -> str:
    shown = sorted(map(str, names))
    return ", ".join(shown[:_NAMED_MAX]) + (" ..." if len(shown) > _NAMED_MAX else "")


def _normalise(location: str) -> str:
    """Write a location so that it is a prefix of another one exactly if it contains that one.

    `file:///x`, `file:/x` and `/x` are the same; so are `s3://b/x`, `s3a://b/x` and `s3n://b/x`.
    """
    scheme, colon, path = location.partition(":")
    if not colon or "/" in scheme:
        scheme, path = _FILE, location
    scheme = scheme.lower()
    if scheme == _FILE:
        path = posixpath.normpath(f"/{path.removeprefix('//localhost').strip('/')}")
    return f"{_SAME_STORE.get(scheme, scheme)}:{path.rstrip('/')}/"
