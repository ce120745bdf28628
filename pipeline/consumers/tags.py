"""A consumer as a tag, and what a table's history means for it. Core: registry.py reads and sets the tags.

    lakefeed_consumer_<name>    at the last snapshot that it has finished; every later one has to stay for it

Iceberg gives up a tag when its *snapshot* is older than the tag's age (`max-ref-age-ms`). A consumer of a table that
rests would be given up though it has read all there is, so the age is set to what the snapshot has at registration and
`max_age` on top: a consumer is kept for `max_age` after it was last heard of.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from pipeline.errors import ConsumerError

TAG_PREFIX = "lakefeed_consumer_"
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
