"""The steps from changes to rows, each on a few rows."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import ArrayType, StringType, StructField, StructType

from lakefeed.pipeline.mirrors.fold import (
    Truncate,
    fold,
    lacks_key,
    prepare,
    unknown_names,
    with_key_changes,
    without_tombstoned,
    without_truncated,
)
from lakefeed.pipeline.mirrors.history import versions_of
from lakefeed.pipeline.mirrors.settings import MirrorMode, MirrorSettings
from lakefeed.pipeline.mirrors.table import Layout, plan_layout
from lakefeed.pipeline.spark.tables import text_literal

CHANGES = (
    StructType()
    .add("id", "integer")
    .add("a", "string")
    .add("b", "string")
    .add("_cdc_source", "string")
    .add("_cdc_epoch", "integer")
    .add("_cdc_sequence", "long")
    .add("_cdc_timestamp", "timestamp")
    .add("_cdc_operation", "string")
    .add("_cdc_row_id", "string")
    .add("_cdc_unchanged", ArrayType(StringType()))
    .add("_cdc_before", "string")
    .add("_cdc_rescued", "string")
)


@pytest.fixture
def spark(running_spark: SparkSession) -> SparkSession:
    session = running_spark.newSession()
    session.conf.set("spark.sql.defaultCatalog", "spark_catalog")  # no catalog of ours is asked for anything
    return session


def at(second: int) -> datetime:
    return datetime.fromtimestamp(1_800_000_000 + second, UTC)


def change(sequence: int, operation: str, key: int | None, a: str | None = None, **more: Any) -> dict[str, Any]:
    facts = {"_cdc_source": "s", "_cdc_timestamp": at(sequence), "_cdc_row_id": str(key or ""), "_cdc_epoch": None}
    return {"_cdc_sequence": sequence, "_cdc_operation": operation, "id": key, "a": a, **facts, **more}


def frame(spark: SparkSession, *changes: dict[str, Any]) -> DataFrame:
    rows = [tuple(each.get(name) for name in CHANGES.names) for each in changes]
    return spark.createDataFrame(rows, CHANGES)


def layout_of(**settings: Any) -> Layout:
    return plan_layout(CHANGES, MirrorSettings(key=("id",), **settings))


def folded(spark: SparkSession, *changes: dict[str, Any], **options: Any) -> dict[int, tuple[Any, ...]]:
    layout = layout_of()
    events = with_key_changes(prepare(frame(spark, *changes), layout), layout)
    rows = fold(events, layout, **options).collect()
    found = {row["id"]: (row["a"], row["b"], row["_cdc_sequence"], row["_cdc_is_deleted"]) for row in rows}
    assert len(found) == len(rows)
    return found


def test_the_last_change_of_each_key_stays_by_epoch_and_sequence(spark: SparkSession) -> None:
    found = folded(
        spark,
        change(7, "UPDATE", 1, "new"),
        change(3, "INSERT", 1, "old"),
        change(9, "INSERT", 2, "before the restart"),
        change(1, "UPDATE", 2, "after it", _cdc_epoch=1),
        change(5, "INSERT", 3, "x"),
        change(6, "DELETE", 3),
        change(8, "MESSAGE", 4),
    )
    assert found == {
        1: ("new", None, 7, False),
        2: ("after it", None, 1, False),
        3: (None, None, 6, True),
    }


def test_between_sources_the_later_time_counts_and_within_one_the_position(spark: SparkSession) -> None:
    found = folded(
        spark,
        change(100, "INSERT", 1, "one", _cdc_source="one", _cdc_timestamp=at(1)),
        change(2, "UPDATE", 1, "two", _cdc_source="two", _cdc_timestamp=at(2)),
        change(5, "UPDATE", 2, "first", _cdc_source="one", _cdc_timestamp=at(9)),
        change(6, "UPDATE", 2, "second", _cdc_source="one", _cdc_timestamp=at(3)),
        change(1, "UPDATE", 2, "other", _cdc_source="two", _cdc_timestamp=at(7)),
    )
    assert (found[1][0], found[2][0]) == ("two", "second")


def test_a_read_loses_to_a_change_at_its_own_position(spark: SparkSession) -> None:
    found = folded(
        spark,
        change(5, "READ", 1, "read", _cdc_timestamp=at(50)),
        change(5, "UPDATE", 1, "streamed"),
        change(4, "UPDATE", 2, "streamed"),
        change(5, "READ", 2, "read"),
    )
    assert (found[1][0], found[2][0]) == ("streamed", "read")


def test_columns_that_were_not_sent_come_from_the_changes_before(spark: SparkSession) -> None:
    found = folded(
        spark,
        change(1, "INSERT", 1, "a1", b="b1"),
        change(2, "UPDATE", 1, "a2", _cdc_unchanged=["b"]),
        change(3, "UPDATE", 1, "a3", _cdc_unchanged=["b"]),
        change(1, "INSERT", 2, "a1", b="b1"),
        change(2, "DELETE", 2),
        change(3, "INSERT", 2, "a3", _cdc_unchanged=["b"]),
        change(3, "UPDATE", 3, "a3", _cdc_unchanged=["b"]),
        unchanged=["b"],
    )
    assert found[1] == ("a3", "b1", 3, False)
    assert found[2] == ("a3", None, 3, False)
    assert found[3] == ("a3", None, 3, False)


def renamed_layout(**settings: Any) -> Layout:
    fields = [
        StructField("label", StringType(), True, {"comment": 'formerly ["b"]'}) if field.name == "b" else field
        for field in CHANGES.fields
    ]
    return plan_layout(StructType(fields), MirrorSettings(key=("id",), **settings))


def test_columns_that_were_not_sent_under_a_former_name_come_from_the_changes_before(spark: SparkSession) -> None:
    layout = renamed_layout()
    changes = frame(
        spark,
        change(1, "INSERT", 1, "a1", b="b1"),
        change(2, "UPDATE", 1, "a2", _cdc_unchanged=["b"]),
        change(3, "UPDATE", 1, "a3", _cdc_unchanged=["label"]),
        change(4, "UPDATE", 2, "a4", _cdc_unchanged=["b"]),
    ).withColumnRenamed("b", "label")
    events = prepare(changes, layout)
    assert {name for row in events.collect() for name in row["_cdc_unchanged"] or ()} == {"label"}
    rows = {
        row["id"]: (row["label"], row["_cdc_unknown"]) for row in fold(events, layout, unchanged=["label"]).collect()
    }
    assert rows == {1: ("b1", None), 2: (None, ["label"])}


def test_a_stored_version_that_lacks_a_column_under_its_former_name_gets_it(spark: SparkSession) -> None:
    first = [change(4, "UPDATE", 1, "y", _cdc_unchanged=["b"])]
    stored = versions(spark, first, unchanged=["b"]).withColumnRenamed("b", "label").localCheckpoint()
    assert [row["_cdc_unknown"] for row in stored.collect()] == [["b"]]
    layout = renamed_layout(mode=MirrorMode.HISTORY)
    late = frame(spark, change(3, "READ", 1, "x", b="b1")).withColumnRenamed("b", "label")
    options: dict[str, Any] = {"tombstones": None, "unchanged": ["label"], "truncates": ()}
    found = versions_of(prepare(late, layout), stored=stored, layout=layout, **options)
    assert sorted((row["a"], row["label"], row["_cdc_unknown"]) for row in found.collect()) == [
        ("x", "b1", None),
        ("y", "b1", None),
    ]


def test_what_a_stored_row_lacks_is_named_as_it_is_called_now(spark: SparkSession) -> None:
    names = unknown_names("t", renamed_layout())
    rows = spark.sql(
        f"SELECT {names} FROM VALUES (array('b', 'a', 'label')), (NULL) AS t(_cdc_unknown), "
        "VALUES ('x', 'y') AS s(_cdc_name, label)"
    )
    assert [row[0] for row in rows.collect()] == [["label", "a", "label"], []]


def test_a_text_is_itself_where_spark_looks_for_variables(spark: SparkSession) -> None:
    spark.conf.set("spark.sql.variable.substitute", "true")
    spark.conf.set("b", "value")
    for text in ("a${b}", "${env:HOME}", "\\${b}'", "\\u0024", "a$b"):
        assert spark.sql(f"SELECT {text_literal(text)}").collect()[0][0] == text


def test_the_origin_of_a_value_is_reported(spark: SparkSession) -> None:
    layout = layout_of()
    changes = frame(
        spark,
        change(1, "INSERT", 1, b="b1"),
        change(2, "UPDATE", 1, _cdc_unchanged=["b"]),
        change(2, "UPDATE", 2, _cdc_unchanged=["b"]),
    )
    rows = fold(prepare(changes, layout), layout, unchanged=["b"]).collect()
    sent_at = {row["id"]: row["_cdc_sent_at_b"] and row["_cdc_sent_at_b"]["_cdc_sequence"] for row in rows}
    assert sent_at == {1: 1, 2: None}


def test_a_row_that_got_another_key_is_deleted_under_its_old_one(spark: SparkSession) -> None:
    found = folded(
        spark,
        change(1, "INSERT", 1, "x"),
        change(2, "UPDATE", 5, "x", _cdc_before='{"id": 1, "a": "x"}'),
        change(3, "UPDATE", 6, "y", _cdc_before='{"id": "__bigint__:6"}'),
        change(4, "UPDATE", 7, "z", _cdc_before='{"a": "z"}'),
    )
    assert found[1] == (None, None, 2, True)
    assert {key for key, row in found.items() if not row[3]} == {5, 6, 7}


def test_an_old_key_is_found_under_any_name_that_its_column_had(spark: SparkSession) -> None:
    comment = {"comment": 'formerly ["nr", "id"]'}
    fields = [
        StructField("number", field.dataType, True, comment) if field.name == "id" else field for field in CHANGES
    ]
    layout = plan_layout(StructType(fields), MirrorSettings(key=("number",)))
    changes = frame(
        spark,
        change(2, "UPDATE", 5, "x", _cdc_before='{"id": 1}'),
        change(3, "UPDATE", 6, "x", _cdc_before='{"number": 5}'),
        change(4, "UPDATE", 7, "x", _cdc_before='{"nr": 6}'),
    ).withColumnRenamed("id", "number")
    events = with_key_changes(prepare(changes, layout), layout)
    deleted = {row["number"] for row in events.collect() if row["_cdc_operation"] == "DELETE"}
    assert deleted == {1, 5, 6}


def test_a_truncate_takes_the_rows_of_its_source_before_it(spark: SparkSession) -> None:
    layout = layout_of()
    changes = frame(
        spark,
        change(4, "INSERT", 1),
        change(5, "TRUNCATE", None),
        change(5, "READ", 2),
        change(6, "INSERT", 3),
        change(4, "INSERT", 4, _cdc_source="other"),
        change(9, "INSERT", 5, _cdc_epoch=1),
    )
    rows = without_truncated(prepare(changes, layout), [Truncate("s", 0, 5)]).collect()
    assert {row["id"] for row in rows} == {2, 3, 4, 5}, "a row that was read at a truncate was read behind it"


def test_a_row_is_blocked_by_a_tombstone_that_is_not_older(spark: SparkSession) -> None:
    layout = layout_of()
    rows = fold(
        prepare(
            frame(
                spark,
                change(4, "INSERT", 1),
                change(5, "READ", 2),
                change(6, "INSERT", 3),
                change(4, "DELETE", 4),
            ),
            layout,
        ),
        layout,
    )
    tombstones = prepare(frame(spark, *(change(5, "DELETE", key) for key in (1, 2, 3, 4))), layout)
    assert {row["id"] for row in without_tombstoned(rows, tombstones, layout).collect()} == {3, 4}


@pytest.mark.parametrize(("key", "missing"), [(("id",), {7}), (("_cdc_row_id",), {7, 8}), (("id", "a"), {7, 9})])
def test_a_change_without_a_part_of_its_key_is_found(
    spark: SparkSession, key: tuple[str, ...], missing: set[int]
) -> None:
    layout = plan_layout(CHANGES, MirrorSettings(key=key))
    changes = frame(
        spark,
        change(6, "INSERT", 1, "x"),
        change(7, "INSERT", None, "x"),
        change(8, "INSERT", 2, "x", _cdc_row_id=""),
        change(9, "INSERT", 2),
        change(10, "TRUNCATE", None),
    )
    found = prepare(changes, layout).where(lacks_key(layout)).collect()
    assert {row["_cdc_sequence"] for row in found} == missing


def versions(
    spark: SparkSession, changes: list[dict[str, Any]], stored: DataFrame | None = None, **options: Any
) -> DataFrame:
    layout = layout_of(mode=MirrorMode.HISTORY)
    events = without_truncated(prepare(frame(spark, *changes), layout), ())
    empty = spark.createDataFrame([], layout.schema)
    usual: dict[str, Any] = {"tombstones": None, "unchanged": (), "truncates": ()}
    return versions_of(events, stored=empty if stored is None else stored, layout=layout, **(usual | options))


def spans(rows: DataFrame) -> list[tuple[Any, ...]]:
    ends = [(row["id"], row["a"], row["_cdc_sequence"], row["_cdc_ended_by"]) for row in rows.collect()]
    return sorted((key, a, start, end and end["sequence"]) for key, a, start, end in ends)


def test_a_version_ends_where_the_next_event_of_its_row_begins(spark: SparkSession) -> None:
    found = versions(
        spark,
        [
            change(1, "INSERT", 1, "x"),
            change(4, "UPDATE", 1, "y"),
            change(6, "DELETE", 1),
            change(9, "INSERT", 1, "z"),
            change(2, "INSERT", 2, "q"),
        ],
        truncates=[Truncate("s", 0, 7, "2027-01-15 08:00:07")],
    )
    assert spans(found) == [(1, "x", 1, 4), (1, "y", 4, 6), (1, "z", 9, None), (2, "q", 2, 7)]
    row = found.where("a = 'y'").collect()[0]
    assert (row["valid_to"] - row["valid_from"]).total_seconds() == 2
    assert row["is_current"] is False


def test_a_version_behind_a_truncate_takes_nothing_from_one_before_it(spark: SparkSession) -> None:
    found = versions(
        spark,
        [
            change(1, "INSERT", 1, "x", b="b1"),
            change(3, "UPDATE", 1, "y", _cdc_unchanged=["b"]),
            change(7, "UPDATE", 1, "z", _cdc_unchanged=["b"]),
        ],
        unchanged=["b"],
        truncates=[Truncate("s", 0, 5, "2027-01-15 08:00:05")],
    )
    rows = [(row["a"], row["b"], row["_cdc_unknown"]) for row in found.orderBy("_cdc_sequence").collect()]
    assert rows == [("x", "b1", None), ("y", "b1", None), ("z", None, ["b"])]


def test_a_version_that_was_read_at_a_truncate_is_not_ended_by_it(spark: SparkSession) -> None:
    emptied = Truncate("s", 0, 5, "2027-01-15 08:00:05")
    inserted, read = change(1, "INSERT", 1, "x"), change(5, "READ", 1, "r")
    together = versions(spark, [inserted, read], truncates=[emptied])
    expected = [(1, "r", 5, None), (1, "x", 1, 5)]
    assert spans(together) == expected
    assert together.where("a = 'x'").collect()[0]["_cdc_ended_by"]["operation"] == "TRUNCATE"
    stored = versions(spark, [inserted], truncates=[emptied]).localCheckpoint()
    assert spans(versions(spark, [read], stored, earlier_truncates=[emptied])) == expected[:1], "the other one stays"
    assert spans(versions(spark, [read], stored)) == expected[:1], "a later truncate stands for all before it"


def test_a_late_change_finds_its_place_and_a_repeated_one_changes_nothing(spark: SparkSession) -> None:
    first = [change(1, "INSERT", 1, "x"), change(6, "DELETE", 1), change(9, "INSERT", 1, "z")]
    stored = versions(spark, first).localCheckpoint()
    assert versions(spark, first, stored).count() == 0
    late = versions(spark, [change(4, "UPDATE", 1, "y", b="b"), change(7, "READ", 1, "r")], stored)
    assert spans(late) == [(1, "r", 7, 9), (1, "x", 1, 4), (1, "y", 4, 6)]


def test_a_version_that_began_with_a_read_is_not_ended_by_its_own_begin(spark: SparkSession) -> None:
    stored = versions(spark, [change(1, "INSERT", 1, "x", b="b"), change(5, "READ", 1, "r")]).localCheckpoint()
    again = versions(spark, [change(7, "UPDATE", 1, "y", _cdc_unchanged=["b"])], stored, unchanged=["b"])
    assert spans(again) == [(1, "r", 5, 7), (1, "y", 7, None)]


def test_a_late_row_behind_a_forgotten_delete_is_ended_by_its_tombstone(spark: SparkSession) -> None:
    layout = layout_of()
    tombstones = prepare(frame(spark, change(6, "DELETE", 1)), layout)
    assert spans(versions(spark, [change(5, "READ", 1, "r")], tombstones=tombstones)) == [(1, "r", 5, 6)]


def test_columns_that_a_version_did_not_send_come_from_the_stored_one_before(spark: SparkSession) -> None:
    stored = versions(spark, [change(1, "INSERT", 1, "x", b="b1")]).localCheckpoint()
    found = versions(spark, [change(4, "UPDATE", 1, "y", _cdc_unchanged=["b"])], stored, unchanged=["b"])
    assert {(row["a"], row["b"], row["is_current"]) for row in found.collect()} == {
        ("x", "b1", False),
        ("y", "b1", True),
    }
