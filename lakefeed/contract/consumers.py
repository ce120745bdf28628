"""Consumers of a table: streaming readers, registered as tags at the last snapshot that they have finished.

    lakefeed_consumer_<name>    type tag, snapshot-id: the last snapshot that the consumer has finished, max-ref-age-ms

The tag lives in the table, so every engine can read, set and drop it. Consumers follow `main` from snapshot to snapshot
and need every one after their tag.

Iceberg expires a tag when its *snapshot* is older than the tag's age. The consumer of a table without changes would
expire although it has read everything, so a registration sets the age that the snapshot has at that time, plus
`max_age`: a consumer is kept for `max_age` after its last registration. Expiry ignores an expired consumer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from lakefeed.contract.errors import ConsumerError
from lakefeed.contract.properties import MAIN_BRANCH

TAG_PREFIX = "lakefeed_consumer_"

# A weekend. Every commit pays for the snapshots that a consumer keeps, so an absent one must not keep them all.
MAX_AGE_DEFAULT = timedelta(days=3)
# Spark's RETAIN counts whole minutes.
MAX_AGE_LEAST = timedelta(minutes=1)

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_MINUTE_MS = 60_000


@dataclass(frozen=True, slots=True)
class Consumer:
    """A registered reader of a table, and how far it is behind `main`.

    `kept_until_ms` is None if it never expires. `snapshots_behind` is None if its snapshot is not an ancestor of
    `main`, or some in between are gone.
    """

    name: str
    snapshot_id: int
    kept_until_ms: int | None
    snapshots_behind: int | None = None
    behind: timedelta = timedelta(0)

    def is_expired(self, now_ms: int) -> bool:
        """Return whether its last registration is too old, so that nothing is kept for it."""
        return self.kept_until_ms is not None and now_ms > self.kept_until_ms


@dataclass(frozen=True, slots=True)
class Ref:
    """A branch (kind BRANCH) or tag (TAG) of a table. A branch may set the age at which its snapshots expire."""

    name: str
    kind: str
    snapshot_id: int
    max_age_ms: int | None
    max_snapshot_age_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Moment:
    """A snapshot: its id, its parent, its commit time and its operation."""

    snapshot_id: int
    parent_id: int | None
    committed_ms: int
    operation: str = "append"


@dataclass(frozen=True, slots=True)
class History:
    """A table's refs and all of its snapshots."""

    refs: Sequence[Ref]
    moments: Sequence[Moment]

    def main_chain(self) -> list[Moment]:
        """Return the newest snapshot of `main` and its known ancestors, newest first."""
        by_id = {moment.snapshot_id: moment for moment in self.moments}
        at = next((ref.snapshot_id for ref in self.refs if ref.name == MAIN_BRANCH), None)
        chain: list[Moment] = []
        while at in by_id and len(chain) < len(by_id):
            chain.append(by_id[at])
            at = by_id[at].parent_id
        return chain

    def consumers(self) -> list[Consumer]:
        """Return the consumers, by name, with how far each is behind."""
        chain = self.main_chain()
        positions = {moment.snapshot_id: position for position, moment in enumerate(chain)}
        committed_ms = {moment.snapshot_id: moment.committed_ms for moment in self.moments}
        head_ms = chain[0].committed_ms if chain else 0
        return [
            replace(
                consumer,
                snapshots_behind=positions.get(consumer.snapshot_id),
                behind=timedelta(milliseconds=max(0, head_ms - committed_ms[consumer.snapshot_id])),
            )
            for consumer in _consumers_of(self.refs, committed_ms)
        ]


def _consumers_of(refs: Iterable[Ref], committed_ms: Mapping[int, int]) -> list[Consumer]:
    return [
        Consumer(
            ref.name.removeprefix(TAG_PREFIX),
            ref.snapshot_id,
            None if ref.max_age_ms is None else committed_ms[ref.snapshot_id] + ref.max_age_ms,
        )
        for ref in sorted(refs, key=lambda ref: ref.name)
        if ref.name.startswith(TAG_PREFIX) and ref.kind == "TAG" and ref.snapshot_id in committed_ms
    ]


# -- registration


def tag_of(name: str) -> str:
    """Return the name of a consumer's tag. Raise ConsumerError if the consumer's name is not valid."""
    if _NAME.fullmatch(name) is None:
        raise ConsumerError(f"a consumer's name is up to 100 letters, digits, '_', '-' and '.': {name!r}")
    return f"{TAG_PREFIX}{name}"


def retain_minutes(*, snapshot_ms: int, now_ms: int, max_age: timedelta) -> int:
    """Return the minutes of age that keep a tag for `max_age` from now on. Raise ConsumerError if it is too short."""
    if max_age < MAX_AGE_LEAST:
        raise ConsumerError(f"a consumer is kept for a minute at least: max_age={max_age}")
    age_ms = max(0, now_ms - snapshot_ms) + int(max_age.total_seconds() * 1000)
    return -(-age_ms // _MINUTE_MS)


def needs_renewal(tag: Ref, *, snapshot_ms: int, now_ms: int, max_age: timedelta) -> bool:
    """Return whether a tag on the same snapshot has to be set again, because it expires too soon."""
    if tag.max_age_ms is None:
        return False
    left_ms = snapshot_ms + tag.max_age_ms - now_ms
    return left_ms < max_age.total_seconds() * 1000 * 3 / 4


# -- table metadata, as the writer reads it


def read_consumers(document: Mapping[str, Any]) -> list[Consumer]:
    """Return the consumers of a table, by name. The document needs no snapshots but those of refs."""
    committed_ms = {snapshot["snapshot-id"]: snapshot["timestamp-ms"] for snapshot in document.get("snapshots") or ()}
    refs = (
        Ref(name, ref["type"].upper(), ref["snapshot-id"], ref.get("max-ref-age-ms"))
        for name, ref in (document.get("refs") or {}).items()
    )
    return _consumers_of(refs, committed_ms)


def snapshots_needed(
    chain: Sequence[Mapping[str, Any]], consumers: Sequence[Consumer], *, now_ms: int, most: int
) -> int:
    """Return how many of the newest snapshots consumers still need, at most `most`. `chain` has the newest first."""
    positions = {snapshot["snapshot-id"]: position for position, snapshot in enumerate(chain[:most])}
    needed = (positions.get(each.snapshot_id, -1) + 1 for each in consumers if not each.is_expired(now_ms))
    return max(needed, default=0)


def describe_consumers(document: Mapping[str, Any], *, now_ms: int) -> list[dict[str, Any]]:
    """Return the consumers of a table for /status, with how far each is behind `main`."""
    by_id = {snapshot["snapshot-id"]: snapshot for snapshot in document.get("snapshots") or ()}
    head = by_id.get((document.get("refs") or {}).get(MAIN_BRANCH, {}).get("snapshot-id"), {})
    described = []
    for consumer in read_consumers(document):
        snapshot = by_id[consumer.snapshot_id]
        behind = timedelta(milliseconds=_difference(head, snapshot, "timestamp-ms") or 0)
        # A table of format version 1 has no sequence numbers.
        snapshots_behind = _difference(head, snapshot, "sequence-number")
        described.append(describe(replace(consumer, snapshots_behind=snapshots_behind, behind=behind), now_ms=now_ms))
    return described


def describe(consumer: Consumer, *, now_ms: int) -> dict[str, Any]:
    """Return a consumer with the keys of /status."""
    left_ms = None if consumer.kept_until_ms is None else consumer.kept_until_ms - now_ms
    return {
        "name": consumer.name,
        "snapshotId": consumer.snapshot_id,
        "snapshotsBehind": consumer.snapshots_behind,
        "secondsBehind": consumer.behind.total_seconds(),
        "keptForSeconds": None if left_ms is None else max(0, left_ms) / 1000,
        "isExpired": consumer.is_expired(now_ms),
    }


def _difference(head: Mapping[str, Any], snapshot: Mapping[str, Any], key: str) -> int | None:
    return max(0, head[key] - snapshot[key]) if key in head and key in snapshot else None
