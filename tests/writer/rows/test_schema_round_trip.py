"""Any schema, rows and drift, through the feed into a table: PyIceberg, DuckDB and the files show what was sent.

An example is a history of one table (schema_histories.py): batches that may declare columns and fields again,
at any depth (more of them, wider, renamed), with rows that fit, that leave some out, or that no column takes.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from pyiceberg.types import IcebergType, ListType, MapType, StructType

from lakefeed.iceberg.arrow import FIELD_ID_KEY
from tests.every_type import plain
from tests.writer.feeding import WAIT_S, Running, running_feed
from tests.writer.schema_histories import Batch, History, histories


@dataclass
class Background:
    """A feed that runs in a thread of its own, for tests that have no event loop, and engines that read its tables."""

    running: Running
    loop: asyncio.AbstractEventLoop
    pyiceberg: Any
    duckdb: Any

    def do(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(WAIT_S)


@pytest.fixture
def background(tmp_path, local_lake) -> Iterator[Background]:
    started: list[tuple[Running, asyncio.AbstractEventLoop]] = []
    ready, done = threading.Event(), asyncio.Event()

    async def run() -> None:
        async with running_feed(tmp_path, local_lake) as running:
            started.append((running, asyncio.get_running_loop()))
            ready.set()
            await done.wait()

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    assert ready.wait(WAIT_S)
    ((running, loop),) = started
    with (
        contextlib.closing(local_lake.open_pyiceberg()) as pyiceberg,
        contextlib.closing(local_lake.open_duckdb()) as duckdb,
    ):
        yield Background(running, loop, pyiceberg, duckdb)
    loop.call_soon_threadsafe(done.set)
    thread.join(WAIT_S)
    assert not thread.is_alive()


async def _send(running: Running, table: str, batches: list[Batch]) -> None:
    """Send all batches, each committed before the next or together with it."""
    first = 1
    for number, batch in enumerate(batches):
        texts = [orjson.Fragment(msgspec.json.encode(row)) for row in batch.rows]
        await running.append(
            range(first, first + len(texts)),
            table=table,
            row=lambda n, texts=texts, first=first: texts[n - first],
            declared={"columns": batch.declared},
        )
        first += len(texts)
        if number % 2:
            await running.flush(table)
    await running.flush(table)


def _check(rows: list[dict[str, Any]], history: History, *, is_loose: bool = False) -> None:
    """Compare rows as an engine shows them; `is_loose` where it cannot tell null from empty."""
    for row, (wanted, rescued) in zip(rows, history.shown, strict=True):
        text = row.pop("_cdc_rescued")
        assert (text and json.loads(text)) == rescued
        for name, value in row.items():
            pair = plain(value, wanted[name]), wanted[name]
            shown, expected = map(_without_empty, pair) if is_loose else pair
            assert shown == expected, name


def _without_empty(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_empty(each) for each in value] or None
    if isinstance(value, dict):
        return {key: _without_empty(each) for key, each in value.items()} or None
    return value


def _pyiceberg_rows(table: Any, names: list[str]) -> list[dict[str, Any]]:
    rows = table.scan().to_arrow().sort_by("_cdc_sequence").to_pylist()
    return [{name: row[name] for name in names} for row in rows]


def _duckdb_rows(duckdb: Any, table: str, names: list[str]) -> list[dict[str, Any]]:
    quoted = ", ".join(f'"{name}"' for name in names)
    rows = duckdb.execute(f"SELECT {quoted} FROM lake.default.{table} ORDER BY _cdc_sequence").fetchall()
    return [dict(zip(names, row, strict=True)) for row in rows]


def _file_rows(table: Any, names: list[str]) -> list[dict[str, Any]]:
    """Read the files by themselves; what their fields are called today, their ids tell."""
    columns = table.schema().as_struct()
    rows = []
    for task in table.scan().plan_files():
        file = pq.ParquetFile(task.file.file_path.removeprefix("file://"))
        rows += [_by_ids(row, pa.struct(list(file.schema_arrow)), columns) for row in file.read().to_pylist()]
    rows.sort(key=lambda row: row["_cdc_sequence"])
    return [{name: row[name] for name in names} for row in rows]


def _by_ids(value: Any, stored: pa.DataType, type_: IcebergType) -> Any:
    if value is None:
        return None
    match type_:
        case StructType():
            known = {int(each.metadata[FIELD_ID_KEY]): each for each in stored}
            pairs = [(each, known.get(each.field_id)) for each in type_.fields]
            return {
                now.name: None if old is None else _by_ids(value[old.name], old.type, now.field_type)
                for now, old in pairs
            }
        case ListType():
            return [_by_ids(each, stored.value_type, type_.element_type) for each in value]
        case MapType():
            return {key: _by_ids(each, stored.item_type, type_.value_type) for key, each in value}
    return value


HISTORIES = int(os.environ.get("SCHEMA_HISTORIES", "40"))
_tables = itertools.count()


# Examples are reported as they were found: to shrink one takes minutes.
@given(history=histories())
@settings(max_examples=HISTORIES, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
def test_every_engine_shows_what_was_sent(background, history):
    table = f"t{next(_tables)}"
    background.do(_send(background.running, table, history.batches))
    names = [*history.columns, "_cdc_rescued"]
    loaded = background.pyiceberg.load_table(f"default.{table}")
    _check(_file_rows(loaded, names), history)
    _check(_pyiceberg_rows(loaded, names), history, is_loose=True)
    _check(_duckdb_rows(background.duckdb, table, names), history)
