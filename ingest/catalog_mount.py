"""The catalog as this project's settings describe it. Wiring: the one place that turns our settings into its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from aiohttp import web

from catalog.app import build_catalog, build_files
from catalog.config import S3Settings, Warehouse
from catalog.storage import Files
from ingest.config import Config
from ingest.data_directory import make_data_dir, warehouse_location
from writer.config import StorageConfig

DATABASE_NAME = "catalog.sqlite"


def build_own_catalog(config: Config, storage: StorageConfig, data_dir: Path) -> web.Application:
    """Build the catalog, to be mounted under /v1; `storage` names the warehouse as a URI."""
    return build_catalog(config.catalog, _warehouse(storage), data_dir / DATABASE_NAME)


@asynccontextmanager
async def open_own_files(config: Config) -> AsyncIterator[Files]:
    """Open the storage that the catalog's metadata files are in."""
    storage = replace(config.storage, warehouse=warehouse_location(config, make_data_dir(config)))
    files = build_files(config.catalog, _warehouse(storage))
    await files.open()
    try:
        yield files
    finally:
        await files.close()


def _warehouse(storage: StorageConfig) -> Warehouse:
    s3 = S3Settings(
        endpoint=storage.s3_endpoint,
        region=storage.s3_region,
        path_style=storage.s3_path_style,
        access_key_id=storage.s3_access_key_id,
        secret_access_key=storage.s3_secret_access_key,
        session_token=storage.s3_session_token,
        profile=storage.s3_profile,
        checksum=storage.s3_checksum,
    )
    return Warehouse(location=storage.warehouse, s3=s3)
