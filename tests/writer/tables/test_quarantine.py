"""What a change looks like in the quarantine: whole, under an id that never changes, with marks of its own."""

from __future__ import annotations

import datetime as dt
import json
from decimal import Decimal

import pyarrow as pa

from lakefeed.contract import properties
from lakefeed.contract.changes import Position, SourceId, TableName
from lakefeed.contract.properties import Reason, Refusal
from lakefeed.writer.rows.groups import Group
from lakefeed.writer.tables.quarantine import COLUMNS, quarantine_rows
from tests.writer.sample_rows import RECEIVED_AT_US, event, frame, json_groups, raw_group
from tests.writer.wire.arrow_batches import arrow_group, changes

USERS = TableName(("default",), "users")
RECORDED_AT_US = 1_794_800_000_000_000
REASON = Reason(Refusal.UNDECODABLE, "ValueError: field=name")


def quarantined(group: Group, *, table: TableName = USERS, reason: Reason = REASON):
    return quarantine_rows(group, table=table, reason=reason, node="n1", recorded_at_us=RECORDED_AT_US)


def test_a_json_change_is_kept_as_it_came_with_its_declaration():
    events = [
        event(
            7,
            operation="UPDATE",
            rowId="9",
            timestamp=1_763_000_000_123,
            before={"id": 9, "n": 1},
            after={"id": 9, "n": 12345678901234567890.123},
            unchanged=["photo"],
            metadata={"lsn": 5},
        )
    ]
    body = json.dumps({"events": events}).replace("1.2345678901234567e+19", "12345678901234567890.123").encode()
    (group,) = json_groups([(33, frame(body, epoch=2))]).values()
    rows = quarantined(group).rows
    assert rows.select(COLUMNS.names).to_pylist() == [
        {
            "kind": "quarantined",
            "table_name": "default.users",
            "source": "shop-1",
            "epoch": 2,
            "sequence": 7,
            "operation": "UPDATE",
            "row_id": "9",
            "row_image": '{"id": 9, "n": 12345678901234567890.123}',
            "before_image": '{"id": 9, "n": 1}',
            "unchanged": ["photo"],
            "metadata": '{"lsn": 5}',
            "declared": [],
            "encoding": "json",
            "reason": "undecodable",
            "reason_text": "ValueError: field=name",
            "node": "n1",
            "log_offset": 33,
            "recorded_at": dt.datetime.fromtimestamp(RECORDED_AT_US / 1e6, dt.UTC),
        }
    ]
    assert rows["_cdc_timestamp"].cast(pa.int64()).to_pylist() == [1_763_000_000_123_000]
    assert rows["_cdc_sequence"].to_pylist() == [7]


def test_rows_in_arrow_become_json_with_every_digit():
    own = {
        "price": pa.array([Decimal("12345678901234567890.12"), None], pa.decimal128(22, 2)),
        "at": pa.array([1_763_251_200_000_001, 0], pa.timestamp("us", "UTC")),
        "big": pa.array([2**63 - 1, 1], pa.int64()),
        "blob": pa.array([b"\xff\x00", b""]),
    }
    cdc = {"timestamp": pa.array([1_763_251_200_000_001] * 2, pa.timestamp("us")), "operation": ["UPDATE", "DELETE"]}
    group = quarantined(arrow_group(changes(own, first=5, **cdc)))
    assert group.rows["row_image"].to_pylist() == [
        '{"price":12345678901234567890.12,"at":"2025-11-16T00:00:00.000001Z","big":9223372036854775807,"blob":"/wA="}',
        '{"price":null,"at":"1970-01-01T00:00:00Z","big":1,"blob":""}',
    ]
    assert group.rows["operation"].to_pylist() == ["UPDATE", "DELETE"]
    assert group.rows["_cdc_timestamp"].cast(pa.int64()).to_pylist() == [1_763_251_200_000_001] * 2
    assert group.rows["encoding"].to_pylist() == ["arrow", "arrow"]


def test_arrow_rows_without_own_columns_are_rows_all_the_same():
    assert quarantined(arrow_group(changes(rows=2))).rows["row_image"].to_pylist() == ["{}", "{}"]


def test_a_row_that_is_not_text_is_kept_as_its_bytes():
    (text,) = quarantined(raw_group(b'{"a":"\xff"}')).rows["row_image"].to_pylist()
    assert json.loads(text) == {"_cdc_base64": "eyJhIjoi/yJ9"}


def test_an_id_names_one_change_and_stays_the_same():
    here = quarantined(raw_group("{}", "{}")).rows["_cdc_row_id"].to_pylist()
    again = quarantined(raw_group("{}", "{}"), reason=Reason(Refusal.LOG_SHARE, "")).rows["_cdc_row_id"].to_pylist()
    elsewhere = quarantined(raw_group("{}", "{}"), table=TableName(("sales",), "users")).rows["_cdc_row_id"].to_pylist()
    assert here == again
    assert len({*here, *elsewhere}) == 4
    assert here[0] == properties.change_id(SourceId("shop-1"), epoch=0, sequence=1, table=USERS)


def test_marks_are_kept_per_source_and_table():
    orders = TableName(("default",), "orders")
    groups = [
        quarantined(raw_group("{}")),
        quarantined(raw_group("{}"), table=orders),
        quarantined(raw_group("{}"), reason=Reason(Refusal.LOG_SHARE, "")),
    ]
    marks = [mark for group in groups for mark in group.spans()]
    assert marks[0] == marks[2] != marks[1]
    assert all(properties.is_own_mark(mark) for mark in marks)
    assert not properties.is_own_mark(SourceId("shop-1"))


def test_a_table_goes_on_behind_what_its_quarantine_has_of_it():
    shop = SourceId("shop-1")
    marks = {
        properties.mark_of(shop, USERS): Position(0, 50),
        properties.mark_of(shop, TableName(("default",), "orders")): Position(0, 70),
        properties.command_mark("resolve"): Position(0, 3),
    }
    assert properties.moved_marks(marks, USERS) == {shop: Position(0, 50)}


def test_a_group_keeps_its_runs_so_that_the_log_is_kept_until_it_is_committed():
    frames = [(4, frame([event(1, after={})])), (9, frame([event(2, after={})], source="shop-2", epoch=1))]
    (group,) = json_groups(frames).values()
    kept = quarantined(group)
    assert (kept.first_offset, kept.last_offset, len(kept)) == (4, 9, 2)
    assert kept.table == "default.lakefeed_quarantine"
    assert [run.received_at_us for run in kept.runs] == [RECEIVED_AT_US] * 2
    assert kept.rows["epoch"].to_pylist() == [0, 1]
    assert kept.rows["log_offset"].to_pylist() == [4, 9]


def test_a_long_reason_is_cut():
    (text,) = set(quarantined(raw_group("{}"), reason=Reason(Refusal.LOG_SHARE, "x" * 10_000)).rows["reason_text"])
    assert len(text.as_py()) == 2_000
