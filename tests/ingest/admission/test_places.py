"""Who is served at a time, and who is let in next."""

from __future__ import annotations

import random

from lakefeed.ingest.admission.addresses import parse_address
from lakefeed.ingest.admission.budget import Places


class Visitor:
    """Remembers when it was let in."""

    def __init__(self, name: str, address: str | None, let_in: list[str]) -> None:
        self.name = name
        self.address = parse_address(address) if address else None
        self.let_in = let_in

    def on_place(self) -> None:
        self.let_in.append(self.name)


def test_so_many_get_a_place_and_the_others_in_the_order_of_coming():
    let_in: list[str] = []
    places = Places(total=2)
    visitors = [Visitor(str(number), None, let_in) for number in range(5)]
    assert [places.enter(visitor) for visitor in visitors] == [True, True, False, False, False]
    assert (places.taken, places.waiting) == (2, 3)
    places.leave(visitors[1])
    places.leave(visitors[0])
    assert let_in == ["2", "3"]
    assert (places.taken, places.waiting) == (2, 1)


def test_address_with_its_share_waits_and_keeps_nobody_behind_it_waiting():
    let_in: list[str] = []
    places = Places(total=3, per_address=1)
    first, twin, other = (
        Visitor(name, ip, let_in) for name, ip in (("a", "8.8.8.8"), ("b", "8.8.8.8"), ("c", "9.9.9.9"))
    )
    assert [places.enter(visitor) for visitor in (first, twin, other)] == [True, False, True]
    places.leave(other)
    assert let_in == [], "a free place is not for it"
    places.leave(first)
    assert let_in == ["b"]


def test_private_addresses_have_no_share_unless_it_is_asked_for():
    for counts, entered in ((False, True), (True, False)):
        places = Places(total=9, per_address=1, private_addresses_count=counts)
        assert places.enter(Visitor("a", "10.0.0.1", []))
        assert places.enter(Visitor("b", "10.0.0.1", [])) is entered


def test_visitor_that_is_gone_is_not_let_in():
    let_in: list[str] = []
    places = Places(total=1)
    inside, gone, last = (Visitor(name, None, let_in) for name in "abc")
    for visitor in (inside, gone, last):
        places.enter(visitor)
    places.forget(gone)
    places.leave(inside)
    assert let_in == ["c"]


def test_whoever_comes_and_goes_no_limit_is_passed_and_nobody_waits_who_could_be_in():
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    let_in: list[str] = []
    places = Places(total=5, per_address=2)
    inside: dict[str, Visitor] = {}
    line: dict[str, Visitor] = {}
    for step in range(5_000):
        if chance.random() < 0.5:
            visitor = Visitor(str(step), f"8.8.8.{chance.randrange(4)}", let_in)
            (inside if places.enter(visitor) else line)[visitor.name] = visitor
        elif inside and chance.random() < 0.8:
            places.leave(inside.pop(chance.choice(list(inside))))
        elif line:
            places.forget(line.pop(chance.choice(list(line))))
        inside |= {name: line.pop(name) for name in let_in}
        let_in.clear()
        counts = [
            sum(visitor.address == address for visitor in inside.values())
            for address in {v.address for v in inside.values()}
        ]
        assert (places.taken, places.waiting) == (len(inside), len(line)), f"seed={seed}"
        assert len(inside) <= 5, f"seed={seed}"
        assert max(counts, default=0) <= 2, f"seed={seed}"
        if len(inside) < 5:
            full = {v.address for v in inside.values() if sum(o.address == v.address for o in inside.values()) == 2}
            assert {visitor.address for visitor in line.values()} <= full, f"seed={seed}"
