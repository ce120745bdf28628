"""The log against a list: whatever is appended, trimmed, reopened or interrupted by power loss, what was acked is there."""

from __future__ import annotations

import asyncio
import random
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.writer.wal.crashes import CrashingFilesystem
from tests.writer.wal.support import SMALL, append, read_all
from writer.errors import WalFull
from writer.wal.log import Log

sizes = st.one_of(st.integers(1, 60), st.integers(480, 540), st.integers(60_000, 250_000))
groups = st.lists(sizes, min_size=1, max_size=5).filter(lambda group: sum(group) < 500_000)
seeds = st.integers(0, 2**32 - 1)
moments = st.floats(0, 1)


class LogAgainstList(RuleBasedStateMachine):
    """`acked` is every payload that an append returned for; `needed` is the lowest offset that was not given up."""

    @initialize()
    def start(self) -> None:
        self.runner = asyncio.Runner()
        self.root = Path(tempfile.mkdtemp(prefix="wal"))
        self.crashes = 0
        self.acked: list[bytes] = []
        self.needed = 0
        (self.root / "0").mkdir()
        self.open()

    def teardown(self) -> None:
        if hasattr(self, "runner"):
            self.runner.run(self.log.close())
            self.runner.close()
            shutil.rmtree(self.root)

    @rule(group=groups, seed=seeds)
    def append(self, group: list[int], seed: int) -> None:
        payloads = payloads_of(group, seed)
        if self.run_unless_full(lambda: append(self.log, *payloads)):
            self.acked += payloads

    @rule(group=groups, seed=seeds, moment=moments)
    def append_and_crash(self, group: list[int], seed: int, moment: float) -> None:
        payloads = payloads_of(group, seed)
        before = self.files.moment()
        fits = self.run_unless_full(lambda: append(self.log, *payloads))
        acked = self.files.moment()
        self.crash(before + round((acked - before) * moment), seed)
        self.adopt(payloads if fits else [])

    @rule(part=moments)
    def trim(self, part: float) -> None:
        self.needed = max(self.needed, round(len(self.acked) * part))
        self.runner.run(self.log.trim(self.needed))

    @rule(part=moments, seed=seeds, moment=moments)
    def trim_and_crash(self, part: float, seed: int, moment: float) -> None:
        before = self.files.moment()
        self.trim(part)
        self.crash(before + round((self.files.moment() - before) * moment), seed)

    @rule(seed=seeds, moment=moments)
    def reopen_and_crash(self, seed: int, moment: float) -> None:
        self.reopen()
        self.crash(round(self.files.moment() * moment), seed)

    @rule()
    def reopen(self) -> None:
        self.runner.run(self.log.close())
        self.open()

    @invariant()
    def every_acked_record_is_read_once_and_in_order(self) -> None:
        if not hasattr(self, "log"):
            return
        assert self.log.durable_end == len(self.acked)
        assert self.log.first_offset <= self.needed
        assert read_all(self.log, max_bytes=100_000) == self.acked[self.log.first_offset :]

    @invariant()
    def head_says_what_was_before_the_newest_segment(self) -> None:
        if hasattr(self, "log") and self.log.head is not None:
            newest = [record.payload for record in self.log.newest_records()]
            assert self.acked[int(self.log.head) :] == newest

    def open(self) -> None:
        directory = self.root / str(self.crashes)
        self.files = CrashingFilesystem(directory)
        self.log = Log.open(directory, SMALL, files=self.files)

    def crash(self, moment: int, seed: int) -> None:
        self.runner.run(self.log.close())
        self.crashes += 1
        self.files.crash(self.root / str(self.crashes), moment=moment, chance=random.Random(seed))
        self.open()

    def adopt(self, unacked: list[bytes]) -> None:
        """Take over as many records of an interrupted group as the log has kept: any number from the front."""
        kept = self.log.durable_end - len(self.acked)
        assert 0 <= kept <= len(unacked)
        self.acked += unacked[:kept]

    def run_unless_full(self, work: Callable[[], Awaitable[int]]) -> bool:
        async def run() -> bool:
            try:
                assert await work() == len(self.acked)
            except WalFull:
                return False
            return True

        return self.runner.run(run())


def payloads_of(group: list[int], seed: int) -> list[bytes]:
    content = random.Random(seed)
    return [content.randbytes(size) for size in group]


LogAgainstList.TestCase.settings = settings(
    max_examples=30,
    stateful_step_count=20,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestLogAgainstList = LogAgainstList.TestCase
