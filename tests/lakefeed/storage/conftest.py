"""Stores of every kind that can run here, each with a root to write under."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from lakefeed.storage.config import MIB, StorageConfig
from lakefeed.storage.store import ObjectStore, open_store
from tests.azure_server import AzureServer, find_azurite, run_azure_server
from tests.gcs_server import GcsServer, run_gcs_server
from tests.s3_server import S3Server


@dataclass(frozen=True, slots=True)
class Place:
    """A store's settings, a root to write under, and how to name its objects from outside, without our code."""

    config: StorageConfig
    root: str
    names: Callable[[], list[str]]


def s3_config(server: S3Server, bucket: str, **settings: object) -> StorageConfig:
    return StorageConfig(
        **{
            "warehouse": f"s3://{bucket}/w",
            "s3_endpoint": server.endpoint,
            "s3_path_style": True,
            "s3_access_key_id": server.access_key_id,
            "s3_secret_access_key": server.secret_access_key,
            "part_bytes": 5 * MIB,
            **settings,
        }
    )


@pytest.fixture(scope="session")
def azure_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AzureServer]:
    if find_azurite() is None:
        pytest.skip("azurite-blob is not on the PATH: npm install -g azurite")
    with run_azure_server(tmp_path_factory.mktemp("azure")) as server:
        yield server


@pytest.fixture(scope="session")
def gcs_server(tmp_path_factory: pytest.TempPathFactory, s3_server: S3Server) -> Iterator[GcsServer]:
    with run_gcs_server(tmp_path_factory.mktemp("gcs"), s3_server) as server:
        yield server


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
    config = StorageConfig(
        warehouse=f"gs://{bucket}/w",
        gcs_endpoint=server.endpoint,
        gcs_service_account=str(server.key_file),
        part_bytes=5 * MIB,
    )
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
