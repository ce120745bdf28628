"""Mirrors end as the model says, whatever the sources do and whenever Spark is killed."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import LongType, StructType
from websockets.sync.client import connect

from lakefeed.pipeline.mirrors.commands import run_mirrors
from tests import mirror_model
from tests.mirror_driver import STEPS, mirror_config
from tests.mirror_model import Change, Database, expected_history, expected_rows
from tests.seeds import choose_count, choose_seed
from tests.service_process import ServiceProcess, service_process
from tests.spark.conftest import OpenSpark

pytestmark = [pytest.mark.timeout(1800), pytest.mark.crash]

ROOT = Path(__file__).parent.parent.parent
MODES = {"default.cow": "copy-on-write", "default.dv": "deletion-vectors", "default.hist": "history"}
KILLED_WITHIN_S = 600.0
# Changes, small enough for the table's own history to be read again and again.
ROUNDS_MAX = 400
REPEATED_MAX = 100


@dataclass
class World:
    """A service with the same changes in several tables, and what the model knows of them."""

    service: ServiceProcess
    database: Database
    random: random.Random
    said: list[Change] = field(default_factory=list)
    reads: list[Change] = field(default_factory=list)
    kept: list[Change] = field(default_factory=list)

    def push_round(self) -> None:
        """Let every source go on; some batches come twice or overlap with those before, some changes do not come."""
        number = self.database.round
        for changes in self.database.play_round():
            sent, kept = self.database.keep_back(changes)
            self.said += sent
            self.kept += kept
            for table in MODES if sent else ():
                self._push(table, sent, number)
        assert self.service.flush()["success"]

    def _push(self, table: str, changes: list[Change], number: int) -> None:
        events = [_event(change, table, number) for change in changes]
        cuts = sorted(self.random.randint(0, len(events)) for _ in range(2))
        parts = [part for part in (events[: cuts[0]], events[cuts[0] : cuts[1]], events[cuts[1] :]) if part]
        if self.random.random() < 0.5:
            parts.insert(self.random.randint(1, len(parts)), parts[0])  # comes again, behind others
        with connect(self.service.ws_url) as socket:
            hello = {
                "type": "connect",
                "sourceDoId": _source(changes[0].source, table),
                "epoch": changes[0].epoch,
                "tables": {table: {"columns": _declared(number)}},
            }
            socket.send(json.dumps(hello))
            status = json.loads(socket.recv(timeout=120))
            assert status["type"] == "status", status
            for place, part in enumerate(parts):
                socket.send(json.dumps({"type": "cdc_batch", "sequenceNumber": place, "events": part}))
                ack = json.loads(socket.recv(timeout=120))
                assert ack["type"] == "ack", ack

    def append_late(self, spark: SparkSession, *, kept_share: float = 0.3) -> None:
        """Append rows that were read some rounds ago, changes that were kept back, and old changes once more."""
        late, self.reads = self.reads, self.database.read_now()
        late += self._kept_no_longer(spark, kept_share)
        for table in MODES:
            name = f"{spark.catalog.currentCatalog()}.{table}"
            share = self.random.random() * 0.3
            again = f"SELECT * FROM {name} WHERE rand({self.random.randrange(1000)}) < {share} LIMIT {REPEATED_MAX}"
            spark.sql(f"INSERT INTO {name} {again}")
            self._append(spark, name, table, late)
        self.said += late

    def _kept_no_longer(self, spark: SparkSession, share: float) -> list[Change]:
        """Take what was kept back and fits the tables by now, as a replay of the quarantine would."""
        schema = spark.table(f"{spark.catalog.currentCatalog()}.{next(iter(MODES))}").schema
        fitting = [change for change in self.kept if self.random.random() < share and _fits(change, schema)]
        self.kept = [change for change in self.kept if change not in fitting]
        return fitting

    def _append(self, spark: SparkSession, name: str, table: str, changes: list[Change]) -> None:
        if not changes:
            return
        schema = spark.table(name).schema
        rows = [_late_row(change, table, schema) for change in changes]
        selects = (f"SELECT {', '.join(row)}" for row in rows)
        spark.sql(f"INSERT INTO {name} {' UNION ALL '.join(selects)}")


def _fits(change: Change, schema: StructType) -> bool:
    is_new = "extra" in change.row and not ("extra" in schema.names and "zip" in str(schema["home"].dataType))
    is_wide = (change.row.get("small") or 0) >= 2**31 and schema["small"].dataType != LongType()
    return not is_new and not is_wide


def _late_row(change: Change, table: str, schema: StructType) -> list[str]:
    """Write a change as the values of an INSERT, in the columns that the table has by now."""
    home = f"'city', {_sql(change.row.get('city'))}"
    if "zip" in str(schema["home"].dataType):
        home += f", 'zip', CAST({_sql(change.row.get('zip'))} AS bigint)"
    old_key = change.key if change.old_key is None else change.old_key
    values = {
        "id": str(change.key),
        "label" if "label" in schema.names else "name": _sql(change.row.get("label")),
        "big": _sql(change.row.get("big")),
        "small": _sql(change.row.get("small")),
        "extra": _sql(change.row.get("extra")),
        "home": f"named_struct({home})",
        "_cdc_source": _sql(_source(change.source, table)),
        "_cdc_epoch": str(change.epoch),
        "_cdc_sequence": str(change.sequence),
        "_cdc_timestamp": f"timestamp_millis({change.time_ms})",
        "_cdc_ingested_at": f"timestamp_millis({change.time_ms})",
        "_cdc_operation": _sql(change.operation),
        "_cdc_row_id": _sql(str(change.key)),
        "_cdc_unchanged": f"array({', '.join(map(_sql, change.unchanged))})" if change.unchanged else "NULL",
        "_cdc_before": _sql(json.dumps({"id": old_key})) if change.operation == "UPDATE" else "NULL",
    }
    return [values.get(name, "NULL") for name in schema.names]


def _source(number: int, table: str) -> str:
    return f"{table}-{number}"


def _sql(value: object) -> str:
    return "NULL" if value is None else f"'{value}'" if isinstance(value, str) else str(value)


def _declared(number: int) -> dict[str, Any]:
    label: Any = {"label": {"type": "string", "renamedFrom": "name"}}
    if number < mirror_model.RENAMED_FROM:
        label = {"name": "string"}
    return {"id": "long", **label, "big": "string", "small": "int"}


def _event(change: Change, table: str, number: int) -> dict[str, Any]:
    event: dict[str, Any] = {
        "sequence": change.sequence,
        "timestamp": change.time_ms,
        "table": table,
        "operation": change.operation,
    }
    if change.key is None:
        return event
    event["rowId"] = str(change.key)
    if change.operation == "DELETE":
        return event | {"before": {"id": change.key}}
    row = dict(change.row)
    label = "label" if number >= mirror_model.RENAMED_FROM else "name"
    row[label] = row.pop("label")
    home = {name: row.pop(name) for name in ("city", "zip") if name in row}
    old_key = change.key if change.old_key is None else change.old_key
    event |= {"after": {"id": change.key, **row, "home": home}, "before": {"id": old_key}}
    return event | ({"unchanged": list(change.unchanged)} if change.unchanged else {})


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    seed = choose_seed("MIRROR_SEED", 20261116)
    with service_process(tmp_path, {"writer.keep_before": "true"}) as service:
        service.start()
        yield World(service, Database(seed), random.Random(seed))


def start_driver(world: World, checkpoints: Path, step: str, countdown: int) -> subprocess.Popen[bytes]:
    order = {
        "url": world.service.http_url,
        "modes": MODES,
        "checkpoints": str(checkpoints),
        "step": step,
        "countdown": countdown,
    }
    with (world.service.directory / "driver.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.mirror_driver", json.dumps(order)],
            cwd=ROOT,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def test_mirrors_are_what_the_model_says_after_random_changes_and_kills_of_spark(
    world: World, open_spark: OpenSpark, tmp_path: Path
) -> None:
    spark = open_spark(uri=world.service.http_url, name="killed")
    world.push_round()
    for number in range(choose_count("MIRROR_ROUNDS", 2)):
        # The first one has to build the three mirrors before it gets to a batch of a stream.
        step, countdown = STEPS[(number + 1) % 2], world.random.randint(1, 3) + (0 if number else len(MODES))
        driver = start_driver(world, tmp_path / "checkpoints", step, countdown)
        try:
            push_until_killed(world, spark, driver)
        finally:
            driver.kill()
            driver.wait()
        assert driver.returncode == -signal.SIGKILL, (tmp_path / "driver.log").read_text()
    world.push_round()
    world.append_late(spark, kept_share=1.0)
    failures = run_mirrors(spark, list(MODES), mirror_config(MODES, str(tmp_path / "checkpoints")), once=True)
    assert failures == {}
    check_mirrors(world, spark)


def push_until_killed(world: World, spark: SparkSession, driver: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + KILLED_WITHIN_S
    while driver.poll() is None:
        assert time.monotonic() < deadline, "the driver was not killed"
        if world.database.round < ROUNDS_MAX:
            world.push_round()
            if world.random.random() < 0.5:
                world.append_late(spark)
        time.sleep(0.5)


def check_mirrors(world: World, spark: SparkSession) -> None:
    columns = ["id", "label", "big", "small", "extra", "home.city", "home.zip"]
    expected = expected_rows(world.said)
    for table in ("cow", "dv"):
        rows = spark.table(f"killed.default.{table}_current").select(*columns).collect()
        assert sorted(tuple(row) for row in rows) == sorted((key, *values) for key, values in expected.items())
    history = spark.table("killed.default.hist_history").selectExpr(
        "id", "_cdc_epoch", "_cdc_sequence", "_cdc_operation = 'READ'", "_cdc_ended_by", "is_current", *columns[1:]
    )
    found = []
    for row in history.collect():
        assert row["is_current"] == (row["_cdc_ended_by"] is None)
        end = () if row["is_current"] else (row["_cdc_ended_by"]["epoch"], row["_cdc_ended_by"]["sequence"])
        found.append((row[0], tuple(row[1:4]), end, tuple(row[6:])))
    assert sorted(found, key=repr) == sorted(expected_history(world.said), key=repr)
