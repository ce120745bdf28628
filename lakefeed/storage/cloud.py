"""Google Cloud Storage and Azure as an object store, by obstore (bindings of Rust's object_store).

The library sends requests and parts, retries with jitter, and finds credentials in the environment. This module maps
locations to containers and our settings to each cloud's. obstore is optional: `lakefeed[gcs]` or `lakefeed[azure]`.
"""

from __future__ import annotations

import asyncio
import contextlib
import posixpath
import re
from collections.abc import Awaitable
from datetime import timedelta
from typing import Any, TypeVar

import obstore
from obstore.exceptions import BaseError
from obstore.store import AzureStore, GCSStore

from lakefeed.contract.errors import FileMissing, StorageError
from lakefeed.storage.config import StorageConfig
from lakefeed.storage.store import ATTEMPTS_MAX, BACKOFF, ObjectStore

T = TypeVar("T")

# Parts of one upload in flight: 64 MiB at the default part size.
PARALLEL_PARTS = 8
# Clients of different containers. A warehouse has one; tables of another catalog may use others.
CONTAINERS_MAX = 64

_LOCATION = re.compile(r"((?:gs|abfss?)://[^/]+)/(.+)", re.DOTALL)
_FAILURES = (BaseError, OSError, ValueError)  # invalid settings are a ValueError


class CloudStore(ObjectStore):
    """Objects of every container that the credentials give access to. A container is opened by its first use."""

    def __init__(self, config: StorageConfig) -> None:
        self._config = config
        self._containers: dict[str, Any] = {}

    async def write(self, location: str, data: Any) -> None:
        """Put an object; see ObjectStore."""
        container, key = self._locate(location)
        view = memoryview(data).cast("B")
        part_bytes = self._config.part_bytes
        put = obstore.put_async(container, key, view, chunk_size=part_bytes, max_concurrency=PARALLEL_PARTS)
        rounds = 1 + len(view) // (part_bytes * PARALLEL_PARTS)
        await self._request(put, verb="write", location=location, requests=rounds)

    async def read(self, location: str, *, max_bytes: int | None = None) -> bytes:
        """Get an object; see ObjectStore."""
        container, key = self._locate(location)

        async def get() -> bytes:
            response = await obstore.get_async(container, key)
            if max_bytes is not None and response.meta["size"] > max_bytes:
                raise StorageError(f"object is larger than {max_bytes} bytes: location={location}")
            return bytes(await response.bytes_async())

        return await self._request(get(), verb="read", location=location)

    async def exists(self, location: str) -> bool:
        """Return whether an object exists."""
        container, key = self._locate(location)
        try:
            await self._request(obstore.head_async(container, key), verb="find", location=location)
        except FileMissing:
            return False
        return True

    async def list_names(self, directory: str) -> list[str]:
        """Return the names of the objects below a prefix; see ObjectStore."""
        container, key = self._locate(directory)
        listing = obstore.list_with_delimiter_async(container, key.rstrip("/"))
        found = await self._request(listing, verb="list", location=directory)
        return [posixpath.basename(item["path"]) for item in found["objects"]]

    async def delete(self, location: str) -> None:
        """Delete an object; see ObjectStore."""
        container, key = self._locate(location)
        with contextlib.suppress(FileMissing):
            await self._request(obstore.delete_async(container, key), verb="delete", location=location)

    def _locate(self, location: str) -> tuple[Any, str]:
        match = _LOCATION.fullmatch(location)
        if match is None:
            raise StorageError(f"not a cloud location: location={location}")
        root, key = match.groups()
        if root not in self._containers:
            if len(self._containers) >= CONTAINERS_MAX:
                self._containers.clear()
            self._containers[root] = _open_container(root, self._config)
        return self._containers[root], key

    async def _request(self, request: Awaitable[T], *, verb: str, location: str, requests: int = 1) -> T:
        """Await a call of the library that sends so many requests in a row, each with its retries."""
        timeout_s = requests * ATTEMPTS_MAX * (self._config.request_timeout_s + BACKOFF.max_s)
        try:
            async with asyncio.timeout(timeout_s):
                return await request
        except _FAILURES as error:
            kind = FileMissing if isinstance(error, FileNotFoundError) else StorageError
            raise kind(f"cannot {verb} object: {_first_line(error)}: location={location}") from error


def _open_container(root: str, config: StorageConfig) -> Any:
    try:
        if root.startswith("gs:"):
            gcs = _given(service_account=config.gcs_service_account, base_url=config.gcs_endpoint)
            return GCSStore.from_url(root, config=gcs, **_client_options(config, config.gcs_endpoint))
        azure = _given(account_key=config.azure_account_key, endpoint=config.azure_endpoint)
        return AzureStore.from_url(root, config=azure, **_client_options(config, config.azure_endpoint))
    except _FAILURES as error:
        raise StorageError(f"cannot open container: {_first_line(error)}: container={root}") from error


def _client_options(config: StorageConfig, endpoint: str) -> dict[str, Any]:
    first, longest = timedelta(seconds=BACKOFF.first_s), timedelta(seconds=BACKOFF.max_s)
    return {
        "client_options": {
            "timeout": timedelta(seconds=config.request_timeout_s),
            "allow_http": endpoint.startswith("http://"),
        },
        "retry_config": {
            "max_retries": ATTEMPTS_MAX - 1,
            "backoff": {"init_backoff": first, "max_backoff": longest, "base": 2},
            "retry_timeout": timedelta(seconds=ATTEMPTS_MAX * (config.request_timeout_s + BACKOFF.max_s)),
        },
    }


def _given(**settings: str) -> Any:
    """Return the settings that are not empty; the library takes the others from the environment."""
    return {name: value for name, value in settings.items() if value}


def _first_line(error: Exception) -> str:
    """Return the message without the library's dump of its own structures after it."""
    return str(error).strip().partition("\n")[0] or "timed out"
