"""S3 object store, by aiobotocore; also for what speaks its protocol (R2, MinIO, SeaweedFS).

    up to part_bytes    one PUT
    above               create the upload -> put parts in parallel -> complete: the object appears, whole
                        a failure on the way -> abort, which frees the parts

Every body carries a checksum, which the store compares. Hashing the body once more for the signature would only double
the CPU of an upload, so signatures leave it out.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import zlib
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, contextmanager
from http import HTTPStatus
from typing import Any, TypeVar

import aiohttp
from aiobotocore.config import AioConfig
from aiobotocore.session import AioSession
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionError,  # noqa: A004 - botocore's base class of failures before a response
    FlexibleChecksumError,
    HTTPClientError,
    IncompleteReadError,
    SSLError,
)

from lakefeed.contract.errors import FileMissing, StorageError
from lakefeed.storage.config import S3_SCHEMES, StorageConfig
from lakefeed.storage.store import ATTEMPTS_MAX, BACKOFF, ObjectStore

T = TypeVar("T")

# Copying parts and computing their checksums; more threads than this gain nothing.
THREADS = 4
# Bodies in memory and in flight at once, over all uploads: enough for a distant store, and 128 MiB at the default part
# size.
PARALLEL_BODIES = 16
MAX_CONNECTIONS = 32
CONNECT_TIMEOUT_S = 10.0
# Aborting a failed upload only saves money: it must not delay the error for long.
ABORT_TIMEOUT_S = 5.0

_FAILURES = (ClientError, BotoCoreError, aiohttp.ClientError, OSError)  # TimeoutError is an OSError
# Lost or damaged on the way. aiohttp's own errors come while a body is read; a bad certificate stays bad.
_TRANSIENT = (
    *(ConnectionError, HTTPClientError, IncompleteReadError, FlexibleChecksumError),
    *(aiohttp.ClientError, OSError),
)
# S3 sends these with status 400, though the same request may succeed.
_TRANSIENT_CODES = ("RequestTimeout", "BadDigest", "IncompleteBody")
# HEAD has no body, so its code is the status.
_MISSING_CODES = ("404", "NoSuchKey", "NotFound")

_DIGESTS: dict[str, Callable[[bytes], dict[str, str]]] = {
    "crc32": lambda data: {"ChecksumCRC32": _base64(zlib.crc32(data).to_bytes(4, "big"))},
    "md5": lambda data: {"ContentMD5": _base64(hashlib.md5(data, usedforsecurity=False).digest())},
    "none": lambda _: {},
}


class S3Store(ObjectStore):
    """Objects of S3 buckets. Objects above `part_bytes` are uploaded in parts."""

    def __init__(self, config: StorageConfig) -> None:
        self._config = config
        self._executor = ThreadPoolExecutor(THREADS, thread_name_prefix="storage")
        self._slots = asyncio.Semaphore(PARALLEL_BODIES)
        self._client: Any = None
        self._exits = AsyncExitStack()

    async def open(self) -> None:
        """Create the client. Connections are made by the first requests."""
        config = self._config
        try:
            client = AioSession(profile=config.s3_profile or None).create_client(
                "s3",
                endpoint_url=config.s3_endpoint or None,
                region_name=config.s3_region,
                aws_access_key_id=config.s3_access_key_id or None,
                aws_secret_access_key=config.s3_secret_access_key or None,
                aws_session_token=config.s3_session_token or None,
                config=AioConfig(
                    retries={
                        "total_max_attempts": 1
                    },  # our own also cover truncated bodies, and 429 without an S3 code
                    max_pool_connections=MAX_CONNECTIONS,
                    connect_timeout=min(CONNECT_TIMEOUT_S, config.request_timeout_s),
                    read_timeout=config.request_timeout_s,
                    s3={
                        "addressing_style": "path" if config.s3_path_style else "auto",
                        "payload_signing_enabled": False,
                    },
                    # We send the checksum in a header: botocore would use a trailer, which not every store accepts.
                    request_checksum_calculation="when_required",
                    response_checksum_validation="when_supported" if config.s3_checksum == "crc32" else "when_required",
                ),
            )
            self._client = await self._exits.enter_async_context(client)
        except (BotoCoreError, ValueError) as error:  # no such profile, half of a key, an endpoint that is no URL
            raise StorageError(f"cannot open S3: {error}") from error

    async def close(self) -> None:
        """Close connections and end the threads."""
        await self._exits.aclose()
        await asyncio.to_thread(self._executor.shutdown)

    async def write(self, location: str, data: Any) -> None:
        """Put an object; see ObjectStore."""
        target = _bucket_and_key(location)
        view = memoryview(data).cast("B")
        with _storage_errors("write", location):
            if len(view) > self._config.part_bytes:
                await self._write_parts(target, view)
            else:
                await self._send_body(self._client.put_object, view, target)

    async def read(self, location: str, *, max_bytes: int | None = None) -> bytes:
        """Get an object; see ObjectStore."""
        target = _bucket_and_key(location)

        async def get() -> bytes:
            response = await self._client.get_object(**target)
            async with response["Body"] as stream:
                if max_bytes is not None and response["ContentLength"] > max_bytes:
                    raise StorageError(f"object is larger than {max_bytes} bytes: location={location}")
                data: bytes = await stream.read()
                return data

        with _storage_errors("read", location):
            return await self._request(get)

    async def exists(self, location: str) -> bool:
        """Return whether an object exists."""
        target = _bucket_and_key(location)
        try:
            with _storage_errors("find", location):
                await self._request(lambda: self._client.head_object(**target))
        except FileMissing:
            return False
        return True

    async def list_names(self, directory: str) -> list[str]:
        """Return the names of the objects below a prefix, page by page; see ObjectStore."""
        target = _bucket_and_key(directory)
        prefix = target["Key"].rstrip("/") + "/"
        page = {"Bucket": target["Bucket"], "Prefix": prefix, "Delimiter": "/"}
        names: list[str] = []
        with _storage_errors("list", directory):
            while True:
                found = await self._request(lambda: self._client.list_objects_v2(**page))
                names += [item["Key"].removeprefix(prefix) for item in found.get("Contents", ())]
                if not found.get("IsTruncated"):
                    return [name for name in names if name]  # the directory itself may be an empty object
                page["ContinuationToken"] = found["NextContinuationToken"]

    async def delete(self, location: str) -> None:
        """Delete an object; see ObjectStore."""
        target = _bucket_and_key(location)
        with _storage_errors("delete", location):
            await self._request(lambda: self._client.delete_object(**target))

    async def _write_parts(self, target: dict[str, str], view: memoryview) -> None:
        """Upload in parts, and abort if anything fails. The object appears with the last request."""
        algorithm = {"ChecksumAlgorithm": "CRC32"} if self._config.s3_checksum == "crc32" else {}
        created = await self._request(lambda: self._client.create_multipart_upload(**target, **algorithm))
        upload = {**target, "UploadId": created["UploadId"]}

        async def upload_part(number: int, start: int) -> dict[str, Any]:
            body = view[start : start + self._config.part_bytes]
            sent, response = await self._send_body(self._client.upload_part, body, {**upload, "PartNumber": number})
            known = {name: value for name, value in sent.items() if name.startswith("Checksum")}
            return {"PartNumber": number, "ETag": response["ETag"], **known}

        starts = range(0, len(view), self._config.part_bytes)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(upload_part(number, start)) for number, start in enumerate(starts, 1)]
            parts = {"Parts": [task.result() for task in tasks]}
            await self._request(lambda: self._client.complete_multipart_upload(**upload, MultipartUpload=parts))
        except BaseException:
            try:
                async with asyncio.timeout(ABORT_TIMEOUT_S):
                    await self._client.abort_multipart_upload(**upload)
            except _FAILURES:
                pass  # the error that led here is raised; a bucket rule for unfinished uploads cleans up
            raise

    async def _send_body(
        self, method: Callable[..., Awaitable[T]], view: memoryview, target: dict[str, Any]
    ) -> tuple[dict[str, str], T]:
        """Send a body with its checksum. Return the checksum and the response."""
        async with self._slots:
            loop = asyncio.get_running_loop()
            data, digest = await loop.run_in_executor(self._executor, _build_body, view, self._config.s3_checksum)
            return digest, await self._request(lambda: method(**target, **digest, Body=data))

    async def _request(self, request: Callable[[], Awaitable[T]]) -> T:
        """Make a request until it succeeds, fails for good, or has failed `ATTEMPTS_MAX` times.

        Cancelling leaves the outcome of the running attempt unknown.
        """
        for attempt in range(1, ATTEMPTS_MAX + 1):
            try:
                async with asyncio.timeout(self._config.request_timeout_s):
                    return await request()
            except _FAILURES as error:
                if attempt == ATTEMPTS_MAX or not is_transient(error):
                    raise
            await asyncio.sleep(BACKOFF.jittered_s(attempt))
        raise AssertionError("the last attempt returns or raises")


def is_transient(error: Exception) -> bool:
    """Return whether the same request may succeed in a moment; a refusal (400, 403, 404) will not."""
    if isinstance(error, ClientError):
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        is_busy = status in (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS) or status >= 500  # noqa: PLR2004
        return is_busy or error.response.get("Error", {}).get("Code") in _TRANSIENT_CODES
    return isinstance(error, _TRANSIENT) and not isinstance(error, SSLError)


def _build_body(view: memoryview, checksum: str) -> tuple[bytes, dict[str, str]]:
    data = bytes(view)
    return data, _DIGESTS[checksum](data)


def _base64(digest: bytes) -> str:
    return base64.b64encode(digest).decode()


def _bucket_and_key(location: str) -> dict[str, str]:
    scheme = next((scheme for scheme in S3_SCHEMES if location.startswith(scheme)), None)
    bucket, _, key = location.removeprefix(scheme or "").partition("/")
    if scheme is None or not bucket or not key:
        raise StorageError(f"not an S3 location: location={location}")
    return {"Bucket": bucket, "Key": key}


@contextmanager
def _storage_errors(verb: str, location: str) -> Iterator[None]:
    """Raise errors of botocore, sockets and timeouts as StorageError; of a group of failed parts, the first."""
    try:
        yield
    except (*_FAILURES, ExceptionGroup) as error:
        first: Exception = error
        while isinstance(first, ExceptionGroup):
            first = first.exceptions[0]
        if not isinstance(first, _FAILURES):
            raise
        is_missing = isinstance(first, ClientError) and first.response.get("Error", {}).get("Code") in _MISSING_CODES
        kind = FileMissing if is_missing else StorageError
        raise kind(f"cannot {verb} object: {str(first) or 'timed out'}: location={location}") from first
