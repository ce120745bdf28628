"""The object store on Google Cloud Storage and Azure, through obstore (bindings of Rust's object_store).

Owns which container a location is in and how each cloud's settings are said; requests, parts, retries with jitter and
credentials from the environment are the library's. It is optional: `lakefeed[gcs]` and `lakefeed[azure]` bring it.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable
from datetime import timedelta
from typing import Any, TypeVar

import obstore
from obstore.exceptions import BaseError
from obstore.store import AzureStore, GCSStore

from lakefeed.aio import ATTEMPTS_MAX, PAUSE_FIRST_S, PAUSE_MAX_S
from lakefeed.contract.errors import StorageError
from lakefeed.storage.config import StorageConfig

T = TypeVar("T")

# Parts of one upload in flight: 64 MiB at the default part size.
PARALLEL_PARTS = 8
# Clients of different containers; a warehouse has one, tables of a foreign catalog may lie in others.
CONTAINERS_MAX = 64

_LOCATION = re.compile(r"((?:gs|abfss?)://[^/]+)/(.+)", re.DOTALL)
_FAILURES = (BaseError, OSError, ValueError)  # a missing object is a FileNotFoundError, bad settings a ValueError


class CloudStore:
    """Objects of any container that the credentials open."""

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
        await self._ask(put, verb="write", location=location, requests=rounds)

    async def read(self, location: str) -> bytes:
        """Get an object; see ObjectStore."""
        container, key = self._locate(location)

        async def get() -> bytes:
            answer = await obstore.get_async(container, key)
            return bytes(await answer.bytes_async())

        return await self._ask(get(), verb="read", location=location)

    async def delete(self, location: str) -> None:
        """Delete an object; see ObjectStore."""
        container, key = self._locate(location)

        async def delete() -> None:
            try:
                await obstore.delete_async(container, key)
            except FileNotFoundError:
                return

        await self._ask(delete(), verb="delete", location=location)

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

    async def _ask(self, request: Awaitable[T], *, verb: str, location: str, requests: int = 1) -> T:
        """Wait for requests one after the other, each with its tries; the library ends each try in its time."""
        patience_s = requests * ATTEMPTS_MAX * (self._config.request_timeout_s + PAUSE_MAX_S)
        try:
            async with asyncio.timeout(patience_s):
                return await request
        except _FAILURES as error:
            raise StorageError(f"cannot {verb} object: {_first_line(error)}: location={location}") from error


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
    backoff = {"init_backoff": timedelta(seconds=PAUSE_FIRST_S), "max_backoff": timedelta(seconds=PAUSE_MAX_S)}
    patience_s = ATTEMPTS_MAX * (config.request_timeout_s + PAUSE_MAX_S)
    return {
        "client_options": {
            "timeout": timedelta(seconds=config.request_timeout_s),
            "allow_http": endpoint.startswith("http://"),
        },
        "retry_config": {
            "max_retries": ATTEMPTS_MAX - 1,
            "backoff": {**backoff, "base": 2},
            "retry_timeout": timedelta(seconds=patience_s),
        },
    }


def _given(**settings: str) -> Any:
    """Leave out what is empty, so that the library looks into the environment."""
    return {name: value for name, value in settings.items() if value}


def _first_line(error: Exception) -> str:
    """Take the message without the library's dump of its own structures behind it."""
    return str(error).strip().partition("\n")[0] or "timed out"
