"""The object store on S3 and what speaks like it (R2, MinIO, SeaweedFS). Owns requests, parts and checksums.

    up to part_bytes     one PUT
    above                   create the upload -> put parts side by side -> complete: the object appears, whole
                            a failure on the way -> abort, which gives the parts back

Every body carries a checksum, which the store compares. With that, hashing the body once more for the signature would
only double an upload's CPU, so signatures leave it out.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any, TypeVar

import aiohttp
from aiobotocore.config import AioConfig
from aiobotocore.session import AioSession
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionError,  # noqa: A004 - botocore's base of what goes wrong before an answer
    FlexibleChecksumError,
    HTTPClientError,
    IncompleteReadError,
    SSLError,
)

from lakefeed.aio import is_transient_status, with_retries
from lakefeed.contract.errors import StorageError
from lakefeed.storage.config import StorageConfig

T = TypeVar("T")

SCHEMES = ("s3://", "s3a://", "s3n://")

# Bodies in memory and on the way at once, of all uploads: enough to fill the way to a far store, and 128 MiB at the
# default part size.
PARALLEL_BODIES = 16
MAX_CONNECTIONS = 32
CONNECT_TIMEOUT_S = 10.0
# Giving up the parts of a failed upload saves money only: it must not hold up the error for long.
ABORT_TIMEOUT_S = 5.0

_FAILURES = (ClientError, BotoCoreError, aiohttp.ClientError, OSError)  # TimeoutError is an OSError
# Lost or damaged on the way. aiohttp's own errors come while a body is read; a certificate does not get better.
_TRANSIENT = (
    *(ConnectionError, HTTPClientError, IncompleteReadError, FlexibleChecksumError),
    *(aiohttp.ClientError, OSError),
)
# S3 says these with status 400, though the same request may well succeed.
_TRANSIENT_CODES = ("RequestTimeout", "BadDigest", "IncompleteBody")

_DIGESTS: dict[str, Callable[[bytes], dict[str, str]]] = {
    "crc32": lambda data: {"ChecksumCRC32": _base64(zlib.crc32(data).to_bytes(4, "big"))},
    "md5": lambda data: {"ContentMD5": _base64(hashlib.md5(data, usedforsecurity=False).digest())},
    "none": lambda _: {},
}


@asynccontextmanager
async def open_s3_store(config: StorageConfig, *, executor: ThreadPoolExecutor) -> AsyncIterator[S3Store]:
    """Open a client for the configured endpoint, and close its connections at the end."""
    async with AsyncExitStack() as stack:
        try:
            client = await stack.enter_async_context(_create_client(config))
        except (BotoCoreError, ValueError) as error:  # no such profile, half of a key, an endpoint that is no URL
            raise StorageError(f"cannot open S3: {error}") from error
        yield S3Store(client, config, executor=executor)


def _create_client(config: StorageConfig) -> Any:
    return AioSession(profile=config.s3_profile or None).create_client(
        "s3",
        endpoint_url=config.s3_endpoint or None,
        region_name=config.s3_region,
        aws_access_key_id=config.s3_access_key_id or None,
        aws_secret_access_key=config.s3_secret_access_key or None,
        aws_session_token=config.s3_session_token or None,
        config=_client_config(config),
    )


def _client_config(config: StorageConfig) -> AioConfig:
    return AioConfig(
        retries={"total_max_attempts": 1},  # ours also cover bodies that break off, and 429 without S3's words
        max_pool_connections=MAX_CONNECTIONS,
        connect_timeout=min(CONNECT_TIMEOUT_S, config.request_timeout_s),
        read_timeout=config.request_timeout_s,
        s3={"addressing_style": "path" if config.s3_path_style else "auto", "payload_signing_enabled": False},
        # We give the checksum ourselves, in a header: botocore would send it in a trailer, which not every store takes.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_supported" if config.s3_checksum == "crc32" else "when_required",
    )


class S3Store:
    """Objects of S3 buckets. Those above `part_bytes` go in parts."""

    def __init__(self, client: Any, config: StorageConfig, *, executor: ThreadPoolExecutor) -> None:
        self._client = client
        self._part_bytes = config.part_bytes
        self._timeout_s = config.request_timeout_s
        self._checksum = config.s3_checksum
        self._executor = executor
        self._slots = asyncio.Semaphore(PARALLEL_BODIES)

    async def write(self, location: str, data: Any) -> None:
        """Put an object; see ObjectStore."""
        target = _bucket_and_key(location)
        view = memoryview(data).cast("B")
        with _storage_errors("write", location):
            if len(view) > self._part_bytes:
                await self._write_parts(target, view)
            else:
                await self._send_body(self._client.put_object, view, target)

    async def read(self, location: str) -> bytes:
        """Get an object; see ObjectStore."""
        target = _bucket_and_key(location)
        with _storage_errors("read", location):
            return await self._ask(lambda: self._get(target))

    async def delete(self, location: str) -> None:
        """Delete an object; see ObjectStore."""
        target = _bucket_and_key(location)
        with _storage_errors("delete", location):
            await self._ask(lambda: self._client.delete_object(**target))

    async def _get(self, target: dict[str, str]) -> bytes:
        answer = await self._client.get_object(**target)
        async with answer["Body"] as stream:
            data: bytes = await stream.read()
            return data

    async def _write_parts(self, target: dict[str, str], view: memoryview) -> None:
        """Upload in parts, and give the parts up if anything goes wrong; the object appears with the last request."""
        algorithm = {"ChecksumAlgorithm": "CRC32"} if self._checksum == "crc32" else {}
        created = await self._ask(lambda: self._client.create_multipart_upload(**target, **algorithm))
        upload = {**target, "UploadId": created["UploadId"]}
        try:
            parts = {"Parts": await self._upload_parts(upload, view)}
            await self._ask(lambda: self._client.complete_multipart_upload(**upload, MultipartUpload=parts))
        except BaseException:
            await self._abort(upload)
            raise

    async def _upload_parts(self, upload: dict[str, str], view: memoryview) -> list[dict[str, Any]]:
        async def upload_part(number: int, start: int) -> dict[str, Any]:
            body = view[start : start + self._part_bytes]
            sent, answer = await self._send_body(self._client.upload_part, body, {**upload, "PartNumber": number})
            known = {name: value for name, value in sent.items() if name.startswith("Checksum")}
            return {"PartNumber": number, "ETag": answer["ETag"], **known}

        starts = range(0, len(view), self._part_bytes)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(upload_part(number, start)) for number, start in enumerate(starts, 1)]
        return [task.result() for task in tasks]

    async def _send_body(
        self, method: Callable[..., Awaitable[T]], view: memoryview, target: dict[str, Any]
    ) -> tuple[dict[str, str], T]:
        """Send a body with its checksum, which is returned beside the answer."""
        async with self._slots:
            loop = asyncio.get_running_loop()
            data, digest = await loop.run_in_executor(self._executor, _build_body, view, self._checksum)
            return digest, await self._ask(lambda: method(**target, **digest, Body=data))

    async def _abort(self, upload: dict[str, str]) -> None:
        try:
            async with asyncio.timeout(ABORT_TIMEOUT_S):
                await self._client.abort_multipart_upload(**upload)
        except _FAILURES:
            pass  # the error that led here is the one to tell; a bucket rule for unfinished uploads cleans up

    async def _ask(self, request: Callable[[], Awaitable[T]]) -> T:
        return await with_retries(request, failures=_FAILURES, is_transient=is_transient, timeout_s=self._timeout_s)


def is_transient(error: Exception) -> bool:
    """Tell whether S3 may answer the same request otherwise in a moment."""
    if isinstance(error, ClientError):
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        return is_transient_status(status) or error.response.get("Error", {}).get("Code") in _TRANSIENT_CODES
    return isinstance(error, _TRANSIENT) and not isinstance(error, SSLError)


def _build_body(view: memoryview, checksum: str) -> tuple[bytes, dict[str, str]]:
    data = bytes(view)
    return data, _DIGESTS[checksum](data)


def _base64(digest: bytes) -> str:
    return base64.b64encode(digest).decode()


def _bucket_and_key(location: str) -> dict[str, str]:
    scheme = next((scheme for scheme in SCHEMES if location.startswith(scheme)), None)
    bucket, _, key = location.removeprefix(scheme or "").partition("/")
    if scheme is None or not bucket or not key:
        raise StorageError(f"not an S3 location: location={location}")
    return {"Bucket": bucket, "Key": key}


@contextmanager
def _storage_errors(verb: str, location: str) -> Iterator[None]:
    """Turn what botocore, sockets and timeouts raise into StorageError; several failed parts into their first."""
    try:
        yield
    except (*_FAILURES, ExceptionGroup) as error:
        first = _first(error)
        if not isinstance(first, _FAILURES):
            raise
        raise StorageError(f"cannot {verb} object: {str(first) or 'timed out'}: location={location}") from first


def _first(error: Exception) -> Exception:
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error
