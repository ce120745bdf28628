"""What is worth doing to a table, and where it must stop. Pure: facts in, plan out.

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
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lakefeed.contract.consumers import Moment
from lakefeed.contract.properties import MAIN_BRANCH
from lakefeed.pipeline.maintenance.facts import LARGE_SHARE, TableFacts
from lakefeed.pipeline.maintenance.settings import MaintenanceSettings, Step

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

# From this format on deletes are deletion vectors, one per data file: there is nothing to merge.
_FORMAT_WITHOUT_POSITION_DELETES = 3
# Entries of a manifest at its usual size.
_FILES_PER_MANIFEST = 10_000
_MANIFESTS_TOO_MANY = 4

# Iceberg's word for a snapshot that only moves rows into other files.
_REWRITE = "replace"


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
    snapshots: int
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
    skipped: Mapping[Step, str] | None = None

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
    steps = set(settings.run)
    skipped = {step: reason for step, reason in _forbidden(facts).items() if step in steps}
    steps -= skipped.keys()
    return TablePlan(
        compaction=plan_compaction(facts, settings) if Step.COMPACT in steps else None,
        deletes=Step.DELETES in steps and _has_position_deletes(facts, settings),
        manifests=Step.MANIFESTS in steps and _has_many_manifests(facts, settings),
        expiry=plan_expiry(facts, settings, now_ms=now_ms) if Step.EXPIRE in steps else None,
        orphans_before_ms=now_ms - int(settings.orphan_age_s * 1000) if Step.ORPHANS in steps else None,
        skipped=skipped,
    )


def _forbidden(facts: TableFacts) -> dict[Step, str]:
    """Return the steps that must not run, with the reason."""
    if facts.properties.get(GC_ENABLED, "true").lower() == "false":
        reason = f"the table has {GC_ENABLED}=false"
        return {Step.EXPIRE: reason, Step.ORPHANS: reason}
    own_ms = next((ref.max_snapshot_age_ms for ref in facts.history.refs if ref.name == MAIN_BRANCH), None)
    if own_ms is not None:
        reason = f"branch {MAIN_BRANCH} has its own max-snapshot-age-ms, by which Iceberg ignores consumers: {own_ms}"
        return {Step.EXPIRE: reason}
    return {}


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
    holders, expired_consumers, cut_ms = [], [], limit_ms
    for consumer in facts.history.consumers():
        depth = consumer.snapshots_behind
        if depth is None or depth >= most or consumer.is_over(now_ms):
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
    age_ms = int(settings.history_s * 1000) or _number(properties, MAX_AGE_MS, _MAX_AGE_DEFAULT_MS)
    most = _number(properties, SNAPSHOTS_MAX, 0)
    by_number_ms = _oldest_ms(chain[:most]) if 0 < most < len(chain) else 0
    behind = next((at for at, moment in enumerate(chain) if moment.committed_ms <= now_ms - age_ms), None)
    by_age_ms = 0 if behind is None else _oldest_ms(chain[: behind + 1])
    return max(by_age_ms, by_number_ms)


def _oldest_ms(chain: Sequence[Moment]) -> int:
    """Return the earliest commit time; clocks may run back a little from one snapshot to the next."""
    return min(moment.committed_ms for moment in chain)


def _count_expired(facts: TableFacts, chain: Sequence[Moment], cut_ms: int) -> int:
    """Count the snapshots that Iceberg will remove, assuming that other branches keep theirs."""
    least = max(1, _number(facts.properties, MIN_SNAPSHOTS, _MIN_SNAPSHOTS_DEFAULT))
    held = {ref.snapshot_id for ref in facts.history.refs if ref.name != MAIN_BRANCH}
    for position, moment in enumerate(chain):
        if position >= least and moment.committed_ms < cut_ms:
            break
        held.add(moment.snapshot_id)
    return sum(m.snapshot_id not in held and m.committed_ms < cut_ms for m in facts.history.moments)


def _number(properties: Mapping[str, str], name: str, default: int) -> int:
    """Return a property as a whole number; anything else counts as not set."""
    text = properties.get(name, "")
    return int(text) if text.isascii() and text.isdecimal() else default
