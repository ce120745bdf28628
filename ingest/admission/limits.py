"""Limits of connections, messages and requests: token buckets, load levels, timeouts and close codes. Pure.

    connection  total, per source, address and subnet, new ones per second  -> ConnectionSlot, or Rejected (HTTP 429)
    message     per connection and second, bytes per source, load           -> admitted, or Refused (a nack to retry)
    request     per source and second, bytes per source                     -> admitted, or the seconds to wait
    silence     heartbeats, half messages, unread replies                   -> nothing, or Closing (a close code)

Time comes in as `now`, in seconds since 1970 unless said otherwise, and randomness as a function. A limit of 0 is no
limit.
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

from lakefeed.backoff import Backoff
from lakefeed.ingest.admission.addresses import Address, is_private, subnet_of
from lakefeed.ingest.admission.budget import ReadBudget
from lakefeed.ingest.config import IngestConfig
from lakefeed.ingest.protocol.offers import NackReason, Refused, Verdict

Key = TypeVar("Key", str, Address)

# Backoff of a client that has to wait; the pause doubles each time the client returns too early.
BACKOFF = Backoff(first_s=0.1, max_s=30.0)

# When to retry a connection for which another one has to end first.
CONNECTION_RETRY_AFTER_S = 5

# Messages with an event above the size limit, after which the connection is closed. DoLake's number.
SIZE_VIOLATIONS_MAX = 3

# Buckets of sources that are kept while the sources are not connected. A full bucket need not be kept.
SOURCE_BUCKETS_MAX = 4096

# Shares of a limit above which load is elevated, high and critical.
ELEVATED_ABOVE, HIGH_ABOVE, CRITICAL_ABOVE = 0.5, 0.7, 0.9


# -- token buckets


@dataclass(frozen=True, slots=True)
class Allowance:
    """What is left of a limit, and when it is full again (seconds since 1970)."""

    limit: int
    remaining: int
    reset_at: float


@dataclass(slots=True)
class TokenBucket:
    """`rate_per_s` tokens a second, at most `burst` of them; a rate of 0 never refuses.

    A cost above the burst passes a full bucket and leaves a debt, so that the rate holds all the same.
    """

    rate_per_s: float
    burst: float
    refilled_at: float
    tokens: float = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = self.burst

    def has(self, cost: float, now: float) -> bool:
        """Return whether there are enough tokens; takes none."""
        if not self.rate_per_s:
            return True
        # A clock that was set back neither refills nor drains the bucket.
        elapsed_s = max(0.0, now - self.refilled_at)
        self.tokens = min(self.burst, self.tokens + elapsed_s * self.rate_per_s)
        self.refilled_at = now
        return self.tokens >= min(cost, self.burst)

    def take(self, cost: float) -> None:
        """Take tokens after `has` returned True."""
        if self.rate_per_s:
            self.tokens -= cost

    def wait_s(self, cost: float) -> float:
        """Return how long after the last `has` there will be enough tokens."""
        missing = min(cost, self.burst) - self.tokens
        return missing / self.rate_per_s if missing > 0 and self.rate_per_s else 0.0

    def allowance(self, now: float) -> Allowance:
        """Return the state as clients see it."""
        self.has(0, now)
        full_in_s = (self.burst - self.tokens) / self.rate_per_s if self.rate_per_s else 0.0
        return Allowance(limit=int(self.burst), remaining=max(0, int(self.tokens)), reset_at=now + full_in_s)


@dataclass(slots=True)
class SourceRates:
    """One bucket per source. Buckets outlive connections: a reconnect gives no new one."""

    per_s: float
    burst: float
    _buckets: dict[str, TokenBucket] = field(default_factory=dict)

    def bucket(self, source: str, now: float) -> TokenBucket:
        """Return a source's bucket; a new one is full."""
        found = self._buckets.get(source)
        if found is None:
            if len(self._buckets) >= SOURCE_BUCKETS_MAX:
                kept = [(name, bucket) for name, bucket in self._buckets.items() if not bucket.has(bucket.burst, now)]
                self._buckets = dict(kept[-SOURCE_BUCKETS_MAX // 2 :])
            found = self._buckets[source] = TokenBucket(self.per_s, self.burst, now)
        return found


@dataclass(frozen=True, slots=True)
class RequestRates:
    """Rates of HTTP requests per source."""

    requests: SourceRates
    bytes: SourceRates

    def admit(self, source: str, size_bytes: int, now: float) -> float:
        """Take the tokens of a request and return 0; or take nothing and return how many seconds to wait."""
        costs = ((self.requests.bucket(source, now), 1), (self.bytes.bucket(source, now), size_bytes))
        wait_s = max((bucket.wait_s(cost) for bucket, cost in costs if not bucket.has(cost, now)), default=0.0)
        if not wait_s:
            for bucket, cost in costs:
                bucket.take(cost)
        return wait_s

    def correct(self, source: str, more_bytes: int, now: float) -> None:
        """Count the bytes by which a request was larger, or smaller, than it was admitted for."""
        self.bytes.bucket(source, now).take(more_bytes)


# -- connections


class RejectReason(enum.Enum):
    """Why a connection is rejected. The values are the wire protocol's."""

    RATE_LIMITED = "rate_limited"
    CONNECTION_LIMIT = "connection_limit"
    IP_LIMIT = "ip_limit"


@dataclass(frozen=True, slots=True)
class Rejected:
    """The connection is rejected; the client may retry after a while."""

    reason: RejectReason
    message: str
    retry_after_s: int


@dataclass(slots=True, eq=False)
class ConnectionSlot:
    """A connection's slot, from the handshake to its end."""

    address: Address | None
    source: str = ""
    shard: str = ""
    is_high_priority: bool = False


@dataclass(slots=True)
class ConnectionSlots:
    """The open connections, counted by source, address and subnet."""

    config: IngestConfig
    now: float
    active: int = 0
    peak: int = 0
    _per_source: Counter[str] = field(default_factory=Counter)
    _per_address: Counter[Address] = field(default_factory=Counter)
    _per_subnet: Counter[Address] = field(default_factory=Counter)
    _new: TokenBucket = field(init=False)

    def __post_init__(self) -> None:
        self._new = TokenBucket(self.config.connection_rate_per_s, self.config.connection_burst, self.now)

    def acquire(self, slot: ConnectionSlot, now: float) -> Rejected | None:
        """Take a slot unless a limit is reached. Rejected connections do not count for the rate."""
        rejected = self._find_limit(slot, now)
        if rejected is None:
            self._new.take(1)
            self._count(slot, 1)
            self.peak = max(self.peak, self.active)
        return rejected

    def _find_limit(self, slot: ConnectionSlot, now: float) -> Rejected | None:
        config, address = self.config, slot.address
        if self.active >= config.connections_max:
            return _too_many(RejectReason.CONNECTION_LIMIT, "all", config.connections_max)
        if self._is_source_full(slot.source):
            return _too_many(RejectReason.CONNECTION_LIMIT, "source", config.connections_per_source_max)
        if address is not None and (config.limit_private_ips or not is_private(address)):
            if 0 < config.connections_per_ip_max <= self._per_address[address]:
                return _too_many(RejectReason.IP_LIMIT, "address", config.connections_per_ip_max)
            if 0 < config.connections_per_subnet_max <= self._per_subnet[subnet_of(address)]:
                return _too_many(RejectReason.IP_LIMIT, "subnet", config.connections_per_subnet_max)
        if not self._new.has(1, now):
            retry_after_s = max(1, math.ceil(self._new.wait_s(1)))
            return Rejected(RejectReason.RATE_LIMITED, "too many new connections", retry_after_s)
        return None

    def _is_source_full(self, source: str) -> bool:
        return source != "" and 0 < self.config.connections_per_source_max <= self._per_source[source]

    def release(self, slot: ConnectionSlot) -> None:
        """Free a slot."""
        self._count(slot, -1)

    def _count(self, slot: ConnectionSlot, by: int) -> None:
        self.active += by
        _add(self._per_source, slot.source, by)
        if slot.address is not None:
            _add(self._per_address, slot.address, by)
            _add(self._per_subnet, subnet_of(slot.address), by)

    def bind(self, slot: ConnectionSlot, source: str) -> bool:
        """Count a connection for the source that its messages name; False if that source is at its limit."""
        if source == slot.source:
            return True
        if self._is_source_full(source):
            return False
        _add(self._per_source, slot.source, -1)
        _add(self._per_source, source, 1)
        slot.source = source
        return True

    def allowance(self, now: float) -> Allowance:
        """Return how many more may connect: at once if the rate is limited, else in total."""
        if self.config.connection_rate_per_s:
            return self._new.allowance(now)
        total = self.config.connections_max
        return Allowance(total, max(0, total - self.active), now)


def _too_many(reason: RejectReason, of: str, limit: int) -> Rejected:
    return Rejected(reason, f"too many connections: of={of} limit={limit}", CONNECTION_RETRY_AFTER_S)


def _add(counter: Counter[Key], key: Key, by: int) -> None:
    """Count, and drop keys that are back at zero."""
    counter[key] += by
    if not counter[key]:
        del counter[key]


class SharedLimits:
    """The limits that the WebSocket and HTTP share."""

    def __init__(self, config: IngestConfig, now: float) -> None:
        self.budget = ReadBudget(config.memory_max_bytes, config.frame_max_bytes)
        self.slots = ConnectionSlots(config, now)
        self.source_bytes = SourceRates(config.source_bytes_per_s, config.source_bytes_per_s)


# -- load


class LoadLevel(enum.Enum):
    """How busy the service is. The values are the wire protocol's."""

    NORMAL = "normal"
    ELEVATED = "elevated"
    HIGH = "high"
    CRITICAL = "critical"

    @property
    def is_degraded(self) -> bool:
        """Return whether clients notice the load."""
        return self in (LoadLevel.HIGH, LoadLevel.CRITICAL)


def load_level(*, connections: float, delay: float, log: float) -> LoadLevel:
    """Return the level for the used shares of three limits: connections, waiting time for the log, bytes of the log.

    The bytes of the queue do not count: under full load the queue is always full, and backpressure slows clients down.
    Only a growing waiting time shows that this is not enough. Connections alone are never critical: that all slots are
    in use is no reason to refuse the work of those connections.
    """
    busiest = max(min(connections, CRITICAL_ABOVE), delay, log)
    if busiest > CRITICAL_ABOVE:
        return LoadLevel.CRITICAL
    if busiest > HIGH_ABOVE:
        return LoadLevel.HIGH
    return LoadLevel.ELEVATED if busiest > ELEVATED_ABOVE else LoadLevel.NORMAL


# -- messages of one connection


@dataclass(slots=True)
class MessageLimiter:
    """The messages of one connection: token buckets, backoff, and the refusals that the client ignored."""

    config: IngestConfig
    jitter: Callable[[], float]
    now: float
    _messages: TokenBucket = field(init=False)
    _heartbeats: TokenBucket = field(init=False)
    _refusals: int = 0
    _size_violations: int = 0
    _full_at: float = math.inf
    _full_until: float = 0.0
    _attempts: int = 0
    _retry_at: float = 0.0

    def __post_init__(self) -> None:
        config = self.config
        self._messages = TokenBucket(config.message_rate_per_s, config.message_burst, self.now)
        self._heartbeats = TokenBucket(config.heartbeat_rate_per_s, 2 * config.heartbeat_rate_per_s, self.now)

    @property
    def ignores_refusals(self) -> bool:
        """Return whether so many messages were refused that the client does not react to refusals."""
        return 0 < self.config.refusals_max <= self._refusals

    def count_too_large(self) -> bool:
        """Count a message with an event that is too large; return whether these are too many."""
        self._size_violations += 1
        return self._size_violations >= SIZE_VIOLATIONS_MAX

    def on_verdict(self, verdict: Verdict | None, *, received_at: float, now: float) -> None:
        """Count a batch that was sent again before its delay was over, while the log is full.

        Batches that were in flight when the client got the delay do not count. An accepted batch takes one refusal off
        the count, so that a client which keeps sending far too much is still found.
        """
        if not isinstance(verdict, Refused):
            self._refusals = max(0, self._refusals - 1)
        elif verdict.reason is NackReason.BUFFER_FULL:
            self._refusals += self._full_at < received_at < self._full_until
            self._full_at, self._full_until = now, now + (verdict.retry_delay_ms or 0) / 1_000

    def allowance(self, now: float) -> Allowance | None:
        """Return what is left of the limit on messages, None without a limit."""
        return self._messages.allowance(now) if self.config.message_rate_per_s else None

    def admit_heartbeat(self, now: float) -> Refused | None:
        """Admit a heartbeat unless there are too many."""
        if self._heartbeats.has(1, now):
            self._heartbeats.take(1)
            return None
        return self._refuse("too many heartbeats", self._heartbeats.wait_s(1), now)

    def admit(self, now: float, *, size_bytes: int = 0, source: TokenBucket | None = None) -> Refused | None:
        """Admit a message unless its connection has sent too many, or its source too many bytes."""
        if not self._messages.has(1, now):
            return self._refuse("too many messages", self._messages.wait_s(1), now)
        if source is not None and not source.has(size_bytes, now):
            return self._refuse("too many bytes of this source", source.wait_s(size_bytes), now)
        self._messages.take(1)
        if source is not None:
            source.take(size_bytes)
        self._attempts = 0
        return None

    def shed(self, now: float) -> Refused:
        """Refuse a batch because load is critical. The client is not to blame: no count."""
        return self._back_off("the service is overloaded", 0.0, now, NackReason.LOAD_SHEDDING)

    def _refuse(self, message: str, wait_s: float, now: float) -> Refused:
        self._refusals += 1
        return self._back_off(message, wait_s, now, NackReason.RATE_LIMITED)

    def _back_off(self, message: str, wait_s: float, now: float, reason: NackReason) -> Refused:
        """Refuse with a delay. Messages that were in flight at the first refusal get the same moment to return."""
        if now >= self._retry_at:
            self._attempts += 1
            jittered = replace(BACKOFF, first_s=BACKOFF.first_s * self.jitter())
            self._retry_at = now + max(jittered.limit_s(self._attempts), min(wait_s, BACKOFF.max_s))
        return Refused(reason, message, retry=True, retry_delay_ms=max(1, round((self._retry_at - now) * 1_000)))


# -- closing


class CloseCode(enum.IntEnum):
    """Why the server closes a connection. The values are the wire protocol's."""

    GOODBYE = 1000
    SHUTTING_DOWN = 1001
    POLICY = 1008
    TOO_BIG = 1009  # sent by websockets itself
    FAILED = 1011
    HEARTBEAT_TIMEOUT = 4000
    NOT_AUTHENTICATED = 4001
    RATE_LIMITED = 4002


@dataclass(frozen=True, slots=True)
class Closing:
    """How to close a connection."""

    code: CloseCode
    reason: str


GOODBYE = Closing(CloseCode.GOODBYE, "goodbye")
FAILED = Closing(CloseCode.FAILED, "internal error: connect again")
SHUTTING_DOWN = Closing(CloseCode.SHUTTING_DOWN, "shutting down")
TOO_MANY_REFUSALS = Closing(CloseCode.RATE_LIMITED, "rate limited: too many refused messages")
TOO_MANY_SIZE_VIOLATIONS = Closing(CloseCode.POLICY, "too many size violations")
TOO_MANY_CONNECTIONS = Closing(CloseCode.POLICY, "too many connections of this source")
_SILENT = Closing(CloseCode.HEARTBEAT_TIMEOUT, "heartbeat timeout")
_MESSAGE_INCOMPLETE = Closing(CloseCode.POLICY, "message did not arrive in time")
_REPLIES_UNREAD = Closing(CloseCode.POLICY, "does not read its answers")


def not_authenticated(message: str) -> Closing:
    """Return how to close a connection without a valid token."""
    return Closing(CloseCode.NOT_AUTHENTICATED, f"authentication failed: {message}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Liveness:
    """Since when a client is silent, has a message half sent, has not read its replies; None where it is not so."""

    silent_since: float | None
    arriving_since: float | None
    unread_since: float | None


def find_timeout(liveness: Liveness, config: IngestConfig, now: float) -> Closing | None:
    """Return how to close a client that exceeded a timeout; all times are of one clock."""

    def is_over(since: float | None, limit_s: float) -> bool:
        return since is not None and bool(limit_s) and now - since > limit_s

    if is_over(liveness.unread_since, config.reply_timeout_s):
        return _REPLIES_UNREAD
    if is_over(liveness.arriving_since, config.message_timeout_s):
        return _MESSAGE_INCOMPLETE
    return _SILENT if is_over(liveness.silent_since, config.heartbeat_timeout_s) else None
