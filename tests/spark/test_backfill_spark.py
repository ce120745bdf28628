"""Files and databases become rows of change tables, once, whatever ends a run, and never over a later change."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import random
import signal
import subprocess
import sys
from collections.abc import Collection, Iterator
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from pipeline.backfill import commands, runner
from pipeline.backfill.chunks import ChunkWriter, Staged, Written
from pipeline.backfill.inputs import FileInput, InputUnreadable
from pipeline.backfill.jdbc import JdbcInput
from pipeline.backfill.plan import Chunk
from pipeline.backfill.runner import Backfill, NotFitting
from pipeline.errors import ConfigError, PipelineError
from pipeline.verification.commands import Selection, verify_all
from tests import every_type
from tests.fault_proxy import Answer, fault_proxy
from tests.seeds import choose_seed
from tests.service_process import LAKEFEED, ServiceProcess, service_process
from tests.spark.backfills import SOURCE, Derby, Pusher, backfill, fold, request, rows_of, target
from tests.spark.conftest import OpenSpark
from writer.verification.backfills import ChunkMark

CATALOG = "filled"
COMMAND_TIMEOUT_S = 180


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    with service_process(tmp_path_factory.mktemp("service")) as running:
        running.start()
        yield running
        assert running.stop() == 0


@pytest.fixture(scope="module")
def pusher(service: ServiceProcess) -> Pusher:
    return Pusher(service)


@pytest.fixture
def spark(service: ServiceProcess, open_spark: OpenSpark) -> SparkSession:
    return open_spark(uri=service.http_url, name=CATALOG)


@pytest.fixture(autouse=True)
def _without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "PAUSE_S", 0.05)


def check_sound(spark: SparkSession, table: str) -> None:
    [report] = verify_all(spark, Selection(tables=[table]), {})
    assert report.findings == []
    assert report.totals_compared


def people(count: int, start: int = 0) -> pa.Table:
    ids = range(start, start + count)
    return pa.table(
        {
            "id": pa.array(ids, pa.int64()),
            "name": [f"name {n}" for n in ids],
            "paid": pa.array([Decimal(n) / 4 for n in ids], pa.decimal128(9, 2)),
            "home": [{"city": f"city {n}", "zip": n} for n in ids],
            "born": pa.array([dt.date(2000, 1, 1)] * count, pa.date32()),
        }
    )


def write_parquet(directory: Path, files: int, rows: int) -> FileInput:
    directory.mkdir()
    for number in range(files):
        pq.write_table(people(rows, number * rows), directory / f"part-{number}.parquet")
    return FileInput(format="parquet", path=str(directory))


def test_a_new_table_is_the_one_that_the_service_would_have_made_and_goes_on_with(
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
    command = [LAKEFEED, "verify", "people", "--url", service.http_url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "everything is as it was recorded"), done.stdout
    # The same command again is a run that was done.
    assert backfill(into, source, request(position="start", chunk_max_bytes=1)).own_chunks == 0
    pq.write_table(people(1, 99), tmp_path / "in" / "part-9.parquet")
    with pytest.raises(InputUnreadable, match="files have changed"):
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
    with pytest.raises(InputUnreadable, match="no JSON objects"):
        backfill(into, FileInput(format="jsonl", path=str(tmp_path / "broken.json")), request(position="mark"))
    with pytest.raises(ConfigError, match="no such column: key=nothing"):
        backfill(into, source, request(position="mark", key=("nothing",), run="another"))
    assert len(rows_of(into)) == len(before)
    check_sound(spark, "notes")


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


class ShopDatabase:
    """A database whose table changes while it is read; each change is pushed after it was made, as sources do."""

    def __init__(self, spark: SparkSession, pusher: Pusher, table: str, chance: random.Random) -> None:
        self.derby = Derby(spark, table)
        self.rows: dict[int, str] = {n: f"old {n}" for n in range(40)}
        self._pusher, self._table, self._chance = pusher, table, chance
        self.derby.run("CREATE TABLE orders (id INT PRIMARY KEY, state VARCHAR(20))")
        self.derby.run(*(f"INSERT INTO orders VALUES ({n}, '{state}')" for n, state in self.rows.items()))

    def change(self, count: int, *, flush: bool, among: Collection[int] = ()) -> None:
        """Make changes of any rows, or of some that are still there."""
        for number in range(count):
            operation = self._chance.choice(["INSERT", "UPDATE", "UPDATE", "DELETE"])
            keys = sorted(self.rows.keys() & among) or sorted(self.rows)
            if operation == "INSERT" and not among:
                key = max(keys) + 1
            else:
                key, operation = self._chance.choice(keys), operation.replace("INSERT", "UPDATE")
            state = f"{operation} {self._pusher.sequence + 1}"
            if operation == "DELETE":
                self.derby.run(f"DELETE FROM orders WHERE id = {key}")
                del self.rows[key]
            elif operation == "UPDATE":
                self.derby.run(f"UPDATE orders SET state = '{state}' WHERE id = {key}")
                self.rows[key] = state
            else:
                self.derby.run(f"INSERT INTO orders VALUES ({key}, '{state}')")
                self.rows[key] = state
            row = {"id": key} if operation == "DELETE" else {"id": key, "state": state}
            self._pusher.push(self._table, operation, row, flush=flush and number == count - 1)


class LiveInput(JdbcInput):
    """The database as an input, which changes between the taking of the mark and the reading of each chunk."""

    __slots__ = ("_shop",)

    def __init__(self, shop: ShopDatabase) -> None:
        super().__init__(url=shop.derby.url, table="orders", column="id")
        object.__setattr__(self, "_shop", shop)

    def read(self, spark: SparkSession, chunk: Chunk, columns: StructType | None) -> DataFrame:
        if columns is not None:
            self._shop.change(4, flush=chunk.number % 2 == 0)
        return super().read(spark, chunk, columns)


class Killed(BaseException):
    """The process ends here: nothing of it is left but what it has written."""


def test_a_database_that_changes_while_it_is_read_and_runs_that_are_killed_end_with_its_rows(
    pusher: Pusher, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(choose_seed("BACKFILL_SEED", 11))
    table = "orders"
    shop = ShopDatabase(spark, pusher, table, chance)
    shop.change(6, flush=True)
    into = target(spark, CATALOG, table)
    wanted = request(position="mark", chunk_max_rows=10)
    real_commit = ChunkWriter.commit
    deaths = iter(["after", "none", "before", "after", "before"])

    def commit(self: ChunkWriter, staged: Staged, mark: ChunkMark) -> Written:
        death = next(deaths, "none")
        if death == "before":
            raise Killed
        written = real_commit(self, staged, mark)
        # Rows that were just read: their changes come later, and have to win.
        read = [row["id"] for row in staged.changes.select("id").collect()]
        shop.change(2, flush=chance.random() < 0.5, among=read)
        if death == "after":
            raise Killed
        return written

    monkeypatch.setattr(ChunkWriter, "commit", commit)
    source, runs = LiveInput(shop), 0
    while True:
        runs += 1
        try:
            outcome = backfill(into, source, wanted)
            break
        except Killed:
            shop.change(1, flush=True)
    pusher.service.flush()
    rows = rows_of(into)
    read = [row for row in rows if row["_cdc_operation"] == "READ"]
    keys = [row["id"] for row in read]
    assert (runs, outcome.chunks) == (5, 4)
    assert len(keys) == len(set(keys)) == outcome.rows
    assert fold(rows, ("state",)) == {key: (state,) for key, state in shop.rows.items()}
    assert {row["_cdc_sequence"] for row in read} <= {row["_cdc_sequence"] for row in rows if row not in read}
    check_sound(spark, table)
    shop.derby.close()


def test_a_commit_that_is_not_answered_is_looked_for_and_not_repeated(
    service: ServiceProcess, open_spark: OpenSpark, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_parquet(tmp_path / "in", 2, 5)
    with fault_proxy(service.http_url) as proxy:
        spark = open_spark(uri=proxy.url, name="unanswered")
        into = target(spark, "unanswered", "unanswered")
        backfill(into, source, request(position="start", run="first"))
        # The next commit that adds rows is done, and told to have failed.
        spoiled = []

        def spoil_commits(self: ChunkWriter, staged: Staged, mark: ChunkMark) -> Written:
            if mark.chunk == 0:
                fault = Answer(504, forwarded=True)
                spoiled.append(proxy.spoil(fault, method="POST", path="/tables/unanswered$", times=1))
            return real_commit(self, staged, mark)

        real_commit = ChunkWriter.commit
        monkeypatch.setattr(ChunkWriter, "commit", spoil_commits)
        outcome = backfill(into, source, request(position="start", run="second", chunk_max_bytes=1))
        assert [rule.met for rule in spoiled] == [1]
        assert (outcome.rows, len(rows_of(into))) == (10, 20)
        check_sound(spark, "unanswered")


def test_a_chunk_whose_snapshot_is_expired_is_found_by_its_rows(spark: SparkSession, tmp_path: Path) -> None:
    source = write_parquet(tmp_path / "in", 2, 5)
    into = target(spark, CATALOG, "expired")
    wanted = request(position="start", chunk_max_bytes=1)
    killed = [True]

    def die_once(number: int, rows: int) -> None:
        if rows and killed and number == 1:
            killed.pop()
            raise Killed

    with pytest.raises(Killed):
        backfill(into, source, wanted, on_chunk=die_once)
    rewrite = "table => 'default.expired', options => map('min-input-files', '1', 'rewrite-all', 'true')"
    spark.sql(f"CALL {CATALOG}.system.rewrite_data_files({rewrite})").collect()
    expiry = "table => 'default.expired', older_than => TIMESTAMP '2099-01-01', retain_last => 1"
    spark.sql(f"CALL {CATALOG}.system.expire_snapshots({expiry})").collect()
    outcome = backfill(into, source, wanted)
    assert (outcome.rows, len(rows_of(into))) == (10, 10)
    check_sound(spark, "expired")


def test_rows_without_a_key_and_runs_that_another_process_has_taken_over_stop(
    spark: SparkSession, tmp_path: Path
) -> None:
    (tmp_path / "in.json").write_text('{"a": 1, "b": "x"}\n{"a": 1}\n', encoding="utf-8")
    into = target(spark, CATALOG, "keyless")
    with pytest.raises(PipelineError, match="rows have no key: key=a,b rows=1"):
        backfill(
            into, FileInput(format="jsonl", path=str(tmp_path / "in.json")), request(position="start", key=("a", "b"))
        )
    (tmp_path / "in.json").write_text('{"a": 1, "b": "x\\"y"}\n', encoding="utf-8")
    source = FileInput(format="jsonl", path=str(tmp_path / "in.json"))
    backfill(into, source, request(position="start", key=("a", "b"), run="keyed"))
    assert [row["_cdc_row_id"] for row in rows_of(into)] == ['[1,"x\\"y"]']
    files = write_parquet(tmp_path / "more", 2, 3)
    wanted = request(position="start", run="contested", chunk_max_bytes=1)

    def take_over(number: int, _rows: int) -> None:
        if number == 0:
            record = into.load_record("contested")
            assert record is not None
            into.save_record(replace(record, owner="somebody else"))

    with pytest.raises(ConfigError, match="another process goes on with this run"):
        backfill(into, files, wanted, on_chunk=take_over)
    assert len(rows_of(into)) == 4
    assert backfill(into, files, wanted).rows == 6
    assert len(rows_of(into)) == 7


def test_a_run_that_is_taken_over_while_it_reads_commits_nothing(spark: SparkSession, tmp_path: Path) -> None:
    into = target(spark, CATALOG, "overtaken")

    class SlowInput(FileInput):
        def read(self, spark: SparkSession, chunk: Chunk, columns: StructType) -> DataFrame:
            record = into.load_record("slow")
            assert record is not None
            into.save_record(replace(record, owner="somebody else"))
            return super().read(spark, chunk, columns)

    (tmp_path / "in.json").write_text('{"id": 1}\n', encoding="utf-8")
    with pytest.raises(ConfigError, match="another process goes on with this run"):
        backfill(
            into,
            SlowInput(format="jsonl", path=str(tmp_path / "in.json")),
            request(position="start", key=("id",), run="slow"),
        )
    assert rows_of(into) == []


def test_a_table_made_by_somebody_else_since_the_plan_gets_no_values_that_do_not_fit(
    spark: SparkSession, tmp_path: Path
) -> None:
    into = target(spark, CATALOG, "raced")
    inputs = []
    for name, line in (("numbers", '{"id": 1}'), ("texts", '{"id": "a"}')):
        (tmp_path / name).write_text(f"{line}\n", encoding="utf-8")
        inputs.append(FileInput(format="jsonl", path=str(tmp_path / name)))
    late = Backfill(into, inputs[0], request(position="start", key=("id",), run="late"))
    prepared = late.prepare()
    backfill(into, inputs[1], request(position="start", key=("id",), run="early"))
    with pytest.raises(NotFitting, match="columns=id"):
        late.run(prepared)
    assert [row["id"] for row in rows_of(into)] == ["a"]


def test_a_table_that_its_source_has_truncated_needs_a_position(
    pusher: Pusher, spark: SparkSession, tmp_path: Path
) -> None:
    pusher.push("emptied", "INSERT", {"id": 1})
    pusher.push("emptied", "TRUNCATE", {"id": 1})
    source = write_parquet(tmp_path / "in", 1, 3)
    into = target(spark, CATALOG, "emptied")
    with pytest.raises(ConfigError, match=f"has truncated the table.*mark=0:{pusher.sequence}"):
        backfill(into, source, request(position="start"))
    backfill(into, source, request(position=f"0:{pusher.sequence}"))
    assert sum(row["_cdc_operation"] == "READ" for row in rows_of(into)) == 3
    spark.sql(f"CREATE TABLE {CATALOG}.default.other (id BIGINT) USING iceberg")
    with pytest.raises(PipelineError, match="not a table of changes"):
        backfill(target(spark, CATALOG, "other"), source, request(position="start"))


def test_the_command_shows_its_plan_and_goes_on_after_kill_nine(
    service: ServiceProcess, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that is killed has a Spark of its own, in whose JVM the commit is under way or just done."""
    source = write_parquet(tmp_path / "in", 3, 5)
    (tmp_path / "lakefeed.toml").write_text("[pipeline.backfill]\nchunk_max_bytes = 1\n", encoding="utf-8")
    arguments = ["killed", source.path, "--from", "parquet", "--source", SOURCE, "--key", "id", "--json"]
    arguments += ["--config", str(tmp_path / "lakefeed.toml")]
    program = [sys.executable, "-m", "tests.spark.dying_backfill", "1", str(random.Random().random() * 0.3)]
    done = subprocess.run(
        [*program, *arguments, "--master", "local[2]", "--url", service.http_url],
        capture_output=True,
        text=True,
        timeout=COMMAND_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    monkeypatch.setattr(runner, "PAUSE_S", 3.0)
    monkeypatch.setattr(commands, "opened_session", lambda *_, **__: contextlib.nullcontext(spark))
    plan = json.loads(CliRunner().invoke(commands.backfill, [*arguments, "--dry-run"]).output)
    assert (len(plan["chunks"]), plan["done"], plan["isNewTable"], plan["position"]) == (3, 1, False, "0:-1")
    outcome = json.loads(CliRunner().invoke(commands.backfill, arguments).output)
    assert (outcome["rows"], outcome["chunks"], outcome["newChunks"] in (1, 2)) == (15, 3, True)
    assert sorted(row["id"] for row in rows_of(target(spark, CATALOG, "killed"))) == list(range(15))
    check_sound(spark, "killed")
    for wrong, shown in (
        (["--position", "yesterday"], "EPOCH:SEQUENCE"),
        (["--dbtable", "orders"], "--dbtable is for --from jdbc"),
        (["--option", "sep"], "NAME=VALUE"),
        (["--schema", "id BIGINT"], "Parquet has types of its own"),
    ):
        result = CliRunner().invoke(commands.backfill, [*arguments, *wrong])
        assert (result.exit_code, shown in result.output) == (2, True), result.output
