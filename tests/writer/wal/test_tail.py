"""Reading behind the end of a log that is being written."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from lakefeed.contract.errors import WalCorrupt
from lakefeed.settings import MIB
from lakefeed.writer.wal.tail import Tail
from tests.writer.wal.support import append, append_large, large, opened, read_all, wait_until


async def test_tail_reads_from_any_offset(tmp_path: Path):
    async with opened(tmp_path) as log:
        payloads = await append_large(log, 4)
        for number in range(50):
            await append(log, b"%d" % number)
        payloads += [b"%d" % number for number in range(50)]
        for offset in range(len(payloads) + 1):
            assert read_all(log, offset=offset) == payloads[offset:]


async def test_read_stops_at_until_and_about_max_bytes_but_never_before_one_record(tmp_path: Path):
    async with opened(tmp_path) as log:
        await append(log, *[b"a" * 1000] * 10)
        await append(log, large(10))
        tail = Tail(log, 0)
        assert [record.offset for record in tail.read(until=3, max_bytes=MIB)] == [0, 1, 2]
        assert tail.read(until=3, max_bytes=MIB) == []
        assert [record.offset for record in tail.read(until=10, max_bytes=3000)] == [3, 4]
        assert [record.offset for record in tail.read(until=10, max_bytes=1)] == [5]
        assert [record.offset for record in tail.read(until=100, max_bytes=5000)] == [6, 7, 8, 9]
        assert tail.offset == 10
        assert tail.read(until=11, max_bytes=1)[0].payload == large(10)
        assert tail.read(until=100, max_bytes=1) == []
        tail.close()


async def test_tail_follows_appends_while_the_log_recycles_what_it_passed(tmp_path: Path):
    async with opened(tmp_path) as log, asyncio.timeout(60):
        tail = Tail(log, 0)
        seen: list[int] = []

        async def follow() -> None:
            while len(seen) < 40:
                await log.wait_beyond(tail.offset)
                for record in await asyncio.to_thread(tail.read, until=log.durable_end, max_bytes=MIB):
                    assert record.payload == large(record.offset)
                    seen.append(record.offset)
                await log.trim(tail.offset)

        following = asyncio.create_task(follow())
        for number in range(40):
            await append(log, large(number))
            await wait_until(lambda: log.durable_end - tail.offset <= 4)  # the budget holds no more than that
        await following
        assert seen == list(range(40))
        tail.close()


async def test_record_that_was_trimmed_before_it_was_read_is_an_error(tmp_path: Path):
    async with opened(tmp_path) as log:
        await append_large(log, 5)
        tail = Tail(log, 0)
        await log.trim(4)
        with pytest.raises(WalCorrupt, match="trimmed before it was read: offset=0"):
            tail.read(until=5, max_bytes=MIB)


async def test_tail_that_starts_beyond_the_end_is_an_error(tmp_path: Path):
    async with opened(tmp_path) as log:
        await append(log, b"a")
        Tail(log, 1)
        with pytest.raises(WalCorrupt, match="offset=2 durable_end=1"):
            Tail(log, 2)


async def test_closed_tail_can_be_read_again(tmp_path: Path):
    async with opened(tmp_path) as log:
        await append(log, b"a", b"b")
        tail = Tail(log, 0)
        assert tail.read(until=1, max_bytes=MIB)[0].payload == b"a"
        tail.close()
        assert tail.read(until=2, max_bytes=MIB)[0].payload == b"b"
        tail.close()
