"""The feed on a log that is not on local files."""

from tests.writer.feeding import read_sequences, running_feed, shop, wait_for
from tests.writer.wal.memory_log import MemoryLog


async def test_feed_needs_nothing_from_a_log_beyond_its_protocol(tmp_path, local_lake):
    log = MemoryLog()
    async with running_feed(tmp_path, local_lake, log=log) as running:
        await running.append(range(1, 4))
        assert (await running.flush())["success"]
        await running.append(range(4, 6), row=lambda n: {"id": n, "name": "new"})
        assert (await running.flush())["success"]
        await wait_for(lambda: log.first_offset == 2)
    assert read_sequences(local_lake) == shop(1, 2, 3, 4, 5)
    assert not (tmp_path / "log").exists()
