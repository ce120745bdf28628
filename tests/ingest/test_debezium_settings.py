"""Where the key columns of Debezium's tables come from."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from lakefeed.ingest.config import DebeziumSettings
from lakefeed.ingest.service import serving
from lakefeed.writer.config import WriterConfig
from lakefeed.writer.rows.table_settings import TableSections
from tests.clients import open_duckdb
from tests.ingest.conftest import small_config
from tests.ingest.ws_client import connected

COLUMNS = {"order_id": "long", "line": "int", "note": "string"}
LINES = TableSections({"public.lines": {"columns": COLUMNS, "identifier": ["order_id", "line"]}})


def keys_of(settings: DebeziumSettings, tables: TableSections, table: str) -> tuple[str, ...]:
    return settings.to_config(tables, WriterConfig()).keys_of(table).columns


def test_keys_are_those_that_were_declared_of_the_table_unless_the_settings_name_others():
    assert keys_of(DebeziumSettings(), LINES, "public.lines") == ("order_id", "line")
    assert keys_of(DebeziumSettings(), LINES, "public.users") == ()
    assert keys_of(DebeziumSettings(keys="public.lines: note"), LINES, "public.lines") == ("note",)


def test_declared_keys_do_not_make_before_images_whole_nor_the_other_way_round():
    whole = DebeziumSettings(replica_identity_full="public.lines").to_config(LINES, WriterConfig())
    assert whole.keys_of("public.lines").replica_identity_full
    assert whole.keys_of("public.lines").columns == ("order_id", "line")
    assert not DebeziumSettings().to_config(LINES, WriterConfig()).keys_of("public.lines").replica_identity_full


async def test_row_id_of_an_event_is_the_declared_key(tmp_path):
    event = {
        "op": "c",
        "after": {"order_id": 7, "line": 2, "note": "x"},
        "source": {"connector": "postgresql", "db": "d", "schema": "public", "table": "lines", "lsn": 5, "txId": 1,
                   "sequence": '["4","5"]', "ts_ms": 1_763_251_200_000},
        "ts_ms": 1_763_251_200_000,
    }  # fmt: skip
    config = replace(small_config(tmp_path), tables=LINES)
    async with serving(config) as addresses, connected(addresses.ws_url, "pg") as client:
        assert (await client.request("debezium_batch", events=[event]))["status"] == "ok"
        await client.request("flush_request")
        assert await asyncio.to_thread(row_ids, addresses.http_url) == [("[7,2]",)]


def row_ids(http_url: str) -> list[tuple[str]]:
    with open_duckdb(http_url) as connection:
        return connection.execute("SELECT _cdc_row_id FROM lake.public.lines").fetchall()
