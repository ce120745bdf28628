"""A consumer as a tag, and what a table's history means for it. Core: registry.py reads and sets the tags.

    lakefeed_consumer_<name>    at the last snapshot that it has finished; every later one has to stay for it

Iceberg gives up a tag when its *snapshot* is older than the tag's age (`max-ref-age-ms`). A consumer of a table that
rests would be given up though it has read all there is, so the age is set to what the snapshot has at registration and
`max_age` on top: a consumer is kept for `max_age` after it was last heard of.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from lakefeed.contract.errors import ConsumerError
from lakefeed.contract.properties import MAIN_BRANCH

# --- writer.iceberg.consumers -----------------------------------------------------------------------------------------
#
# Consumers of a table: streaming readers that have registered with how far they have come. Core.
#
# A consumer is a tag on the last snapshot that it has finished, so that it lives in the table itself and every engine
# can
# read, set and drop it:
#
#     lakefeed_consumer_<name>    type tag, snapshot-id, max-ref-age-ms
#
# Readers follow `main` from snapshot to snapshot and need every one from their tag on. A tag whose snapshot is older
# than
# `max-ref-age-ms` is over, by Iceberg's own rule: whoever registers counts in the age that the snapshot has then, so
# that
# a consumer is kept for that long after it was last heard of. One that is over is passed over.


TAG_PREFIX = "lakefeed_consumer_"


@dataclass(frozen=True, slots=True)
class IcebergConsumer:
    """A registered reader. `until_ms` is when it is given up; None means never."""

    name: str
    snapshot_id: int
    until_ms: int | None

    def is_over(self, now_ms: int) -> bool:
        """Tell whether it was last heard of too long ago."""
        return self.until_ms is not None and now_ms > self.until_ms


def read_consumers(document: Mapping[str, Any]) -> list[IcebergConsumer]:
    """Find the consumers of a table, by name. The snapshots of its refs are all that is needed of its history."""
    moments = {snapshot["snapshot-id"]: snapshot["timestamp-ms"] for snapshot in document.get("snapshots") or ()}
    found = []
    for name, ref in sorted((document.get("refs") or {}).items()):
        if name.startswith(TAG_PREFIX) and ref["type"] == "tag" and ref["snapshot-id"] in moments:
            age_ms = ref.get("max-ref-age-ms")
            until_ms = None if age_ms is None else moments[ref["snapshot-id"]] + age_ms
            found.append(IcebergConsumer(name.removeprefix(TAG_PREFIX), ref["snapshot-id"], until_ms))
    return found


def snapshots_needed(
    chain: Sequence[Mapping[str, Any]], consumers: Sequence[IcebergConsumer], *, now_ms: int, most: int
) -> int:
    """Count how many of the newest snapshots consumers still need, at most `most`. `chain` has the newest first."""
    positions = {snapshot["snapshot-id"]: position for position, snapshot in enumerate(chain[:most])}
    needed = (positions.get(each.snapshot_id, -1) + 1 for each in consumers if not each.is_over(now_ms))
    return max(needed, default=0)


def describe_consumers(document: Mapping[str, Any], *, now_ms: int) -> list[dict[str, Any]]:
    """Describe the consumers of a table for /status, with how far each is behind `main`."""
    return list(_described(document, now_ms))


def _described(document: Mapping[str, Any], now_ms: int) -> Iterator[dict[str, Any]]:
    by_id = {snapshot["snapshot-id"]: snapshot for snapshot in document.get("snapshots") or ()}
    head = by_id.get((document.get("refs") or {}).get(MAIN_BRANCH, {}).get("snapshot-id"), {})
    for consumer in read_consumers(document):
        at = by_id[consumer.snapshot_id]
        left_ms = None if consumer.until_ms is None else consumer.until_ms - now_ms
        yield {
            "name": consumer.name,
            "snapshotId": consumer.snapshot_id,
            "snapshotsBehind": _difference(head, at, "sequence-number"),
            "secondsBehind": (_difference(head, at, "timestamp-ms") or 0) / 1000,
            "keptForSeconds": None if left_ms is None else max(0, left_ms) / 1000,
            "isPassedOver": consumer.is_over(now_ms),
        }


def _difference(head: Mapping[str, Any], at: Mapping[str, Any], key: str) -> int | None:
    """Tell how far a snapshot is behind; a table of format version 1 has no sequence numbers."""
    return max(0, head[key] - at[key]) if key in head and key in at else None


# --- pipeline.consumers.tags ------------------------------------------------------------------------------------------


MAIN = "main"

# A weekend. What a consumer keeps is paid for with every commit: one that stays away must not be waited for for ever.
MAX_AGE_DEFAULT = timedelta(days=3)
# Spark's RETAIN counts whole minutes.
MAX_AGE_LEAST = timedelta(minutes=1)

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_MINUTE_MS = 60_000


@dataclass(frozen=True, slots=True)
class Ref:
    """A branch or a tag of a table. A branch may have an age of its own at which its snapshots expire."""

    name: str
    kind: str
    snapshot_id: int
    max_age_ms: int | None
    max_snapshot_age_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Moment:
    """A snapshot's place in time. `operation` is Iceberg's word for what it did."""

    snapshot_id: int
    parent_id: int | None
    committed_ms: int
    operation: str = "append"


@dataclass(frozen=True, slots=True)
class Consumer:
    """A registered reader of a table, and how far it is behind `main`.

    `snapshots_behind` is None where the snapshot does not lead to `main`, or some in between are gone. `kept_until_ms`
    is None if nobody will ever give it up.
    """

    name: str
    snapshot_id: int
    snapshots_behind: int | None
    behind: timedelta
    kept_until_ms: int | None

    def is_over(self, now_ms: int) -> bool:
        """Tell whether it was last heard of too long ago, so that expiry passes over it."""
        return self.kept_until_ms is not None and now_ms > self.kept_until_ms


@dataclass(frozen=True, slots=True)
class History:
    """A table's refs and all of its snapshots."""

    refs: Sequence[Ref]
    moments: Sequence[Moment]

    def main_chain(self) -> list[Moment]:
        """Walk from the newest snapshot of `main` to its oldest known ancestor."""
        by_id = {moment.snapshot_id: moment for moment in self.moments}
        at = next((ref.snapshot_id for ref in self.refs if ref.name == MAIN), None)
        chain: list[Moment] = []
        while at in by_id and len(chain) < len(by_id):
            chain.append(by_id[at])
            at = by_id[at].parent_id
        return chain

    def consumers(self) -> list[Consumer]:
        """Find the consumers, by name."""
        chain = self.main_chain()
        positions = {moment.snapshot_id: position for position, moment in enumerate(chain)}
        moments = {moment.snapshot_id: moment.committed_ms for moment in self.moments}
        found = []
        for ref in sorted(self.refs, key=lambda ref: ref.name):
            if ref.name.startswith(TAG_PREFIX) and ref.kind == "TAG" and ref.snapshot_id in moments:
                at_ms = moments[ref.snapshot_id]
                head_ms = chain[0].committed_ms if chain else at_ms
                consumer = Consumer(
                    name=ref.name.removeprefix(TAG_PREFIX),
                    snapshot_id=ref.snapshot_id,
                    snapshots_behind=positions.get(ref.snapshot_id),
                    behind=timedelta(milliseconds=max(0, head_ms - at_ms)),
                    kept_until_ms=None if ref.max_age_ms is None else at_ms + ref.max_age_ms,
                )
                found.append(consumer)
        return found


def tag_of(name: str) -> str:
    """Name a consumer's tag.

    Raises: ConsumerError.
    """
    if _NAME.fullmatch(name) is None:
        raise ConsumerError(f"a consumer's name is up to 100 letters, digits, '_', '-' and '.': {name!r}")
    return f"{TAG_PREFIX}{name}"


def retain_minutes(*, snapshot_ms: int, now_ms: int, max_age: timedelta) -> int:
    """Compute the age that a tag may reach, so that it is kept for `max_age` from now on.

    Raises: ConsumerError.
    """
    if max_age < MAX_AGE_LEAST:
        raise ConsumerError(f"a consumer is kept for a minute at least: max_age={max_age}")
    age_ms = max(0, now_ms - snapshot_ms) + int(max_age.total_seconds() * 1000)
    return -(-age_ms // _MINUTE_MS)


def needs_renewal(tag: Ref, *, snapshot_ms: int, now_ms: int, max_age: timedelta) -> bool:
    """Tell whether a tag that stays where it is has to be set again, lest it is given up."""
    if tag.max_age_ms is None:
        return False
    left_ms = snapshot_ms + tag.max_age_ms - now_ms
    return left_ms < max_age.total_seconds() * 1000 * 3 / 4
