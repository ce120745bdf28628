"""The sync modes: what an append waits for, what is known to be on disk, and what happens when syncing fails."""

from __future__ import annotations

import asyncio
import errno
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from lakefeed.contract.errors import WalCorrupt, WalFailed
from lakefeed.writer.config import SYNC_MODES, LogConfig
from lakefeed.writer.wal.directory import Filesystem
from lakefeed.writer.wal.log import FileLog
from lakefeed.writer.wal.records import record_bytes
from tests.fakes import FaultyFilesystem
from tests.writer.wal.support import (
    SMALL,
    append,
    append_large,
    die,
    flip,
    opened,
    read_all,
    segments,
    wait_for_spare,
    wait_until,
)

INTERVAL = replace(SMALL, sync="interval", sync_interval_ms=1)
NEVER_DUE = replace(SMALL, sync="interval", sync_interval_ms=60_000)
NONE = replace(SMALL, sync="none")


class SlowSyncs(Filesystem):
    """Counts syncs, and holds them back when told to."""

    def __init__(self) -> None:
        self.syncs = 0
        self.held_back = threading.Event()
        self.go_on = threading.Event()
        self.go_on.set()

    def sync(self, descriptor: int) -> None:
        self.syncs += 1
        if not self.go_on.is_set():
            self.held_back.set()
            assert self.go_on.wait(10)
        super().sync(descriptor)


@pytest.mark.parametrize("settings", [{"sync": "sometimes"}, {"sync_interval_ms": 0}, {"sync_interval_ms": 60_001}])
def test_invalid_settings_are_refused(settings: dict):
    with pytest.raises(ValueError, match="sync"):
        LogConfig(**settings)


async def test_append_waits_for_its_own_sync_only_in_always_mode(tmp_path: Path):
    for mode, waits in (("always", True), ("interval", False), ("none", False)):
        files = SlowSyncs()
        async with opened(tmp_path / mode, replace(SMALL, sync=mode, sync_interval_ms=60_000), files=files) as log:
            await append(log, b"begins the segment")
            await wait_for_spare(log)
            files.go_on.clear()
            appending = asyncio.create_task(append(log, b"a"))
            await wait_until(lambda: files.held_back.is_set() or appending.done())  # noqa: B023
            assert files.held_back.is_set() is waits
            assert log.durable_end == (1 if waits else 2)
            files.go_on.set()
            await appending


async def test_acked_records_are_synced_within_the_interval_and_then_nothing_happens(tmp_path: Path):
    files = SlowSyncs()
    async with opened(tmp_path, INTERVAL, files=files) as log:
        for _ in range(3):
            await append(log, b"a", b"b")
            await wait_until(lambda: log.synced_end == log.durable_end)
        await wait_for_spare(log)
        assert log.synced_end == 6
        assert log._background._timer is None


async def test_sync_covers_what_was_written_before_it_began(tmp_path: Path):
    files = SlowSyncs()
    async with opened(tmp_path, replace(INTERVAL, sync_interval_ms=5_000), files=files) as log:
        await append(log, b"first")
        await wait_for_spare(log)
        files.go_on.clear()
        log._background._timer.cancel()
        log._background._start()  # the interval is over
        await wait_until(files.held_back.is_set)
        assert await append(log, b"written while the first is being synced") == 1
        files.go_on.set()
        await wait_until(lambda: log.synced_end > 0)
        assert (log.synced_end, log.durable_end) == (1, 2)


async def test_append_waits_while_a_sync_takes_longer_than_the_interval(tmp_path: Path):
    files = SlowSyncs()
    async with opened(tmp_path, INTERVAL, files=files) as log:
        await append(log, b"first")
        await wait_for_spare(log)
        await wait_until(lambda: log.synced_end == 1)
        files.go_on.clear()
        await append(log, b"second")
        await wait_until(files.held_back.is_set)
        started = log._background._started_at
        await wait_until(lambda: asyncio.get_running_loop().time() > started + 0.001)
        appending = asyncio.create_task(append(log, b"third"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await asyncio.wrap_future(log._append_thread.submit(int))  # whatever was to be written is written by now
        assert b"third" not in segments(tmp_path)[0].read_bytes()
        files.go_on.set()
        assert await appending == 2


async def test_without_sync_only_rotation_and_close_sync_records(tmp_path: Path):
    async with opened(tmp_path, NONE) as log:
        await append_large(log, 2)
        assert log.synced_end == 0
        await append_large(log, 1)
        assert (log.synced_end, log.durable_end) == (2, 3)
    async with opened(tmp_path, NONE) as log:
        assert log.synced_end == 3


@pytest.mark.parametrize("config", [NEVER_DUE, NONE], ids=["interval", "none"])
async def test_process_that_dies_loses_nothing_in_any_mode(tmp_path: Path, config: LogConfig):
    async with opened(tmp_path, config) as log:
        payloads = await append_large(log, 5)
        assert log.synced_end < log.durable_end
        died = die(tmp_path, tmp_path / "died")
    async with opened(died) as log:
        assert read_all(log) == payloads
        assert log.synced_end == 5


@pytest.mark.parametrize("mode", SYNC_MODES)
@pytest.mark.parametrize("next_mode", SYNC_MODES)
async def test_records_of_one_mode_and_then_another_are_torn_or_corrupt_by_what_was_synced(
    tmp_path: Path, mode: str, next_mode: str
):
    positions = []
    path = tmp_path
    for number, sync in enumerate((mode, next_mode)):
        async with opened(path, replace(NEVER_DUE, sync=sync)) as log:
            synced = log.synced_end
            for _ in range(3):
                await append(log, b"payload")
                positions.append(log.size_bytes - record_bytes((b"payload",)))
            path = die(path, tmp_path / f"died {number}")
    segment = segments(path)[0]
    whole = segment.read_bytes()
    known_synced = 5 if next_mode == "always" else synced  # what the last record says of those before it
    for offset, position in enumerate(positions):
        flip(segment, position)
        if offset < known_synced:
            with pytest.raises(WalCorrupt, match=f"position={position} offset={offset} "):
                FileLog.open(path, SMALL)
        else:
            async with opened(path) as log:
                assert log.durable_end == offset
        segment.write_bytes(whole)


async def test_failed_background_sync_stops_appends_and_the_next_open_writes_again_what_was_acked(
    tmp_path: Path,
):
    files = FaultyFilesystem()
    log = FileLog.open(tmp_path, INTERVAL, files=files)
    await append(log, b"synced")
    await wait_for_spare(log)
    await wait_until(lambda: log.synced_end == 1)
    files.fail("sync", errno.EIO)
    assert await append(log, b"acked") == 1
    await wait_until(lambda: log.failed is not None)
    assert (log.synced_end, log.durable_end) == (1, 2)
    files.heal()
    with pytest.raises(WalFailed, match="injected into sync"):
        await append(log, b"refused")
    await log.close()
    async with opened(tmp_path, INTERVAL) as log:
        assert read_all(log) == [b"synced", b"acked"]
        assert log.synced_end == 2


@pytest.mark.parametrize("config", [NEVER_DUE, NONE], ids=["interval", "none"])
async def test_close_that_cannot_sync_raises_and_releases_the_lock(tmp_path: Path, config: LogConfig):
    files = FaultyFilesystem()
    log = FileLog.open(tmp_path, config, files=files)
    await append(log, b"acked")
    await wait_for_spare(log)
    files.fail("sync", errno.EIO)
    with pytest.raises(WalFailed, match="injected into sync"):
        await log.close()
    async with opened(tmp_path) as log:
        assert read_all(log) == [b"acked"]


async def test_failed_sync_before_a_rotation_ends_all_appends(tmp_path: Path):
    files = FaultyFilesystem()
    async with opened(tmp_path, NONE, files=files) as log:
        await append_large(log, 2)
        await wait_for_spare(log)
        files.fail("sync", errno.EIO)
        with pytest.raises(WalFailed, match="injected into sync"):
            await append_large(log, 1)
        files.heal()
        with pytest.raises(WalFailed, match="injected into sync"):
            await append_large(log, 1)
        assert len(segments(tmp_path)) == 1
