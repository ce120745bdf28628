"""Who may read, with how much of what is read not yet durable."""

from __future__ import annotations

import random
from collections import deque

import pytest

from lakefeed.ingest.admission.budget import ALLOWANCE_BYTES, ReadBudget

MIB = 1024 * 1024


class Reader:
    """Remembers its turns."""

    def __init__(self, name: str, turns: list[tuple[str, bool]]) -> None:
        self.name = name
        self.turns = turns

    def on_granted(self, *, reserved: bool) -> None:
        self.turns.append((self.name, reserved))


@pytest.fixture
def turns() -> list[tuple[str, bool]]:
    return []


@pytest.fixture
def budget() -> ReadBudget:
    return ReadBudget(max_bytes=8 * MIB, message_max_bytes=MIB)


def test_everybody_reads_below_the_limit_and_nobody_at_it(budget):
    budget.charge(8 * MIB - 1)
    assert budget.is_open()
    budget.charge(1)
    assert not budget.is_open()


def test_readers_go_on_in_the_order_in_which_they_came(budget, turns):
    budget.charge(8 * MIB)
    for name in "abc":
        budget.wait(Reader(name, turns))
    budget.release(2 * ALLOWANCE_BYTES)
    assert turns == [("a", False), ("b", False)]
    budget.release(ALLOWANCE_BYTES)
    assert turns[2:] == [("c", False)]


def test_large_message_is_reserved_whole_or_waits(budget, turns):
    granted = [budget.reserve(Reader(str(number), turns)) for number in range(6)]
    assert granted == [True] * 4 + [False] * 2
    budget.release(budget.reservation_bytes)
    assert turns == [("4", True)]
    budget.release(budget.reservation_bytes)
    assert turns == [("4", True), ("5", True)]


def test_message_of_known_size_reserves_only_that(budget, turns):
    granted = [budget.reserve(Reader(str(number), turns), MIB) for number in range(10)]
    assert granted == [True] * 8 + [False] * 2
    assert budget.used_bytes == 8 * MIB
    budget.release(MIB)
    assert turns == [("8", True)]
    assert budget.used_bytes == 8 * MIB, "the next one has it"


def test_small_readers_do_not_overtake_a_large_one_that_waits(budget, turns):
    budget.charge(7 * MIB)
    assert not budget.reserve(Reader("large", turns))
    assert not budget.is_open(), "or small messages would keep the budget full for ever"
    budget.wait(Reader("small", turns))
    budget.release(MIB)
    assert turns == [("large", True)], "the small one waits for its turn behind it"
    budget.release(6 * MIB)
    assert turns[1:] == [("small", False)]


def test_readers_that_have_nothing_to_read_keep_nobody_waiting(budget, turns):
    budget.charge(8 * MIB)
    names = [str(number) for number in range(1_000)]
    for name in names:
        budget.wait(Reader(name, turns))
    budget.release(8 * MIB)
    assert [name for name, _ in turns] == names, "all, though the budget has not an allowance for each"


def test_reader_that_is_gone_makes_room_for_those_behind_it(budget, turns):
    budget.charge(7 * MIB)
    large = Reader("large", turns)
    budget.reserve(large)
    budget.wait(Reader("small", turns))
    budget.forget(large)
    assert turns == [("small", False)]


def test_budget_that_cannot_hold_two_messages_is_no_budget():
    with pytest.raises(AssertionError):
        ReadBudget(max_bytes=3 * MIB, message_max_bytes=MIB)


class ModelReader:
    """Has messages to send, reads one piece a turn, and knows what it holds."""

    def __init__(self, budget: ReadBudget, messages: deque[int]) -> None:
        self.budget = budget
        self.messages = messages
        self.arriving = 0
        self.reserved = False
        self.paused = False

    def on_granted(self, *, reserved: bool) -> None:
        self.reserved = reserved
        self.paused = False

    def read(self, held: deque[int]) -> None:
        if self.paused or not self.messages:
            return
        if not self.reserved and not self.budget.is_open():
            self.paused = True
            self.budget.wait(self)
            return
        self.arriving += ALLOWANCE_BYTES
        if self.arriving >= self.messages[0]:
            held.append(self.messages.popleft())
            self.budget.charge(held[-1])
            self.arriving = 0
            if self.reserved:
                self.reserved = False
                self.budget.release(self.budget.reservation_bytes)
        elif not self.reserved:
            self.reserved = self.budget.reserve(self)
            self.paused = not self.reserved


def test_whatever_clients_send_the_bound_holds_and_every_message_arrives():
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    for _ in range(20):
        budget = ReadBudget(max_bytes=8 * MIB, message_max_bytes=MIB)
        sizes = [1, 1_000, ALLOWANCE_BYTES, 2 * ALLOWANCE_BYTES, MIB]
        readers = [
            ModelReader(budget, deque(chance.choices(sizes, k=chance.randint(0, 20))))
            for _ in range(chance.randint(1, 60))
        ]
        held: deque[int] = deque()
        steps = 0
        while any(reader.messages for reader in readers):
            for reader in chance.sample(readers, len(readers)):
                reader.read(held)
                assert sum(held) <= budget.used_bytes
                assert sum(held) + sum(r.arriving for r in readers) <= budget.max_bytes + len(readers) * ALLOWANCE_BYTES
            for _ in range(chance.randint(0, 30)):  # the log takes some of it
                budget.release(held.popleft()) if held else None
            steps += 1
            assert steps < 20_000, f"nobody gets on: seed={seed}"
        while held:
            budget.release(held.popleft())
        assert (budget.used_bytes, budget.waiting_readers) == (0, 0), f"seed={seed}"
