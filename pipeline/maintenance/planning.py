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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.consumers.tags import MAIN, Moment
from pipeline.maintenance.settings import MaintenanceSettings, Step
from pipeline.maintenance.sizes import LARGE_SHARE, TableFacts

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
