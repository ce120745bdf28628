"""What the next open makes of a log that was torn, damaged or cut short."""

from __future__ import annotations

from pathlib import Path

import pytest

from lakefeed.contract.errors import WalCorrupt
from lakefeed.settings import MIB
from lakefeed.writer.wal.directory import Filesystem
from lakefeed.writer.wal.log import FileLog
from lakefeed.writer.wal.records import HEADER_BYTES, MARK_BYTES, record_bytes
from lakefeed.writer.wal.tail import Tail
from tests.writer.wal.support import (
    SMALL,
    append,
    append_large,
    die,
    flip,
    large,
    opened,
    read_all,
    segments,
    wait_for_spare,
)


async def test_damaged_header_is_corruption(tmp_path: Path):
    async with opened(tmp_path) as log:
        await append_large(log, 5)
    for path in segments(tmp_path):
        data = path.read_bytes()
        path.write_bytes(data[:20] + bytes([data[20] ^ 1]) + data[21:])
        with pytest.raises(WalCorrupt, match=f"segment={path}"):
            FileLog.open(tmp_path, SMALL)
        path.write_bytes(data)


async def test_missing_segment_is_corruption(tmp_path: Path):
    async with opened(tmp_path) as log:
        await append_large(log, 5)
    segments(tmp_path)[1].unlink()
    with pytest.raises(WalCorrupt, match=r"segment is missing: segment=.*/0000000002\.wal"):
        FileLog.open(tmp_path, SMALL)


async def test_segment_that_was_cut_short_is_corruption(tmp_path: Path):
    async with opened(tmp_path) as log:
        await append_large(log, 3)
    for path in segments(tmp_path):
        data = path.read_bytes()
        path.write_bytes(data[:-8])
        with pytest.raises(WalCorrupt, match=f"segment was cut short: segment={path}"):
            FileLog.open(tmp_path, SMALL)
        path.write_bytes(data)


async def test_torn_tail_is_cut_off_at_open_wherever_it_is_torn(tmp_path: Path):
    async with opened(tmp_path) as log:
        await append(log, b"durable")
        start = log.size_bytes
        await append(log, b"first", b"second one")
        middle, end = start + record_bytes((b"first",)), log.size_bytes
    path = segments(tmp_path)[0]
    whole = path.read_bytes()
    for cut in range(start, end):
        path.write_bytes(whole[:cut] + bytes(len(whole) - cut))
        async with opened(tmp_path) as log:
            kept = 1 + sum(1 for stop in (middle, end) if not any(whole[cut:stop]))
            assert read_all(log) == [b"durable", b"first", b"second one"][:kept]


async def test_flipped_byte_in_an_earlier_group_is_corruption(tmp_path: Path):
    async with opened(tmp_path) as log:
        start = log.segment_of(await append(log, b"one", b"two")).records_start
        end = log.size_bytes
        await append(log, b"three")
    path = segments(tmp_path)[0]
    whole = path.read_bytes()
    for position in range(start, end):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 0xFF]) + whole[position + 1 :])
        with pytest.raises(WalCorrupt, match=r"segment=/.*/0000000001\.wal position=\d+ offset=[01] "):
            FileLog.open(tmp_path, SMALL)


async def test_remains_of_a_torn_group_never_come_back(tmp_path: Path):
    async with opened(tmp_path) as log:
        await append(log, b"durable")
        start = log.size_bytes
        await append(log, b"torn-1", b"torn-2", b"torn-3")
        died = die(tmp_path, tmp_path / "died")
    flip(segments(died)[0], start)  # the first is bad, the others are good and have the offsets that are due
    async with opened(died) as log:
        assert read_all(log) == [b"durable"]
        await append(log, b"newer1")  # as long as the record that it overwrites
        died_again = die(died, tmp_path / "died again")
    for path in (died, died_again):
        async with opened(path) as log:
            assert read_all(log) == [b"durable", b"newer1"]


async def test_damage_to_the_last_group_is_found_if_the_log_was_closed(tmp_path: Path):
    async with opened(tmp_path) as log:
        await append(log, b"durable")
        start = log.size_bytes
        await append(log, b"last")
    flip(segments(tmp_path)[0], start)
    with pytest.raises(WalCorrupt, match=f"position={start} offset=1 "):
        FileLog.open(tmp_path, SMALL)


async def test_each_close_after_an_append_leaves_one_mark_and_there_is_always_space_for_it(tmp_path: Path):
    async with opened(tmp_path) as log:
        await append(log, b"a")
        room = SMALL.segment_max_bytes - log.size_bytes
        await append(log, b"b" * (room // 2 - 100))
    for _ in range(3):  # the mark is the only thing that a close adds, and only once
        async with opened(tmp_path) as log:
            size = log.size_bytes
    assert size < SMALL.segment_max_bytes
    async with opened(tmp_path) as log:
        assert log.size_bytes == size
        room = SMALL.segment_max_bytes - size - HEADER_BYTES
        fuller = die(tmp_path, tmp_path / "fuller")
        await append(log, b"c" * (room - MARK_BYTES))
        assert len(segments(tmp_path)) == 1
        assert log.size_bytes == SMALL.segment_max_bytes - MARK_BYTES
    async with opened(tmp_path) as log:
        assert log.size_bytes == SMALL.segment_max_bytes
        assert await append(log, b"d") == 3
        assert len(segments(tmp_path)) == 2
    async with opened(fuller) as log:
        await append(log, b"c" * (room - MARK_BYTES + 8))
        assert len(segments(fuller)) == 2


async def test_corruption_is_reported_with_file_position_offset_and_what_to_do(tmp_path: Path):
    directory = tmp_path / "data" / "log"
    async with opened(directory) as log:
        start = log.segment_of(await append(log, b"one")).records_start
    flip(segments(directory)[0], start + 24)
    with pytest.raises(WalCorrupt) as caught:
        FileLog.open(directory, SMALL)
    assert str(caught.value) == (
        f"damaged record before a durable one: segment={directory}/0000000001.wal position={start} offset=0"
        f" next_good_position={start + 32}; see what is lost with `lakefeed wal inspect --data-dir {tmp_path}/data`,"
        f" go on without it after `lakefeed wal repair --data-dir {tmp_path}/data`"
    )


async def test_last_group_is_written_again_at_open_because_a_failed_sync_may_have_left_it_in_memory_only(
    tmp_path: Path,
):
    class WatchingFilesystem(Filesystem):
        def __init__(self) -> None:
            self.written: list[bytes] = []

        def write(self, descriptor, parts, position):
            self.written.append(b"".join(parts))
            return super().write(descriptor, parts, position)

    async with opened(tmp_path) as log:
        await append(log, b"group before")
        await append(log, b"last", b"group")
        await wait_for_spare(log)
        died = die(tmp_path, tmp_path / "died")
    files = WatchingFilesystem()
    async with opened(died, files=files):
        assert any(b"last" in written and b"group" in written for written in files.written)
        assert not any(b"before" in written for written in files.written)


async def test_tail_read_meets_damage_in_an_older_segment(tmp_path: Path):
    async with opened(tmp_path) as log:
        payloads = await append_large(log, 5)
        start = log.segment_of(0).records_start
    path = segments(tmp_path)[1]
    data = bytearray(path.read_bytes())
    data[start + 100] ^= 1
    path.write_bytes(data)
    async with opened(tmp_path) as log:
        assert read_all(log, offset=4) == payloads[4:]
        with pytest.raises(WalCorrupt, match=r"segment=/.*/0000000002\.wal position=\d+ offset=2"):
            read_all(log)


async def test_tail_read_meets_records_that_end_before_the_next_segment_begins(tmp_path: Path):
    async with opened(tmp_path) as log:
        await append_large(log, 3)
        start = log.segment_of(0).records_start
    path = segments(tmp_path)[0]
    second = start + record_bytes((large(1),))
    path.write_bytes(path.read_bytes()[:second].ljust(SMALL.segment_max_bytes, b"\0"))
    async with opened(tmp_path) as log:
        tail = Tail(log, 0)
        assert [record.offset for record in tail.read(until=3, max_bytes=MIB)] == [0]
        with pytest.raises(WalCorrupt, match=r" offset=1;"):
            tail.read(until=3, max_bytes=MIB)
        tail.close()
