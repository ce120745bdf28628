"""Request slots: how many requests are served at a time, and which is next."""

from __future__ import annotations

import random

from lakefeed.ingest.admission.addresses import parse_address
from lakefeed.ingest.admission.budget import RequestSlots
from lakefeed.ingest.config import IngestConfig


class Request:
    """A request that records when it gets a slot."""

    def __init__(self, name: str, address: str | None, granted: list[str]) -> None:
        self.name = name
        self.address = parse_address(address) if address else None
        self.granted = granted

    def on_slot(self) -> None:
        self.granted.append(self.name)


def slots_of(total: int, *, per_ip: int = 0, limit_private_ips: bool = False) -> RequestSlots:
    limits = {"http_requests_max": total, "http_requests_per_ip_max": per_ip, "limit_private_ips": limit_private_ips}
    return RequestSlots(IngestConfig(**limits))


def test_requests_beyond_the_limit_get_a_slot_in_order_of_arrival():
    granted: list[str] = []
    slots = slots_of(2)
    requests = [Request(str(number), None, granted) for number in range(5)]
    assert [slots.acquire(request) for request in requests] == [True, True, False, False, False]
    assert (slots.used, slots.waiting) == (2, 3)
    slots.release(requests[1])
    slots.release(requests[0])
    assert granted == ["2", "3"]
    assert (slots.used, slots.waiting) == (2, 1)


def test_request_of_an_address_at_its_limit_does_not_block_those_behind_it():
    granted: list[str] = []
    slots = slots_of(3, per_ip=1)
    first, twin, other = (
        Request(name, ip, granted) for name, ip in (("a", "8.8.8.8"), ("b", "8.8.8.8"), ("c", "9.9.9.9"))
    )
    assert [slots.acquire(request) for request in (first, twin, other)] == [True, False, True]
    slots.release(other)
    assert granted == [], "the free slot is not for its address"
    slots.release(first)
    assert granted == ["b"]


def test_private_addresses_are_not_limited_unless_configured():
    for counts, entered in ((False, True), (True, False)):
        slots = slots_of(9, per_ip=1, limit_private_ips=counts)
        assert slots.acquire(Request("a", "10.0.0.1", []))
        assert slots.acquire(Request("b", "10.0.0.1", [])) is entered


def test_request_that_is_gone_gets_no_slot():
    granted: list[str] = []
    slots = slots_of(1)
    served, gone, last = (Request(name, None, granted) for name in "abc")
    for request in (served, gone, last):
        slots.acquire(request)
    slots.forget(gone)
    slots.release(served)
    assert granted == ["c"]


def test_random_requests_exceed_no_limit_and_none_waits_that_could_be_served():
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    granted: list[str] = []
    slots = slots_of(5, per_ip=2)
    served: dict[str, Request] = {}
    waiting: dict[str, Request] = {}
    for step in range(5_000):
        if chance.random() < 0.5:
            request = Request(str(step), f"8.8.8.{chance.randrange(4)}", granted)
            (served if slots.acquire(request) else waiting)[request.name] = request
        elif served and chance.random() < 0.8:
            slots.release(served.pop(chance.choice(list(served))))
        elif waiting:
            slots.forget(waiting.pop(chance.choice(list(waiting))))
        served |= {name: waiting.pop(name) for name in granted}
        granted.clear()
        counts = [
            sum(request.address == address for request in served.values())
            for address in {v.address for v in served.values()}
        ]
        assert (slots.used, slots.waiting) == (len(served), len(waiting)), f"seed={seed}"
        assert len(served) <= 5, f"seed={seed}"
        assert max(counts, default=0) <= 2, f"seed={seed}"
        if len(served) < 5:
            full = {v.address for v in served.values() if sum(o.address == v.address for o in served.values()) == 2}
            assert {request.address for request in waiting.values()} <= full, f"seed={seed}"
