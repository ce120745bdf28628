"""Which transaction goes on behind a batch, as sources say it, and that the log keeps it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import orjson
import pytest
from prometheus_client import CollectorRegistry

from lakefeed.contract.changes import SourceId
from lakefeed.ingest.intake.debezium import DebeziumIntake
from lakefeed.ingest.metrics import IngestMetrics
from lakefeed.ingest.protocol.batch import TRANSACTION_ID_MAX_CHARS, open_transaction
from lakefeed.ingest.protocol.offers import Durable
from lakefeed.writer.wal.payload import Encoding
from tests.ingest.debezium.envelopes import KEYED, mark, streamed
from tests.ingest.http_ingest import NOW_S
from tests.ingest.offers import offer_of
from tests.ingest.running_intake import running_intake
from tests.writer.wire.arrow_batches import changes, stream_of


def batch(*metadata: Any, first: int = 1):
    """Offer one insert for each metadata; None stands for an event without."""
    events = [
        {"sequence": first + number, "operation": "INSERT", "table": "users", "after": {"id": number}}
        | ({} if each is None else {"metadata": each})
        for number, each in enumerate(metadata)
    ]
    sequences = range(first, first + len(metadata))
    body = orjson.dumps({"type": "cdc_batch", "sourceDoId": "shop", "events": events})
    return replace(offer_of(*sequences), sequences=sequences, body=body)


def inside(name: Any = "t1", **more: Any) -> dict[str, Any]:
    return {"user": "ada", "transaction": {"id": name, **more}}


END = inside(end=True)


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        pytest.param([None], "", id="no metadata"),
        pytest.param([{"user": "ada"}], "", id="no transaction"),
        pytest.param([inside()], "t1", id="inside"),
        pytest.param([inside(), END], "", id="ended"),
        pytest.param([END, inside("t2")], "t2", id="the next has begun"),
        pytest.param([inside(), None], "", id="the last one has none"),
        pytest.param([inside(end=False)], "t1", id="not the end"),
        pytest.param([inside(2041)], "2041", id="a number"),
        pytest.param([inside(order=7)], "t1", id="more fields"),
    ],
)
def test_last_event_tells_which_transaction_goes_on(metadata, expected):
    assert open_transaction(batch(*metadata)) == expected


@pytest.mark.parametrize(
    "metadata",
    [
        pytest.param({"transaction": "t1"}, id="a text"),
        pytest.param({"transaction": None}, id="null"),
        pytest.param({"transaction": {"end": False}}, id="no id"),
        pytest.param(inside(None), id="a null id"),
        pytest.param(inside("x" * (TRANSACTION_ID_MAX_CHARS + 1)), id="too long"),
        pytest.param(inside(end="yes"), id="an end that is no boolean"),
        pytest.param([1, 2], id="a list"),
    ],
)
def test_metadata_of_another_form_says_nothing(metadata):
    assert open_transaction(batch(metadata)) == ""


def test_arrow_frame_says_it_in_its_schema():
    rows = changes({"id": [1, 2]})
    offer = replace(offer_of(1, 2), encoding=Encoding.ARROW_STREAM)
    assert open_transaction(replace(offer, body=stream_of(rows, transaction="t1"))) == "t1"
    assert open_transaction(replace(offer, body=stream_of(rows))) == ""
    long = open_transaction(replace(offer, body=stream_of(rows, transaction="x" * 1_000)))
    assert long == "x" * TRANSACTION_ID_MAX_CHARS


async def test_log_keeps_which_transaction_goes_on(tmp_path):
    async with running_intake(tmp_path, tracks_transactions=True) as client:
        await client.verdicts(batch(inside()), batch(inside(), END, first=2), batch(None, first=4))
        assert [frame.open_transaction for frame in client.frames()] == ["t1", "", ""]


async def test_log_says_nothing_of_transactions_unless_they_are_heeded(tmp_path):
    async with running_intake(tmp_path) as client:
        await client.verdicts(batch(inside()))
        await take(client, mark("BEGIN", "5:101"), in_transaction(1), source="debezium")
        assert [frame.open_transaction for frame in client.frames()] == ["", ""]


async def test_longest_names_fit_the_log(tmp_path):
    async with running_intake(tmp_path, tracks_transactions=True) as client:
        name = "\x01" * TRANSACTION_ID_MAX_CHARS
        offers = [batch(inside(name), first=number) for number in range(1, 400)]
        assert all(isinstance(verdict, Durable) for verdict in await client.verdicts(*offers))
        assert {frame.open_transaction for frame in client.frames()} == {name}


def in_transaction(row: int) -> dict[str, Any]:
    document = streamed(90, 100 + row, row)
    document["transaction"] = {"id": f"5:{100 + row}", "total_order": row, "data_collection_order": row}
    return document


async def take(client, *documents: Any, source: str = "shop") -> None:
    intake = DebeziumIntake(
        client.intake, config=KEYED, metrics=IngestMetrics(CollectorRegistry()), clock=lambda: NOW_S
    )
    await intake.accept(SourceId(source), json.dumps(list(documents)).encode(), {})


async def test_transaction_of_debezium_is_open_until_its_end_is_in_the_log(tmp_path):
    async with running_intake(tmp_path, tracks_transactions=True) as client:
        await take(client, mark("BEGIN", "5:101"), in_transaction(1))
        await take(client, in_transaction(2))
        await take(client, mark("END", "5:200", 2, t=2))
        assert [frame.open_transaction for frame in client.frames()] == ["5", "5", ""]
