"""Clients that share no code with ours complete connect, batch, ack and persisted: aiohttp, and Node where it is."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from tests.service_process import ServiceProcess, service_process

pytestmark = pytest.mark.integration

NODE_CLIENT = """
const socket = new WebSocket(process.argv[1]);
const heard = [];
const event = {sequence: 1, operation: "INSERT", table: "nodes", rowId: "1", after: {id: 1, name: "Ada"}};
socket.onopen = () => socket.send(JSON.stringify({type: "connect", sourceDoId: "node"}));
socket.onmessage = ({data}) => {
  const message = JSON.parse(data);
  heard.push(message.status ?? message.type);
  if (message.type === "status")
    socket.send(JSON.stringify({type: "cdc_batch", sourceDoId: "node", sequenceNumber: 1, events: [event]}));
  if (message.status === "persisted") { console.log(JSON.stringify(heard)); socket.close(); }
};
setTimeout(() => { console.log(JSON.stringify(heard)); process.exit(1); }, 30000).unref();
"""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    with service_process(tmp_path_factory.mktemp("service"), {"writer.flush_max_age_s": 0.1}) as running:
        running.start()
        yield running
        assert running.stop() == 0


async def test_aiohttps_client_completes_the_conversation(service: ServiceProcess) -> None:
    event = {"sequence": 1, "operation": "INSERT", "table": "aio", "rowId": "1", "after": {"id": 1}}
    async with asyncio.timeout(240), aiohttp.ClientSession() as session, session.ws_connect(service.ws_url) as socket:
        await socket.send_json({"type": "connect", "sourceDoId": "aio"})
        assert (await socket.receive_json())["type"] == "status"
        await socket.send_bytes(json.dumps({"type": "cdc_batch", "sequenceNumber": 1, "events": [event]}).encode())
        assert (await socket.receive_json())["status"] == "ok"
        assert (await socket.receive_json())["status"] == "persisted"


@pytest.mark.skipif(shutil.which("node") is None, reason="Node.js is not installed on this machine")
def test_nodes_own_websocket_completes_the_conversation(service: ServiceProcess, tmp_path: Path) -> None:
    command = ["node", "--experimental-websocket", "-e", NODE_CLIENT, service.ws_url]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == ["status", "ok", "persisted"]
