"""Reads the tables with PyIceberg through the REST catalog, and checks them against what the senders sent."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.exceptions import NoSuchTableError
from pyiceberg.table import Table

from tests.clients import S3Settings, open_pyiceberg
from tests.crash.senders import (
    EXTRA_COLUMNS,
    TABLES,
    Sender,
    count_up_to,
    operation_of,
    row_of,
    sequence_of,
    table_of,
    timestamp_ms_of,
)

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_SHOWN_MAX = 10


@dataclass(frozen=True, slots=True)
class Contents:
    """One table: its rows as a scan gives them, and the files of each snapshot, oldest snapshot first."""

    source_table: str
    rows: pa.Table
    snapshots: Sequence[Sequence[pa.Table]]


def load_contents(catalog_url: str, *, s3: S3Settings | None = None) -> list[Contents]:
    """Read all tables through the catalog."""
    catalog = open_pyiceberg(catalog_url, s3=s3)
    try:
        return [read_table(name, catalog.load_table(name if "." in name else f"default.{name}")) for name in TABLES]
    except NoSuchTableError as error:
        raise AssertionError(f"a table is missing: {error}") from error
    finally:
        catalog.close()


def read_table(source_table: str, table: Table) -> Contents:
    """Read one table, whole and file by file."""
    return Contents(source_table, table.scan().to_arrow(), list(_files_by_snapshot(table)))


def _files_by_snapshot(table: Table) -> Iterator[list[pa.Table]]:
    snapshot = table.current_snapshot()
    assert snapshot is not None
    by_number: dict[int, list[str]] = {}
    for manifest in snapshot.manifests(table.io):
        for entry in manifest.fetch_manifest_entry(table.io):
            assert entry.sequence_number is not None
            by_number.setdefault(entry.sequence_number, []).append(entry.data_file.file_path)
    for _, paths in sorted(by_number.items()):
        # The file alone: a reader that is given a path under key=value directories would add columns for them.
        yield [pq.ParquetFile(table.io.new_input(path).open()).read() for path in paths]


def check_tables(tables: Sequence[Contents], senders: Iterable[Sender]) -> None:
    """Check that every acked change is there exactly once, in order and whole, and nothing that was never sent."""
    senders = list(senders)
    _check_sources(tables, senders)
    for sender in senders:
        _check_each_once(tables, sender)
    for table in tables:
        _check_order(table)
        _check_values(table)


def _check_sources(tables: Sequence[Contents], senders: Sequence[Sender]) -> None:
    known = {sender.source for sender in senders}
    found = {source for table in tables for source in table.rows["_cdc_source"].unique().to_pylist()}
    assert found <= known, f"rows of sources that never sent: {found - known}"


def _check_each_once(tables: Sequence[Contents], sender: Sender) -> None:
    present = sorted(
        sequence
        for table in tables
        for source, sequence in _pairs(table.rows, "_cdc_source", "_cdc_sequence")
        if source == sender.source
    )
    twice = [after for before, after in pairwise(present) if before == after]
    assert not twice, f"changes are there twice: source={sender.source} count={len(twice)} {twice[:_SHOWN_MAX]}"
    missing = sorted({sequence_of(index) for index in range(sender.acked)}.difference(present))
    assert not missing, f"acked changes are lost: source={sender.source} count={len(missing)} {missing[:_SHOWN_MAX]}"
    foreign = sorted(set(present).difference(sequence_of(index) for index in range(sender.sent)))
    assert not foreign, f"changes were never sent: source={sender.source} {foreign[:_SHOWN_MAX]}"
    holes = [after for before, after in pairwise(present) if count_up_to(after) != count_up_to(before) + 1]
    assert not holes, f"changes are missing before: source={sender.source} {holes[:_SHOWN_MAX]}"


def _check_order(table: Contents) -> None:
    newest: dict[str, int] = {}
    for files in table.snapshots:
        before = dict(newest)
        for file in files:
            last = dict(before)
            for source, sequence in _pairs(file, "_cdc_source", "_cdc_sequence"):
                assert sequence > last.get(source, -1), f"out of order: {table.source_table} {source} {sequence}"
                last[source] = sequence
            newest |= {source: max(sequence, newest.get(source, -1)) for source, sequence in last.items()}


def _check_values(table: Contents) -> None:
    for row in table.rows.to_pylist():
        expected = _expected(row["_cdc_source"], count_up_to(row["_cdc_sequence"]) - 1)
        assert table_of(row["_cdc_source"], count_up_to(row["_cdc_sequence"]) - 1) == table.source_table
        assert {name: row.get(name) for name in expected} == expected
        assert row["_cdc_rescued"] is None


def _expected(source: str, index: int) -> dict[str, Any]:
    return {
        "_cdc_operation": operation_of(source, index),
        "_cdc_row_id": f"{source}/{index}",
        "_cdc_timestamp": _EPOCH + timedelta(milliseconds=timestamp_ms_of(source, index)),
        **dict.fromkeys(EXTRA_COLUMNS),
        **row_of(source, index),
    }


def _pairs(table: pa.Table, *names: str) -> Iterator[tuple[Any, ...]]:
    return zip(*(table[name].to_pylist() for name in names), strict=True)
