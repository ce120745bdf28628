"""Changes that come late: in whatever order they are merged, a mirror shows what they say in their own order."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody names it
from pyspark.sql.types import ArrayType, StringType, StructType

from lakefeed.pipeline.mirrors.marker import Marker
from lakefeed.pipeline.mirrors.merge import load_state, merge_changes
from lakefeed.pipeline.mirrors.settings import MirrorMode, MirrorSettings, mirror_names
from lakefeed.pipeline.mirrors.table import MirrorOrigin, plan_layout, prepare_mirror
from lakefeed.pipeline.mirrors.tombstones import Tombstones
from lakefeed.pipeline.spark.tables import TableIdentifier
from tests.mirror_model import START_MS, Change, expected_history, expected_rows
from tests.seeds import choose_seed
from tests.spark.conftest import OpenSpark

CHANGES = (
    StructType()
    .add("id", "long")
    .add("label", "string")
    .add("big", "string")
    .add("_cdc_source", "string")
    .add("_cdc_epoch", "long")
    .add("_cdc_sequence", "long")
    .add("time_ms", "long")
    .add("_cdc_operation", "string")
    .add("_cdc_row_id", "string")
    .add("_cdc_unchanged", ArrayType(StringType()))
    .add("_cdc_before", "string")
)
KEYS = 60
BATCHES = 4


class Feed:
    """A mirror that is merged batch by batch, without a stream."""

    def __init__(self, spark: SparkSession, mode: MirrorMode) -> None:
        self.spark = spark
        self._settings = MirrorSettings(key=("id",), mode=mode)
        self._names = mirror_names(
            TableIdentifier.parse("changes"), self._settings, spark.sql("SELECT current_catalog()").collect()[0][0]
        )
        self._layout = plan_layout(self._frame([]).schema, self._settings)
        origin = MirrorOrigin(str(self._names.table), None)
        prepare_mirror(spark, self._names, self._layout, self._settings, origin=origin)
        self._tombstones = Tombstones(self._names, self._layout, settings=self._settings)
        self._tombstones.load(spark)
        self._merges = 0

    def _frame(self, changes: list[Change]) -> Any:
        rows = [_row(change) for change in changes]
        frame = self.spark.createDataFrame(rows, CHANGES).withColumnRenamed("time_ms", "_cdc_timestamp")
        times = frame.withColumn("_cdc_timestamp", F.timestamp_millis("_cdc_timestamp"))
        return times.localCheckpoint()  # read several times by a merge, and slow to come from here

    def merge(self, *changes: Change) -> None:
        self._merges += 1
        marker = Marker(snapshot=self._merges, stream="s", batch=self._merges, run="r", merges=self._merges)
        merge_changes(
            self._frame(list(changes)),
            names=self._names,
            layout=self._layout,
            settings=self._settings,
            tombstones=self._tombstones,
            marker=marker,
            state=load_state(self.spark, self._names),
        )

    def rows(self) -> dict[int, tuple[Any, ...]]:
        """Give the current rows as the model has them."""
        table = self.spark.table(self._names.mirror_sql)
        found = (table.where("is_current") if self._layout.keeps_history else table).collect()
        assert len({row["id"] for row in found}) == len(found)
        return {row["id"]: (row["label"], row["big"]) for row in found}

    def versions(self) -> list[tuple[Any, ...]]:
        ends = "IF(is_current, array(), array(_cdc_ended_by.epoch, _cdc_ended_by.sequence))"
        start = ("_cdc_epoch", "_cdc_sequence", "_cdc_operation = 'READ'")
        rows = self.spark.table(self._names.mirror_sql).selectExpr("id", *start, ends, "label", "big")
        return sorted(((row[0], tuple(row[1:4]), tuple(row[4]), tuple(row[5:])) for row in rows.collect()), key=repr)

    def unknown(self) -> dict[int, list[str] | None]:
        return {row["id"]: row["_cdc_unknown"] for row in self.spark.table(self._names.mirror_sql).collect()}


def _row(change: Change) -> tuple[Any, ...]:
    row = change.row
    before = None if change.old_key is None else json.dumps({"id": change.old_key})
    position = (f"s{change.source}", change.epoch, change.sequence, change.time_ms, change.operation)
    unchanged = list(change.unchanged) or None
    return (change.key, row.get("label"), row.get("big"), *position, str(change.key), unchanged, before)


def at(sequence: int, operation: str, key: int = 1, **more: Any) -> Change:
    """A change of one source, whose time rises with its sequence; columns that are not given were not sent."""
    facts = {name: more.pop(name) for name in ("source", "old_key") if name in more}
    unsent = tuple(name for name in ("label", "big") if name not in more and operation != "DELETE")
    position = {"epoch": 0, "sequence": sequence, "time_ms": START_MS + sequence}
    return Change(**({"source": 0} | facts), **position, operation=operation, key=key, row=more, unchanged=unsent)


@pytest.fixture
def open_feed(catalog_url: str, open_spark: OpenSpark) -> Callable[[MirrorMode], Feed]:
    def opened(mode: MirrorMode) -> Feed:
        name = f"late_{mode.name.lower()}_{random.randrange(10**9)}"
        spark = open_spark(uri=catalog_url, name=name)
        spark.sql("CREATE NAMESPACE IF NOT EXISTS default")
        return Feed(spark, mode)

    return opened


@pytest.mark.parametrize("mode", [MirrorMode.DELETION_VECTORS, MirrorMode.HISTORY])  # copy-on-write: the random one
def test_values_of_late_changes_reach_rows_whose_later_changes_did_not_send_them(
    open_feed: Callable[[MirrorMode], Feed], mode: MirrorMode
) -> None:
    feed = open_feed(mode)
    feed.merge(
        at(1, "INSERT", 1, label="x", big="A"),
        at(10, "UPDATE", 2, label="y"),
        at(1, "INSERT", 3, label="x", big="A"),
        at(1, "INSERT", 4, label="x", big="A"),
        at(1, "INSERT", 5, label="x", big="A"),
    )
    feed.merge(*(at(10, "UPDATE", key, label="y") for key in (1, 3, 4)), at(10, "UPDATE", 5, label="y", big="C"))
    late = (
        at(5, "UPDATE", 1, label="l", big="B"),
        at(3, "INSERT", 2, label="l", big="B"),
        at(5, "DELETE", 3),
        at(5, "UPDATE", 4, label="l"),
        at(5, "UPDATE", 5, label="l", big="B"),
    )
    for _ in range(2):  # comes again, and changes nothing
        feed.merge(*late)
        assert feed.rows() == {1: ("y", "B"), 2: ("y", "B"), 3: ("y", None), 4: ("y", "A"), 5: ("y", "C")}
        assert not any(feed.unknown().values())
    # Older than what came late, and what comes later than all.
    feed.merge(at(4, "UPDATE", 1, label="l", big="0"), at(2, "READ", 2, label="r", big="0"))
    feed.merge(at(11, "UPDATE", 1, label="z"), at(8, "UPDATE", 2, big="8"))
    assert feed.rows()[1] == ("z", "B")
    assert feed.rows()[2] == ("y", "8")


def test_a_late_value_from_before_a_delete_does_not_reach_the_row_behind_it(
    open_feed: Callable[[MirrorMode], Feed],
) -> None:
    feed = open_feed(MirrorMode.COPY_ON_WRITE)
    feed.merge(at(4, "DELETE", 1), at(1, "INSERT", 2, label="x", big="A"))
    feed.merge(at(3, "READ", 1, label="r", big="old"), at(5, "UPDATE", 1, label="y"))
    assert feed.rows() == {1: ("y", None), 2: ("x", "A")}


def shuffled(seed: int) -> list[Change]:
    """Make up changes of many keys, whose values nobody would expect; of odd keys two sources tell."""
    chance = random.Random(seed)
    changes = []
    sequences = {0: 0, 1: 0}
    time_ms = START_MS
    for _ in range(KEYS * 7):
        key = chance.randrange(KEYS)
        time_ms += 1
        source = chance.randrange(2) if key % 2 else 0
        sequences[source] += 1
        operations = ["INSERT", "UPDATE", "DELETE"] + ([] if key % 2 else ["READ"])
        operation = chance.choices(operations, [2, 6, 2, 1][: len(operations)])[0]
        values = {"label": f"l{time_ms % 100_000}", "big": f"b{time_ms % 100_000}" if chance.random() < 0.8 else None}
        if operation == "UPDATE":
            values = {name: value for name, value in values.items() if chance.random() < 0.5}
        change = at(0, operation, key, source=source, **({} if operation == "DELETE" else values))
        change = replace(change, sequence=sequences[source], time_ms=time_ms)
        if operation == "UPDATE" and chance.random() < 0.1:
            change = replace(change, old_key=(key + 2 * chance.randrange(1, KEYS // 2)) % KEYS)
        changes.append(change)
    return changes


@pytest.mark.parametrize("mode", [MirrorMode.COPY_ON_WRITE, MirrorMode.HISTORY])
def test_changes_in_any_order_and_any_batches_end_as_the_model_says(
    open_feed: Callable[[MirrorMode], Feed], mode: MirrorMode
) -> None:
    seed = choose_seed("MIRROR_SEED", 20261116)
    changes, chance = shuffled(seed), random.Random(seed)
    batches: list[list[Change]] = [[] for _ in range(BATCHES)]
    for change in changes:
        chance.choice(batches).append(change)
    feed = open_feed(mode)
    for batch in batches:
        feed.merge(*batch)
    columns = ("label", "big")
    assert feed.rows() == expected_rows(changes, columns)
    if mode is MirrorMode.HISTORY:
        assert feed.versions() == sorted(expected_history(changes, columns), key=repr)
