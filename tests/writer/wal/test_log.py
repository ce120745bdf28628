"""Appending, rotating, trimming and opening again."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import pytest

from lakefeed.contract.errors import WalCorrupt, WalFailed, WalFull, WalLocked
from lakefeed.settings import MIB
from lakefeed.writer.config import LogConfig
from lakefeed.writer.wal.directory import Filesystem
from lakefeed.writer.wal.log import FileLog
from lakefeed.writer.wal.records import record_bytes
from tests.fakes import FaultyFilesystem
from tests.writer.wal.support import (
    LARGE,
    SMALL,
    append,
    append_large,
    disk_bytes,
    head_of,
    large,
    opened,
    read_all,
    segments,
    spares,
    wait_for_spare,
    wait_until,
)


async def test_new_log_is_empty(tmp_path: Path):
    async with opened(tmp_path / "data" / "wal") as log:
        assert (log.first_offset, log.durable_end, log.durable_end, log.size_bytes) == (0, 0, 0, 0)
        assert log.head is None
        assert list(log.newest_records()) == []
        assert log.failed is None


async def test_appended_records_are_read_back_after_reopening(tmp_path: Path):
    async with opened(tmp_path) as log:
        assert await log.append([(b"one ", b"part"), (b"two",)], head=lambda: b"marks") == 0
        assert await append(log, b"three") == 2
    async with opened(tmp_path) as log:
        assert (log.first_offset, log.durable_end, log.head) == (0, 3, b"marks")
        assert [(record.offset, record.payload) for record in log.newest_records()] == [
            (0, b"one part"),
            (1, b"two"),
            (2, b"three"),
        ]
        assert await append(log, b"four") == 3
        assert read_all(log) == [b"one part", b"two", b"three", b"four"]


async def test_group_with_more_parts_than_one_call_takes_is_written_whole(tmp_path: Path):
    payloads = [b"%d" % number for number in range(3000)]
    async with opened(tmp_path) as log:
        await append(log, *payloads)
    async with opened(tmp_path) as log:
        assert read_all(log) == payloads


async def test_short_writes_are_continued(tmp_path: Path):
    files = FaultyFilesystem()
    async with opened(tmp_path, files=files) as log:
        await append(log, b"x")
        files.write_max_bytes = 7
        await log.append([(b"abc", b"defghij" * 5), (b"k" * 100, b"", b"l")], head=head_of(log))
        files.write_max_bytes = None
    async with opened(tmp_path) as log:
        assert read_all(log) == [b"x", b"abc" + b"defghij" * 5, b"k" * 100 + b"l"]


async def test_head_is_called_only_when_a_segment_is_begun(tmp_path: Path):
    calls: list[int] = []

    def head() -> bytes:
        calls.append(log.durable_end)
        return b"head %d" % len(calls)

    async with opened(tmp_path) as log:
        for number in range(5):
            await log.append([(large(number),)], head=head)
        assert calls == [0, 2, 4]
        assert log.head == b"head 3"


async def test_segments_are_rotated_and_read_across(tmp_path: Path):
    async with opened(tmp_path) as log:
        payloads = await append_large(log, 5)
        assert [path.name for path in segments(tmp_path)] == ["0000000001.wal", "0000000002.wal", "0000000003.wal"]
        assert read_all(log) == payloads
    async with opened(tmp_path) as log:
        assert read_all(log) == payloads
        assert [record.offset for record in log.newest_records()] == [4]


async def test_group_stays_in_one_segment(tmp_path: Path):
    async with opened(tmp_path) as log:
        await append_large(log, 2)
        await append(log, *[b"a" * 100_000] * 5)
        assert log.segment_of(1).path != log.segment_of(2).path
        assert log.segment_of(2).path == log.segment_of(6).path


async def test_group_that_is_empty_or_too_large_is_refused(tmp_path: Path):
    async with opened(tmp_path) as log:
        for payloads in ([], [()], [(b"a",), (b"", b"")], [(b"a" * log.group_max_bytes,)]):
            with pytest.raises(ValueError, match="group"):
                await log.append(payloads, head=head_of(log))
        largest = b"a" * (log.group_max_bytes - record_bytes((b"12345678",)) + 8)
        assert await append(log, largest) == 0


async def test_head_that_is_too_large_is_refused_and_costs_no_spare(tmp_path: Path):
    async with opened(tmp_path) as log:
        for _ in range(5):
            with pytest.raises(ValueError, match="head is too large"):
                await log.append([(b"a",)], head=lambda: bytes(MIB))
        assert await append(log, b"a") == 0


async def test_trimmed_segments_are_recycled_and_the_head_keeps_what_they_said(tmp_path: Path):
    async with opened(tmp_path) as log:
        payloads = await append_large(log, 5)
        await log.trim(4)
        assert (log.first_offset, log.durable_end) == (4, 5)
        assert [path.name for path in segments(tmp_path)] == ["0000000003.wal"]
        assert read_all(log) == payloads[4:]
    async with opened(tmp_path) as log:
        assert (log.first_offset, log.head) == (4, b"4")
        assert read_all(log) == payloads[4:]


async def test_trim_takes_whole_segments_and_never_the_newest(tmp_path: Path):
    async with opened(tmp_path) as log:
        await append_large(log, 5)
        await log.trim(1)
        assert log.first_offset == 0
        await log.trim(3)
        assert log.first_offset == 2
        await log.trim(100)
        assert (log.first_offset, log.durable_end) == (4, 5)


async def test_recycled_segments_are_read_without_what_they_held_before(tmp_path: Path):
    async with opened(tmp_path) as log:
        await append_large(log, 6)
        await log.trim(6)
        recycled = {path.stat().st_ino for path in spares(tmp_path)}
        await append_large(log, 2)
        await append(log, b"small")
        assert segments(tmp_path)[-1].stat().st_ino in recycled
        assert read_all(log, offset=8) == [b"small"]
    for number in range(9, 12):
        async with opened(tmp_path) as log:
            assert log.durable_end == number
            await append(log, b"small")
    async with opened(tmp_path) as log:
        assert read_all(log, offset=8) == [b"small"] * 4


async def test_spares_are_limited_and_survive_a_reopen(tmp_path: Path):
    config = LogConfig(segment_max_bytes=MIB, max_bytes=64 * MIB)
    async with opened(tmp_path, config) as log:
        await append_large(log, 50)
        await log.trim(50)
        assert len(spares(tmp_path)) == 16
    async with opened(tmp_path, config):
        assert len(spares(tmp_path)) == 16
    async with opened(tmp_path, SMALL):
        assert len(spares(tmp_path)) == 3  # what its budget has room for


async def test_spare_of_another_size_is_removed_at_open(tmp_path: Path):
    (tmp_path / "0000000007.spare").write_bytes(bytes(100))
    async with opened(tmp_path) as log:
        await append(log, b"a")
        assert not (tmp_path / "0000000007.spare").exists()


async def test_segment_size_may_change_between_runs(tmp_path: Path):
    async with opened(tmp_path) as log:
        before = await append_large(log, 3)
    async with opened(tmp_path, LogConfig(segment_max_bytes=2 * MIB, max_bytes=16 * MIB)) as log:
        after = await append_large(log, 6)
        await append(log, b"a" * 900_000)
        assert read_all(log) == [*before, *after, b"a" * 900_000]
    async with opened(tmp_path, LogConfig(segment_max_bytes=MIB, max_bytes=16 * MIB)) as log:
        assert len(read_all(log)) == 10
        await log.trim(9)
        await append_large(log, 3)
        assert log.durable_end == 13


async def test_budget_is_kept_and_a_trim_frees_space(tmp_path: Path):
    async with opened(tmp_path) as log:
        payloads = await append_large(log, 8)
        for _ in range(3):
            with pytest.raises(WalFull, match="max_bytes=4194304"):
                await append(log, large(8))
        assert log.failed is None
        assert log.durable_end == 8
        assert disk_bytes(tmp_path) <= SMALL.max_bytes
        assert await append(log, b"still fits") == 8
        await log.trim(2)
        assert await append(log, large(9)) == 9
        assert read_all(log) == [*payloads[2:], b"still fits", large(9)]


async def test_size_grows_with_records_and_shrinks_with_trims(tmp_path: Path):
    async with opened(tmp_path) as log:
        await append_large(log, 2)
        assert 2 * LARGE < log.size_bytes < MIB
        await append_large(log, 1)
        assert MIB + LARGE < log.size_bytes < 2 * MIB
        await log.trim(2)
        assert LARGE < log.size_bytes < MIB


async def test_log_is_open_only_once(tmp_path: Path):
    async with opened(tmp_path):
        with pytest.raises(WalLocked, match=f"stop that one first .* directory={tmp_path} pid={os.getpid()}"):
            FileLog.open(tmp_path, SMALL)
    async with opened(tmp_path):
        pass


async def test_log_that_could_not_be_opened_is_not_locked(tmp_path: Path):
    async with opened(tmp_path) as log:
        await append(log, b"a")
    damaged = segments(tmp_path)[0].read_bytes()
    segments(tmp_path)[0].write_bytes(b"\0" + damaged[1:])
    for _ in range(2):
        with pytest.raises(WalCorrupt, match="not a segment"):
            FileLog.open(tmp_path, SMALL)


async def test_closed_log_refuses_appends_and_closes_again(tmp_path: Path):
    async with opened(tmp_path) as log:
        await append(log, b"a")
        await log.close()
        with pytest.raises(WalFailed, match="closed"):
            await append(log, b"b")


async def test_waiting_ends_when_the_record_is_durable(tmp_path: Path):
    async with opened(tmp_path) as log, asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        waiting = [tasks.create_task(log.wait_beyond(offset)) for offset in (0, 2)]
        given_up = asyncio.create_task(log.wait_beyond(2))
        await append(log, b"a", b"b")
        await waiting[0]
        assert not waiting[1].done()
        given_up.cancel()
        await append(log, b"c")


class BlockingFilesystem(Filesystem):
    """Holds writes to segments back until told to go on."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.go_on = threading.Event()
        self.go_on.set()

    def write(self, descriptor, parts, position):
        self.entered.set()
        assert self.go_on.wait(10)
        return super().write(descriptor, parts, position)


async def test_cancelled_append_ends_only_when_its_group_is_durable(tmp_path: Path):
    files = BlockingFilesystem()
    async with opened(tmp_path, files=files) as log:
        await append(log, b"first")
        await wait_for_spare(log)
        files.go_on.clear()
        files.entered.clear()
        task = asyncio.create_task(append(log, b"second"))
        await wait_until(files.entered.is_set)
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0)
            assert not task.done()
        files.go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert log.durable_end == 2
        assert await append(log, b"third") == 2
        assert read_all(log) == [b"first", b"second", b"third"]


async def test_overlapping_appends_are_written_one_after_the_other(tmp_path: Path):
    async with opened(tmp_path) as log:
        offsets = await asyncio.gather(*(append(log, b"%d" % number, b"again") for number in range(20)))
        assert sorted(offsets) == list(range(0, 40, 2))
        payloads = read_all(log)
        assert [payloads[offset] for offset in offsets] == [b"%d" % number for number in range(20)]
