"""A committer on a lake, through a catalog that can be spoiled."""

from __future__ import annotations

import contextlib
import uuid
from dataclasses import replace

from lakefeed.contract.changes import Position, SourceId, Span, TableName
from lakefeed.iceberg.arrow import split_by_partition
from lakefeed.storage.store import open_store
from lakefeed.writer.commit.committer import Committer
from lakefeed.writer.commit.plan import Flush
from lakefeed.writer.commit.rest_catalog import open_catalog
from lakefeed.writer.commit.state import data_location
from lakefeed.writer.config import WriterConfig
from lakefeed.writer.files.parquet import write_data_file
from lakefeed.writer.rows.table_settings import TableSettings
from tests.fakes import FlakyCatalog
from tests.writer.examples import NESTED, nested_rows

USERS = TableName(("default",), "users")
SHOP = SourceId("shop")
COMMIT_TIMEOUT_S = 2.0


class Bench:
    """A committer on a lake, through a catalog that can be spoiled."""

    def __init__(self, lake, store, flaky, committer):
        self.lake = lake
        self.store = store
        self.flaky = flaky
        self.committer = committer

    async def create(self, name=USERS, **settings):
        return await self.committer.load_or_create(name, NESTED, TableSettings(config=WriterConfig(**settings)))

    async def make_flush(self, state, first, last, *, node="n1", epoch=0, rows=None):
        """Write data files of shop's changes `first` to `last`."""
        rows = nested_rows(last - first + 1, first_sequence=first) if rows is None else rows
        files = []
        for partition, part in split_by_partition(rows, state.spec, state.schema):
            location = data_location(state, partition, f"{uuid.uuid4()}.parquet")
            buffer, file = write_data_file(
                part, schema=state.schema, location=location, partition=partition, config=WriterConfig()
            )
            await self.store.write(location, buffer)
            files.append(file)
        spans = {SHOP: Span(Position(epoch, first), Position(epoch, last))}
        return Flush(id=str(uuid.uuid4()), node=node, log_from=first, log_to=last + 1, spans=spans, files=files)

    def renumber(self, flush, number):
        """Make another flush of the same files, so that many commits cost no time to write."""
        spans = {SHOP: Span(Position(0, number), Position(0, number))}
        return replace(flush, id=str(uuid.uuid4()), log_from=number, log_to=number + 1, spans=spans)

    def sequences(self, name="default.users"):
        """Read the table with PyIceberg, and give what it holds."""
        with contextlib.closing(self.lake.open_pyiceberg()) as catalog:
            return sorted(catalog.load_table(name).scan().to_arrow()["_cdc_sequence"].to_pylist())

    def snapshots(self, name="default.users"):
        with contextlib.closing(self.lake.open_pyiceberg()) as catalog:
            return catalog.load_table(name).snapshots()


@contextlib.asynccontextmanager
async def open_bench(lake):
    async with (
        FlakyCatalog(lake.catalog_url) as flaky,
        open_store(lake.storage) as store,
        open_catalog(flaky.url, timeout_s=COMMIT_TIMEOUT_S) as catalog,
    ):
        await catalog.load_config()
        yield Bench(lake, store, flaky, Committer(catalog, store))
