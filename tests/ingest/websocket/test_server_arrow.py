"""Arrow frames on the data plane: acked, deduplicated and refused like JSON batches, and committed beside them."""

from __future__ import annotations

import asyncio
import contextlib
import random
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from lakefeed.ingest.errors import ProtocolError
from lakefeed.ingest.protocol.messages import ARROW_EXPANSION_MAX_FRAMES, CORRELATION_ID_MAX_CHARS, open_arrow_frame
from lakefeed.ingest.protocol.session import Session
from lakefeed.ingest.service import Addresses, serving
from lakefeed.writer.wal.payload import Encoding
from tests.clients import open_duckdb
from tests.ingest.conftest import small_config
from tests.ingest.ws_client import WsClient, connected
from tests.writer.wire.arrow_batches import changes, stream_of

FRAME_MAX_BYTES = 1024 * 1024


def offer(stream: bytes, session: Session | None = None):
    session = session or Session(event_max_bytes=FRAME_MAX_BYTES, default_source="shop")
    opened = open_arrow_frame(stream, frame_max_bytes=FRAME_MAX_BYTES)
    return session.on_batch(opened, stream, received_at_us=5)


def refused(stream: bytes, session: Session | None = None) -> ProtocolError:
    with pytest.raises(ProtocolError) as caught:
        offer(stream, session)
    return caught.value


def test_a_frame_becomes_an_offer_with_its_bytes_as_they_came():
    stream = stream_of(changes({"id": [1, 2, 3]}, first=7), source="shop-2")
    made = offer(stream)
    assert (made.source, made.encoding, made.body) == ("shop-2", Encoding.ARROW_STREAM, stream)
    assert (made.first_sequence, made.last_sequence, made.changes_after(7)) == (7, 9, 2)
    assert made.expanded_bytes > 3 * 16


def test_offers_with_holes_in_their_sequences_count_right():
    made = offer(stream_of(pa.table({"_cdc_sequence": pa.array([1, 5, 6, 100], pa.int64())})))
    assert (made.first_sequence, made.last_sequence) == (1, 100)
    assert [made.changes_after(sequence) for sequence in (0, 1, 5, 99, 100)] == [4, 3, 2, 1, 0]
    assert made.first_after(6) == 100
    assert type(made.last_sequence) is int


def test_a_frame_without_rows_offers_nothing():
    assert offer(stream_of(changes({"id": pa.array([], pa.int64())}))) is None


def test_refusals_name_the_rule_and_the_batch():
    error = refused(stream_of(changes(rows=1, operation=["X"]), sequence_number=4, correlation_id="c"))
    assert (error.reason, error.sequence_number) == ("invalid_format", 4)
    assert str(error).startswith("_cdc_operation: expected one of INSERT")
    assert str(refused(stream_of(changes(rows=1), table="a..b"))).startswith("lakefeed.table: expected a name")
    long = "x" * (CORRELATION_ID_MAX_CHARS + 1)
    assert str(refused(stream_of(changes(rows=1), correlation_id=long))).startswith("lakefeed.correlation-id: expected")
    assert refused(b"\xff\xff\xff\xff").reason == "invalid_format"


def test_rows_above_the_limit_of_events_are_refused_as_such():
    session = Session(event_max_bytes=1_000, default_source="shop")
    assert refused(stream_of(changes({"t": ["x" * 2_000]})), session).reason == "event_too_large"


def test_a_frame_may_stand_for_a_few_of_the_largest():
    limit = ARROW_EXPANSION_MAX_FRAMES * FRAME_MAX_BYTES
    session = Session(event_max_bytes=FRAME_MAX_BYTES, default_source="shop")
    fine = stream_of(changes({"t": ["x" * 1_000] * (limit // 1_100)}), compression="zstd")
    assert offer(fine, session).expanded_bytes < limit
    large = stream_of(changes({"t": ["x" * 1_000] * (limit // 1_000)}), compression="zstd")
    assert "once expanded" in str(refused(large))


def test_a_hole_in_the_batch_numbers_is_refused_before_the_rows_are_looked_at():
    session = Session(event_max_bytes=FRAME_MAX_BYTES, default_source="shop")
    assert offer(stream_of(changes(rows=1), sequence_number=0), session) is not None
    error = refused(stream_of(changes(rows=1, operation=["X"]), sequence_number=2), session)
    assert (error.reason, error.retry) == ("invalid_sequence", True)


# -- the whole service


async def users(service: Addresses, columns: str) -> list[tuple]:
    return await asyncio.to_thread(read_users, service, columns)


def read_users(service: Addresses, columns: str) -> list[tuple]:
    with contextlib.closing(open_duckdb(service.http_url)) as duckdb:
        query = f"SELECT _cdc_sequence, {columns} FROM lake.default.users ORDER BY _cdc_sequence"
        return duckdb.execute(query).fetchall()


async def send(client: WsClient, rows: pa.Table, **options) -> dict:
    await client.socket.send(stream_of(rows, **options))
    return await client.receive()


async def test_both_encodings_go_to_one_table_each_change_once(service: Addresses):
    async with connected(service.ws_url) as client:
        assert (await send(client, changes({"id": [1, 2], "name": ["a", "b"]})))["status"] == "ok"
        assert (await client.batch(3, 4))["status"] == "ok"
        overlapping = changes({"id": [3, 4, 5], "name": ["c", "d", "e"]}, first=3, operation=["UPDATE"] * 3)
        answer = await send(client, overlapping, compression="zstd", correlation_id="c-1")
        assert (answer["details"]["eventsProcessed"], answer["correlationId"]) == (1, "c-1")
        assert (await send(client, overlapping))["status"] == "duplicate"
        await client.request("flush_request")
    rows = await users(service, "_cdc_operation, id, name")
    expected = [(1, "INSERT", 1, "a"), (2, "INSERT", 2, "b"), (3, "INSERT", 3, "name 3"), (4, "INSERT", 4, "name 4")]
    assert rows == [*expected, (5, "UPDATE", 5, "e")]


async def test_bytes_that_only_begin_like_arrow_are_refused_and_affect_no_other_client(service: Addresses):
    rng = random.Random(1)
    async with connected(service.ws_url) as client:
        for length in (0, 1, 4, 8, 100, 10_000):
            await client.socket.send(b"\xff\xff\xff\xff" + rng.randbytes(length))
            answer = await client.receive()
            assert (answer["type"], answer["reason"]) == ("nack", "invalid_format")
        assert (await send(client, changes({"id": [1]})))["status"] == "ok"


async def test_frames_in_the_log_are_written_after_a_restart(tmp_path: Path):
    config = small_config(tmp_path / "data")
    stopped = replace(config, server=replace(config.server, shutdown_deadline_s=0.0))
    async with serving(stopped) as service, connected(service.ws_url) as client:
        for first in (1, 11, 21):
            rows = changes({"id": list(range(first, first + 10))}, first=first)
            assert (await send(client, rows, batch_rows=3, compression="lz4"))["status"] == "ok"
    async with serving(config) as service:
        async with connected(service.ws_url) as client:
            await client.request("flush_request")
        assert await users(service, "id") == [(number, number) for number in range(1, 31)]
