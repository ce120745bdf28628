"""Rows of a backfill have the ids that live changes give them, or the backfill is refused."""

from __future__ import annotations

import base64
import datetime as dt
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import types as t
from pyspark.sql.types import StructField, StructType

from lakefeed.ingest.cli.push import read_change
from lakefeed.ingest.debezium.envelope import read_events
from lakefeed.ingest.debezium.events import Change, DebeziumConfig, TableKeys
from lakefeed.pipeline.backfill.inputs import FileInput, JdbcInput
from lakefeed.pipeline.backfill.rows import form_problem, row_id
from lakefeed.pipeline.backfill.runner import SchemaMismatch
from lakefeed.pipeline.backfill.types import FittedColumn, fit_columns
from lakefeed.pipeline.mirrors.table import MIRROR_KEY
from lakefeed.settings import SettingsError
from tests.ingest.debezium.envelopes import envelope
from tests.spark.backfill.feeding import CATALOG, Derby, Pusher, backfill, check_sound, request, rows_of, target

EPOCH = dt.datetime(1970, 1, 1)
# Jackson, which Debezium writes with, escapes what JSON wants escaped and nothing else.
ODD_TEXT = 'a "b"\\c/\n\té\N{SNOWMAN}\N{GRINNING FACE}'


@dataclass(frozen=True)
class Key:
    """A type of key: values as Spark has them, and how Debezium sends them."""

    name: str
    type: t.DataType
    values: Sequence[Any]
    schema: dict[str, Any]
    sent: Callable[[Any], Any] = lambda value: value


def unscaled(value: Decimal) -> str:
    number = int(value.scaleb(-int(value.as_tuple().exponent)))
    return base64.b64encode(number.to_bytes(20, "big", signed=True)).decode()


def days(value: dt.date) -> int:
    return (value - EPOCH.date()).days


def micros(value: dt.datetime) -> int:
    return (value - EPOCH) // dt.timedelta(microseconds=1)


def decimal_of(precision: int, scale: int, *texts: str) -> Key:
    schema = {
        "type": "bytes",
        "name": "org.apache.kafka.connect.data.Decimal",
        "parameters": {"scale": str(scale)},
    }
    values = [Decimal(text) for text in texts]
    return Key(f"decimal{precision}_{scale}", t.DecimalType(precision, scale), values, schema, unscaled)


MOMENTS = [
    dt.datetime(2026, 11, 16, 5, 28),
    dt.datetime(2026, 11, 16, 5, 28, 0, 123456),
    dt.datetime(2026, 11, 16, 5, 28, 0, 123457),  # another microsecond is another row
    dt.datetime(2026, 11, 16, 5, 28, 0, 120000),
    dt.datetime(1, 1, 1),
    dt.datetime(9999, 12, 31, 23, 59, 59, 999999),
    dt.datetime(1969, 12, 31, 23, 59, 59, 999999),
]
KEYS = (
    Key("int", t.IntegerType(), [0, -7, 2**31 - 1], {"type": "int32"}),
    Key("short", t.ShortType(), [-(2**15)], {"type": "int16"}),
    Key("long", t.LongType(), [2**63 - 1, -(2**63)], {"type": "int64"}),
    Key("boolean", t.BooleanType(), [True, False], {"type": "boolean"}),
    Key("string", t.StringType(), ["x", "7", "", " x ", ODD_TEXT], {"type": "string"}),
    Key("uuid", t.StringType(), ["f79c3e09-677c-4bbd-a479-3f349cb785e7"], {"type": "string"}),
    decimal_of(9, 2, "12.50", "-0.05", "0.00", "1234567.89"),
    decimal_of(18, 8, "0.00000001", "-0.00000099", "0.00000000", "0.00000100", "-12.50000000"),
    decimal_of(20, 0, "12", "-99999999999999999999", "0"),
    Key(
        "date",
        t.DateType(),
        [dt.date(2026, 11, 16), dt.date(1, 1, 1), dt.date(9999, 12, 31)],
        {"type": "int32", "name": "io.debezium.time.Date"},
        days,
    ),
    Key(
        "timestamp",
        t.TimestampNTZType(),
        MOMENTS,
        {"type": "int64", "name": "io.debezium.time.MicroTimestamp"},
        micros,
    ),
    Key(
        "binary",
        t.BinaryType(),
        [b"", b"\x00\xff\x80", bytes(range(256))],
        {"type": "bytes"},
        lambda value: base64.b64encode(value).decode(),
    ),
)
LAST = Key("last", t.LongType(), [7], {"type": "int64"})


def live_id(parts: Sequence[tuple[Key, Any]]) -> str:
    """Ask the live path: an event of Debezium, with its schema."""
    fields = [{"field": key.name, **key.schema} for key, _ in parts]
    schema = {"type": "struct", "fields": [{"type": "struct", "field": "after", "fields": fields}]}
    payload = envelope("c", after={key.name: key.sent(value) for key, value in parts})
    body = json.dumps({"schema": schema, "payload": payload}, ensure_ascii=False).encode()
    config = DebeziumConfig(tables={"public.t": TableKeys(columns=tuple(key.name for key, _ in parts))})
    (change,) = read_events(body, {}, config)
    assert isinstance(change, Change)
    return change.row_id


def pushed_id(value: object) -> str:
    """Ask the live path: a line of `lakefeed push`."""
    line = json.dumps({"v": value}, ensure_ascii=False).encode()
    return str(json.loads(bytes(read_change(line, 1, 1, table="t", key="v")))["rowId"])


def fitted(given: StructType, known: StructType | None = None, **options: Any) -> list[FittedColumn]:
    fitting = fit_columns(given, known or StructType(), **options)
    assert fitting.problems == []
    return fitting.columns


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.name)
def test_a_key_of_any_type_names_its_row_as_the_live_change_does(key: Key, spark: SparkSession) -> None:
    fields = [StructField(each.name, each.type) for each in (key, LAST)]
    rows = spark.createDataFrame([(value, 7) for value in key.values], StructType(fields))
    columns = fitted(rows.schema)
    assert [form_problem(column) for column in columns] == [None, None]
    found = rows.select(row_id(columns[:1]), row_id(columns), row_id(columns[::-1])).collect()
    assert [tuple(row) for row in found] == [
        tuple(live_id(parts) for parts in ([(key, value)], [(key, value), (LAST, 7)], [(LAST, 7), (key, value)]))
        for value in key.values
    ]
    assert len({row[0] for row in found}) == len({row[1] for row in found}) == len(key.values)


def test_ids_are_those_of_pushed_rows(spark: SparkSession) -> None:
    written = ("7", '"x é"', "true", '"12.50"', '"2026-11-16"', '"2026-11-16T05:28:00.123456"', '"AP+A"')
    given = [7, "x é", True, Decimal("12.50"), dt.date(2026, 11, 16), MOMENTS[1], b"\x00\xff\x80"]
    types = [
        *(t.LongType(), t.StringType(), t.BooleanType(), t.DecimalType(9, 2), t.DateType(), t.TimestampNTZType()),
        t.BinaryType(),
    ]
    schema = StructType([StructField(f"c{at}", type_) for at, type_ in enumerate(types)])
    rows = spark.createDataFrame([tuple(given)], schema)
    [found] = rows.select(*(row_id([column]) for column in fitted(schema))).collect()
    assert list(found) == [pushed_id(json.loads(text)) for text in written]


def test_text_names_a_row_by_the_value_that_it_is_in_the_table(spark: SparkSession) -> None:
    texts = {
        "l": (t.LongType(), "007", 7),
        "b": (t.BooleanType(), "T", True),
        "n": (t.DecimalType(20, 0), "+012", "12"),
        "d": (t.DateType(), "2026-11-16", "2026-11-16"),
        "at": (t.TimestampNTZType(), "2026-11-16 05:28:00.120", "2026-11-16T05:28:00.12"),
        "x": (t.BinaryType(), "AP+A", "AP+A"),
        "u": (t.StringType(), "F79C3E09-677C-4BBD-A479-3F349CB785E7", "f79c3e09-677c-4bbd-a479-3f349cb785e7"),
        "s": (t.StringType(), "007", "007"),
    }
    given = StructType([StructField(name, t.StringType()) for name in texts])
    known = StructType([StructField(name, type_) for name, (type_, _, _) in texts.items()])
    columns = fitted(given, known, uuids={"u"})
    assert [form_problem(column) for column in columns] == [None] * len(columns)
    rows = spark.createDataFrame([tuple(text for _, text, _ in texts.values())], given)
    live = [value for _, _, value in texts.values()]
    [found] = rows.select(*(row_id([column]) for column in columns)).collect()
    assert list(found) == [pushed_id(value) for value in live]
    [(listed,)] = rows.select(row_id(columns)).collect()
    assert listed == json.dumps(live, separators=(",", ":"))


def test_a_decimal_has_the_digits_of_its_source_and_not_of_the_table(spark: SparkSession) -> None:
    given = StructType([StructField("v", t.DecimalType(9, 2)), StructField("n", t.IntegerType())])
    known = StructType([StructField("v", t.DecimalType(12, 4)), StructField("n", t.DecimalType(12, 1))])
    rows = spark.createDataFrame([(Decimal("12.50"), 7)], given)
    [(found,)] = rows.select(row_id(fitted(given, known))).collect()
    assert found == '["12.50",7]'


def test_a_row_that_lacks_a_part_of_its_key_has_no_id(spark: SparkSession) -> None:
    schema = StructType([StructField(name, t.StringType()) for name in "ab"])
    rows = spark.createDataFrame([("x", None), (None, "x"), (None, None)], schema)
    columns = fitted(schema)
    assert [row[0] for row in rows.select(row_id(columns)).collect()] == [None] * 3
    assert [row[0] for row in rows.select(row_id(columns[:1])).collect()] == ["x", None, None]


UNTOLD = {
    "double": (t.DoubleType(), 0.5),
    "float": (t.FloatType(), 0.5),
    "timestamptz": (t.TimestampType(), dt.datetime(2026, 11, 16, 5, 28, tzinfo=dt.UTC)),
    "numeric without digits": (t.DecimalType(38, 18), Decimal(1)),
}


def test_keys_whose_live_form_the_input_does_not_tell_are_refused_until_an_identifier_is_declared(
    pusher: Pusher, spark: SparkSession, tmp_path: Path
) -> None:
    for name, (type_, value) in UNTOLD.items():
        schema = StructType([StructField(name, type_)])
        [column] = fitted(schema)
        assert form_problem(column) is not None, name
        # Where ids do not matter they still have to tell rows apart.
        rows = spark.createDataFrame([(value,)], schema)
        assert rows.select(row_id([column])).collect()[0][0], name
    text = StructType([StructField("v", t.StringType())])
    for type_ in (t.DoubleType(), t.DecimalType(9, 2), t.TimestampType()):
        [column] = fitted(text, StructType([StructField("v", type_)]))
        assert form_problem(column) is not None, type_

    pusher.push("measured", "INSERT", {"id": 0.5, "note": "live"})
    pq.write_table(pa.table({"id": [0.5, 1.5], "note": ["old", "older"]}), tmp_path / "in.parquet")
    source = FileInput(format="parquet", path=str(tmp_path / "in.parquet"))
    into = target(spark, CATALOG, "measured")
    with pytest.raises(SettingsError, match=r"identifier.*table=default\.measured: id double: floating point"):
        backfill(into, source, request(position="start"))
    with pytest.raises(SettingsError, match="identifier"):
        backfill(into, source, request(position="start", key=("note", "id")))
    assert len(rows_of(into)) == 1
    spark.sql(f"ALTER TABLE {into.sql} ALTER COLUMN id COMMENT 'key'")
    # A mirror that was built by row ids keeps to them.
    key = json.dumps(["_cdc_row_id"])
    mirror = f"{CATALOG}.default.measured_current"
    spark.sql(f"CREATE TABLE {mirror} (id DOUBLE) USING iceberg TBLPROPERTIES ('{MIRROR_KEY}' = '{key}')")
    with pytest.raises(SettingsError, match=r"drop the mirror.*mirror=default\.measured_current"):
        backfill(into, source, request(position="start"))
    spark.sql(f"DROP TABLE {mirror}")
    assert backfill(into, source, request(position="start")).rows == 2
    check_sound(spark, "measured")


def test_timestamps_are_compared_in_utc_in_every_session_time_zone(spark: SparkSession) -> None:
    spark.conf.set("spark.sql.session.timeZone", "Europe/Berlin")
    schema = StructType([StructField("at", t.TimestampType())])
    # The hour that Berlin has twice.
    given = [dt.datetime(2026, 10, 25, hour, 30, 0, 5, tzinfo=dt.UTC) for hour in (0, 1)]
    rows = spark.createDataFrame([(moment,) for moment in given], schema)
    found = [row[0] for row in rows.select(row_id(fitted(schema))).collect()]
    assert found == ["2026-10-25T00:30:00.000005Z", "2026-10-25T01:30:00.000005Z"]


def test_times_of_day_of_a_database_come_as_text_or_not_at_all(pusher: Pusher, spark: SparkSession) -> None:
    derby = Derby(spark, "hours")
    derby.run("CREATE TABLE hours (id TIME PRIMARY KEY, n INT)", "INSERT INTO hours VALUES ('05:28:00', 1)")
    pusher.push("hours", "INSERT", {"id": "05:28:00", "n": 1})
    into = target(spark, CATALOG, "hours")

    def read(column: str) -> JdbcInput:
        return JdbcInput(url=derby.url, table=f'(SELECT {column}, n AS "n" FROM hours)', must_split=False)

    with pytest.raises(SchemaMismatch, match=r"time of day.*column=at"):
        backfill(into, read('id AS "at"'), request(position="mark", key=("n",)))
    backfill(into, read('CHAR(id) AS "id"'), request(position="mark"))
    time = Key("id", t.StringType(), ["05:28:00"], {"type": "int64", "name": "io.debezium.time.MicroTime"})
    live = live_id([(time, (5 * 60 + 28) * 60_000_000)])
    assert [row["_cdc_row_id"] for row in rows_of(into)] == [live, live]
    derby.close()
