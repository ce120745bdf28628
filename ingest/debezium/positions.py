"""Deduplication of Debezium changes by their position in the source's log.

A source sends in order, one request at a time. Changes come twice in one of two ways:

    retry    the same request again, byte for byte, because its answer got lost: known by its digest
    resend   a restarted server goes back to its last stored offset: known by position

A streamed change of PostgreSQL has a *key*, its `source.sequence` as numbers: (last commit before it, its own lsn).
Keys never fall while a server runs, even where transactions overlap and lsn alone does. Several changes can share a key
(a COPY, the halves of a key change, a TRUNCATE of many tables): the *place* counts them. A run of equal keys is sent
again from its start or not at all, so places agree.

    mark     the highest (key, place) that was accepted
    cursor   the (key, place) that came last; behind the mark during a resend

             key > mark: new                    key < mark: repeat
             key = mark: new if place is above the mark's

             committed later than all accepted changes: new, whatever its key, and the mark starts over from it

    a new run of the server, or a BEGIN, clears the cursor: an equal key then starts to be counted anew, if the change
    is the one that the run began with; if not, the run goes on where it was

`[null, lsn]` (nothing was committed since the snapshot) counts as (lsn, lsn): below what that server sent later, above
all that came before a new snapshot. Messages outside of transactions are sent at once and make the key of an earlier,
still open transaction fall behind theirs: they have a mark of their own, and each has its key to itself.

A resent change has the time of commit that it had, so one that is later than all others was never here: the database
was restored, or replaced by another, and its log counts from elsewhere.

Some changes have no key and are always new, unless their request is a retry: reads of snapshots (never resent,
but read anew, and replace their rows), and changes without a `sequence` (unwrapped rows without `source.sequence` in
`add.fields`, other databases). Two equal requests in a row look like a retry; that needs rows without key, time and
order in them.

Deciding changes nothing: `plan` gives the state to keep once the changes are durable. Keep it also when none was new,
or a crash during a resend inside a run of equal keys loses count.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from lakefeed.ingest.debezium.events import Change, DebeziumEvent, SourceOperation, TransactionMark, TransactionStatus

Key: TypeAlias = tuple[int, int]

_DIGEST_BYTES = 16
_FINGERPRINT_BYTES = 8


@dataclass(frozen=True, slots=True)
class Spot:
    """A place in a run of equal keys, and the fingerprint of the change that the run began with."""

    key: Key
    place: int
    first: str


@dataclass(frozen=True, slots=True)
class Lane:
    """How far the streamed changes have come."""

    mark: Spot | None = None
    cursor: Spot | None = None

    def advanced(self, key: Key, fingerprint: str) -> tuple[bool, Lane]:
        """Add the next change; return whether it is new, and the lane after it."""
        spot = self._spot_of(key, fingerprint)
        is_new = self.mark is None or (spot.key, spot.place) > (self.mark.key, self.mark.place)
        return is_new, Lane(spot if is_new else self.mark, spot)

    def _spot_of(self, key: Key, fingerprint: str) -> Spot:
        last = self.cursor
        if last is None and self.mark is not None and fingerprint != self.mark.first:
            last = self.mark
        if last is None or last.key != key:
            return Spot(key, 1, fingerprint)
        return Spot(key, last.place + 1, last.first)


@dataclass(frozen=True, slots=True)
class Positions:
    """How far a source has come. `taken` is the sequence number of the last change that was new.

    `latest_ms` is the latest time of commit among them.
    """

    streamed: Lane = field(default_factory=Lane)
    message_mark: Key | None = None
    latest_ms: int = 0
    run_id: str = ""
    digest: str = ""
    taken: int = 0

    def plan(self, events: Sequence[DebeziumEvent], *, digest: str = "", run_id: str = "") -> Plan:
        """Decide which changes of a request are new. `digest` is that of its body, `run_id` its header's."""
        is_restarted = bool(run_id and self.run_id and run_id != self.run_id)
        if digest and digest == self.digest and not is_restarted:
            changes = (index for index, event in enumerate(events) if isinstance(event, Change))
            return Plan(is_retry=True, fresh=(), repeated=tuple(changes), after=self)
        fresh: list[int] = []
        repeated: list[int] = []
        state = self.without_cursor() if is_restarted else self
        for index, event in enumerate(events):
            if isinstance(event, TransactionMark) and event.status is TransactionStatus.BEGIN:
                state = state.without_cursor()
            elif isinstance(event, Change):
                is_new, state = _judge(state, event)
                (fresh if is_new else repeated).append(index)
        after = replace(state, run_id=run_id or self.run_id, digest=digest, taken=self.taken + len(fresh))
        return Plan(is_retry=False, fresh=tuple(fresh), repeated=tuple(repeated), after=after)

    def without_cursor(self) -> Positions:
        """Return the state for a resend: the next change may have come before."""
        return replace(self, streamed=Lane(self.streamed.mark))


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do with a request: indexes of new changes and of those accepted before, and what to remember.

    The new changes have the sequence numbers up to `after.taken`, in order. A retry repeats everything.
    """

    is_retry: bool
    fresh: tuple[int, ...]
    repeated: tuple[int, ...]
    after: Positions


def key_of(change: Change) -> Key | None:
    """Return the key that orders a streamed change; None if it has none."""
    if change.operation is SourceOperation.READ or change.origin.snapshot or change.origin.sequence is None:
        return None
    commit, lsn = change.origin.sequence
    if lsn is None:
        return None
    return (lsn if commit is None else commit, lsn)


def _judge(state: Positions, change: Change) -> tuple[bool, Positions]:
    key = key_of(change)
    if key is None:
        return True, state
    if change.operation is SourceOperation.MESSAGE and not change.origin.tx_id:
        is_new = state.message_mark is None or key > state.message_mark
        return is_new, replace(state, message_mark=key) if is_new else state
    is_new, lane = state.streamed.advanced(key, _fingerprint(change))
    if not is_new and change.timestamp_ms > state.latest_ms:
        is_new, lane = Lane().advanced(key, _fingerprint(change))
    return is_new, replace(state, streamed=lane, latest_ms=max(state.latest_ms, change.timestamp_ms))


def digest_of(body: bytes) -> str:
    """Return the digest of a request's body."""
    return hashlib.blake2b(body, digest_size=_DIGEST_BYTES).hexdigest()


def _fingerprint(change: Change) -> str:
    parts = (change.table.encode(), change.operation.value.encode(), change.before, change.after)
    hashed = hashlib.blake2b(b"\0".join(parts), digest_size=_FINGERPRINT_BYTES)
    return hashed.hexdigest()
