"""The data plane against its promises: random conversations with random faults, thousands of them, the same each run.

Sources connect and resume, send batches with and without numbers that overlap, repeat and break rules, and give up
connections whose frames arrive later; the disk is slow, full or broken; the service is overloaded, dies, loses power and
is stopped; the log is trimmed. Checked after every step (service.py): every change is in the log once, in order and over
no gap; an ack or a receipt is never early; a resume point is what is durable; and whatever happened, all can go on.

MODEL_CASES sets how many conversations, MODEL_SEED which.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from tests.model.service import Service, Wire
from tests.model.sources import Source
from writer.changes import SourceId

CASES = int(os.environ.get("MODEL_CASES", "2000"))
SEED = int(os.environ.get("MODEL_SEED", "1"))
STEPS_MAX = 25
SHOW_PROGRESS_EVERY = 1_000

# Of a batch's rows, together: a few bytes, or most of what a segment takes.
PADDINGS = (0, 0, 300, 3_000, 6_000)

which = st.integers(0, 1)
seldom = st.sampled_from([False, False, False, True])
counts = st.integers(1, 4)
parts = st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0])
ack_levels = st.sampled_from(["durable", "durable", "committed"])


class Conversations(RuleBasedStateMachine):
    """Two sources and a service."""

    cases = 0

    def __init__(self) -> None:
        super().__init__()
        self.service = Service()
        self.sources = [Source(SourceId("a")), Source(SourceId("b"))]
        self.current: list[Wire | None] = [None, None]

    def teardown(self) -> None:
        try:
            self._go_on()
        finally:
            self.service.close()
        type(self).cases += 1
        if self.cases % SHOW_PROGRESS_EVERY == 0:
            print(f"conversations: {self.cases}", flush=True)

    # -- sources

    @initialize(numbered=st.booleans(), ack_level=ack_levels)
    def begin(self, numbered: bool, ack_level) -> None:
        for index in range(2):
            self._connect(index, numbered=numbered, ack_level=ack_level)

    @rule(index=which, numbered=st.booleans(), new_epoch=seldom, ack_level=ack_levels)
    def connect(self, index: int, numbered: bool, new_epoch: bool, ack_level) -> None:
        self.sources[index].epoch += new_epoch
        self._connect(index, numbered=numbered, ack_level=ack_level)

    def _connect(self, index: int, *, numbered: bool, ack_level) -> None:
        source = self.sources[index]
        self.current[index], durable = self.service.connect(source, ack_level=ack_level)
        source.resume(numbered=numbered, ack_level=ack_level, durable=durable)

    @rule(
        index=which,
        back=st.sampled_from([0, 0, 0, 1, 3]),
        size=counts,
        padding=st.sampled_from(PADDINGS),
        batches=counts,
        read=st.integers(0, 4),
        sheds=seldom,
    )
    def send(self, index: int, back: int, size: int, padding: int, batches: int, read: int, sheds: bool) -> None:
        """Send some batches, of which the first may go back over what was sent; the service reads some of what waits."""
        wire = self.current[index]
        if wire is not None:
            for number in range(batches):
                batch = self.sources[index].batch(back=0 if number else back, size=size, padding=padding // size)
                wire.unread.append(batch.body)
            self._read(wire, read, sheds=sheds)

    @rule(index=which)
    def send_malformed(self, index: int) -> None:
        wire = self.current[index]
        if wire is not None and self.sources[index].numbered:
            wire.unread.append(self.sources[index].malformed())

    @rule(index=which)
    def hear(self, index: int) -> None:
        wire = self.current[index]
        if wire is not None:
            self.service.answer(wire)
            while wire.unheard:
                self.sources[index].hear(wire.unheard.popleft())

    # -- the service

    @precondition(lambda self: any(wire.unread for wire in self.service.wires))
    @rule(choice=st.integers(0, 3), count=counts, sheds=seldom)
    def read(self, choice: int, count: int, sheds: bool) -> None:
        """Read what waits on some connection, be it one that its source has given up."""
        waiting = [wire for wire in self.service.wires if wire.unread]
        self._read(waiting[choice % len(waiting)], count, sheds=sheds)

    def _read(self, wire: Wire, count: int, *, sheds: bool) -> None:
        """Read frames; a service that sheds load refuses the first of them."""
        for number in range(min(count, len(wire.unread))):
            self.service.read(wire, sheds=sheds and number == 0)

    @rule(part=parts)
    def commit(self, part: float) -> None:
        self.service.commit(part)

    @rule(part=parts, power_loss=st.none() | st.integers(0, 2**16), clean=seldom)
    def crash(self, part: float, power_loss: int | None, clean: bool) -> None:
        self.service.crash(part=part, power_loss=power_loss, clean=clean)
        self.current = [None, None]
        self._check_acked()
        for index in range(2):
            self._connect(index, numbered=True, ack_level="durable")

    # -- the disk

    @rule(held=st.booleans())
    def hold_the_disk(self, held: bool) -> None:
        self.service.hold_disk(held)

    @rule(full=st.booleans())
    def fill_the_disk(self, full: bool) -> None:
        self.service.disk.no_room = full

    @rule(index=which, part=parts, power_loss=st.none() | st.integers(0, 2**16))
    def break_the_disk(self, index: int, part: float, power_loss: int | None) -> None:
        """Let a sync fail: the log takes nothing more until the next start has looked at what is there."""
        self.service.disk.sync_fails = True
        self.send(index, back=0, size=2, padding=0, batches=2, read=4, sheds=False)
        self.hear(index)
        self.crash(part=part, power_loss=power_loss, clean=False)

    # -- what must be true

    def _check_acked(self) -> None:
        for source in self.sources:
            for epoch, acked in source.acked.items():
                assert acked <= self.service.durable.get((source.name, epoch), 0), "what was acked is lost"

    def _go_on(self) -> None:
        """Whatever happened: once the disk is well and there is room, every source gets its changes through."""
        self._check_acked()
        self.crash(part=1.0, power_loss=None, clean=False)
        self.service.commit(1.0)
        for index, source in enumerate(self.sources):
            self._connect(index, numbered=True, ack_level="durable")
            self.send(index, back=1, size=3, padding=0, batches=1, read=1, sheds=False)
            self.hear(index)
            assert source.acked[source.epoch] == source.next == self.service.durable[source.name, source.epoch]


def test_every_acked_change_is_in_the_log_once_in_order_and_over_no_gap_whatever_happens():
    print(f"seed: MODEL_SEED={SEED} MODEL_CASES={CASES}", flush=True)
    run_state_machine_as_test(
        seed(SEED)(Conversations),
        settings=settings(
            max_examples=CASES,
            stateful_step_count=STEPS_MAX,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
