"""Files of the catalog in object storage: checked locations, one time limit, Iceberg's error texts."""

from __future__ import annotations

import asyncio
import errno
import functools
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from lakefeed.contract.errors import FileMissing, LocationInvalid, StorageError
from lakefeed.locations import parse_location
from lakefeed.storage.store import ObjectStore

_T = TypeVar("_T")

# Locations of current metadata files, which every load asks for; a few hundred bytes each.
_PARSED_MAX = 4_096


class Files:
    """Whole files by location. Every method raises LocationInvalid for a location that has no single meaning."""

    def __init__(self, store: ObjectStore, *, timeout_s: float) -> None:
        self._store = store
        self._timeout_s = timeout_s

    async def open(self) -> None:
        """Open the store."""
        await self._store.open()

    async def close(self) -> None:
        """Close the store."""
        await self._store.close()

    async def read(self, location: str, *, max_bytes: int) -> bytes:
        """Read a file.

        Raises: FileMissing; StorageError, also if the file is larger than `max_bytes`.
        """
        return await self._run(location, lambda checked: self._store.read(checked, max_bytes=max_bytes))

    async def write(self, location: str, body: bytes) -> None:
        """Write a new file, which is durable when this returns.

        Raises: StorageError. Whether the file exists is then unknown.
        """
        await self._run(location, lambda checked: self._store.write(checked, body))

    def blocking_write(self, location: str, body: bytes) -> Callable[[], None] | None:
        """Return a function that writes a new file from a thread, or None if writes need no thread.

        It raises: StorageError.
        """
        write = self._store.blocking_write(_normalized(location), body)
        if write is None:
            return None

        def write_or_fail() -> None:
            with _catalog_errors(location):
                write()

        return write_or_fail

    async def delete(self, location: str) -> None:
        """Delete a file. It is no error if the file does not exist.

        Raises: StorageError.
        """
        await self._run(location, self._store.delete)

    async def check_exists(self, location: str) -> None:
        """Check that a file exists.

        Raises: FileMissing, StorageError.
        """
        if not await self._run(location, self._store.exists):
            raise _missing(location)

    async def make_directory(self, location: str) -> None:
        """Create a directory and its parents, where storage has directories.

        Raises: StorageError.
        """
        await self._run(location, self._store.make_directory)

    async def _run(self, location: str, call: Callable[[str], Awaitable[_T]]) -> _T:
        with _catalog_errors(location):
            async with asyncio.timeout(self._timeout_s):
                return await call(_normalized(location))


@contextmanager
def _catalog_errors(location: str) -> Iterator[None]:
    try:
        yield
    except FileMissing as error:
        raise _missing(location) from error
    except TimeoutError as error:
        raise StorageError(f"Storage failed: timed out: {location}") from error
    except StorageError as error:
        cause = error.__cause__
        if isinstance(cause, OSError) and cause.errno == errno.ENAMETOOLONG:  # only another location helps
            raise LocationInvalid(f"Invalid location, longer than a path may be: {location}") from error
        raise


def _missing(location: str) -> FileMissing:
    """Return the error in the words of Iceberg's clients."""
    return FileMissing(f"Failed to open input stream for file: {location}")


@functools.lru_cache(_PARSED_MAX)
def _normalized(text: str) -> str:
    """Return a location in the one spelling that every store reads."""
    location = parse_location(text)
    return location.path if location.scheme == "file" else f"{location.scheme}://{location.container}{location.path}"
