"""Damage of every kind, and what a repair makes of it: all good records, in order, once, and an honest report."""

from __future__ import annotations

import asyncio
import errno
import itertools
import json
import random
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lakefeed.contract.changes import Position
from lakefeed.contract.errors import WalCorrupt, WalLocked, WalVersionUnknown, WriterError
from lakefeed.ingest.cli.wal import HEADS
from lakefeed.ingest.intake.sources import load_source_state
from lakefeed.writer.config import SYNC_MODES
from lakefeed.writer.wal.directory import Filesystem
from lakefeed.writer.wal.inspect import LogReport, Loss, inspect_log
from lakefeed.writer.wal.log import FileLog
from lakefeed.writer.wal.payload import encode_frame
from lakefeed.writer.wal.records import HEADER_MIN_BYTES
from lakefeed.writer.wal.repair import RepairPlan, apply_repair, locked, plan_repair
from tests.fakes import FaultyFilesystem
from tests.writer.wal.log_frames import Placed, Senders, changes_of, place, read_records
from tests.writer.wal.support import SMALL, die, flip, opened, segments


async def write_log(path: Path, *, groups: int = 60, body_max_bytes: int = 60_000) -> Senders:
    rng = random.Random(1)
    senders = Senders(rng, body_max_bytes=body_max_bytes)
    async with opened(path, replace(SMALL, max_bytes=64 * 2**20)) as log:
        for _ in range(groups):
            await senders.send(log, frames=rng.choice([1, 1, 1, 2, 5]))
    return senders


def repair(path: Path, *, name: str = "now", files: Filesystem | None = None) -> RepairPlan:
    with locked(path):
        plan = plan_repair(inspect_log(path, HEADS), name=name)
        if plan.rewrites:
            apply_repair(plan, HEADS, files=files)
    return plan


async def records_of(path: Path) -> list[tuple[int, bytes]]:
    async with opened(path) as log:
        return [(record.offset, record.payload) for record in read_records(log)]


def expected(items: list[Placed]) -> list[tuple[int, bytes]]:
    return [(item.offset, b"".join(encode_frame(item.frame))) for item in items]


# -- random damage


class Damager:
    """Damages files of a log at random, and knows which records it has touched."""

    def __init__(self, rng: random.Random, paths: list[Path]) -> None:
        self.rng = rng
        self.before = {path: path.read_bytes() for path in paths}
        self.after: dict[Path, bytes | None] = dict(self.before)

    def damage(self) -> None:
        path = self.rng.choice([path for path, data in self.after.items() if data is not None])
        kind = self.rng.choice([self._flip, self._flip, self._flip_header, self._zero, self._cut, self._remove])
        kind(path)

    def store(self) -> None:
        for path, data in self.after.items():
            if data is None:
                path.unlink()
            else:
                path.write_bytes(data)

    def touched(self, path: Path, start: int, end: int) -> bool:
        data = self.after[path]
        return data is None or data[start:end] != self.before[path][start:end]

    def _used(self, path: Path) -> int:
        return max(len(self.after[path].rstrip(b"\0")), 1)

    def _flip(self, path: Path) -> None:
        self._put(path, self.rng.randrange(self._used(path)), bytes([self.rng.randrange(256)]))

    def _flip_header(self, path: Path) -> None:
        self._put(path, self.rng.randrange(HEADER_MIN_BYTES), bytes([self.rng.randrange(256)]))

    def _zero(self, path: Path) -> None:
        self._put(path, self.rng.randrange(self._used(path)), bytes(self.rng.choice([8, 512, 4096, 200_000])))

    def _put(self, path: Path, position: int, data: bytes) -> None:
        old = self.after[path]
        self.after[path] = (old[:position] + data + old[position + len(data) :])[: len(old)]

    def _cut(self, path: Path) -> None:
        if self.rng.random() < 0.3:
            self.after[path] = self.after[path][: self.rng.randrange(len(self.after[path]))]

    def _remove(self, path: Path) -> None:
        middle = list(self.after)[1:-1]  # the first could have been trimmed, and none is expected after the last
        if path in middle and self.rng.random() < 0.3:
            self.after[path] = None


def untouched(placed: list[Placed], damager: Damager, report: LogReport) -> list[Placed]:
    """Tell which records a repair must keep: all that are whole, but for those in a torn tail."""
    newest = report.segments[-1]
    kept = [item for item in placed if not damager.touched(item.path, item.start, item.end)]
    if damager.touched(newest.path, 0, newest.header.records_start):
        return kept
    mark_is_good = not damager.touched(newest.path, newest.end_position - 24, newest.end_position)
    known_synced = max([newest.base_offset, *(item.synced for item in kept)])
    if mark_is_good and newest.torn is None and is_closed(newest.path, newest.end_position):
        known_synced = newest.end_offset
    lost = [item.offset for item in placed if item.path == newest.path and item not in kept]
    torn_at = next((offset for offset in lost if offset >= known_synced), newest.end_offset)
    return [item for item in kept if item.offset < torn_at]


def is_closed(path: Path, end: int) -> bool:
    """Tell whether the segment ends in a mark."""
    return path.read_bytes()[end - 20 : end - 16] == (2**31).to_bytes(4, "little")


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), mode=st.sampled_from(SYNC_MODES), died=st.booleans())
def test_every_record_that_damage_has_not_touched_is_read_back_once_and_in_order_after_a_repair(seed, mode, died):
    root = Path(tempfile.mkdtemp(prefix="wal"))
    try:
        asyncio.run(_damage_and_repair(root, random.Random(seed), mode, died=died))
    finally:
        shutil.rmtree(root)


async def _damage_and_repair(root: Path, rng: random.Random, mode: str, *, died: bool) -> None:
    path = root / "log"
    config = replace(SMALL, sync=mode, max_bytes=64 * 2**20)
    senders = Senders(rng, body_max_bytes=rng.choice([200, 40_000]))
    async with opened(path, config) as log:
        for _ in range(rng.randint(1, 90)):
            await senders.send(log, frames=rng.choice([1, 1, 3]))
        if died:
            path = die(path, root / "died")
    report, placed = place(path)
    damager = Damager(rng, segments(path))
    for _ in range(rng.choice([1, 1, 2, 5])):
        damager.damage()
    kept = untouched(placed, damager, report)
    damager.store()
    plan = repair(path)
    async with opened(path, config) as log:
        assert [(record.offset, record.payload) for record in read_records(log)] == expected(kept)
        check_report(plan, placed, kept)
        check_marks(log, kept, senders)
        end = log.durable_end
        await senders.send(log)
        assert [record.offset for record in read_records(log)] == [*(item.offset for item in kept), end]
    assert repair(path).rewrites == ()


def check_report(plan: RepairPlan, placed: list[Placed], kept: list[Placed]) -> None:
    """What is certainly missing is missing, and what is missing is reported in one way or the other."""
    end = plan.report.segments[-1].end_offset
    lost = changes_of(item for item in placed if item not in kept and item.offset < end)
    assert {change for loss in plan.losses() if loss.is_certain for change in changes_in(loss)} <= lost
    assert plan.is_unsettled or all(any(covers(loss, change) for loss in plan.losses()) for change in lost)


def changes_in(loss: Loss) -> set[tuple[str, Position]]:
    sequences = range(loss.after_sequence + 1, loss.last_sequence + 1)
    return {(loss.source, Position(loss.epoch, sequence)) for sequence in sequences}


def covers(loss: Loss, change: tuple[str, Position]) -> bool:
    source, position = change
    if source != loss.source or position <= Position(loss.epoch, loss.after_sequence):
        return False
    return loss.last_sequence is None or position <= Position(loss.epoch, loss.last_sequence)


def check_marks(log: FileLog, kept: list[Placed], senders: Senders) -> None:
    """Nothing that is in the log would be taken again, and no source is thought further than it ever was."""
    marks = load_source_state(log)[0].marks()
    for source, mark in marks.items():
        assert mark <= senders.marks[source]
    for item in kept:
        assert marks[item.frame.source] >= Position(item.frame.epoch, item.frame.last_sequence)


# -- one kind of damage at a time


async def test_gap_is_left_where_records_were_damaged_and_offsets_continue(tmp_path: Path):
    await write_log(tmp_path)
    _, placed = place(tmp_path)
    for item in placed[7:10]:
        flip(item.path, item.start + 30)
    with pytest.raises(WalCorrupt):
        await records_of(tmp_path)
    plan = repair(tmp_path)
    assert [(gap.offset, gap.next_offset) for gap in plan.report.gaps] == [(7, 10)]
    assert await records_of(tmp_path) == expected(placed[:7] + placed[10:])
    report = inspect_log(tmp_path, HEADS)
    assert not report.needs_repair
    assert [(gap.offset, gap.next_offset, gap.repaired) for gap in report.gaps] == [(7, 10, True)]


async def test_gap_at_the_end_of_the_log_is_skipped(tmp_path: Path):
    senders = await write_log(tmp_path, groups=3)
    _, placed = place(tmp_path)
    flip(placed[-1].path, placed[-1].start + 30)
    repair(tmp_path)
    async with opened(tmp_path) as log:
        assert log.durable_end == len(placed)
        assert [record.offset for record in read_records(log)] == list(range(len(placed) - 1))
        await senders.send(log)
        assert [record.offset for record in read_records(log)][-1] == len(placed)


async def test_lost_header_is_rebuilt_with_the_marks_of_the_segments_before(tmp_path: Path):
    senders = await write_log(tmp_path)
    _, placed = place(tmp_path)
    for path in segments(tmp_path)[1:]:
        flip(path, 30)
    repair(tmp_path)
    assert await records_of(tmp_path) == expected(placed)
    async with opened(tmp_path) as log:
        dedup, origins = load_source_state(log)
        assert (dedup.marks(), origins.texts()) == (senders.marks, senders.origins)


async def test_missing_segment_becomes_a_gap(tmp_path: Path):
    await write_log(tmp_path)
    _, placed = place(tmp_path)
    gone = segments(tmp_path)[1]
    gone.unlink()
    plan = repair(tmp_path)
    assert await records_of(tmp_path) == expected([item for item in placed if item.path != gone])
    assert [rewrite.describe().partition(":")[0] for rewrite in plan.rewrites] == [gone.name]


async def test_torn_tail_needs_no_repair(tmp_path: Path):
    async with opened(tmp_path) as log:
        senders = Senders(random.Random(1))
        await senders.send(log)
        await senders.send(log, frames=2)
        died = die(tmp_path, tmp_path / "died")
    _, placed = place(died)
    flip(placed[1].path, placed[1].start + 30)
    report = inspect_log(died, HEADS)
    assert report.segments[0].torn.offset == 1
    assert repair(died).rewrites == ()
    assert await records_of(died) == expected(placed[:1])


async def test_damaged_file_is_kept_whole_beside_a_report_of_what_is_missing(tmp_path: Path):
    await write_log(tmp_path)
    _, placed = place(tmp_path)
    lost = placed[4]
    flip(lost.path, lost.start + 30)
    damaged = lost.path.read_bytes()
    repair(tmp_path)
    assert (tmp_path / "damaged" / "now" / lost.path.name).read_bytes() == damaged
    document = json.loads((tmp_path / "damaged" / "now" / "report.json").read_text())
    assert document["missing"] == [
        {
            "source": lost.frame.source,
            "epoch": lost.frame.epoch,
            "afterSequence": lost.frame.after_sequence,
            "lastSequence": lost.frame.last_sequence,
            "certain": True,
            "offsets": [[4, 4]],
        }
    ]
    assert document["segments"][0]["missing"] == [
        {"firstOffset": 4, "lastOffset": 4, "position": lost.start, "endPosition": lost.end}
    ]
    assert "perhapsMissing" in document


async def test_second_repair_keeps_the_gaps_of_the_first_and_reports_only_its_own(tmp_path: Path):
    await write_log(tmp_path)
    _, placed = place(tmp_path)
    flip(placed[4].path, placed[4].start + 30)
    repair(tmp_path, name="first")
    _, after = place(tmp_path)
    again = next(item for item in after if item.offset == 9)
    flip(again.path, again.start + 30)
    plan = repair(tmp_path, name="second")
    assert {loss.gaps[0].offset for loss in plan.losses()} == {9}
    assert await records_of(tmp_path) == expected([item for item in placed if item.offset not in (4, 9)])


async def test_gap_mark_that_is_damaged_itself_is_repaired(tmp_path: Path):
    await write_log(tmp_path)
    _, placed = place(tmp_path)
    flip(placed[4].path, placed[4].start + 30)
    repair(tmp_path, name="first")
    _, after = place(tmp_path)
    flip(after[3].path, after[3].end)
    repair(tmp_path, name="second")
    assert await records_of(tmp_path) == expected(placed[:4] + placed[5:])


async def test_log_in_use_is_not_repaired(tmp_path: Path):
    async with opened(tmp_path):
        with pytest.raises(WalLocked), locked(tmp_path):
            pass
    with pytest.raises(WriterError, match="no log here"), locked(tmp_path / "none"):
        pass


async def test_log_of_another_version_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    await write_log(tmp_path, groups=2)
    monkeypatch.setattr("lakefeed.writer.wal.records._VERSION", 3)
    with pytest.raises(WalVersionUnknown):
        repair(tmp_path)


@pytest.mark.parametrize("operation", ["write", "sync", "rename", "sync_directory", "link"])
async def test_repair_that_fails_at_any_step_loses_nothing_and_can_be_started_again(tmp_path: Path, operation: str):
    root = tmp_path / "log"
    await write_log(root, body_max_bytes=20_000, groups=80)
    _, placed = place(root)
    lost = [placed[3], placed[-3]]
    assert lost[0].path != lost[1].path
    for item in lost:
        flip(item.path, item.start + 30)
    for calls in itertools.count():
        path = shutil.copytree(root, tmp_path / f"{calls}")
        files = FaultyFilesystem()
        files.fail(operation, errno.EIO, after_calls=calls)
        try:
            repair(path, files=files)
        except OSError:
            repair(path, name="again")
        else:
            assert calls > 0
            break
        assert await records_of(path) == expected([item for item in placed if item not in lost])
        shutil.rmtree(path)
        if calls > 40:  # writes are many, and all alike
            break
