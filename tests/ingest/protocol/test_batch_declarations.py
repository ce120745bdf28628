"""What a source declares of its tables at connect: refused with the place and the rule, or durable with its rows."""

from __future__ import annotations

import asyncio
import datetime as dt
import json
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from lakefeed.ingest.config import load_config
from lakefeed.ingest.errors import ProtocolError
from lakefeed.ingest.protocol.messages import Connect, decode_message
from lakefeed.ingest.protocol.session import Session
from lakefeed.ingest.service import serving
from lakefeed.settings import SettingsError
from lakefeed.writer.rows.declaration import DECLARATIONS_MAX_BYTES
from lakefeed.writer.wire.json_batch import BatchHead
from tests.clients import open_duckdb
from tests.ingest.conftest import small_config
from tests.ingest.ws_client import connected, insert
from tests.writer.wire.arrow_batches import changes, stream_of

ORDERS = {"columns": {"id": "long", "price": "decimal(18, 2)", "day": "date"}, "identifier": ["id"]}
USERS = {"columns": {"born": "date"}}


def session_with(tables: Any) -> Session:
    session = Session(event_max_bytes=1024)
    message = decode_message(json.dumps({"type": "connect", "sourceDoId": "shop", "tables": tables}).encode())
    assert isinstance(message, Connect)
    session.on_connect(message)
    return session


def declared_with(session: Session, number: int, *tables: str) -> dict[str, Any]:
    """Offer a batch that has one change of each table; what its record would declare."""
    first = 10 * number
    events = [insert(first + place, table=table) for place, table in enumerate(tables)]
    body = json.dumps({"type": "cdc_batch", "sequenceNumber": number, "events": events}).encode()
    message = decode_message(body)
    assert isinstance(message, BatchHead)
    offer = session.on_batch(message, body, received_at_us=5)
    assert offer is not None
    return json.loads(offer.declared) if offer.declared else {}


def test_a_declaration_travels_with_the_batches_of_its_table_until_one_is_durable():
    session = session_with({"orders": ORDERS, "users": USERS})
    assert declared_with(session, 0, "orders") == {"orders": ORDERS}
    assert declared_with(session, 1, "orders", "users") == {"orders": ORDERS, "users": USERS}
    session.declarations.on_durable(json.dumps({"orders": ORDERS}))
    assert declared_with(session, 2, "orders", "users") == {"users": USERS}
    session.declarations.on_durable(json.dumps({"users": USERS}))
    assert declared_with(session, 3, "orders", "users", "others") == {}


def test_what_was_declared_since_is_not_taken_for_durable():
    session = session_with({"orders": USERS})
    session.declarations.on_durable(json.dumps({"orders": ORDERS}))
    assert declared_with(session, 0, "orders") == {"orders": USERS}


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        (None, "tables: expected an object"),
        ({"orders": {"columns": {"price": "money"}}}, "tables.orders.columns.price: expected a type"),
        ({"x" * DECLARATIONS_MAX_BYTES: {}}, f"tables: expected at most {DECLARATIONS_MAX_BYTES} bytes"),
    ],
)
def test_a_declaration_that_breaks_a_rule_refuses_the_connect_and_binds_nothing(tables, message):
    with pytest.raises(ProtocolError) as error:
        session_with(tables)
    assert str(error.value).startswith(message)


async def test_refused_declaration_is_a_nack_that_names_column_and_rule(service):
    async with connected(service.ws_url, source=None) as client:
        answer = await client.request(
            "connect", sourceDoId="shop", tables={"orders": {"columns": {"price": "decimal(40, 2)"}}}
        )
        assert (answer["type"], answer["reason"]) == ("nack", "invalid_format")
        assert answer["errorMessage"].startswith("tables.orders.columns.price: expected at most 38 digits")


def read_orders(http_url: str) -> list[tuple]:
    with open_duckdb(http_url) as connection:
        return connection.execute("SELECT price, day, typeof(id) FROM lake.default.orders ORDER BY id").fetchall()


EXPECTED = [(Decimal("19.90"), dt.date(2026, 11, 16), "BIGINT"), (Decimal("0.10"), dt.date(2026, 11, 17), "BIGINT")]


async def test_declared_columns_hold_for_rows_in_json_and_in_arrow_after_a_restart(tmp_path):
    config = small_config(tmp_path / "data")
    async with serving(config) as service, connected(service.ws_url, source=None) as client:
        assert (await client.request("connect", sourceDoId="shop", tables={"orders": ORDERS}))["type"] == "status"
        event = insert(1, table="orders", after={"id": 1, "price": "19.90", "day": "2026-11-16"})
        assert (await client.request("cdc_batch", events=[event]))["status"] == "ok"
    async with serving(config) as service:
        async with connected(service.ws_url, source=None) as client:
            await client.request("connect", sourceDoId="shop", tables={"orders": ORDERS})
            texts = {"id": pa.array([2]), "price": pa.array(["0.10"]), "day": pa.array(["2026-11-17"])}
            await client.socket.send(stream_of(changes(texts, first=2), table="orders"))
            assert (await client.receive())["status"] == "ok"
            await client.request("flush_request")
        assert await asyncio.to_thread(read_orders, service.http_url) == EXPECTED


async def test_a_declaration_lies_in_the_log_once_if_its_first_batch_is_durable(tmp_path):
    async with serving(small_config(tmp_path)) as service, connected(service.ws_url, source=None) as client:
        await client.request("connect", sourceDoId="shop", tables={"users": USERS})
        for sequence in range(3):
            assert (await client.batch(sequence))["status"] == "ok"
        logged = b"".join(segment.read_bytes() for segment in (tmp_path / "log").glob("*.wal"))
    assert (logged.count(b"name 2"), logged.count(b"born")) == (1, 1)


TOML = """
[tables."sales.orders"]
identifier = ["id"]

[tables."sales.orders".columns]
id = "long"
customer = { type = "string", renamedFrom = "client" }
lines = { type = "list", element = { type = "struct", fields = { sku = "string" } } }
"""


def test_the_configuration_declares_columns_in_the_same_form(tmp_path):
    path = tmp_path / "lakefeed.toml"
    path.write_text(TOML)
    config = load_config(path, {}).config
    declared = config.tables.settings_for("sales.orders", config.writer).declared
    assert [(field.name, field.doc) for field in declared.fields] == [
        ("id", "key"),
        ("customer", 'formerly ["client"]'),
        ("lines", None),
    ]
    assert config.tables.settings_for("sales.lines", config.writer).declared.fields == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('columns = { price = "money" }', 'tables."sales.orders": columns.price: expected a type'),
        ('identifier = ["id"]', 'tables."sales.orders": identifier: expected a list of names of declared columns'),
        ('columns = "id long"', 'wrong type: key=tables."sales.orders".columns'),
    ],
)
def test_columns_that_break_a_rule_stop_the_start_with_their_place(tmp_path, text, message):
    path = tmp_path / "lakefeed.toml"
    path.write_text(f'[tables."sales.orders"]\n{text}\n')
    with pytest.raises(SettingsError) as error:
        load_config(path, {})
    assert str(error.value).startswith(message)
