"""What the pages on HTTP and Debezium show works as shown: bodies, statuses, the configuration of Debezium Server."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from lakefeed.ingest.config import load_config
from lakefeed.ingest.http import changes
from lakefeed.ingest.protocol.offers import NackReason
from tests.ingest.debezium.envelopes import streamed
from tests.ingest.http_ingest import NDJSON, serving_routes

DOCS = Path(__file__).parents[3] / "docs"
HTTP = (DOCS / "http.md").read_text(encoding="utf-8")
DEBEZIUM = (DOCS / "debezium.md").read_text(encoding="utf-8")


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.DOTALL | re.MULTILINE)


def server_properties() -> dict[str, str]:
    (block,) = blocks(DEBEZIUM, "properties")
    return dict(line.split("=", 1) for line in block.splitlines() if line)


def demanded_properties() -> dict[str, str]:
    """What the first column of the page's table of settings asks for."""
    return dict(re.findall(r"^\| `(debezium\.[^`=]+)=([^`]+)` \|", DEBEZIUM, re.MULTILINE))


def test_configuration_shown_for_debezium_server_has_every_setting_that_its_table_demands():
    demanded = demanded_properties()

    assert len(demanded) >= 10
    assert demanded.items() <= server_properties().items()


def test_configuration_shown_is_patient_and_the_wait_shown_is_that_of_the_code():
    properties = server_properties()

    assert int(properties["debezium.sink.http.timeout.ms"]) >= 60_000
    assert int(properties["debezium.sink.http.retries"]) >= 1_000_000
    assert f"{changes.WAIT_MAX_S:.0f} seconds" in HTTP
    assert changes.WAIT_MAX_S < 60, "the timeout that the page asks clients for"


async def test_url_shown_for_debezium_server_is_a_route_that_takes_its_events(tmp_path):
    properties = server_properties()
    url = urlsplit(properties["debezium.sink.http.url"])

    assert properties["debezium.sink.type"] == "http"
    assert url.port == load_config(None, {}).config.server.http_port
    async with serving_routes(tmp_path) as client:
        answer = await client.post(f"{url.path}?{url.query}", streamed(90, 100, 1))
        assert (answer.status, answer.document["eventsAccepted"]) == (200, 1)
        assert list(client.running.intake.sources()) == ["shop"]


def test_keys_shown_for_lakefeed_are_settings(tmp_path):
    (block,) = blocks(DEBEZIUM, "toml")
    path = tmp_path / "lakefeed.toml"
    path.write_text(block, encoding="utf-8")
    config = load_config(path, {}).config.debezium.to_config()

    assert tomllib.loads(block).keys() == {"debezium"}
    assert config.keys_of("shop.order_items").columns == ("order_id", "line_no")
    assert config.keys_of("shop.order_items").replica_identity_full


async def test_bodies_shown_are_taken_and_answered_as_shown(tmp_path):
    batch, answer, refusal, consumer = (json.loads(block) for block in blocks(HTTP, "json"))
    (rows,) = blocks(HTTP, "ndjson")
    async with serving_routes(tmp_path) as client:
        assert await client.post("/cdc", batch) == (200, answer)
        taken = await client.post("/cdc", rows.encode(), headers=NDJSON, params={"source": "rows", "table": "users"})
        assert taken.document["eventsAccepted"] == 2
        refused = await client.post("/cdc", {"sourceDoId": "shop", "events": [5]})
        assert refused.document.keys() == refusal.keys()
    assert {"table", "name", "snapshotId", "snapshotsBehind", "secondsBehind", "isExpired"} <= consumer.keys()


def test_statuses_shown_are_those_of_their_reasons():
    shown = {(int(status), reason) for status, reason in re.findall(r"^\| (\d+) \| `(\w+)` \|", HTTP, re.MULTILINE)}
    refused = {(status, reason) for reason, status in changes.STATUS_OF_REASON.items()}

    assert shown == refused | {(400, NackReason.INVALID_FORMAT.value)}


@pytest.mark.parametrize("name", ["source", "table", "key", "sequence", "previousSequence", "epoch"])
def test_query_parameters_shown_are_those_that_are_read(name):
    source = Path(changes.__file__).read_text(encoding="utf-8")

    assert f"| `{name}` |" in HTTP
    assert f'"{name}"' in source
