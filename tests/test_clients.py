"""The helpers that open other engines do reach the catalog's tables, on local files and on S3."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from aiohttp import web

from lakefeed.catalog.app import build_catalog
from lakefeed.catalog.config import CatalogConfig, Warehouse
from lakefeed.storage.config import StorageConfig
from tests.clients import open_duckdb, open_pyiceberg
from tests.s3_server import S3Server
from tests.serving import serve_in_thread

ROWS = pa.table({"id": [1, 2], "item": ["pen", "ink"]})


def serve_catalog(directory: Path, warehouse: Warehouse):
    app = web.Application()
    app.add_subapp("/v1", build_catalog(CatalogConfig(), warehouse, directory / "catalog.db"))
    return serve_in_thread(app)


@pytest.fixture
def local_catalog(tmp_path: Path) -> Iterator[str]:
    with serve_catalog(tmp_path, Warehouse(StorageConfig(warehouse=(tmp_path / "warehouse").as_uri()))) as url:
        yield url


@pytest.fixture
def s3_catalog(tmp_path: Path, s3_server: S3Server) -> Iterator[str]:
    with serve_catalog(tmp_path, Warehouse(s3_server.storage(f"s3://{s3_server.create_bucket()}/lake"))) as url:
        yield url


def test_pyiceberg_writes_and_duckdb_reads_local_files(local_catalog):
    with open_pyiceberg(local_catalog) as catalog:
        catalog.create_namespace("shop")
        catalog.create_table("shop.orders", ROWS.schema).append(ROWS)

    with open_duckdb(local_catalog) as duckdb:
        assert duckdb.execute("SELECT * FROM lake.shop.orders ORDER BY id").fetchall() == [(1, "pen"), (2, "ink")]


def test_pyiceberg_writes_and_duckdb_reads_s3_with_credentials_of_their_own(s3_catalog, s3_server):
    with open_pyiceberg(s3_catalog, s3=s3_server.settings) as catalog:
        catalog.create_namespace("shop")
        catalog.create_table("shop.orders", ROWS.schema).append(ROWS)

    with open_duckdb(s3_catalog, s3=s3_server.settings) as duckdb:
        assert duckdb.execute("SELECT * FROM lake.shop.orders ORDER BY id").fetchall() == [(1, "pen"), (2, "ink")]


def test_served_application_is_gone_after_its_context():
    with serve_in_thread(web.Application()) as url:
        pass

    with pytest.raises(OSError, match="refused"):
        open_pyiceberg(url)
