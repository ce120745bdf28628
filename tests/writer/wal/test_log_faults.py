"""A disk that is full or fails under the log: what is refused, and what continues."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path

import pytest

from lakefeed.contract.errors import WalFailed, WalFull
from lakefeed.writer.config import SYNC_MODES
from tests.fakes import FaultyFilesystem
from tests.writer.wal.support import (
    SMALL,
    append,
    append_large,
    die,
    large,
    opened,
    read_all,
    spares,
    wait_for_spare,
    wait_until,
)


@pytest.mark.parametrize("operation", ["allocate", "write"])
async def test_full_disk_changes_nothing_and_appends_continue_once_there_is_space(tmp_path: Path, operation: str):
    files = FaultyFilesystem()
    files.fail(operation, errno.ENOSPC)
    async with opened(tmp_path, files=files) as log:
        for _ in range(3):
            with pytest.raises(WalFull, match="disk is full"):
                await append(log, b"a")
        assert (log.durable_end, log.failed, spares(tmp_path)) == (0, None, [])
        files.heal()
        assert await append(log, b"a") == 0


@pytest.mark.parametrize("operation", ["rename", "sync", "write"])
async def test_no_space_to_begin_a_segment_changes_nothing(tmp_path: Path, operation: str):
    files = FaultyFilesystem()
    async with opened(tmp_path, files=files) as log:
        before = await append_large(log, 4)
        await log.trim(2)  # leaves a spare, so that only beginning the segment can fail
        files.fail(operation, errno.ENOSPC)
        for _ in range(3):
            with pytest.raises(WalFull):
                await append(log, large(4))
        assert (log.durable_end, log.failed) == (4, None)
        files.heal()
        assert await append(log, large(4)) == 4
    async with opened(tmp_path) as log:
        assert read_all(log) == [*before[2:], large(4)]


@pytest.mark.parametrize("sync", SYNC_MODES)
async def test_no_space_to_write_a_group_changes_nothing_and_appends_continue_once_there_is(tmp_path: Path, sync: str):
    files = FaultyFilesystem()
    async with opened(tmp_path, replace(SMALL, sync=sync), files=files) as log:
        await append(log, b"before")
        await wait_for_spare(log)
        files.write_max_bytes = 100  # the first call still works, so that a part of the group is in the file
        files.fail("write", errno.ENOSPC, after_calls=1)
        with pytest.raises(WalFull, match="the group was not written"):
            await append(log, b"refused, whole", b"refused, in part" * 100)
        for _ in range(3):  # no new segment can be begun either
            with pytest.raises(WalFull, match="no segment can be added"):
                await append(log, b"refused")
        assert (log.durable_end, log.failed) == (1, None)
        files.heal()
        files.write_max_bytes = None
        assert await append(log, b"after") == 1
        assert read_all(log) == [b"before", b"after"]
        died = die(tmp_path, tmp_path / "died")
    for path in (tmp_path, died):
        async with opened(path) as log:
            assert read_all(log) == [b"before", b"after"]


async def test_earlier_failure_to_make_a_spare_does_not_refuse_an_append_that_has_space(tmp_path: Path):
    files = FaultyFilesystem()
    files.fail("allocate", errno.ENOSPC)
    async with opened(tmp_path, files=files) as log:
        await wait_until(log._preparing.done)
        files.heal()
        assert await append(log, b"a") == 0


@pytest.mark.parametrize(("operation", "code"), [("write", errno.EIO), ("sync", errno.EIO), ("sync", errno.ENOSPC)])
async def test_failure_while_writing_a_group_ends_all_appends(tmp_path: Path, operation: str, code: int):
    files = FaultyFilesystem()
    async with opened(tmp_path, files=files) as log:
        await append(log, b"before")
        await log.wait_beyond(0)
        await wait_for_spare(log)
        files.fail(operation, code)
        with pytest.raises(WalFailed, match=f"injected into {operation}"):
            await append(log, b"lost")
        files.heal()
        with pytest.raises(WalFailed, match=f"injected into {operation}"):
            await append(log, b"after")
        assert log.failed.startswith("log cannot be written, restart the service once the disk is well: ")
        assert log.durable_end == 1
        assert read_all(log) == [b"before"]
    async with opened(tmp_path) as log:
        assert read_all(log) in ([b"before"], [b"before", b"lost"])


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
async def test_trim_that_changed_nothing_is_tried_again_and_appends_continue(tmp_path: Path, code: int):
    files = FaultyFilesystem()
    async with opened(tmp_path, files=files) as log:
        before = await append_large(log, 3)
        await wait_for_spare(log)
        files.fail("rename", code)
        for _ in range(3):
            with pytest.raises(WalFailed, match="log cannot be trimmed"):
                await log.trim(2)
        assert (log.failed, log.first_offset, read_all(log)) == (None, 0, before)
        assert await append(log, b"small") == 3
        files.heal()
        await log.trim(2)
        assert log.first_offset == 2
    async with opened(tmp_path) as log:
        assert read_all(log, offset=2) == [large(2), b"small"]


async def test_failed_directory_sync_while_trimming_ends_all_appends(tmp_path: Path):
    files = FaultyFilesystem()
    async with opened(tmp_path, files=files) as log:
        await append_large(log, 3)
        files.fail("sync_directory", errno.EIO)
        with pytest.raises(WalFailed):
            await log.trim(2)
        files.heal()
        with pytest.raises(WalFailed):
            await append(log, b"after")
        await log.trim(2)
    async with opened(tmp_path) as log:
        assert read_all(log, offset=2) == [large(2)]


async def test_failed_directory_sync_while_rotating_ends_all_appends(tmp_path: Path):
    files = FaultyFilesystem()
    async with opened(tmp_path, files=files) as log:
        await append_large(log, 2)
        files.fail("sync_directory", errno.EIO)
        with pytest.raises(WalFailed):
            await append_large(log, 1)
        files.heal()
        with pytest.raises(WalFailed):
            await append_large(log, 1)
    async with opened(tmp_path) as log:
        assert read_all(log) == [large(0), large(1)]
        assert await append(log, large(2)) == 2
