"""`lakefeed wal`: what an operator sees of a good, a busy and a damaged log, and the way back to a running service."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import aiohttp
import pytest
from click.testing import CliRunner, Result

from lakefeed.contract.changes import SourceId
from lakefeed.contract.errors import WalCorrupt
from lakefeed.ingest.cli.main import main
from lakefeed.ingest.cli.wal import HEADS
from lakefeed.ingest.intake.sources import encode_head
from lakefeed.ingest.service import serving
from lakefeed.writer.wal.inspect import inspect_log
from lakefeed.writer.wal.log import FileLog
from lakefeed.writer.wal.payload import Encoding, Frame, encode_frame
from lakefeed.writer.wal.repair import offsets_text
from tests.ingest.conftest import small_config
from tests.writer.wal.log_frames import Placed, Senders, place
from tests.writer.wal.support import append, flip, opened, segments

SECRET = b"a value that must not be shown"


@pytest.fixture(autouse=True)
def _empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def wal(*arguments: str, **options: object) -> Result:
    return CliRunner().invoke(main, ["wal", *arguments], **options)


def write_log(directory: Path = Path("data/log"), *, groups: int = 60) -> list[Placed]:
    async def write() -> None:
        async with opened(directory) as log:
            senders = Senders(random.Random(3))
            for _ in range(groups):
                await senders.send(log)

    asyncio.run(write())
    return place(directory)[1]


def damage(*items: Placed) -> None:
    for item in items:
        flip(item.path, item.start + 40)


# -- inspect


def test_inspect_shows_segments_and_says_that_all_is_well():
    placed = write_log()
    result = wal("inspect")
    assert result.exit_code == 0
    for path in segments(Path("data/log")):
        assert path.name in result.output
    assert f"{len(placed):,} records" in result.output
    assert "good" in result.output
    assert "missing" not in result.output


def test_inspect_takes_the_data_directory_from_option_file_and_environment(tmp_path):
    write_log(tmp_path / "elsewhere" / "log", groups=1)
    Path("lakefeed.toml").write_text('[server]\ndata_dir = "elsewhere"\n')
    assert "1 records" in wal("inspect").output
    Path("lakefeed.toml").unlink()
    assert "1 records" in wal("inspect", "--data-dir", "elsewhere").output
    assert "1 records" in wal("inspect", env={"LAKEFEED_SERVER_DATA_DIR": "elsewhere"}).output


def test_inspect_without_a_log_says_where_it_looked(tmp_path):
    result = wal("inspect")
    assert result.exit_code == 1
    assert result.output == f"Error: there is no log here: directory={tmp_path}/data/log\n"


def test_inspect_lists_records_and_never_their_values():
    async def write() -> None:
        async with opened(Path("data/log")) as log:
            frame = Frame(SourceId("shop-1"), 2, 10, 12, 0, Encoding.JSON_BATCH, SECRET)
            await log.append([encode_frame(frame)], head=lambda: encode_head({}, {}))
            await append(log, SECRET)

    asyncio.run(write())
    text = wal("inspect", "--records").output
    assert "offset=0 bytes=" in text
    assert "source=shop-1 epoch=2 afterSequence=10 lastSequence=12 encoding=json_batch" in text
    lines = wal("inspect", "--records", "--json").output.splitlines()
    records, summary = [json.loads(line) for line in lines[:-1]], json.loads(lines[-1])
    assert [record["offset"] for record in records] == [0, 1]
    assert records[0]["source"] == "shop-1"
    assert (summary["records"], summary["nextOffset"], summary["needsRepair"]) == (2, 2, False)
    assert SECRET.decode() not in text + "".join(lines)


def test_inspect_of_a_damaged_log_says_what_is_missing_and_ends_with_3():
    placed = write_log()
    lost = placed[5]
    damage(lost)
    result = wal("inspect")
    assert result.exit_code == 3
    assert f"damaged: {lost.path.name} from byte {lost.start} to {lost.end}, offset 5" in result.output
    frame = lost.frame
    missing = f"missing: source {frame.source} epoch {frame.epoch}, sequences up to {frame.last_sequence}, above "
    assert missing + str(frame.after_sequence) in result.output
    document = json.loads(wal("inspect", "--json").output)
    assert document["needsRepair"]
    assert document["segments"][0]["damage"][0]["firstOffset"] == 5
    assert document["missing"][0]["source"] == frame.source


async def test_inspect_works_beside_the_service_and_repair_does_not(tmp_path):
    async with serving(small_config(tmp_path / "data")):
        assert (await asyncio.to_thread(wal, "inspect")).exit_code == 0
        assert "nothing to repair" in (await asyncio.to_thread(wal, "repair", "--dry-run")).output
        result = await asyncio.to_thread(wal, "repair", "--yes")
    assert result.exit_code == 1
    assert "log is in use by another process, stop that one first" in result.output


# -- repair


def test_repair_of_a_good_log_does_nothing():
    write_log(groups=2)
    before = sorted(Path("data/log").rglob("*"))
    result = wal("repair", "--yes")
    assert (result.exit_code, result.output) == (0, f"nothing to repair: {Path('data/log').resolve()}\n")
    assert sorted(Path("data/log").rglob("*")) == before


@pytest.mark.parametrize(
    ("arguments", "answer", "code"),
    [(["--dry-run"], "", 0), ([], "n\n", 1), ([], "", 1)],
    ids=["dry run", "refused", "nobody there to ask"],
)
def test_repair_says_what_it_would_do_and_changes_nothing_without_a_yes(arguments, answer, code):
    placed = write_log()
    damage(placed[5], placed[6])
    before = {path: path.read_bytes() for path in segments(Path("data/log"))}
    result = wal("repair", *arguments, input=answer)
    assert result.exit_code == code
    assert f"{placed[5].path.name}: keep" in result.output
    assert "leave a gap for offsets 5 to 6" in result.output
    assert "damaged files move to" in result.output
    assert {path: path.read_bytes() for path in segments(Path("data/log"))} == before
    assert not Path("data/log/damaged").exists()


@pytest.mark.parametrize(("arguments", "answer"), [(["--yes"], ""), ([], "y\n")], ids=["yes", "asked"])
def test_repair_makes_the_log_open_again(arguments, answer):
    placed = write_log()
    damage(placed[5])
    result = wal("repair", *arguments, input=answer)
    assert result.exit_code == 0, result.output
    assert wal("inspect").exit_code == 0
    assert "gap of an earlier repair: offset 5" in wal("inspect").output
    [kept] = Path("data/log/damaged").iterdir()
    assert {path.name for path in kept.iterdir()} == {"report.json", placed[5].path.name}
    assert str(kept.resolve()) in result.output


def test_range_of_offsets_reads_well():
    assert (offsets_text(5, 6), offsets_text(5, 8)) == ("offset 5", "offsets 5 to 7")


async def test_service_starts_after_a_repair_and_commits_all_that_is_good_and_goes_on(tmp_path):
    directory = tmp_path / "data" / "log"
    async with opened(directory) as log:
        for sequence in range(5):
            await append_change(log, sequence)
    _, placed = place(directory)
    damage(placed[1], placed[4])  # one in the middle and the last one, so that the log ends in a gap
    with pytest.raises(WalCorrupt, match=f"lakefeed wal repair --data-dir {tmp_path}/data"):
        async with serving(small_config(tmp_path / "data")):
            pass
    assert (await asyncio.to_thread(wal, "repair", "--yes")).exit_code == 0
    assert inspect_log(directory, HEADS).segments[-1].end_offset == 5
    async with (
        asyncio.timeout(30),
        serving(small_config(tmp_path / "data")) as addresses,
        aiohttp.ClientSession(addresses.http_url) as client,
    ):
        async with client.post("/flush") as answer:
            assert (await answer.json())["tables"]["default.users"]["rows"] == 3
        async with client.get("/status") as answer:
            assert (await answer.json())["log"]["uncommittedRecords"] == 0


async def append_change(log: FileLog, sequence: int) -> None:
    event = {"sequence": sequence, "operation": "INSERT", "table": "users", "rowId": "1", "after": {"id": sequence}}
    body = json.dumps({"type": "cdc_batch", "sourceDoId": "shop", "events": [event]}).encode()
    frame = Frame(SourceId("shop"), 0, sequence - 1, sequence, 0, Encoding.JSON_BATCH, body)
    await log.append([encode_frame(frame)], head=lambda: encode_head({}, {}))
