"""An S3 server of its own for the tests: SeaweedFS on free loopback ports, its data in a directory of the test run."""

from __future__ import annotations

import contextlib
import functools
import json
import socket
import subprocess
import sysconfig
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import botocore.session
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from lakefeed.storage.config import StorageConfig
from tests.clients import S3Settings

_START_TIMEOUT_S = 240.0
_POLL_S = 0.05

# Every bucket takes a volume. Left alone, the server allows as many as the free disk holds full ones, which on a nearly
# full disk is fewer than the tests have buckets.
_VOLUMES_MAX = 10_000

_PORT_OPTIONS = (
    "s3.port",
    "s3.port.grpc",
    "s3.port.iceberg",
    "master.port",
    "master.port.grpc",
    "volume.port",
    "volume.port.grpc",
    "filer.port",
    "filer.port.grpc",
    "admin.port",
    "admin.port.grpc",
)


@dataclass(frozen=True, slots=True)
class S3Server:
    """A running server; each test makes itself a bucket."""

    endpoint: str
    access_key_id: str
    secret_access_key: str
    region: str = "us-east-1"

    @property
    def settings(self) -> S3Settings:
        return S3Settings(
            endpoint=self.endpoint, access_key_id=self.access_key_id, secret_access_key=self.secret_access_key
        )

    def storage(self, warehouse: str, **settings: object) -> StorageConfig:
        """Return the settings of a warehouse on this server."""
        return StorageConfig(
            **{
                "warehouse": warehouse,
                "s3_endpoint": self.endpoint,
                "s3_path_style": True,
                "s3_access_key_id": self.access_key_id,
                "s3_secret_access_key": self.secret_access_key,
                **settings,
            }
        )

    def new_warehouse(self, *, endpoint: str = "") -> dict[str, str]:
        """Give the settings of a service whose files go to a new bucket; `endpoint` is where it finds the server."""
        return {
            "storage.warehouse": f"s3://{self.create_bucket()}/tables",
            "storage.s3_endpoint": endpoint or self.endpoint,
            "storage.s3_path_style": "true",
            "storage.s3_access_key_id": self.access_key_id,
            "storage.s3_secret_access_key": self.secret_access_key,
        }

    def client(self):
        """Open a plain client, to look at the store from outside."""
        return _session().create_client(
            "s3",
            endpoint_url=self.endpoint,
            region_name=self.region,
            aws_access_key_id=self.access_key_id,
            aws_secret_access_key=self.secret_access_key,
            config=Config(s3={"addressing_style": "path"}, retries={"total_max_attempts": 1}),
        )

    def create_bucket(self) -> str:
        """Create a bucket with a name of its own."""
        name = f"lake-{uuid.uuid4().hex[:12]}"
        with contextlib.closing(self.client()) as client:
            client.create_bucket(Bucket=name)
        return name

    def keys(self, bucket: str) -> list[str]:
        """Name all objects of a bucket."""
        with contextlib.closing(self.client()) as client:
            return [item["Key"] for item in client.list_objects_v2(Bucket=bucket).get("Contents", [])]


@functools.cache
def _session() -> botocore.session.Session:
    """Return a session for all clients: each session parses the description of S3 anew, for 0.1 s."""
    return botocore.session.get_session()


@contextlib.contextmanager
def run_s3_server(directory: Path) -> Iterator[S3Server]:
    """Start SeaweedFS, wait until it stores objects, and kill it afterwards."""
    ports = dict(zip(_PORT_OPTIONS, _free_ports(len(_PORT_OPTIONS)), strict=True))
    server = S3Server(f"http://127.0.0.1:{ports['s3.port']}", "lakefeed", "lakefeed-secret")
    with (directory / "weed.log").open("wb") as log:
        process = subprocess.Popen(_command(directory, server, ports), stdout=log, stderr=log, cwd=directory)
        try:
            _wait_until_ready(server, process)
            yield server
        finally:
            process.kill()  # its data ends with it
            process.wait()


def _command(directory: Path, server: S3Server, ports: dict[str, int]) -> list[str]:
    credentials = [{"accessKey": server.access_key_id, "secretKey": server.secret_access_key}]
    identity = {"name": "lake", "credentials": credentials, "actions": ["Admin", "Read", "Write", "List", "Tagging"]}
    config = directory / "s3.json"
    config.write_text(json.dumps({"identities": [identity]}))
    data = directory / "data"
    data.mkdir()
    return [
        str(Path(sysconfig.get_path("scripts")) / "weed"),
        "mini",
        f"-dir={data}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        f"-s3.config={config}",
        "-webdav=false",
        "-admin.ui=false",
        "-s3.port.lance=0",
        f"-volume.max={_VOLUMES_MAX}",
        "-master.telemetry=false",
        *(f"-{option}={port}" for option, port in ports.items()),
    ]


def _free_ports(count: int) -> list[int]:
    """Find ports that are free now; all are held at once, so that none comes twice."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _wait_until_ready(server: S3Server, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while True:
        assert process.poll() is None, f"the S3 server ended: status={process.returncode}"
        try:
            _store_an_object(server)
        except (ClientError, BotoCoreError):
            assert time.monotonic() < deadline, "the S3 server did not get ready"
            time.sleep(_POLL_S)
        else:
            return


def _store_an_object(server: S3Server) -> None:
    with contextlib.closing(server.client()) as client:
        client.create_bucket(Bucket="ready")
        client.put_object(Bucket="ready", Key="ready", Body=b"ready")
