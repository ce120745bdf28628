"""Events of every form become the changes that they stand for, and what is no event is refused with its place."""

from __future__ import annotations

import base64
import json

import pytest

from lakefeed.ingest.debezium.envelope import read_events
from lakefeed.ingest.debezium.events import (
    Change,
    DebeziumConfig,
    DebeziumMalformed,
    Ignored,
    SourceOperation,
    TableKeys,
    TransactionMark,
    TransactionStatus,
)
from lakefeed.ingest.debezium.forms import read_context
from tests.ingest.debezium.envelopes import KEYED, envelope, header, mark, read, read_change, source
from tests.ingest.debezium.recordings import load, load_events

TOKEN = "__debezium_unavailable_value"
CODES = list(TOKEN.encode())
FULL = DebeziumConfig(tables={"public.t": TableKeys(columns=("id",), replica_identity_full=True)})


def image(raw) -> dict:
    return json.loads(bytes(raw))


@pytest.mark.parametrize(
    ("op", "operation"),
    [
        ("r", SourceOperation.READ),
        ("c", SourceOperation.INSERT),
        ("u", SourceOperation.UPDATE),
        ("d", SourceOperation.DELETE),
        ("t", SourceOperation.TRUNCATE),
    ],
)
def test_operations_are_told_apart(op, operation):
    before, after = ({"id": 1}, None) if op == "d" else (None, None) if op == "t" else (None, {"id": 1})

    change = read_change(envelope(op, before=before, after=after))

    assert change.operation is operation
    assert change.table == "public.t"
    assert change.row_id == ("" if op == "t" else "1")


def test_message_is_a_change_of_the_table_for_messages():
    document = envelope("m", schema="", table="", txId=None) | {"message": {"prefix": "p", "content": "AP8Q"}}

    change = read_change(document)

    assert (change.operation, change.table) == (SourceOperation.MESSAGE, "debezium_messages")
    assert image(change.after) == {"prefix": "p", "content": "AP8Q"}


def test_events_that_change_no_row_are_told_apart():
    events = read(
        {"ts_ms": 5}, mark("BEGIN", "7:1"), mark("END", "7:9", 2, a=1, b=1), None, {"source": {}, "tableChanges": []}
    )

    assert events == [
        Ignored("heartbeat"),
        TransactionMark(TransactionStatus.BEGIN, "7", 0, {}),
        TransactionMark(TransactionStatus.END, "7", 2, {"public.a": 1, "public.b": 1}),
        Ignored("tombstone"),
        Ignored("schema change"),
    ]


def test_event_with_its_schema_is_the_event_without():
    document = envelope("c", after={"id": 1, "n": None})

    assert read({"schema": None, "payload": document}) == read(document)
    assert read({"schema": {"type": "struct"}, "payload": {"ts_ms": 5}}) == [Ignored("heartbeat")]
    assert read({"schema": None, "payload": None}) == [Ignored("tombstone")]


def test_row_that_needs_nothing_done_keeps_its_very_bytes():
    row = '{ "id":1,"n" : 1.10, "e":"\\u00e9" }'
    body = json.dumps(envelope("c", after="HERE")).replace('"HERE"', row)

    (change,) = read_events(body.encode(), {}, KEYED)

    assert bytes(change.after).decode() == row


def test_delete_keeps_key_columns_only_because_the_others_are_made_up():
    change = read_change(envelope("d", before={"id": 4, "name": "", "dom_i": 0, "note": None}))

    assert image(change.before) == {"id": 4}
    assert change.row_id == "4"


def test_delete_under_full_identity_keeps_every_column():
    change = read_change(envelope("d", before={"id": 4, "name": "", "note": None}), config=FULL)

    assert image(change.before) == {"id": 4, "name": "", "note": None}


def test_delete_of_a_table_that_nobody_described_stores_nothing_made_up_and_loses_nothing():
    change = read_change(envelope("d", before={"id": 4, "name": ""}), config=DebeziumConfig())

    assert image(change.before) == {}
    assert change.row_id == ""
    assert image(change.metadata)["untrustedBefore"] == {"id": 4, "name": ""}


def test_delete_without_a_before_image_is_kept():
    assert read_change(envelope("d")).row_id == ""


@pytest.mark.parametrize(
    ("keys", "row", "row_id"),
    [
        (("id",), {"id": 9223372036854775807}, "9223372036854775807"),
        (("id",), {"id": 'a "b" é'}, 'a "b" é'),
        (("id",), {"id": True}, "true"),
        (("a", "b"), {"b": "x", "a": 1}, '[1,"x"]'),
        (("a", "b"), {"a": 1}, ""),
        (("id",), {"id": None}, ""),
        ((), {"id": 1}, ""),
    ],
)
def test_row_id_is_the_key(keys, row, row_id):
    config = DebeziumConfig(tables={"public.t": TableKeys(columns=keys)})

    assert read_change(envelope("c", after=row), config=config).row_id == row_id


@pytest.mark.parametrize(
    "value",
    [
        TOKEN,
        "X19kZWJleml1bV91bmF2YWlsYWJsZV92YWx1ZQ==",
        [TOKEN],
        CODES,
        [float(code) for code in CODES],
        {TOKEN: TOKEN},
    ],
)
def test_placeholder_of_an_unchanged_value_is_never_stored(value):
    row = {"id": 1, "big": value, "note": f"about {TOKEN}"}

    change = read_change(envelope("u", after=row))

    assert image(change.after) == {"id": 1, "note": row["note"]}
    assert change.unchanged == ("big",)


@pytest.mark.parametrize("value", [CODES[:-1], [*CODES, 0], [TOKEN, TOKEN], f"{TOKEN} ", {"a": TOKEN}])
def test_value_that_only_resembles_the_placeholder_is_stored(value):
    change = read_change(envelope("u", after={"id": 1, "big": value}))

    assert image(change.after)["big"] == value
    assert change.unchanged == ()


def test_placeholder_can_be_another():
    config = DebeziumConfig(unavailable_value='n/a "ü"')

    change = read_change(envelope("u", after={"id": 1, "big": 'n/a "ü"', "other": TOKEN}), config=config)

    assert image(change.after) == {"id": 1, "other": TOKEN}


def test_placeholder_in_a_before_image_is_dropped_too():
    change = read_change(envelope("u", before={"id": 1, "big": TOKEN}, after={"id": 1, "big": "new"}), config=FULL)

    assert image(change.before) == {"id": 1}
    assert change.unchanged == ()


def test_headers_of_a_key_change_name_the_other_key_and_the_key_columns():
    old = {"X-DEBEZIUM-__DEBEZIUM.OLDKEY": header({"schema": None, "payload": {"id": 1}})}
    new = {"x-debezium-__debezium.newkey": header({"id": 1001})}

    inserted = read_change(envelope("c", after={"id": 1001, "n": 5}), config=DebeziumConfig(), headers=old)
    deleted = read_change(envelope("d", before={"id": 1, "n": 0}), config=DebeziumConfig(), headers=new)

    assert (inserted.row_id, inserted.moved_from, inserted.moved_to) == ("1001", "1", "")
    assert (deleted.row_id, deleted.moved_from, deleted.moved_to) == ("1", "", "1001")
    assert image(deleted.before) == {"id": 1}
    assert image(inserted.metadata)["oldKey"] == {"id": 1}
    assert image(inserted.metadata)["movedFrom"] == "1"


def test_halves_of_a_key_change_in_a_batch_name_each_other_without_headers():
    events = read(
        envelope("d", before={"id": 8}, lsn=90),
        envelope("c", after={"id": 9}, lsn=95),
        envelope("d", before={"id": 1}, lsn=100),
        envelope("c", after={"id": 2}, lsn=100),
        envelope("c", after={"id": 3}, lsn=100),
    )

    assert [(event.moved_from, event.moved_to) for event in events] == [
        ("", ""),
        ("", ""),
        ("", "2"),
        ("1", ""),
        ("", ""),
    ]
    told = [image(event.metadata) for event in events]
    assert [(each.get("movedFrom"), each.get("movedTo")) for each in told[1:]] == [
        (None, None),
        (None, "2"),
        ("1", None),
        (None, None),
    ]


def test_headers_of_a_batch_belong_to_its_first_event():
    headers = {"X-DEBEZIUM-__DEBEZIUM.OLDKEY": header({"id": 7})}

    events = read(envelope("c", after={"id": 1}), envelope("c", after={"id": 2}), headers=headers)

    assert [event.moved_from for event in events] == ["7", ""]


def test_context_says_which_run_sends():
    context = read_context(load("v1")[0].headers)

    assert context.logical_name == "rec"
    assert context.run_id == "01a1e28f-c9d4-7cb4-86ce-aceb4005590f"
    assert read_context({}).run_id == ""


@pytest.mark.parametrize("snapshot", [None, "false", False])
def test_streamed_changes_are_of_no_snapshot(snapshot):
    assert read_change(envelope("c", after={"id": 1}, snapshot=snapshot)).origin.snapshot == ""


def test_position_stays_readable_in_the_metadata():
    document = envelope("c", after={"id": 1}, sequence='["90","100"]', lsn=100, xmin=None)
    document["transaction"] = {"id": "5:100", "total_order": 3, "data_collection_order": 1}

    change = read_change(document)

    metadata = image(change.metadata)
    assert metadata["source"]["sequence"] == '["90","100"]'
    assert (metadata["source"]["lsn"], metadata["source"]["txId"], metadata["source"]["table"]) == (100, 5, "t")
    assert "xmin" not in metadata["source"]
    assert metadata["transaction"]["total_order"] == 3
    assert (change.origin.sequence, change.transaction) == ((90, 100), "5")


@pytest.mark.parametrize(
    ("fields", "timestamp_ms"),
    [
        ({"ts_us": 1794802444929136, "ts_ms": 5}, 1794802444929),
        ({"ts_ms": 1794802444929}, 1794802444929),
        ({"ts_ms": None, "ts_ns": 1794802444929136000}, 1794802444929),
        ({"ts_ms": None}, 0),
        ({"ts_ms": 10**18}, 0),
    ],
)
def test_timestamp_is_that_of_the_source(fields, timestamp_ms):
    assert read_change(envelope("c", after={"id": 1}, **fields)).timestamp_ms == timestamp_ms


@pytest.mark.parametrize(
    ("fields", "table"),
    [
        ({"schema": "shop", "table": "orders"}, "shop.orders"),
        ({"schema": "public", "table": "OddNäme"}, "public.OddNäme"),
        ({"schema": "a.b", "table": "c"}, "a_x2Eb.c"),
        ({"schema": "a", "table": "b/c d"}, "a.b_x2Fc d"),
        ({"schema": None, "db": "shop", "table": "orders"}, "shop.orders"),
        ({"schema": None, "db": None, "table": "orders"}, "orders"),
    ],
)
def test_tables_have_names_that_a_catalog_can_hold(fields, table):
    assert read_change(envelope("c", after={"id": 1}, **fields)).table == table


def test_unwrapped_row_keeps_columns_that_look_like_its_own_fields():
    row = {"id": 1, "__v": 2, "__op": "c", "__deleted": "false", "__table": "t", "__schema": "public", "__lsn": 5}

    change = read_change(row)

    assert image(change.after) == {"id": 1, "__v": 2}
    assert (change.operation, change.table, change.origin.lsn) == (SourceOperation.INSERT, "public.t", 5)


def test_unwrapped_row_can_have_its_fields_in_headers():
    headers = {"X-DEBEZIUM-__OP": header("d"), "X-DEBEZIUM-__SOURCE_TABLE": header({"schema": None, "payload": "t"})}
    headers["X-DEBEZIUM-__SOURCE_SCHEMA"] = header("public")

    change = read_change({"id": 1, "n": 0}, headers=headers)

    assert (change.operation, change.table, image(change.before)) == (SourceOperation.DELETE, "public.t", {"id": 1})


def test_unwrapped_row_without_an_operation_is_one_to_be_kept():
    row = {"id": 1, "__source_table": "t", "__source_schema": "public"}

    assert read_change({**row, "__deleted": "false"}).operation is SourceOperation.UPDATE
    assert read_change({**row, "__deleted": "true"}).operation is SourceOperation.DELETE


def test_unwrapped_row_with_a_schema_is_read_by_it():
    columns = [{"type": "int32", "field": "id"}, {"type": "int32", "name": "io.debezium.time.Date", "field": "day"}]
    row = {"id": 1, "day": 0, "__op": "c", "__table": "t", "__schema": "public"}

    change = read_change({"schema": {"type": "struct", "fields": columns}, "payload": row})

    assert image(change.after) == {"id": 1, "day": "1970-01-01"}


def test_unwrapped_row_with_a_sequence_can_be_ordered():
    row = {"id": 1, "__op": "c", "__source_table": "t", "__source_sequence": '["90","100"]'}

    assert read_change(row).origin.sequence == (90, 100)


def test_cloud_event_with_a_schema_in_its_data_is_read_by_it():
    day = {"type": "int32", "name": "io.debezium.time.Date", "field": "day"}
    schema = {"type": "struct", "fields": [{"type": "struct", "field": "after", "fields": [day]}]}
    document = {"specversion": "1.0", "iodebeziumop": "c", "iodebeziumschema": "public", "iodebeziumtable": "t"}
    document |= {"iodebeziumtxId": "5", "iodebeziumtxid": "5:100", "iodebeziumlsn": "100"}

    change = read_change(document | {"data": {"schema": schema, "payload": {"before": None, "after": {"day": 0}}}})

    assert image(change.after) == {"day": "1970-01-01"}
    assert (change.origin.tx_id, change.origin.lsn, change.transaction) == ("5", 100, "5")


def test_forms_of_one_change_agree():
    def recorded(variant: str) -> Change:
        return next(
            event
            for events in load_events(variant)
            for event in events
            if isinstance(event, Change) and event.table == "shop.orders" and event.row_id == "3"
        )

    changes = {variant: recorded(variant) for variant in ("v2", "v4", "v5")}

    assert {change.operation for change in changes.values()} == {SourceOperation.INSERT}
    assert len({change.origin.tx_id == change.transaction for change in changes.values()}) == 1
    assert {image(change.after)["total"] for change in changes.values()} == {"449.81"}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "event: expected an object"),
        (b"{", "event: expected an object"),
        (b"[{]", "body: expected JSON"),
        (b"\xff", "body: expected UTF-8"),
        (b'{"a":' * 5000, "body: a value is nested too deeply"),
        (b"5", "event: expected an object"),
        (b"{}", "event: expected a change, a transaction marker or a heartbeat"),
        (b'[{"ts_ms":1},{"x":"secret"}]', "events[1]: expected a change, a transaction marker or a heartbeat"),
        (b'{"status":"secret","id":"1"}', "event.status: expected one of BEGIN, END"),
        (b'{"status":"END","id":"1","event_count":"secret"}', "event.event_count: expected a count"),
        (b'{"status":"END","id":"1","data_collections":[1]}', "event.data_collections: expected names and counts"),
        (b'{"op":"x","source":{"table":"t"}}', "event.op: expected one of r, c, u, d, t, m"),
        (b'{"op":"c","source":{"table":5}}', "event.source.table: expected text"),
        (b'{"op":"t","source":{}}', "event.source.table: expected the name of a table"),
        (b'{"op":"c","source":"secret"}', "event.source: expected an object"),
        (b'{"op":"c","source":{"table":"t"},"after":null}', "event.after: expected a row"),
        (b'{"op":"c","source":{"table":"t"},"after":"secret"}', "event.after: expected an object"),
        (b'{"op":"m","source":{}}', "event.message: expected a message"),
        (b'{"id":1,"__op":"c"}', "event.source.table: expected the name of a table"),
    ],
)
def test_what_is_no_event_is_refused_with_its_place_and_the_rule(body, message):
    with pytest.raises(DebeziumMalformed) as caught:
        read_events(body, {}, KEYED)

    assert str(caught.value) == message


@pytest.mark.parametrize("value", ["%%%", header("x")[:-3] + "é", header({"id": 1})[:-4]])
def test_header_that_is_no_base64_of_json_is_refused(value):
    with pytest.raises(DebeziumMalformed, match=r"^header X-DEBEZIUM-__DEBEZIUM\.OLDKEY: "):
        read(envelope("c", after={"id": 1}), headers={"X-DEBEZIUM-__DEBEZIUM.OLDKEY": value})


def test_header_that_is_nested_too_deeply_is_refused():
    nested = base64.b64encode(b'{"schema":' + b"[" * 3000 + b"]" * 3000 + b',"payload":1}').decode()

    with pytest.raises(DebeziumMalformed):
        read_context({"X-DEBEZIUM-__DEBEZIUM.CONTEXT.RUNID": nested})
    with pytest.raises(DebeziumMalformed):
        read(envelope("c", after={"id": 1}), headers={"X-DEBEZIUM-__DEBEZIUM.OLDKEY": nested})


@pytest.mark.parametrize(
    "sequence", ["", "[]", "[1]", '["-1","2"]', '["1","99999999999999999999"]', '{"a":1}', "NaN", 5]
)
def test_sequence_that_is_no_pair_of_positions_orders_nothing(sequence):
    assert read_change(envelope("c", after={"id": 1}, sequence=sequence)).origin.sequence is None


def test_source_without_position_is_read_all_the_same():
    document = envelope("c", after={"id": 1})
    document["source"] = source(lsn=None, txId=None, sequence="no pair", connector="mysql")

    origin = read_change(document).origin

    assert (origin.lsn, origin.tx_id, origin.sequence) == (None, "", None)
