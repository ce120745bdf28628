"""PyIceberg reads the same metadata as Lakefeed's own reader, and every disagreement is found."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, date, datetime, time
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest

from lakefeed.contract.verification import Kind, Report
from lakefeed.writer import verify
from lakefeed.writer.files.scan import SnapshotFiles, load_contents
from lakefeed.writer.verify import partition_text
from tests.writer import lakes
from tests.writer.conftest import Lake
from tests.writer.lakes import load_document, verify_document
from tests.writer.quarantine.bench import USERS, Bench, changes_of, lake_bench


@pytest.fixture
async def bench(local_lake: Lake) -> AsyncIterator[Bench]:
    async with lake_bench(local_lake) as opened:
        await opened.write(USERS, changes_of({1: {"id": 1}, 2: {"id": 2}}))
        await opened.write(USERS, changes_of({3: {"id": 3}}))
        yield opened


async def verify_twice_read(bench: Bench) -> Report:
    """Verify as the command does, with the second reader."""
    document = await load_document(bench)
    storage = replace(bench.lake.storage, warehouse=document["location"])
    return await verify_document(bench, document, storage=storage)


async def test_both_readers_agree_on_a_partitioned_table(bench: Bench) -> None:
    document = await load_document(bench)
    assert document["partition-specs"][-1]["fields"], "the comparison includes partitions"
    report = await verify_twice_read(bench)
    assert report.is_sound, report.findings


async def test_both_readers_agree_on_s3(s3_lake: Lake) -> None:
    async with lake_bench(s3_lake) as bench:
        await bench.write(USERS, changes_of({1: {"id": 1}}))
        report = await verify_twice_read(bench)
    assert report.is_sound, report.findings


async def test_a_file_that_our_reader_skips_is_found(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    async def skip_the_last(*args: Any, **options: Any) -> SnapshotFiles:
        contents = await load_contents(*args, **options)
        return replace(contents, files=contents.files[:-1])

    monkeypatch.setattr(verify, "load_contents", skip_the_last)
    report = await verify_twice_read(bench)
    (finding,) = [each for each in report.findings if each.kind is Kind.READERS]
    assert finding.text.startswith("1 data files that only PyIceberg finds: file:")


async def test_a_file_that_an_edited_manifest_list_hides_from_our_reader_is_found(bench: Bench) -> None:
    await lakes.list_a_manifest_as_deletes(bench)
    report = await verify_twice_read(bench)
    (finding,) = [each for each in report.findings if each.kind is Kind.READERS]
    assert finding.text.startswith("1 data files that only PyIceberg finds: file:")


@pytest.mark.parametrize(
    ("change", "text"),
    [({"rows": 7}, "1 data files with other rows in"), ({"partition": (1,)}, "1 data files with another partition in")],
)
async def test_other_rows_or_partitions_are_found(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], text: str
) -> None:
    async def change_the_first(*args: Any, **options: Any) -> SnapshotFiles:
        contents = await load_contents(*args, **options)
        first, *others = contents.files
        return replace(contents, files=[replace(first, **change), *others])

    monkeypatch.setattr(verify, "load_contents", change_the_first)
    report = await verify_twice_read(bench)
    (finding,) = [each for each in report.findings if each.kind is Kind.READERS]
    assert finding.text.startswith(text)


@pytest.mark.parametrize(
    ("program", "text"),
    [
        (
            "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
            "PyIceberg crashed while it planned the table: SIGSEGV",
        ),
        ("raise SystemExit('first\\nbad manifest')", "PyIceberg cannot plan the table: bad manifest"),
    ],
)
async def test_a_reader_that_crashes_or_fails_is_a_finding_and_the_rest_is_verified(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, program: str, text: str
) -> None:
    monkeypatch.setattr(verify, "READER_COMMAND", (sys.executable, "-c", program))
    report = await verify_twice_read(bench)
    assert [(each.kind, each.text) for each in report.findings] == [(Kind.UNREADABLE, text)]
    assert (report.rows, report.totals_compared) == (3, True)


async def test_a_reader_that_hangs_is_ended_and_is_a_finding(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "READER_COMMAND", (sys.executable, "-c", "import time; time.sleep(600)"))
    monkeypatch.setattr(verify, "READER_TIMEOUT_S", 0.1)
    report = await verify_twice_read(bench)
    assert [each.kind for each in report.findings] == [Kind.READERS]


def test_partitions_are_compared_by_value_whatever_types_decoders_use() -> None:
    uuid = UUID("12345678-1234-5678-1234-567812345678")
    decoded = (
        date(1970, 1, 3),
        datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC),
        time(0, 0, 2),
        uuid,
        Decimal("1.50"),
        None,
        "x",
    )
    plain = (2, 1_000_000, 2_000_000, uuid.bytes, Decimal("1.50"), None, "x")
    assert partition_text(decoded) == partition_text(plain)
    assert partition_text((1,)) != partition_text(("1",))


def test_the_service_does_not_import_pyiceberg() -> None:
    program = "import sys, lakefeed.ingest.service; sys.exit('pyiceberg' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
