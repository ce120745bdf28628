"""The log against a list: through appends, trims, reopens, dying processes and lost power, what was acked is there.

That is what every sync mode promises when a process dies. When power is lost, what was synced is there and, of what was
acked behind it, as much as the disk has kept without a hole. The log always opens; a torn tail is no damage.
"""

from __future__ import annotations

import asyncio
import enum
import itertools
import random
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lakefeed.contract.errors import WalFailed, WalFull
from lakefeed.writer.wal.directory import LogDirectory
from lakefeed.writer.wal.log import FileLog
from tests.writer.wal.crashes import CrashingFilesystem
from tests.writer.wal.support import SMALL, append, append_large, large, opened, read_all, wait_until

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


async def test_spare_whose_filling_failed_to_sync_is_no_segment_that_power_loss_cuts_short(tmp_path: Path):
    """The process dies before it can remove the spare: the next one sees all its bytes, the disk has none."""
    files = CrashingFilesystem(tmp_path / "log")
    directory = LogDirectory(files.directory, segment_bytes=SMALL.segment_max_bytes, files=files)
    files.sync_fails = True
    with pytest.raises(OSError, match="injected into sync"):
        directory.prepare_spare()
    directory.close()
    died = files.crash(tmp_path / "died", moment=files.moment() - 1, power_loss=None)
    async with opened(died.directory, files=died) as log:
        await append(log, b"acked")
        acked = died.moment()
    for seed in range(4):
        dark = died.crash(tmp_path / f"dark-{seed}", moment=acked, power_loss=random.Random(seed))
        async with opened(dark.directory, files=dark) as log:
            assert read_all(log) == [b"acked"]


class Outcome(enum.Enum):
    """What is known of a group after an append."""

    ACKED = "the append has returned"
    UNKNOWN = "it failed: the group may be found at the next open"
    REFUSED = "it has changed nothing"


class LogAgainstList(RuleBasedStateMachine):
    """`acked` is every payload that an append returned for; `needed` is the lowest offset that was not given up.

    Each open takes the next of `modes`.
    """

    modes = ("always",)

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.root = Path(tempfile.mkdtemp(prefix="wal"))
        self.runs = 0
        self.acked: list[bytes] = []
        self.needed = 0
        self.open(CrashingFilesystem(self.root / "0"))

    def teardown(self) -> None:
        self.close()
        self.runner.close()
        shutil.rmtree(self.root)

    @rule(group=groups, seed=seeds)
    def append(self, group: list[int], seed: int) -> None:
        payloads = payloads_of(group, seed)
        if self.try_append(payloads) is Outcome.ACKED:
            self.acked += payloads

    @rule(group=groups, seed=seeds, part=parts, power_loss=power)
    def append_and_crash_meanwhile(self, group: list[int], seed: int, part: float, power_loss: bool) -> None:
        payloads = payloads_of(group, seed)
        start = self.files.moment()
        synced = self.log.synced_end
        outcome = self.try_append(payloads)
        self.crash(start + int((self.files.moment() - start) * part), seed if power_loss else None)
        self.adopt([] if outcome is Outcome.REFUSED else payloads, synced=synced if power_loss else None)

    @rule(group=groups, seed=seeds)
    def append_and_fail_to_sync(self, group: list[int], seed: int) -> None:
        payloads = payloads_of(group, seed)
        self.files.sync_fails = True
        outcome = self.try_append(payloads)
        if outcome is Outcome.ACKED:
            self.acked += payloads
        self.crash(self.files.moment(), None)
        self.adopt(payloads if outcome is Outcome.UNKNOWN else [])

    @rule(part=parts)
    def trim(self, part: float) -> None:
        self.needed = max(self.needed, round(len(self.acked) * part))
        self.runner.run(self.log.trim(self.needed))

    @rule(part=parts, seed=seeds, moment=parts, power_loss=power)
    def trim_and_crash_meanwhile(self, part: float, seed: int, moment: float, power_loss: bool) -> None:
        start = self.files.moment()
        synced = self.log.synced_end
        self.trim(part)
        self.crash(start + int((self.files.moment() - start) * moment), seed if power_loss else None)
        self.adopt([], synced=synced if power_loss else None)

    @rule(seed=seeds, power_loss=power)
    def crash_while_nothing_happens(self, seed: int, power_loss: bool) -> None:
        synced = self.log.synced_end
        self.crash(self.files.moment(), seed if power_loss else None)
        self.adopt([], synced=synced if power_loss else None)

    @rule(seed=seeds, part=parts)
    def crash_while_opening(self, seed: int, part: float) -> None:
        synced = self.log.synced_end
        self.crash(self.files.moment(), None)
        self.crash(int(self.opened_at * part), seed)
        self.adopt([], synced=synced)

    @rule(seed=seeds, part=parts)
    def close_and_lose_power_meanwhile(self, seed: int, part: float) -> None:
        start = self.files.moment()
        synced = self.log.synced_end
        self.close()
        self.crash(start + int((self.files.moment() - start) * part), seed)
        self.adopt([], synced=synced)

    @rule(seed=seeds, power_loss=power)
    def close_and_lose_nothing(self, seed: int, power_loss: bool) -> None:
        self.close()
        self.crash(self.files.moment(), seed if power_loss else None)
        self.adopt([])

    @precondition(lambda self: self.mode == "interval")
    @rule()
    def wait_for_the_interval(self) -> None:
        async def wait() -> None:
            await wait_until(lambda: self.log.synced_end == self.log.durable_end)

        self.runner.run(wait())

    @invariant()
    def every_acked_record_is_read_once_and_in_order(self) -> None:
        assert self.log.durable_end == len(self.acked)
        assert self.log.synced_end <= self.log.durable_end
        assert self.log.first_offset <= self.needed
        assert read_all(self.log, max_bytes=100_000) == self.acked[self.log.first_offset :]

    @invariant()
    def head_says_what_was_before_the_newest_segment(self) -> None:
        if self.log.head is not None:
            assert self.acked[int(self.log.head) :] == [record.payload for record in self.log.newest_records()]

    def open(self, files: CrashingFilesystem) -> None:
        self.files = files
        self.mode = self.modes[self.runs % len(self.modes)]
        self.log = FileLog.open(files.directory, replace(SMALL, sync=self.mode, sync_interval_ms=1), files=files)
        self.opened_at = files.moment()

    def close(self) -> None:
        try:
            self.runner.run(self.log.close())
        except WalFailed:
            assert self.files.sync_fails

    def crash(self, moment: int, power_loss_seed: int | None) -> None:
        """Go on with what is left after a crash at that moment; what close() writes afterwards never happened."""
        self.close()
        self.runs += 1
        power_loss = None if power_loss_seed is None else random.Random(power_loss_seed)
        self.open(self.files.crash(self.root / str(self.runs), moment=moment, power_loss=power_loss))

    def adopt(self, unknown: list[bytes], *, synced: int | None = None) -> None:
        """Check how many records the log has kept, and take over of an interrupted group as many from the front.

        `synced` tells that power was lost, and what had been synced before.
        """
        least = len(self.acked) if synced is None else synced
        assert least <= self.log.durable_end <= len(self.acked) + len(unknown)
        self.acked = (self.acked + unknown)[: self.log.durable_end]
        self.needed = min(self.needed, len(self.acked))

    def try_append(self, payloads: list[bytes]) -> Outcome:
        try:
            assert self.runner.run(append(self.log, *payloads)) == len(self.acked)
        except WalFull:
            return Outcome.REFUSED
        except WalFailed:
            assert self.files.sync_fails
            return Outcome.UNKNOWN
        return Outcome.ACKED


class LogSyncedAtIntervals(LogAgainstList):
    modes = ("interval",)


class LogThatTheSystemSyncs(LogAgainstList):
    modes = ("none",)


class LogUnderAllModesInTurn(LogAgainstList):
    modes = ("none", "always", "interval")


def payloads_of(group: list[int], seed: int) -> list[bytes]:
    content = random.Random(seed)
    return [content.randbytes(size) for size in group]


SETTINGS = settings(
    max_examples=20,
    stateful_step_count=20,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


class TestLogAgainstList(LogAgainstList.TestCase):
    settings = SETTINGS


class TestLogSyncedAtIntervals(LogSyncedAtIntervals.TestCase):
    settings = SETTINGS


class TestLogThatTheSystemSyncs(LogThatTheSystemSyncs.TestCase):
    settings = SETTINGS


class TestLogUnderAllModesInTurn(LogUnderAllModesInTurn.TestCase):
    settings = SETTINGS
