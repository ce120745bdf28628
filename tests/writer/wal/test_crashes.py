"""The log against a list: through appends, trims, reopens, dying processes and lost power, what was acked is there."""

from __future__ import annotations

import asyncio
import itertools
import random
import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.writer.wal.crashes import CrashingFilesystem
from tests.writer.wal.support import SMALL, append, append_large, large, opened, read_all
from writer.errors import WalFailed, WalFull
from writer.wal.log import Log

sizes = st.one_of(st.integers(1, 60), st.integers(480, 540), st.integers(60_000, 250_000))
groups = st.lists(sizes, min_size=1, max_size=5).filter(lambda group: sum(group) < 500_000)
seeds = st.integers(0, 2**32 - 1)
parts = st.floats(0, 1)
power = st.booleans()


async def test_power_loss_at_any_step_of_recycling_and_rotating_loses_nothing_that_was_acked(tmp_path: Path):
    files = CrashingFilesystem(tmp_path / "log")
    async with opened(files.directory, files=files) as log:
        await append_large(log, 4)
        trimmed = files.moment()
        await log.trim(2)
        await append_large(log, 1)  # goes to the file that was just recycled
        acked = files.moment()
        await append_large(log, 1)
        end = files.moment()
    for moment, seed in itertools.product(range(trimmed, end + 1), range(4)):
        directory = tmp_path / f"{moment}-{seed}"
        crashed = files.crash(directory, moment=moment, power_loss=random.Random(seed))
        async with opened(directory, files=crashed) as log:
            assert log.durable_end in ((4, 5) if moment < acked else (5, 6) if moment < end else (6,))
            assert read_all(log, offset=2) == [large(offset) for offset in range(2, log.durable_end)]
        shutil.rmtree(directory)


class LogAgainstList(RuleBasedStateMachine):
    """`acked` is every payload that an append returned for; `needed` is the lowest offset that was not given up."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.root = Path(tempfile.mkdtemp(prefix="wal"))
        self.runs = 0
        self.acked: list[bytes] = []
        self.needed = 0
        self.open(CrashingFilesystem(self.root / "0"))

    def teardown(self) -> None:
        self.runner.run(self.log.close())
        self.runner.close()
        shutil.rmtree(self.root)

    @rule(group=groups, seed=seeds)
    def append(self, group: list[int], seed: int) -> None:
        payloads = payloads_of(group, seed)
        if self.try_append(payloads):
            self.acked += payloads

    @rule(group=groups, seed=seeds, part=parts, power_loss=power)
    def append_and_crash_meanwhile(self, group: list[int], seed: int, part: float, power_loss: bool) -> None:
        payloads = payloads_of(group, seed)
        start = self.files.moment()
        fits = self.try_append(payloads)
        self.crash(start + int((self.files.moment() - start) * part), seed if power_loss else None)
        self.adopt(payloads if fits else [])

    @rule(group=groups, seed=seeds)
    def append_and_fail_to_sync(self, group: list[int], seed: int) -> None:
        payloads = payloads_of(group, seed)
        self.files.sync_fails = True
        fits = self.try_append(payloads)
        self.crash(self.files.moment(), None)
        self.adopt(payloads if fits else [])

    @rule(part=parts)
    def trim(self, part: float) -> None:
        self.needed = max(self.needed, round(len(self.acked) * part))
        self.runner.run(self.log.trim(self.needed))

    @rule(part=parts, seed=seeds, moment=parts, power_loss=power)
    def trim_and_crash_meanwhile(self, part: float, seed: int, moment: float, power_loss: bool) -> None:
        start = self.files.moment()
        self.trim(part)
        self.crash(start + int((self.files.moment() - start) * moment), seed if power_loss else None)

    @rule(seed=seeds, power_loss=power)
    def crash_while_nothing_happens(self, seed: int, power_loss: bool) -> None:
        self.crash(self.files.moment(), seed if power_loss else None)

    @rule(seed=seeds, part=parts)
    def crash_while_opening(self, seed: int, part: float) -> None:
        self.crash(self.files.moment(), None)
        self.crash(int(self.opened_at * part), seed)

    @invariant()
    def every_acked_record_is_read_once_and_in_order(self) -> None:
        assert self.log.durable_end == len(self.acked)
        assert self.log.first_offset <= self.needed
        assert read_all(self.log, max_bytes=100_000) == self.acked[self.log.first_offset :]

    @invariant()
    def head_says_what_was_before_the_newest_segment(self) -> None:
        if self.log.head is not None:
            assert self.acked[int(self.log.head) :] == [record.payload for record in self.log.newest_records()]

    def open(self, files: CrashingFilesystem) -> None:
        self.files = files
        self.log = Log.open(files.directory, SMALL, files=files)
        self.opened_at = files.moment()

    def crash(self, moment: int, power_loss_seed: int | None) -> None:
        self.runner.run(self.log.close())
        self.runs += 1
        power_loss = None if power_loss_seed is None else random.Random(power_loss_seed)
        self.open(self.files.crash(self.root / str(self.runs), moment=moment, power_loss=power_loss))

    def adopt(self, unacked: list[bytes]) -> None:
        """Take over as many records of an interrupted group as the log has kept: any number from the front."""
        kept = self.log.durable_end - len(self.acked)
        assert 0 <= kept <= len(unacked)
        self.acked += unacked[:kept]

    def try_append(self, payloads: list[bytes]) -> bool:
        """Append, and tell whether the log may hold the group now."""
        try:
            assert self.runner.run(append(self.log, *payloads)) == len(self.acked)
        except WalFull:
            return False
        except WalFailed:
            assert self.files.sync_fails
        return True


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
