"""The data plane against its promises: random conversations with random faults, thousands of them, the same each run.

Sources connect and resume, or go on without asking, send batches with and without numbers that overlap, repeat, are cut
anew and break rules, and give up connections whose frames arrive later; there is room for few refused batches; the disk
is slow, full or broken; the service sheds load, dies, loses power and is stopped; the log is trimmed. Checked after
every step (service.py): every change is in the log once, in order and over no gap; an ack or receipt is never early; a
resume point is what is durable; and whatever happened, all can go on.

MODEL_CASES sets how many conversations, MODEL_SEED (a number, or `random`) which.
"""

from __future__ import annotations

import random

from hypothesis import HealthCheck, given, note, seed, settings
from hypothesis import strategies as st

from lakefeed.contract.changes import SourceId
from tests.model.service import Service, Wire
from tests.model.sources import Source
from tests.seeds import choose_count, choose_seed

CASES = choose_count("MODEL_CASES", 1_000)
STEPS = 40
SHOW_PROGRESS_EVERY = 1_000

# Of a batch's rows, together: a few bytes, or most of what a segment takes.
PADDINGS = (0, 0, 300, 3_000, 6_000)


class Conversation:
    """Two sources and a service. Each step draws what it does, and says it."""

    def __init__(self) -> None:
        self.sources = [
            Source(SourceId("a")),
            Source(SourceId("b"), stride=3),
            Source(SourceId("c"), stride=3, names_previous=True),
        ]
        self.service = Service(self.sources)
        self.wires: list[Wire] = []
        self._start_over(random.Random(0))

    def step(self, chance: random.Random) -> str:
        """Do something; faults are rarer than work, so that there is something to lose."""
        steps = (
            self.send,
            self.read,
            self.hear,
            self.connect,
            self.reopen,
            self.commit,
            self.hold_disk,
            self.fill_disk,
        )
        rare = (self.send_malformed, self.crash, self.break_disk)
        (chosen,) = chance.choices((*steps, *rare), weights=(8, 7, 4, 2, 5, 1, 1, 2, 1, 1, 0.5))
        return chosen(chance)

    # -- sources

    def connect(self, chance: random.Random) -> str:
        """Give up the connection and open another."""
        index = chance.randrange(2)
        source = self.sources[index]
        source.epoch += chance.random() < 0.1
        numbered, ack_level = chance.random() < 0.5, chance.choice(("durable", "durable", "committed"))
        self.wires[index], durable = self.service.connect(source, ack_level=ack_level)
        source.resume(numbered=numbered, ack_level=ack_level, durable=durable)
        return f"connect {source.name}: {numbered=} {ack_level=} {durable=} epoch={source.epoch}"

    def reopen(self, chance: random.Random) -> str:
        """Give up the connection and go on with another, without a word."""
        index = chance.randrange(2)
        source, numbered = self.sources[index], chance.random() < 0.5
        self.wires[index] = self.service.open(source)
        source.go_on(numbered=numbered)
        sent = self.send_from(index, chance)
        return f"reopen {source.name}: {numbered=} acked={source.acked} epoch={source.epoch}, {sent}"

    def send(self, chance: random.Random) -> str:
        """Send some batches, which may go back over what was sent; the service reads some of what waits."""
        return self.send_from(chance.randrange(2), chance)

    def send_from(self, index: int, chance: random.Random) -> str:
        """Send some batches of one source."""
        batches = []
        for _ in range(chance.choice((1, 1, 2, 4))):
            size = chance.choice((1, 1, 2, 4))
            back, padding = chance.choice((0, 0, 0, 1, 3)), chance.choice(PADDINGS) // size
            batches.append(self.sources[index].batch(back=back, size=size, padding=padding))
            self.wires[index].unread.append(batches[-1].body)
        read = self._read(self.wires[index], chance.choice((0, 0, 1, 4)), chance)
        sent = " ".join(f"{batch.first}-{batch.stop - 1}({len(batch.body)} bytes)" for batch in batches)
        return f"send {self.sources[index].name}: {sent}, {read}"

    def send_malformed(self, chance: random.Random) -> str:
        """Send a batch that breaks a rule."""
        index = chance.randrange(2)
        if self.sources[index].numbered:
            self.wires[index].unread.append(self.sources[index].malformed())
        return f"send malformed {self.sources[index].name}"

    def hear(self, chance: random.Random) -> str:
        """Hear all answers that are due."""
        index = chance.randrange(2)
        heard = self._hear(index)
        return f"hear {self.sources[index].name}: {heard}"

    def _hear(self, index: int) -> list[str]:
        wire, heard = self.wires[index], []
        self.service.answer(wire)
        while wire.unheard:
            answer = wire.unheard.popleft()
            heard.append(f"{answer.status} {answer.number}")
            self.sources[index].hear(answer)
        return heard

    # -- the service

    def read(self, chance: random.Random) -> str:
        """Read what waits on some connection, be it one that its source has given up."""
        waiting = [wire for wire in self.service.wires if wire.unread]
        if not waiting:
            return "read nothing"
        wire = chance.choice(waiting)
        is_revoked = wire.session.lease.is_revoked
        return f"read {wire.source.name}: revoked={is_revoked} {self._read(wire, chance.randint(1, 4), chance)}"

    def _read(self, wire: Wire, count: int, chance: random.Random) -> str:
        """Read frames; now and then the service is overloaded and refuses the first of them."""
        count, sheds = min(count, len(wire.unread)), chance.random() < 0.25
        for number in range(count):
            self.service.read(wire, sheds=sheds and number == 0)
        return f"{count} read{', the first shed' if sheds and count else ''}"

    def commit(self, chance: random.Random) -> str:
        """Commit some of what is durable, and trim the log."""
        self.service.commit(chance.choice((0.0, 0.25, 0.5, 1.0)))
        return f"commit up to {self.service.committed_offset} of {len(self.service.history)}"

    def crash(self, chance: random.Random) -> str:
        """Die, lose power or stop, and start again."""
        part, clean = chance.random(), chance.random() < 0.2
        power_loss = chance.choice((None, chance.getrandbits(32)))
        self.service.crash(part=part, power_loss=power_loss, clean=clean)
        self._check_acked()
        self._start_over(chance)
        return f"crash: {part=:.2f} {power_loss=} {clean=}, durable={self.service.durable}"

    def _start_over(self, chance: random.Random) -> None:
        self.wires = []
        for source in self.sources:
            wire, durable = self.service.connect(source, ack_level="durable")
            source.resume(numbered=chance.random() < 0.5, ack_level="durable", durable=durable)
            self.wires.append(wire)

    # -- the disk

    def hold_disk(self, chance: random.Random) -> str:
        """Make the disk slow, or fast again."""
        held = chance.random() < 0.4
        self.service.hold_disk(held)
        return f"{held=}"

    def fill_disk(self, chance: random.Random) -> str:
        """Fill the disk, or make room."""
        full = chance.random() < 0.4
        self.service.disk.no_room = full
        return f"{full=}"

    def break_disk(self, chance: random.Random) -> str:
        """Let syncs fail: the log takes nothing more until the next start has looked at what is there."""
        self.service.disk.sync_fails = True
        return f"broken: {self.send(chance)}, {self._hear(0)} {self._hear(1)}, {self.crash(chance)}"

    # -- what must be true

    def _check_acked(self) -> None:
        for source in self.sources:
            for epoch, acked in source.acked.items():
                assert acked <= self.service.durable.get((source.name, epoch), 0), "what was acked is lost"

    def end(self) -> None:
        """Whatever happened: once the disk is well and there is room, every source gets its changes through."""
        self._check_acked()
        self.service.crash(part=1.0, power_loss=None, clean=False)
        self.service.commit(1.0)
        self._start_over(random.Random(0))
        for index, source in enumerate(self.sources):
            self.wires[index].unread.append(source.batch(back=1, size=3, padding=0).body)
            self.service.read(self.wires[index])
            self._hear(index)
            assert source.acked[source.epoch] == source.next == self.service.durable[source.name, source.epoch]


class _Count:
    cases = 0


# One number per step, from which the step draws everything; 0 does nothing, so that what is left of a failing
# conversation is what it takes to fail. Shown step by step when it does.
@settings(max_examples=CASES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(choices=st.lists(st.integers(0, 2**32 - 1), min_size=STEPS, max_size=STEPS))
def _converse(choices: list[int]) -> None:
    conversation = Conversation()
    try:
        for choice in filter(None, choices):
            note(conversation.step(random.Random(choice)))
        conversation.end()
    finally:
        conversation.service.close()
    _Count.cases += 1
    if _Count.cases % SHOW_PROGRESS_EVERY == 0:
        print(f"conversations: {_Count.cases} of {CASES}", flush=True)


def test_every_acked_change_is_in_the_log_once_in_order_and_over_no_gap_whatever_happens():
    seed(choose_seed("MODEL_SEED", 1))(_converse)()
