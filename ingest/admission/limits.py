"""Who may connect, how much a client may send, and when it is told to wait. Owns limits, their counts and load levels.

    connection  total, per source, per address and subnet, per second   -> a Slot, or TurnedAway (HTTP 429)
    message     per connection and second, bytes per source, load       -> admitted, or Refused (a nack, to be retried)
    request     per source and second, bytes per source                 -> admitted, or how long to wait

Sockets, headers and answers belong to others. Time comes in as `now` in seconds since 1970, chance as a function; a
limit of 0 is no limit.
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from lakefeed.ingest.admission.addresses import Address, is_private, subnet_of
from lakefeed.ingest.protocol.offers import NackReason, Refused

# --- ingest.buckets ---------------------------------------------------------------------------------------------------
#
# Token buckets: so much a second, and a burst. Owns the arithmetic; time comes in as `now` in seconds.


@dataclass(slots=True)
class TokenBucket:
    """`rate_per_s` tokens a second, at most `burst` of them; a rate of 0 never refuses.

    What costs more than the burst is let through a full bucket and leaves a debt, so that the rate holds all the same.
    """

    rate_per_s: float
    burst: float
    tokens: float
    refilled_at: float

    @classmethod
    def full(cls, rate_per_s: float, burst: float, now: float) -> TokenBucket:
        """Start with all tokens."""
        return cls(rate_per_s, burst, burst, now)

    def has(self, cost: float, now: float) -> bool:
        """Tell whether there is enough; takes nothing."""
        if not self.rate_per_s:
            return True
        # A clock that was set back refills nothing and takes nothing.
        elapsed_s = max(0.0, now - self.refilled_at)
        self.tokens = min(self.burst, self.tokens + elapsed_s * self.rate_per_s)
        self.refilled_at = now
        return self.tokens >= min(cost, self.burst)

    def take(self, cost: float) -> None:
        """Take what `has` has found."""
        if self.rate_per_s:
            self.tokens -= cost

    def wait_s(self, cost: float) -> float:
        """Tell how long after the last `has` there will be enough."""
        missing = min(cost, self.burst) - self.tokens
        return missing / self.rate_per_s if missing > 0 and self.rate_per_s else 0.0

    def allowance(self, now: float) -> Allowance:
        """Describe it to a client."""
        self.has(0, now)
        full_in_s = (self.burst - self.tokens) / self.rate_per_s if self.rate_per_s else 0.0
        return Allowance(limit=int(self.burst), remaining=max(0, int(self.tokens)), reset_at=now + full_in_s)


@dataclass(frozen=True, slots=True)
class Allowance:
    """What is left of a limit, and when it is whole again (seconds since 1970)."""

    limit: int
    remaining: int
    reset_at: float


# --- ingest.admission -------------------------------------------------------------------------------------------------


Key = TypeVar("Key", str, Address)

# Backoff of a client that is told to wait: 100 ms, twice as long each time it comes back too early.
BACKOFF_FIRST_MS = 100
BACKOFF_MAX_DOUBLINGS = 10
BACKOFF_MAX_MS = 30_000

# When to come back for a connection that some other one has to end for.
CONNECTION_RETRY_AFTER_S = 5

# Messages with too large an event, after which the client has not understood.
SIZE_VIOLATIONS_MAX = 3

# Sources whose bytes are remembered though they are not connected. A bucket that is full again need not be.
SOURCE_BUCKETS_MAX = 4096

# Shares of a limit above which load is elevated, high and critical.
ELEVATED_ABOVE, HIGH_ABOVE, CRITICAL_ABOVE = 0.5, 0.7, 0.9


# -- connections


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """How many connections, in all and of one kind, and how many new ones a second."""

    total: int
    per_source: int = 0
    per_address: int = 0
    per_subnet: int = 0
    private_addresses_count: bool = False
    per_s: float = 0
    burst: int = 0


class TurnAwayReason(enum.Enum):
    """Why a connection is refused. The values are the wire protocol's."""

    RATE_LIMITED = "rate_limited"
    CONNECTION_LIMIT = "connection_limit"
    IP_LIMIT = "ip_limit"


@dataclass(frozen=True, slots=True)
class TurnedAway:
    """No connection; come back later."""

    reason: TurnAwayReason
    message: str
    retry_after_s: int


@dataclass(slots=True, eq=False)
class Slot:
    """A connection's place, from the upgrade to its end."""

    address: Address | None
    source: str = ""
    shard: str = ""
    is_high_priority: bool = False


@dataclass(slots=True)
class Connections:
    """The connections that are open, counted by what limits them."""

    limits: ConnectionLimits
    now: float
    active: int = 0
    peak: int = 0
    _per_source: Counter[str] = field(default_factory=Counter)
    _per_address: Counter[Address] = field(default_factory=Counter)
    _per_subnet: Counter[Address] = field(default_factory=Counter)
    _new: TokenBucket = field(init=False)

    def __post_init__(self) -> None:
        self._new = TokenBucket.full(self.limits.per_s, self.limits.burst, self.now)

    def enter(self, slot: Slot, now: float) -> TurnedAway | None:
        """Give a client a place, unless a limit is reached. Only those who get one count for the rate."""
        refusal = self._refusal(slot, now)
        if refusal is None:
            self._new.take(1)
            self._count(slot, 1)
            self.peak = max(self.peak, self.active)
        return refusal

    def _refusal(self, slot: Slot, now: float) -> TurnedAway | None:
        limits = self.limits
        if limits.total and self.active >= limits.total:
            return _no_place(TurnAwayReason.CONNECTION_LIMIT, "all", limits.total)
        if self._is_source_full(slot.source):
            return _no_place(TurnAwayReason.CONNECTION_LIMIT, "source", limits.per_source)
        if slot.address is not None and self._counts(slot.address):
            if limits.per_address and self._per_address[slot.address] >= limits.per_address:
                return _no_place(TurnAwayReason.IP_LIMIT, "address", limits.per_address)
            if limits.per_subnet and self._per_subnet[subnet_of(slot.address)] >= limits.per_subnet:
                return _no_place(TurnAwayReason.IP_LIMIT, "subnet", limits.per_subnet)
        if not self._new.has(1, now):
            retry_after_s = max(1, math.ceil(self._new.wait_s(1)))
            return TurnedAway(TurnAwayReason.RATE_LIMITED, "too many new connections", retry_after_s)
        return None

    def _counts(self, address: Address) -> bool:
        return self.limits.private_addresses_count or not is_private(address)

    def _is_source_full(self, source: str) -> bool:
        return bool(source and self.limits.per_source and self._per_source[source] >= self.limits.per_source)

    def leave(self, slot: Slot) -> None:
        """Free a place."""
        self._count(slot, -1)

    def _count(self, slot: Slot, by: int) -> None:
        self.active += by
        self._count_source(slot.source, by)
        if slot.address is not None:
            _add(self._per_address, slot.address, by)
            _add(self._per_subnet, subnet_of(slot.address), by)

    def _count_source(self, source: str, by: int) -> None:
        if source:
            _add(self._per_source, source, by)

    def bind(self, slot: Slot, source: str) -> bool:
        """Count a connection for the source that it has turned out to speak for; false if that has too many."""
        if source == slot.source:
            return True
        if self._is_source_full(source):
            return False
        self._count_source(slot.source, -1)
        self._count_source(source, 1)
        slot.source = source
        return True

    def allowance(self, now: float) -> Allowance:
        """Describe how many more may connect: at once, where the rate is limited, else in all."""
        if self.limits.per_s:
            return self._new.allowance(now)
        return Allowance(self.limits.total, max(0, self.limits.total - self.active), now)


def _no_place(reason: TurnAwayReason, of: str, limit: int) -> TurnedAway:
    return TurnedAway(reason, f"too many connections: of={of} limit={limit}", CONNECTION_RETRY_AFTER_S)


def _add(counter: Counter[Key], key: Key, by: int) -> None:
    """Count, and forget what nobody has any more."""
    counter[key] += by
    if not counter[key]:
        del counter[key]


# -- load


class LoadLevel(enum.Enum):
    """How busy the service is. The values are the wire protocol's."""

    NORMAL = "normal"
    ELEVATED = "elevated"
    HIGH = "high"
    CRITICAL = "critical"

    @property
    def is_degraded(self) -> bool:
        """Tell whether clients feel it."""
        return self in (LoadLevel.HIGH, LoadLevel.CRITICAL)


def load_level(*, connections: float, delay: float, log: float) -> LoadLevel:
    """Judge by the shares of their limits: open connections, how long batches wait for the log, the log's bytes.

    The queue's bytes do not count: under full load it is full all the time, and clients are slowed down by not being
    read. Only a wait that grows says that this is not enough. Connections alone are never critical: a place that is
    taken is no reason to refuse the work of those who have one.
    """
    busiest = max(min(connections, CRITICAL_ABOVE), delay, log)
    if busiest > CRITICAL_ABOVE:
        return LoadLevel.CRITICAL
    if busiest > HIGH_ABOVE:
        return LoadLevel.HIGH
    return LoadLevel.ELEVATED if busiest > ELEVATED_ABOVE else LoadLevel.NORMAL


# -- messages


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageLimits:
    """What one connection may send a second, and one source."""

    per_s: float = 0
    burst: int = 1
    heartbeats_per_s: float = 0
    refusals_max: int = 0


@dataclass(slots=True)
class SourceRates:
    """Buckets of sources, which outlive connections: coming again must not give a new one. By default of one second."""

    per_s: float
    burst: float | None = None
    _buckets: dict[str, TokenBucket] = field(default_factory=dict)

    def bucket(self, source: str, now: float) -> TokenBucket:
        """Find a source's bucket, or start a full one."""
        found = self._buckets.get(source)
        if found is None:
            if len(self._buckets) >= SOURCE_BUCKETS_MAX:
                self._forget_full(now)
            burst = self.per_s if self.burst is None else self.burst
            found = self._buckets[source] = TokenBucket.full(self.per_s, burst, now)
        return found

    def _forget_full(self, now: float) -> None:
        kept = {source: bucket for source, bucket in self._buckets.items() if not bucket.has(bucket.burst, now)}
        self._buckets = dict(list(kept.items())[-SOURCE_BUCKETS_MAX // 2 :])


@dataclass(frozen=True, slots=True)
class RequestRates:
    """What a source may send in requests, where there is no connection to count for; None is no limit."""

    requests: SourceRates | None = None
    bytes: SourceRates | None = None

    def admit(self, source: str, size_bytes: int, now: float) -> float:
        """Take a request if its source may send it now, and give 0; else take nothing and give how long to wait."""
        rates = ((self.requests, 1), (self.bytes, size_bytes))
        costs = [(rate.bucket(source, now), cost) for rate, cost in rates if rate is not None]
        wait_s = max((bucket.wait_s(cost) for bucket, cost in costs if not bucket.has(cost, now)), default=0.0)
        if not wait_s:
            for bucket, cost in costs:
                bucket.take(cost)
        return wait_s

    def correct(self, source: str, more_bytes: int, now: float) -> None:
        """Count what a request was larger, or smaller, than it was admitted for."""
        if self.bytes is not None:
            self.bytes.bucket(source, now).take(more_bytes)


@dataclass(slots=True)
class Messages:
    """One connection's messages: its buckets, and how often it was refused."""

    limits: MessageLimits
    is_high_priority: bool
    jitter: Callable[[], float]
    now: float
    size_violations: int = 0
    _messages: TokenBucket = field(init=False)
    _heartbeats: TokenBucket = field(init=False)
    _refusals: int = 0
    _too_early: int = 0
    _told_full_at: float = math.inf
    _welcome_at: float = 0.0
    _doublings: int = -1
    _retry_at: float = 0.0

    def __post_init__(self) -> None:
        limits = self.limits
        self._messages = TokenBucket.full(limits.per_s, limits.burst, self.now)
        self._heartbeats = TokenBucket.full(limits.heartbeats_per_s, 2 * limits.heartbeats_per_s, self.now)

    @property
    def is_offender(self) -> bool:
        """Tell whether it was refused so often that it does not listen."""
        return bool(self.limits.refusals_max) and self._refusals >= self.limits.refusals_max

    @property
    def is_impatient(self) -> bool:
        """Tell whether it came back too early so often, while the log was full, that it does not listen."""
        return bool(self.limits.refusals_max) and self._too_early >= self.limits.refusals_max

    def on_full(self, *, received_at: float, retry_delay_s: float, now: float) -> None:
        """Count a batch that the log has no room for, if its client had been told to wait and has not.

        What was under way when it was told so does not count.
        """
        self._too_early += self._told_full_at < received_at < self._welcome_at
        self._told_full_at, self._welcome_at = now, now + retry_delay_s

    def on_taken(self) -> None:
        """Forget how impatient it was."""
        self._too_early = 0

    @property
    def is_limited(self) -> bool:
        """Tell whether there is a limit to speak of."""
        return bool(self.limits.per_s)

    def allowance(self, now: float) -> Allowance | None:
        """Describe the limit on messages, if there is one."""
        return self._messages.allowance(now) if self.is_limited else None

    def admit_heartbeat(self, now: float) -> Refused | None:
        """Take a heartbeat, unless there are too many."""
        if self._heartbeats.has(1, now):
            self._heartbeats.take(1)
            return None
        self._refusals += 1
        return self._refuse("too many heartbeats", self._heartbeats.wait_s(1), now)

    def admit(self, now: float, *, size_bytes: int = 0, source: TokenBucket | None = None) -> Refused | None:
        """Take a message, unless its connection has sent too many or its source too much."""
        if not self._messages.has(1, now):
            return self._refuse_message("too many messages", self._messages.wait_s(1), now)
        if source is not None and not source.has(size_bytes, now):
            return self._refuse_message("too many bytes of this source", source.wait_s(size_bytes), now)
        self._messages.take(1)
        if source is not None:
            source.take(size_bytes)
        # One step back for each that was good: who keeps sending far too much is still found out.
        self._refusals = max(0, self._refusals - 1)
        self._doublings = -1
        return None

    def _refuse_message(self, what: str, wait_s: float, now: float) -> Refused:
        self._refusals += 1
        return self._refuse(what, wait_s, now)

    def shed(self, level: LoadLevel, now: float) -> Refused | None:
        """Refuse a batch when load is critical, unless the connection has priority. Nobody's fault, so not counted."""
        if level is not LoadLevel.CRITICAL or self.is_high_priority:
            return None
        return self._refuse("the service is overloaded", 0.0, now, NackReason.LOAD_SHEDDING)

    def _refuse(self, what: str, wait_s: float, now: float, reason: NackReason = NackReason.RATE_LIMITED) -> Refused:
        """Say when to come back. Messages that were under way at the first refusal are told the same moment."""
        if now >= self._retry_at:
            self._doublings = min(self._doublings + 1, BACKOFF_MAX_DOUBLINGS)
            backoff_ms = min(BACKOFF_MAX_MS, BACKOFF_FIRST_MS * 2**self._doublings * self.jitter())
            self._retry_at = now + max(backoff_ms / 1_000, min(wait_s, BACKOFF_MAX_MS / 1_000))
        return Refused(reason, what, retry=True, retry_delay_ms=max(1, round((self._retry_at - now) * 1_000)))


# --- ingest.patience --------------------------------------------------------------------------------------------------
#
# When a client has kept us waiting too long, and how connections end. Owns close codes and the decision.
#
# Time comes in as `now` in seconds; a limit of 0 waits for ever.


class CloseCode(enum.IntEnum):
    """Why the server ends a connection. The values are the wire protocol's."""

    GOODBYE = 1000
    SHUTTING_DOWN = 1001
    POLICY = 1008
    FAILED = 1011
    HEARTBEAT_TIMEOUT = 4000
    NOT_AUTHENTICATED = 4001
    RATE_LIMITED = 4002
    BUFFER_OVERFLOW = 4003


@dataclass(frozen=True, slots=True)
class Closing:
    """How to end a connection."""

    code: CloseCode
    reason: str


GOODBYE = Closing(CloseCode.GOODBYE, "goodbye")
FAILED = Closing(CloseCode.FAILED, "internal error: connect again")
SHUTTING_DOWN = Closing(CloseCode.SHUTTING_DOWN, "shutting down")
TOO_MANY_REFUSALS = Closing(CloseCode.RATE_LIMITED, "rate limited: too many refused messages")
BUFFER_OVERFLOW = Closing(CloseCode.BUFFER_OVERFLOW, "buffer full: too many batches sent again too early")
TOO_MANY_SIZE_VIOLATIONS = Closing(CloseCode.POLICY, "too many size violations")
TOO_MANY_CONNECTIONS = Closing(CloseCode.POLICY, "too many connections of this source")
_NOTHING_HEARD = Closing(CloseCode.HEARTBEAT_TIMEOUT, "heartbeat timeout")
_MESSAGE_NOT_ENDED = Closing(CloseCode.POLICY, "message did not arrive in time")
_ANSWERS_UNREAD = Closing(CloseCode.POLICY, "does not read its answers")


def not_authenticated(why: str) -> Closing:
    """End a connection whose client has shown no valid token."""
    return Closing(CloseCode.NOT_AUTHENTICATED, f"authentication failed: {why}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long a client may keep us waiting; 0 is for ever."""

    heartbeat_s: float
    message_s: float
    answers_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SignsOfLife:
    """Since when a client has not been heard, has not ended its message, has not read; None where that is not so."""

    silent_since: float | None
    arriving_since: float | None
    unread_since: float | None


def find_overdue(signs: SignsOfLife, patience: Patience, now: float) -> Closing | None:
    """Decide whether to wait for a client any longer."""
    if _is_over(signs.unread_since, patience.answers_s, now):
        return _ANSWERS_UNREAD
    if _is_over(signs.arriving_since, patience.message_s, now):
        return _MESSAGE_NOT_ENDED
    return _NOTHING_HEARD if _is_over(signs.silent_since, patience.heartbeat_s, now) else None


def _is_over(since: float | None, limit_s: float, now: float) -> bool:
    return since is not None and bool(limit_s) and now - since > limit_s
