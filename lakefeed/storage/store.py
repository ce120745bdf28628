"""The object store seam: what a store promises, and which one a warehouse needs. Each store has a module of its own.

    file:///path, file:/path, /path                            local.py
    s3://bucket/key (also s3a, s3n)                            s3.py
    gs://bucket/key                                            cloud.py
    abfss://container@account.dfs.core.windows.net/key         cloud.py (also abfs)

Locations are taken as Iceberg stores them: a percent sign in one is a percent sign in the name.

An object appears whole or not at all. A write that raised may still have happened, so a caller who tries again picks
a new name. Names are never used twice.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, Protocol

from lakefeed.contract.errors import StorageError
from lakefeed.storage import s3
from lakefeed.storage.config import CLOUD_SCHEMES, StorageConfig
from lakefeed.storage.local import LocalStore

# Local writes spend their time in fsync, S3 parts in copying and checksums; more threads than this gain nothing.
STORAGE_THREADS = 4


class ObjectStore(Protocol):
    """Whole objects by location. All methods raise StorageError when the store did not do what was asked."""

    async def write(self, location: str, data: Any) -> None:
        """Store bytes or a buffer; on return they are durable. Cancelling leaves the object whole or absent."""

    async def read(self, location: str) -> bytes:
        """Read a whole object."""

    async def delete(self, location: str) -> None:
        """Delete an object; one that is absent is no error."""


@asynccontextmanager
async def open_store(config: StorageConfig) -> AsyncIterator[ObjectStore]:
    """Open the store that the warehouse's URI names, and close it at the end.

    Raises:
        StorageError: the library for the store is not installed, or its settings are not sound.
    """
    if config.warehouse.startswith(CLOUD_SCHEMES):
        yield _open_cloud_store(config)
        return
    with ThreadPoolExecutor(STORAGE_THREADS, thread_name_prefix="storage") as executor:
        if config.warehouse.startswith(s3.SCHEMES):
            async with s3.open_s3_store(config, executor=executor) as store:
                yield store
        else:
            yield LocalStore(executor, timeout_s=config.request_timeout_s)


def _open_cloud_store(config: StorageConfig) -> ObjectStore:
    try:
        from lakefeed.storage.cloud import CloudStore  # noqa: PLC0415 - its library is optional
    except ImportError as error:
        raise StorageError(
            f"storage needs a library: pip install 'lakefeed[gcs]' or 'lakefeed[azure]': warehouse={config.warehouse}"
        ) from error
    return CloudStore(config)
