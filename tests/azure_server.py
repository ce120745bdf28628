"""An Azure Blob server of its own for the tests: Azurite, where it is installed (npm install -g azurite).

AZURITE=/path/to/azurite-blob names one that is not on the PATH.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import os
import re
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from email.utils import formatdate
from html import unescape
from pathlib import Path

from tests.service_process import free_ports

# Azurite's well-known account, the same everywhere.
_ACCOUNT = "devstoreaccount1"
_ACCOUNT_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
_API_VERSION = "2021-12-02"

_START_TIMEOUT_S = 240.0
_STOP_TIMEOUT_S = 20.0
_POLL_S = 0.05


def find_azurite() -> str | None:
    return os.environ.get("AZURITE") or shutil.which("azurite-blob")


@dataclass(frozen=True, slots=True)
class AzureServer:
    """A running server; each test makes itself a container."""

    endpoint: str
    account: str = _ACCOUNT
    account_key: str = _ACCOUNT_KEY

    def create_container(self) -> str:
        """Create a container with a name of its own."""
        name = f"lake-{uuid.uuid4().hex[:12]}"
        self._ask("PUT", name, {"restype": "container"})
        return name

    def names(self, container: str) -> list[str]:
        """Name all blobs."""
        listing = self._ask("GET", container, {"comp": "list", "restype": "container"})
        return [unescape(name) for name in re.findall("<Name>(.*?)</Name>", listing)]

    def _ask(self, method: str, container: str, query: dict[str, str]) -> str:
        headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": _API_VERSION}
        signed = "".join(f"{name}:{value}\n" for name, value in headers.items())
        resource = f"/{self.account}/{self.account}/{container}" + "".join(f"\n{k}:{v}" for k, v in query.items())
        text = method + "\n" * 12 + signed + resource
        digest = hmac.new(base64.b64decode(self.account_key), text.encode(), hashlib.sha256).digest()
        headers["Authorization"] = f"SharedKey {self.account}:{base64.b64encode(digest).decode()}"
        url = f"{self.endpoint}/{container}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(urllib.request.Request(url, method=method, headers=headers), timeout=240) as answer:
            return answer.read().decode()


@contextlib.contextmanager
def run_azure_server(directory: Path) -> Iterator[AzureServer]:
    """Start Azurite, wait until it listens, and end it by its process afterwards."""
    program = find_azurite()
    assert program is not None
    port = free_ports(1)[0]
    options = ["--blobHost", "127.0.0.1", "--blobPort", str(port), "--inMemoryPersistence", "--disableTelemetry"]
    with (directory / "azurite.log").open("wb") as log:
        command = [program, *options, "--skipApiVersionCheck"]
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=directory)
        try:
            _wait_until_it_listens(port, process)
            yield AzureServer(f"http://127.0.0.1:{port}/{_ACCOUNT}")
        finally:
            process.terminate()
            try:
                process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_until_it_listens(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while True:
        assert process.poll() is None, f"the Azure server ended: status={process.returncode}"
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
        except OSError:
            assert time.monotonic() < deadline, "the Azure server did not get ready"
            time.sleep(_POLL_S)
        else:
            return
