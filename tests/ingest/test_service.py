"""Starting and stopping: what is in the way is named, nothing stays open behind a failed start, identity is kept."""

from __future__ import annotations

import asyncio
import gc
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from websockets.asyncio.client import connect

from lakefeed.contract.errors import WriterError
from lakefeed.ingest.config import Config
from lakefeed.ingest.errors import IngestError
from lakefeed.ingest.intake.intake import Intake
from lakefeed.ingest.service import listen, load_node_id, own_storage, serving
from lakefeed.settings import SettingsError
from lakefeed.storage.config import StorageConfig
from tests.ingest.conftest import small_config
from tests.ingest.ws_client import connected


async def test_two_services_in_one_process_do_not_mix(tmp_path):
    first, second = small_config(tmp_path / "one"), small_config(tmp_path / "two")
    async with serving(first) as one, serving(second) as two:
        for addresses in (one, two):
            async with connected(addresses.ws_url) as client:
                assert (await client.batch(1))["details"]["eventsProcessed"] == 1


async def test_data_directory_in_use_is_refused_and_leaves_nothing_open(tmp_path):
    config = small_config(tmp_path)
    async with serving(config):
        with pytest.raises(WriterError):
            async with serving(config):
                pass
    gc.collect()  # an unclosed socket would be reported, and fail the test


async def test_port_in_use_is_named_with_its_setting_and_leaves_nothing_open(tmp_path):
    config = small_config(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = replace(config.server, ws_port=taken.getsockname()[1])
        with pytest.raises(IngestError, match=r"cannot listen: address=127.0.0.1:\d+ .*server.ws_port"):
            async with serving(replace(config, server=server)):
                pass
    gc.collect()


async def test_partition_that_no_table_could_have_is_refused_at_the_start(tmp_path):
    with pytest.raises(SettingsError, match=r"writer.partition: "):
        async with serving(small_config(tmp_path, partition="day(nowhere)")):
            pass


def test_node_keeps_its_name(tmp_path):
    assert load_node_id(tmp_path) == load_node_id(tmp_path)
    assert load_node_id(tmp_path).startswith("node-")


@pytest.mark.parametrize(
    ("given", "location"),
    [
        ("", "file:///data/warehouse"),
        ("s3://bucket/path/", "s3://bucket/path"),
        ("s3a://bucket/path", "s3://bucket/path"),
        ("file:///lake/", "file:///lake"),
        ("/lake", "file:///lake"),
    ],
)
def test_warehouse_is_named_as_a_uri(given, location):
    config = Config(storage=StorageConfig(warehouse=given))
    assert own_storage(config, Path("/data")).warehouse == location


async def test_part_that_fails_while_a_client_waits_ends_the_service(tmp_path, monkeypatch):
    async def fail(*_: object) -> None:
        raise RuntimeError("a defect of ours")

    monkeypatch.setattr(Intake, "_admit", fail)
    event = b'{"sequence":1,"operation":"INSERT","table":"t"}'
    with pytest.raises(ExceptionGroup) as failed:  # noqa: PT012 - the service ends the block by itself
        async with (
            asyncio.timeout(30),
            serving(small_config(tmp_path)) as addresses,
            connect(addresses.ws_url) as client,
        ):
            await client.send(b'{"type":"cdc_batch","sourceDoId":"s","events":[%s]}' % event)
            await asyncio.Event().wait()
    assert failed.value.exceptions[0].args == ("a defect of ours",)


def test_answers_are_not_held_back_to_be_sent_together():
    with (
        listen("127.0.0.1", 0, setting="ws_port") as listener,
        socket.create_connection(listener.getsockname()),
        listener.accept()[0] as accepted,
    ):
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
