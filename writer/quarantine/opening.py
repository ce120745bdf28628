"""What a command needs to reach the quarantines of a lake: catalog, store, threads. Owns their lifetime.

Everything goes through the REST catalog, so a command runs beside a service, on another machine, or on a catalog that
is not Lakefeed's own.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from prometheus_client import CollectorRegistry

from writer.changes import TableName
from writer.committer import Committer
from writer.config import StorageConfig, WriterConfig
from writer.errors import TableMissing
from writer.iceberg.catalog_client import CatalogClient, open_foreign_catalog
from writer.iceberg.config import IcebergConfig
from writer.metrics import WriterMetrics
from writer.quarantine import names
from writer.quarantine.store import Quarantine
from writer.storage import open_store
from writer.table_context import TableContext
from writer.table_settings import TableSections

# Who commits, as snapshots name it.
NODE = "lakefeed-quarantine"


@dataclass(frozen=True, slots=True)
class OpenLake:
    """The quarantines of a lake, and what it takes to read and write their tables."""

    quarantines: Sequence[Quarantine]
    context: TableContext


@asynccontextmanager
async def open_quarantines(
    iceberg: IcebergConfig,
    *,
    namespace: tuple[str, ...] | None,
    writer: WriterConfig,
    storage: StorageConfig,
    tables: TableSections,
) -> AsyncIterator[OpenLake | None]:
    """Open the quarantine of a namespace, or those of all; None if there is none."""
    async with open_foreign_catalog(iceberg) as catalog:
        await catalog.load_config()
        namespaces = [namespace] if namespace is not None else await catalog.list_namespaces()
        found = [(each, location) for each in namespaces if (location := await _locate(catalog, each)) is not None]
        if not found:
            yield None
            return
        # The tables say where files are; the settings, how to get there.
        where = replace(storage, warehouse=found[0][1])
        with (
            ThreadPoolExecutor(1, thread_name_prefix="decode") as decoders,
            ThreadPoolExecutor(1, thread_name_prefix="parquet") as encoders,
        ):
            async with open_store(where) as store:
                context = TableContext(
                    node=NODE,
                    config=writer,
                    committer=Committer(catalog, store),
                    store=store,
                    decoders=decoders,
                    encoders=encoders,
                    metrics=WriterMetrics(CollectorRegistry()),
                    clock=time.monotonic,
                    tables=tables,
                )
                yield OpenLake([Quarantine(each, context) for each, _ in found], context)


async def _locate(catalog: CatalogClient, namespace: tuple[str, ...]) -> str | None:
    try:
        loaded = await catalog.load_table(TableName(namespace, names.TABLE))
    except TableMissing:
        return None
    location: str = loaded.document["location"]
    return location
