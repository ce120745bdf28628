"""Any schema, rows and drift, through the feed into a table: PyIceberg, DuckDB and the files show what was sent.

An example is a history of one table: batches, each of which may declare columns anew (more of them, wider, renamed),
with rows that fit, that leave columns out, or that bring values no column takes. What a row must look like in the end
is worked out beside it, so that nothing is compared with our own reading of it.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import datetime as dt
import itertools
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import msgspec
import orjson
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.every_type import plain
from tests.writer.feeding import WAIT_S, Running, running_feed
from writer.types import FIELD_ID_KEY

NAMES = ("a", "b", "c", "D d", "ß")
MISFITS = {"no": ["number"]}  # fits nothing that is declared below


@dataclass(frozen=True)
class Kind:
    """A declared type with its values: pairs of what JSON says and what engines show."""

    declared: Any
    values: st.SearchStrategy[tuple[Any, Any]]


def _twice(values: st.SearchStrategy) -> st.SearchStrategy:
    return values.map(lambda value: (value, value))


def _decimals(precision: int, scale: int) -> st.SearchStrategy:
    numbers = st.integers(-(10**precision) + 1, 10**precision - 1).map(lambda n: Decimal(f"{n}e{-scale}"))
    texts = numbers.map(lambda number: (f"{number:f}", number))
    return st.one_of(texts, texts.map(lambda pair: (msgspec.Raw(pair[0]), pair[1])))


def _moments(**options: Any) -> st.SearchStrategy:
    return st.datetimes(dt.datetime(2, 1, 1), dt.datetime(9998, 12, 31), **options)


def _zoned(pair: tuple[dt.datetime, int]) -> tuple[str, dt.datetime]:
    moment, hours = pair
    zone = dt.timezone(dt.timedelta(hours=hours))
    return moment.replace(tzinfo=dt.UTC).astimezone(zone).isoformat(), moment.replace(tzinfo=dt.UTC)


def _floats(width: int) -> st.SearchStrategy:
    return _twice(st.floats(allow_nan=False, allow_infinity=False, width=width))


def _bytes(**options: Any) -> st.SearchStrategy:
    return st.binary(**options).map(lambda value: (base64.b64encode(value).decode(), value))


LONGS = st.integers(-(2**63), 2**63 - 1)
TEXTS = _twice(st.text(st.characters(codec="utf-8"), max_size=6))
KEYS = {
    "string": TEXTS,
    "int": st.integers(-(2**31), 2**31 - 1).map(lambda n: (str(n), n)),
    "long": LONGS.map(lambda n: (str(n), n)),
    "date": st.dates().map(lambda day: (day.isoformat(), day)),
    "uuid": st.uuids().map(lambda value: (str(value), value)),
    "decimal(9, 3)": _decimals(9, 3).map(lambda pair: (f"{pair[1]:f}", pair[1])),
}
PRIMITIVES = {
    "boolean": _twice(st.booleans()),
    "int": _twice(st.integers(-(2**31), 2**31 - 1)),
    "long": st.one_of(_twice(LONGS), LONGS.map(lambda n: (f"__bigint__:{n}", n))),
    "float": _floats(32),
    "double": _floats(64),
    "decimal(9, 3)": _decimals(9, 3),
    "decimal(38, 10)": _decimals(38, 10),
    "string": TEXTS,
    "binary": _bytes(max_size=5),
    "fixed[3]": _bytes(min_size=3, max_size=3),
    "date": KEYS["date"],
    "time": st.times().map(lambda time: (time.isoformat(), time)),
    "timestamp": _moments().map(lambda moment: (moment.isoformat(), moment)),
    "timestamptz": st.tuples(_moments(), st.integers(-14, 14)).map(_zoned),
    "uuid": KEYS["uuid"],
}


def _list_of(kind: Kind) -> Kind:
    values = st.lists(st.one_of(st.just((None, None)), kind.values), max_size=3)
    pairs = values.map(lambda pairs: ([pair[0] for pair in pairs], [pair[1] for pair in pairs]))
    return Kind({"type": "list", "element": kind.declared}, pairs)


def _struct_of(kinds: list[Kind]) -> Kind:
    fields = dict(zip(NAMES, kinds, strict=False))
    values = st.fixed_dictionaries(
        {name: st.one_of(st.just((None, None)), each.values) for name, each in fields.items()}
    )
    pairs = values.map(lambda members: tuple({name: pair[side] for name, pair in members.items()} for side in (0, 1)))
    return Kind({"type": "struct", "fields": {name: each.declared for name, each in fields.items()}}, pairs)


def _map_of(pair: tuple[str, Kind]) -> Kind:
    key, kind = pair
    entries = st.lists(st.tuples(KEYS[key], kind.values), max_size=3, unique_by=lambda entry: entry[0][1])
    pairs = entries.map(lambda entries: tuple({name[side]: each[side] for name, each in entries} for side in (0, 1)))
    return Kind({"type": "map", "key": key, "value": kind.declared}, pairs)


KINDS = st.recursive(
    st.sampled_from([Kind(name, values) for name, values in PRIMITIVES.items()]),
    lambda kinds: st.one_of(
        kinds.map(_list_of),
        st.lists(kinds, min_size=1, max_size=2).map(_struct_of),
        st.tuples(st.sampled_from(list(KEYS)), kinds).map(_map_of),
    ),
    max_leaves=3,
)
WIDE = PRIMITIVES | {"decimal(20, 3)": _decimals(20, 3)}
WIDER = {"int": "long", "float": "double", "decimal(9, 3)": "decimal(20, 3)"}


# A column that nobody declares: its type is found from its values.
UNDECLARED = "found"
UNDECLARED_VALUES = st.fixed_dictionaries({"n": LONGS, "t": TEXTS.map(lambda pair: pair[0])})


@dataclass
class Batch:
    """Rows to send, what is declared with them, and how each must be shown: columns by place, and what is rescued."""

    declared: dict[str, Any]
    rows: list[dict[str, Any]] = field(default_factory=list)
    shown: list[tuple[dict[int | str, Any], Any]] = field(default_factory=list)


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[Batch], list[str]]:
    """Draw batches of one table, and the names that its columns have in the end."""
    names: list[str] = []
    kinds: list[Kind] = []
    batches = []
    for _ in range(draw(st.integers(1, 3))):
        declared: dict[str, Any] = {}
        for place, kind in enumerate(kinds):
            wide = WIDER.get(kind.declared) if isinstance(kind.declared, str) else None
            if wide is not None and draw(st.booleans()):
                kinds[place] = Kind(wide, WIDE[wide])
                declared[names[place]] = wide
            if draw(st.integers(0, 3)) == 0:
                former, names[place] = names[place], f"{names[place]}'"
                declared.pop(former, None)
                declared[names[place]] = {"type": kinds[place].declared, "renamedFrom": former}
                if not isinstance(kinds[place].declared, str):
                    declared[names[place]] = kinds[place].declared | {"renamedFrom": former}
        for kind in draw(st.lists(KINDS, min_size=0 if kinds else 1, max_size=2)):
            kinds.append(kind)
            names.append(f"{NAMES[len(names) % len(NAMES)]}{len(names)}")
            declared[names[-1]] = kind.declared
        batch = Batch(declared)
        for _ in range(draw(st.integers(1, 3))):
            _draw_row(draw, names, kinds, batch)
        batches.append(batch)
    return batches, names


def _draw_row(draw: st.DrawFn, names: list[str], kinds: list[Kind], batch: Batch) -> None:
    row, shown, rescued = {}, {}, {}
    for place, (name, kind) in enumerate(zip(names, kinds, strict=True)):
        match draw(st.sampled_from(["fits", "fits", "fits", "null", "absent", "misfit"])):
            case "fits":
                row[name], shown[place] = draw(kind.values)
            case "null":
                row[name] = None
            case "misfit" if isinstance(kind.declared, str):
                row[name] = rescued[name] = MISFITS
    if draw(st.booleans()):
        row[UNDECLARED] = shown[UNDECLARED] = draw(UNDECLARED_VALUES)
    batch.rows.append(row)
    batch.shown.append((shown, rescued or None))


# -- the lake


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


def _check(rows: list[dict[str, Any]], batches: list[Batch], *, is_loose: bool = False) -> None:
    """Compare rows, as an engine shows them, by place; `is_loose` where it cannot tell null from empty."""
    expected = [pair for batch in batches for pair in batch.shown]
    assert len(rows) == len(expected)
    for row, (values, rescued) in zip(rows, expected, strict=True):
        text = row.pop("_cdc_rescued")
        assert (text and json.loads(text)) == rescued
        for place, value in row.items():
            shown, wanted = plain(value, values.get(place)), values.get(place)
            if is_loose:
                shown, wanted = _without_empty(shown), _without_empty(wanted)
            assert shown == wanted, place


def _without_empty(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_empty(each) for each in value] or None
    if isinstance(value, dict):
        return {key: _without_empty(each) for key, each in value.items()} or None
    return value


def _pyiceberg_rows(table: Any, places: dict[str, Any]) -> list[dict[Any, Any]]:
    rows = table.scan().to_arrow().sort_by("_cdc_sequence").to_pylist()
    return [{place: row[name] for name, place in places.items()} for row in rows]


def _duckdb_rows(duckdb: Any, table: str, places: dict[str, Any]) -> list[dict[Any, Any]]:
    quoted = ", ".join(f'"{name}"' for name in places)
    rows = duckdb.execute(f"SELECT {quoted} FROM lake.default.{table} ORDER BY _cdc_sequence").fetchall()
    return [dict(zip(places.values(), row, strict=True)) for row in rows]


def _file_rows(table: Any, places: dict[str, Any]) -> list[dict[Any, Any]]:
    """Read the files by themselves; what their columns are called today, their field ids tell."""
    by_id = {field.field_id: field.name for field in table.schema().fields}
    rows = []
    for task in table.scan().plan_files():
        file = pq.ParquetFile(task.file.file_path.removeprefix("file://"))
        names = [by_id[int(each.metadata[FIELD_ID_KEY])] for each in file.schema_arrow]
        rows += file.read().rename_columns(names).to_pylist()
    rows.sort(key=lambda row: row["_cdc_sequence"])
    return [{place: row.get(name) for name, place in places.items()} for row in rows]


_tables = itertools.count()


# Examples are told as they were found: to shrink one takes minutes.
@given(history=histories())
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
def test_every_engine_shows_what_was_sent(background, history):
    batches, names = history
    table = f"t{next(_tables)}"
    background.do(_send(background.running, table, batches))
    places: dict[str, Any] = {name: place for place, name in enumerate(names)} | {"_cdc_rescued": "_cdc_rescued"}
    if any(UNDECLARED in row for batch in batches for row in batch.rows):
        places[UNDECLARED] = UNDECLARED
    loaded = background.pyiceberg.load_table(f"default.{table}")
    _check(_file_rows(loaded, places), batches)
    _check(_pyiceberg_rows(loaded, places), batches, is_loose=True)
    _check(_duckdb_rows(background.duckdb, table, places), batches)
