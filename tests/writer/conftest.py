"""A lake for the writer's tests: the real catalog in a thread of its own, files on local disk or on S3."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from aiohttp import web

from lakefeed.catalog.app import build_catalog
from lakefeed.catalog.config import CatalogConfig, Warehouse
from lakefeed.storage.config import StorageConfig
from lakefeed.writer.rows.groups import JsonGroup
from tests import clients
from tests.serving import serve_in_thread


@dataclass(frozen=True, slots=True)
class Lake:
    """Where the catalog answers and files live."""

    catalog_url: str
    storage: StorageConfig
    s3: clients.S3Settings | None

    def open_pyiceberg(self):
        return clients.open_pyiceberg(self.catalog_url, s3=self.s3)

    def open_duckdb(self):
        return clients.open_duckdb(self.catalog_url, s3=self.s3)


def _serve(warehouse: Warehouse, database: Path):
    app = web.Application()
    app.add_subapp("/v1", build_catalog(CatalogConfig(), warehouse, database))
    return serve_in_thread(app)


@pytest.fixture
def local_lake(tmp_path) -> Iterator[Lake]:
    storage = StorageConfig(warehouse=f"file://{tmp_path}/warehouse")
    with _serve(Warehouse(storage), tmp_path / "catalog.db") as url:
        yield Lake(url, storage, None)


@pytest.fixture
def s3_lake(tmp_path, s3_server) -> Iterator[Lake]:
    storage = s3_server.storage(f"s3://{s3_server.create_bucket()}/warehouse")
    with _serve(Warehouse(storage), tmp_path / "catalog.db") as url:
        yield Lake(url, storage, s3_server.settings)


@pytest.fixture
def poison(monkeypatch):
    """Make our own decoder fail on some rows, as a defect that is not known yet would."""

    def failing(decode):
        def call(group: JsonGroup, *args, **kwargs):
            if any(b"poison" in bytes(image) for image in group.images):
                raise KeyError("a value of the row")
            return decode(group, *args, **kwargs)

        return call

    for name in ("strict", "exact"):
        monkeypatch.setattr(JsonGroup, name, failing(getattr(JsonGroup, name)))
