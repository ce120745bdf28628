"""Stores of every kind that can run here, each with a root to write under."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from lakefeed.settings import MIB
from lakefeed.storage.config import StorageConfig
from lakefeed.storage.store import ObjectStore, open_store
from tests.azure_server import AzureServer
from tests.gcs_server import GcsServer
from tests.s3_server import S3Server


@dataclass(frozen=True, slots=True)
class Place:
    """A store's settings, a root to write under, and how to name its objects from outside, without our code."""

    config: StorageConfig
    root: str
    names: Callable[[], list[str]]


def s3_config(server: S3Server, bucket: str, **settings: object) -> StorageConfig:
    return server.storage(f"s3://{bucket}/w", **{"part_bytes": 5 * MIB, **settings})


def local_place(directory: Path) -> Place:
    def names() -> list[str]:
        return [str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()]

    return Place(StorageConfig(warehouse=str(directory)), f"file://{directory}", names)


def s3_place(server: S3Server) -> Place:
    bucket = server.create_bucket()
    return Place(s3_config(server, bucket), f"s3://{bucket}", lambda: server.keys(bucket))


def azure_place(server: AzureServer) -> Place:
    container = server.create_container()
    root = f"abfss://{container}@{server.account}.dfs.core.windows.net"
    config = StorageConfig(
        warehouse=root, azure_endpoint=server.endpoint, azure_account_key=server.account_key, part_bytes=5 * MIB
    )
    return Place(config, root, lambda: server.names(container))


def gcs_place(server: GcsServer) -> Place:
    bucket = server.create_bucket()
    config = server.storage(f"gs://{bucket}/w", part_bytes=5 * MIB)
    return Place(config, f"gs://{bucket}", lambda: server.names(bucket))


@pytest.fixture(params=["local", "s3", "gcs", "azure"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    match request.param:
        case "local":
            return local_place(tmp_path)
        case "s3":
            return s3_place(request.getfixturevalue("s3_server"))
        case "gcs":
            return gcs_place(request.getfixturevalue("gcs_server"))
        case _:
            return azure_place(request.getfixturevalue("azure_server"))


@pytest.fixture
async def store(place: Place) -> AsyncIterator[ObjectStore]:
    async with open_store(place.config) as opened:
        yield opened
