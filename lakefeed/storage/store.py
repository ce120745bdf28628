"""Object store interface, and which implementation a warehouse needs.

Locations are taken as Iceberg stores them: a percent sign in one is a percent sign in the name.

Objects are written once, under names that are never used twice, and never changed. When `write` returns, the object is
whole and durable. A write that raised or was cancelled may still have happened, or may still be running; a crash on a
local disk may leave a truncated file. A caller who tries again therefore takes a new name, and refers to an object
only after `write` has returned.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from lakefeed.backoff import Backoff
from lakefeed.contract.errors import StorageError
from lakefeed.storage.config import CLOUD_SCHEMES, S3_SCHEMES, StorageConfig

# A few attempts hide the occasional error of a busy store: two seconds in all, unless attempts time out. An outage is
# not waited out here; the flush that needs the object reports it in /status and starts again.
ATTEMPTS_MAX = 5
BACKOFF = Backoff(first_s=0.1, max_s=5.0)


class ObjectStore(ABC):
    """Whole objects by location. Every method raises StorageError if the store did not do what was asked."""

    async def open(self) -> None:  # noqa: B027 - not every store connects
        """Connect. Must be called before any other method."""

    async def close(self) -> None:  # noqa: B027
        """Wait for running work in threads, then release connections and threads."""

    @abstractmethod
    async def write(self, location: str, data: Any) -> None:
        """Write bytes or a buffer as a new object, which is durable when this returns."""

    def blocking_write(self, location: str, data: Any) -> Callable[[], None] | None:
        """Return a function that writes a new object from a thread, or None if writes need no thread."""
        return None

    @abstractmethod
    async def read(self, location: str, *, max_bytes: int | None = None) -> bytes:
        """Read a whole object.

        Raises: FileMissing; StorageError, also if the object is larger than `max_bytes`.
        """

    @abstractmethod
    async def exists(self, location: str) -> bool:
        """Return whether an object exists."""

    @abstractmethod
    async def list_names(self, directory: str) -> list[str]:
        """Return the names of the objects directly in a directory, in any order; none if it does not exist."""

    @abstractmethod
    async def delete(self, location: str) -> None:
        """Delete an object. It is no error if the object does not exist."""

    async def make_directory(self, location: str) -> None:  # noqa: B027 - object stores have no directories
        """Create a directory and its parents durably, where storage has directories."""


@asynccontextmanager
async def open_store(config: StorageConfig) -> AsyncIterator[ObjectStore]:
    """Open the store that the warehouse's location names, and close it at the end.

    Raises: StorageError if the client library is not installed or the settings are not valid.
    """
    store = build_object_store(config)
    await store.open()
    try:
        yield store
    finally:
        await store.close()


def build_object_store(config: StorageConfig) -> ObjectStore:
    """Return the store that the warehouse's location names, not yet open.

    Raises: StorageError if the client library is not installed.
    """
    if config.warehouse.startswith(S3_SCHEMES):
        from lakefeed.storage.s3 import S3Store  # noqa: PLC0415 - importing botocore takes half a second

        return S3Store(config)
    if config.warehouse.startswith(CLOUD_SCHEMES):
        try:
            from lakefeed.storage.cloud import CloudStore  # noqa: PLC0415 - obstore is optional
        except ImportError as error:
            raise StorageError(
                "storage needs a library: pip install 'lakefeed[gcs]' or 'lakefeed[azure]':"
                f" warehouse={config.warehouse}"
            ) from error
        return CloudStore(config)
    from lakefeed.storage.local import LocalStore  # noqa: PLC0415 - it is derived from ObjectStore

    return LocalStore(timeout_s=config.request_timeout_s)
