"""Values and columns of an input are in the table as if they had been pushed, or are rescued."""

from __future__ import annotations

import datetime as dt
import json
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from lakefeed.pipeline.backfill.inputs import FileInput, InputUnreadable
from lakefeed.pipeline.errors import PipelineError
from lakefeed.settings import SettingsError
from tests import every_type
from tests.lakefeed_process import run_lakefeed
from tests.service_process import ServiceProcess
from tests.spark.backfill.feeding import (
    CATALOG,
    SOURCE,
    Pusher,
    backfill,
    check_sound,
    fold,
    people,
    request,
    rows_of,
    target,
    write_parquet,
)


def test_a_new_table_equals_one_that_the_service_creates_and_the_service_continues_it(
    service: ServiceProcess, pusher: Pusher, spark: SparkSession, tmp_path: Path
) -> None:
    source = write_parquet(tmp_path / "in", 3, 10)
    into = target(spark, CATALOG, "people")
    outcome = backfill(into, source, request(position="start", chunk_max_bytes=1))
    assert (outcome.rows, outcome.chunks) == (30, 3)
    rows = rows_of(into)
    assert sorted(row["id"] for row in rows) == list(range(30))
    [row] = [row for row in rows if row["id"] == 7]
    assert (row["_cdc_operation"], row["_cdc_sequence"], row["_cdc_source"], row["_cdc_row_id"]) == (
        "READ",
        -1,
        SOURCE,
        "7",
    )
    assert (row["name"], row["paid"], row["born"]) == ("name 7", Decimal("1.75"), dt.date(2000, 1, 1))
    assert row["_cdc_ingested_at"] == row["_cdc_timestamp"]
    pusher.push("people", "UPDATE", {"id": 7, "name": "Grace"})
    pusher.push("people", "DELETE", {"id": 8})
    state = fold(rows_of(into), ("name",))
    assert (state[7], 8 in state, len(state)) == (("Grace",), False, 29)
    pusher.push("made_by_us", "INSERT", {"id": 7, "name": "x"})
    ours, made = (service.get(f"/v1/namespaces/default/tables/{name}")["metadata"] for name in ("made_by_us", "people"))
    assert made["partition-specs"] == ours["partition-specs"]
    own = [field for field in ours["schemas"][0]["fields"] if field["name"].startswith("_cdc_")]
    created = [field for field in made["schemas"][0]["fields"] if field["name"].startswith("_cdc_")]
    assert [(f["id"], f["name"], f["required"]) for f in created] == [(f["id"], f["name"], f["required"]) for f in own]
    differing = {"lakefeed.progress", "lakefeed.totals", "owner"}
    assert {k: v for k, v in made["properties"].items() if k not in differing and "backfill" not in k} == {
        k: v for k, v in ours["properties"].items() if k not in differing
    }
    check_sound(spark, "people")
    done = run_lakefeed("verify", "people", "--url", service.http_url)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "everything is as it was recorded"), done.stdout
    # The same command again is a run that was done.
    assert backfill(into, source, request(position="start", chunk_max_bytes=1)).own_chunks == 0
    pq.write_table(people(1, 99), tmp_path / "in" / "part-9.parquet")
    with pytest.raises(InputUnreadable, match="have changed since the run started"):
        backfill(into, source, request(position="start", chunk_max_bytes=1))


def test_text_goes_into_its_column_exactly_or_is_rescued(spark: SparkSession, tmp_path: Path) -> None:
    lines = [
        "id,age,paid,at,when,ok,data,score,note",
        '1,30,1.50,2026-11-16T05:28:00.123456+02:00,2026-11-16,true,AP+A,0.5,"a ""quoted"", one"',
        "2, 30,1.505,2026-11-16T05:28:00,2026,yes,AP+,1d,",
        "3,1.5,1234567.89,16.11.2026,2026-02-30,F,,1e400,''",
        "4,99999999999,1e2,2026-11-16 05:28:00Z,2026-1-1,,====,NaN,x",
        '5,-7,-0.10,2026-11-16T05:28:00+0000,0001-01-01,t,"",-1e-3,""',
    ]
    (tmp_path / "in.csv").write_text("\n".join(lines), encoding="utf-8")
    types = (
        "id BIGINT, age INT, paid DECIMAL(9, 2), at TIMESTAMP, when DATE, ok BOOLEAN, data BINARY, score DOUBLE,"
        " note STRING"
    )
    declared = spark.createDataFrame([], types).schema
    source = FileInput(format="csv", path=str(tmp_path / "in.csv"), declared=declared)
    into = target(spark, CATALOG, "texts")
    backfill(into, source, request(position="start"))
    rows = {row["id"]: row for row in rows_of(into)}
    assert rows[1]["_cdc_rescued"] is None
    shown = spark.table(into.sql).where("id = 1").selectExpr("cast(at as string)").collect()[0][0]
    assert (rows[1]["age"], rows[1]["paid"], shown) == (30, Decimal("1.50"), "2026-11-16 03:28:00.123456")
    assert (rows[1]["ok"], bytes(rows[1]["data"]), rows[1]["note"]) == (True, b"\x00\xff\x80", 'a "quoted", one')
    assert json.loads(rows[2]["_cdc_rescued"]) == {
        "age": " 30",
        "paid": "1.505",
        "at": "2026-11-16T05:28:00",
        "when": "2026",
        "ok": "yes",
        "data": "AP+",
        "score": "1d",
    }
    assert json.loads(rows[3]["_cdc_rescued"]) == {
        "age": "1.5",
        "at": "16.11.2026",
        "when": "2026-02-30",
        "score": "1e400",
    }
    assert (rows[3]["paid"], rows[3]["ok"], rows[3]["data"]) == (Decimal("1234567.89"), False, None)
    assert json.loads(rows[4]["_cdc_rescued"]) == {
        "age": "99999999999",
        "paid": "1e2",
        "when": "2026-1-1",
        "data": "====",
    }
    assert rows[4]["score"] != rows[4]["score"]  # NaN
    assert (rows[5]["_cdc_rescued"], rows[5]["age"], rows[5]["paid"]) == (None, -7, Decimal("-0.10"))
    check_sound(spark, "texts")


def test_json_lines_are_fitted_to_the_table_that_is_there(pusher: Pusher, spark: SparkSession, tmp_path: Path) -> None:
    pusher.push("notes", "INSERT", {"id": 1, "text": "live", "at": {"x": 1}, "kept": "k"})
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.json").write_text('{"ID": 2, "text": "old", "at": {"x": 2, "y": "new"}}\n', encoding="utf-8")
    (tmp_path / "in" / "b.json").write_text('{"ID": 3, "extra": [1, 2]}\n', encoding="utf-8")
    into = target(spark, CATALOG, "notes")
    source = FileInput(format="jsonl", path=str(tmp_path / "in"))
    backfill(into, source, request(position="mark", chunk_max_bytes=1))
    rows = {row["id"]: row for row in rows_of(into)}
    assert (rows[2]["at"]["x"], rows[2]["at"]["y"], rows[1]["at"]["y"]) == (2, "new", None)
    assert (rows[3]["extra"], rows[3]["_cdc_row_id"], rows[3]["_cdc_sequence"]) == ([1, 2], "3", pusher.sequence)
    assert rows[2]["_cdc_unchanged"] == ["kept"]
    before = rows_of(into)
    (tmp_path / "wrong.json").write_text('{"id": 4, "text": {"no": "text"}}\n', encoding="utf-8")
    (tmp_path / "broken.json").write_text('{"id": 4}\nno json\n', encoding="utf-8")
    wrong = FileInput(format="jsonl", path=str(tmp_path / "wrong.json"))
    with pytest.raises(PipelineError, match=r"column=text type=struct<no:string> table_type=string"):
        backfill(into, wrong, request(position="mark"))
    with pytest.raises(InputUnreadable, match="not JSON objects"):
        backfill(into, FileInput(format="jsonl", path=str(tmp_path / "broken.json")), request(position="mark"))
    with pytest.raises(SettingsError, match="no such column: key=nothing"):
        backfill(into, source, request(position="mark", key=("nothing",), run="another"))
    assert len(rows_of(into)) == len(before)
    check_sound(spark, "notes")


def test_an_export_from_before_a_rename_fills_the_column_under_its_new_name(
    service: ServiceProcess, pusher: Pusher, spark: SparkSession, tmp_path: Path
) -> None:
    pusher.push("renamed", "INSERT", {"id": 1, "client": "Ada", "home": {"town": "London"}})
    home = {"type": "struct", "fields": {"city": {"type": "string", "renamedFrom": "town"}}}
    columns = {"customer": {"type": "string", "renamedFrom": "client"}, "home": home}
    pusher.declare({"renamed": {"columns": columns}})
    pusher.push("renamed", "INSERT", {"id": 2, "customer": "Grace", "home": {"city": "New York"}})
    line = {"id": 3, "client": "Edsger", "home": {"town": "Rotterdam"}}
    (tmp_path / "in.json").write_text(json.dumps(line) + "\n", encoding="utf-8")
    into = target(spark, CATALOG, "renamed")
    names = into.columns().names
    backfill(into, FileInput(format="jsonl", path=str(tmp_path / "in.json")), request(position="start"))
    rows = {row["id"]: (row["customer"], row["home"]["city"], row["_cdc_unchanged"]) for row in rows_of(into)}
    assert rows == {1: ("Ada", "London", None), 2: ("Grace", "New York", None), 3: ("Edsger", "Rotterdam", None)}
    assert into.columns().names == names
    check_sound(spark, "renamed")


def test_values_of_every_type_are_read_as_they_would_have_been_pushed(
    service: ServiceProcess, spark: SparkSession, tmp_path: Path
) -> None:
    every_type.push_every_type(service)
    names = every_type.NAMES["every_type"]
    values = dict(every_type.VALUES["every_type"])
    # Spark reads no ids from Parquet, so they come as text.
    arrow = {column[0]: column[2] for column in every_type.TABLES["every_type"]}
    arrow |= {"token": pa.string(), "deep": pa.list_(pa.map_(pa.int32(), pa.list_(pa.string())))}
    values |= {"token": str(values["token"]).upper(), "deep": [{7: [str(values["token"])]}, {}]}
    cells = {name: pa.array([_as_arrow(values[name])], arrow[name]) for name in names}
    wider = pa.table({**cells, "small": pa.array([-(2**31)], pa.int64()), "more": pa.array([1.5], pa.float32())})
    pq.write_table(wider, tmp_path / "in.parquet")
    (tmp_path / "in.csv").write_text("large,token\n7,no id\n", encoding="utf-8")
    into = target(spark, CATALOG, "every_type")
    backfill(
        into, FileInput(format="parquet", path=str(tmp_path / "in.parquet")), request(position="start", key=("large",))
    )
    backfill(into, FileInput(format="csv", path=str(tmp_path / "in.csv")), request(position="start", key=("large",)))
    rows = spark.table(into.sql).where("_cdc_sequence < 2").orderBy("_cdc_sequence", "large").collect()
    rescued, read, pushed = (row.asDict() for row in rows)
    assert {name: read[name] for name in names} == {name: pushed[name] for name in names}
    assert (read["_cdc_rescued"], read["more"], pushed["more"]) == (None, 1.5, None)
    assert dict(spark.table(into.sql).dtypes)["small"] == "bigint"
    assert (rescued["token"], rescued["_cdc_rescued"], rescued["_cdc_row_id"]) == (None, '{"token":"no id"}', "7")
    check_sound(spark, "every_type")


def _as_arrow(value: object) -> object:
    """Give maps as the pairs that Arrow takes them for, at any depth."""
    match value:
        case {"sku": _}:
            return {name: _as_arrow(each) for name, each in value.items()}
        case dict():
            return [(key, _as_arrow(each)) for key, each in value.items()]
        case list():
            return [_as_arrow(each) for each in value]
    return value
