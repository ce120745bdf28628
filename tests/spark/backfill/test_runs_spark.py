"""Files and databases become rows of change tables, once, whatever ends a run, and never over a later change."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import subprocess
import sys
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from lakefeed.contract.ledger import ChunkMark
from lakefeed.pipeline.backfill import commands, runner
from lakefeed.pipeline.backfill.inputs import FileInput, InputChunk, JdbcInput
from lakefeed.pipeline.backfill.runner import Backfill, CommittedChunk, SchemaMismatch, StagedChunk, commit_chunk
from lakefeed.pipeline.backfill.target import TargetTable
from lakefeed.pipeline.errors import PipelineError
from lakefeed.settings import SettingsError
from tests.fault_proxy import Answer, fault_proxy
from tests.seeds import choose_seed
from tests.service_process import ServiceProcess
from tests.spark.backfill.feeding import (
    CATALOG,
    COMMAND_TIMEOUT_S,
    SOURCE,
    Derby,
    Pusher,
    backfill,
    check_sound,
    fold,
    request,
    rows_of,
    target,
    write_parquet,
)
from tests.spark.conftest import OpenSpark


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

    def read(self, spark: SparkSession, chunk: InputChunk, columns: StructType | None) -> DataFrame:
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
    deaths = iter(["after", "none", "before", "after", "before"])

    def commit(into: TargetTable, staged: StagedChunk, mark: ChunkMark) -> CommittedChunk:
        death = next(deaths, "none")
        if death == "before":
            raise Killed
        written = commit_chunk(into, staged, mark)
        # Rows that were just read: their changes come later, and have to win.
        read = [row["id"] for row in staged.changes.select("id").collect()]
        shop.change(2, flush=chance.random() < 0.5, among=read)
        if death == "after":
            raise Killed
        return written

    monkeypatch.setattr(runner, "commit_chunk", commit)
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

        def spoil_commits(into: TargetTable, staged: StagedChunk, mark: ChunkMark) -> CommittedChunk:
            if mark.chunk == 0:
                fault = Answer(504, forwarded=True)
                spoiled.append(proxy.spoil(fault, method="POST", path="/tables/unanswered$", times=1))
            return commit_chunk(into, staged, mark)

        monkeypatch.setattr(runner, "commit_chunk", spoil_commits)
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
    with pytest.raises(PipelineError, match=r"rows have no key.*key=a,b rows=1"):
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

    with pytest.raises(SettingsError, match="another process has taken over this run"):
        backfill(into, files, wanted, on_chunk=take_over)
    assert len(rows_of(into)) == 4
    assert backfill(into, files, wanted).rows == 6
    assert len(rows_of(into)) == 7


def test_a_run_resumes_only_with_the_key_that_it_started_with(spark: SparkSession, tmp_path: Path) -> None:
    source = write_parquet(tmp_path / "in", 2, 3)
    into = target(spark, CATALOG, "rekeyed")

    def die(_number: int, _rows: int) -> None:
        raise Killed

    with pytest.raises(Killed):
        backfill(into, source, request(position="start", chunk_max_bytes=1), on_chunk=die)
    for key in (("name",), ("id", "name")):
        with pytest.raises(SettingsError, match=f"started with another key.*started_with=id key={','.join(key)}"):
            backfill(into, source, request(position="start", chunk_max_bytes=1, key=key))
    # The same column, however it is written.
    assert backfill(into, source, request(position="start", chunk_max_bytes=1, key=("ID",))).rows == 6
    assert sorted(row["_cdc_row_id"] for row in rows_of(into)) == [*"012345"]
    with pytest.raises(SettingsError, match="started with another key"):
        backfill(into, source, request(position="start", chunk_max_bytes=1, key=("name",)))


def test_a_run_that_is_taken_over_while_it_reads_commits_nothing(spark: SparkSession, tmp_path: Path) -> None:
    into = target(spark, CATALOG, "overtaken")

    class SlowInput(FileInput):
        def read(self, spark: SparkSession, chunk: InputChunk, columns: StructType) -> DataFrame:
            record = into.load_record("slow")
            assert record is not None
            into.save_record(replace(record, owner="somebody else"))
            return super().read(spark, chunk, columns)

    (tmp_path / "in.json").write_text('{"id": 1}\n', encoding="utf-8")
    with pytest.raises(SettingsError, match="another process has taken over this run"):
        backfill(
            into,
            SlowInput(format="jsonl", path=str(tmp_path / "in.json")),
            request(position="start", key=("id",), run="slow"),
        )
    assert rows_of(into) == []


def test_a_table_that_another_client_created_after_the_plan_gets_no_values_that_do_not_fit(
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
    with pytest.raises(SchemaMismatch, match="columns=id"):
        late.run(prepared)
    assert [row["id"] for row in rows_of(into)] == ["a"]


def test_a_table_that_its_source_has_truncated_needs_a_position(
    pusher: Pusher, spark: SparkSession, tmp_path: Path
) -> None:
    pusher.push("emptied", "INSERT", {"id": 1})
    pusher.push("emptied", "TRUNCATE", {"id": 1})
    source = write_parquet(tmp_path / "in", 1, 3)
    into = target(spark, CATALOG, "emptied")
    with pytest.raises(SettingsError, match=f"has truncated the table.*mark=0:{pusher.sequence}"):
        backfill(into, source, request(position="start"))
    backfill(into, source, request(position=f"0:{pusher.sequence}"))
    assert sum(row["_cdc_operation"] == "READ" for row in rows_of(into)) == 3
    spark.sql(f"CREATE TABLE {CATALOG}.default.other (id BIGINT) USING iceberg")
    with pytest.raises(PipelineError, match="not a change table"):
        backfill(target(spark, CATALOG, "other"), source, request(position="start"))


def test_the_command_shows_its_plan_and_resumes_after_sigkill(
    service: ServiceProcess, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that is killed has a Spark of its own, in whose JVM the commit is under way or just done."""
    source = write_parquet(tmp_path / "in", 3, 5)
    (tmp_path / "lakefeed.toml").write_text("[pipeline.backfill]\nchunk_max_bytes = 1\n", encoding="utf-8")
    arguments = ["killed", source.path, "--from", "parquet", "--source", SOURCE, "--key", "id", "--json"]
    arguments += ["--config", str(tmp_path / "lakefeed.toml")]
    program = [sys.executable, "-m", "tests.spark.backfill.killed_backfill", "1", str(random.Random().random() * 0.3)]
    done = subprocess.run(
        [*program, *arguments, "--master", "local[2]", "--url", service.http_url],
        capture_output=True,
        text=True,
        timeout=COMMAND_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    monkeypatch.setattr(runner, "RETRY_DELAY_S", 3.0)
    monkeypatch.setattr(commands, "opened_session", lambda *_, **__: contextlib.nullcontext(spark))
    plan = json.loads(CliRunner().invoke(commands.backfill, [*arguments, "--dry-run"]).output)
    assert (len(plan["chunks"]), plan["done"], plan["isNewTable"], plan["position"]) == (3, 1, False, "0:-1")
    outcome = json.loads(CliRunner().invoke(commands.backfill, arguments).output)
    assert (outcome["rows"], outcome["chunks"], outcome["newChunks"] in (1, 2)) == (15, 3, True)
    assert sorted(row["id"] for row in rows_of(target(spark, CATALOG, "killed"))) == list(range(15))
    check_sound(spark, "killed")
    for wrong, shown in (
        (["--position", "yesterday"], "EPOCH:SEQUENCE"),
        (["--dbtable", "orders"], "--dbtable needs --from jdbc"),
        (["--option", "sep"], "NAME=VALUE"),
        (["--schema", "id BIGINT"], "Parquet has types of its own"),
    ):
        result = CliRunner().invoke(commands.backfill, [*arguments, *wrong])
        assert (result.exit_code, shown in result.output) == (2, True), result.output
