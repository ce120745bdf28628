"""Looking at logs: whole, damaged, and while they are written to and trimmed."""

from __future__ import annotations

import asyncio
import random
import threading
from pathlib import Path

import pytest

from lakefeed.contract.errors import WriterError
from lakefeed.ingest.cli.wal import HEADS
from lakefeed.writer.wal.directory import Filesystem
from lakefeed.writer.wal.inspect import Damage, LogReport, RecordReport, TornTail, inspect_log
from tests.writer.wal.log_frames import Senders
from tests.writer.wal.support import append, append_large, die, flip, opened, segments


async def test_report_names_segments_records_and_sources(tmp_path: Path):
    seen: list[RecordReport] = []
    async with opened(tmp_path) as log:
        senders = Senders(random.Random(5))
        while len(segments(tmp_path)) < 3:
            await senders.send(log, frames=2)
        report = inspect_log(tmp_path, HEADS, on_record=seen.append)
        assert [segment.path for segment in report.segments] == segments(tmp_path)
        assert [segment.base_offset for segment in report.segments[1:]] == [
            segment.end_offset for segment in report.segments[:-1]
        ]
        assert report.segments[-1].end_offset == log.durable_end == len(seen)
        assert [segment.sources for segment in report.segments] == [0, 3, 3]
        assert [record.offset for record in seen] == list(range(len(seen)))
        assert {record.frame.source for record in seen} == {"shop-1", "shop-2", "shop-3"}
        assert not report.needs_repair
        assert (report.gaps, report.losses, report.unsettled_gaps) == ((), (), ())


async def test_every_byte_is_reported_as_read(tmp_path: Path):
    read: list[int] = []
    async with opened(tmp_path) as log:
        await append_large(log, 5)
        inspect_log(tmp_path, HEADS, on_bytes=read.append)
    assert sum(read) == sum(path.stat().st_size for path in segments(tmp_path))


async def test_payload_that_is_no_frame_and_unknown_head_are_reported(tmp_path: Path):
    seen: list[RecordReport] = []
    async with opened(tmp_path) as log:
        await append(log, b"not a frame")
        report = inspect_log(tmp_path, HEADS, on_record=seen.append)
    assert (report.segments[0].sources, report.segments[0].records) == (0, 1)
    assert (seen[0].payload_bytes, seen[0].frame) == (11, None)


async def test_damage_is_named_by_file_bytes_and_offsets(tmp_path: Path):
    async with opened(tmp_path) as log:
        await append_large(log, 5)
    _, placed = place_raw(tmp_path)
    flip(segments(tmp_path)[0], placed[1].position + 40)
    report = inspect_log(tmp_path, HEADS)
    assert report.needs_repair
    assert report.segments[0].damages == (Damage(placed[1].position, 2**20, 1, 2),)
    assert [segment.records for segment in report.segments] == [1, 2, 1]


async def test_torn_tail_is_no_damage(tmp_path: Path):
    async with opened(tmp_path) as log:
        await append(log, b"durable")
        end = log.size_bytes
        await append(log, b"torn", b"torn too")
        died = die(tmp_path, tmp_path / "died")
    flip(segments(died)[0], end + 25)
    report = inspect_log(died, HEADS)
    assert (report.needs_repair, report.segments[0].torn) == (False, TornTail(end, 1))


async def test_part_of_a_torn_group_that_had_been_synced_is_damage_and_the_rest_is_not(tmp_path: Path):
    async with opened(tmp_path) as log:
        await append(log, b"zero")
        start = log.size_bytes
        await append(log, b"one")
        await append(log, b"two", b"three")
        died = die(tmp_path, tmp_path / "died")
    data = bytearray(segments(died)[0].read_bytes())
    data[start : start + 64] = bytes(64)  # one, which had been synced, and two, which had not
    segments(died)[0].write_bytes(data)
    report = inspect_log(died, HEADS)
    assert [(damage.offset, damage.next_offset) for damage in report.segments[0].damages] == [(1, 2)]
    assert report.segments[0].torn.offset == 2
    assert report.segments[0].end_offset == 2


def test_no_log_is_an_error_and_an_empty_one_is_not(tmp_path: Path):
    with pytest.raises(WriterError, match=f"no log here: directory={tmp_path}/none"):
        inspect_log(tmp_path / "none", HEADS)
    assert inspect_log(tmp_path, HEADS).segments == ()


class InterruptedReads(Filesystem):
    """Lets something happen after the first part of each of the first readings."""

    def __init__(self, happen: list) -> None:
        self.happen = happen

    def read(self, descriptor: int, buffer: memoryview, position: int) -> int:
        if len(buffer) < 1000 or not self.happen:
            return super().read(descriptor, buffer, position)
        if position == 0:
            return super().read(descriptor, buffer[:800], position)
        self.happen.pop(0)()
        return super().read(descriptor, buffer, position)


async def test_groups_that_are_written_while_the_log_is_read_are_not_taken_for_damage(tmp_path: Path):
    async with opened(tmp_path) as log:
        await append(log, b"a")
        loop = asyncio.get_running_loop()

        def append_some() -> None:
            for payloads in ([b"b" * 1000], [b"c"], [b"d"]):
                asyncio.run_coroutine_threadsafe(append(log, *payloads), loop).result(10)

        # The first reading has the file up to byte 800 from before these appends, and the rest from after them.
        files = InterruptedReads([append_some, append_some])
        report = await asyncio.to_thread(inspect_log, tmp_path, HEADS, files=files)
        assert not report.needs_repair
        assert report.segments[0].records == log.durable_end == 7


async def test_segment_that_is_recycled_while_the_log_is_read_is_left_out(tmp_path: Path):
    async with opened(tmp_path) as log:
        await append_large(log, 5)
        loop = asyncio.get_running_loop()

        def recycle() -> None:
            asyncio.run_coroutine_threadsafe(log.trim(4), loop).result(10)
            asyncio.run_coroutine_threadsafe(append_large(log, 4), loop).result(10)

        report = await asyncio.to_thread(inspect_log, tmp_path, HEADS, files=InterruptedReads([recycle]))
        assert not report.needs_repair
        assert [segment.path.name for segment in report.segments] == ["0000000003.wal"]


async def test_log_that_is_written_and_trimmed_all_the_time_is_never_found_damaged(tmp_path: Path):
    async with opened(tmp_path) as log, asyncio.timeout(60):
        stop = threading.Event()

        def inspect_repeatedly() -> list[LogReport]:
            reports = []
            try:
                while len(reports) < 15:
                    reports.append(inspect_log(tmp_path, HEADS))
            finally:
                stop.set()
            return reports

        inspecting = asyncio.create_task(asyncio.to_thread(inspect_repeatedly))
        while not stop.is_set():
            await append(log, *[b"x" * 50_000] * 3, b"y" * 3)
            await log.trim(log.durable_end - 20)
        assert not any(report.needs_repair for report in await inspecting)


def place_raw(path: Path) -> tuple[LogReport, list[RecordReport]]:
    seen: list[RecordReport] = []
    return inspect_log(path, HEADS, on_record=seen.append), seen
