"""The object store on S3 and what speaks like it (R2, MinIO, SeaweedFS). Owns requests, parts, checksums and retries.

Every body carries its CRC-32, which the store checks; with that, hashing the body once more for the signature would
only double an upload's CPU, so signatures leave it out.
"""

from __future__ import annotations

import asyncio
import base64
import zlib
from collections.abc import AsyncIterator, Awaitable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from aiobotocore.config import AioConfig
from aiobotocore.session import get_session
from botocore.exceptions import BotoCoreError, ClientError

from writer.config import StorageConfig
from writer.errors import StorageError

T = TypeVar("T")

SCHEMES = ("s3://", "s3a://")

# Parts of one upload in flight: enough to fill the way to a far store, and 64 MiB at the default part size.
PARALLEL_PARTS = 8
# Tries of one request by botocore, with exponential backoff and jitter, all within request_timeout_s.
MAX_ATTEMPTS = 5
MAX_CONNECTIONS = 32
CONNECT_TIMEOUT_S = 10.0
_FAILURES = (ClientError, BotoCoreError, OSError)  # TimeoutError is an OSError

# Giving up the parts of a failed upload saves money only: it must not hold up the error for long.
ABORT_TIMEOUT_S = 5.0


@asynccontextmanager
async def open_s3_store(config: StorageConfig, *, executor: ThreadPoolExecutor) -> AsyncIterator[S3Store]:
    """Open a client for the configured endpoint, and close its connections at the end."""
    client = get_session().create_client(
        "s3",
        endpoint_url=config.s3_endpoint or None,
        region_name=config.s3_region,
        aws_access_key_id=config.s3_access_key_id or None,
        aws_secret_access_key=config.s3_secret_access_key or None,
        config=_client_config(config),
    )
    async with client as opened:
        yield S3Store(opened, config, executor=executor)


def _client_config(config: StorageConfig) -> AioConfig:
    return AioConfig(
        retries={"mode": "standard", "total_max_attempts": MAX_ATTEMPTS},
        max_pool_connections=MAX_CONNECTIONS,
        connect_timeout=min(CONNECT_TIMEOUT_S, config.request_timeout_s),
        read_timeout=config.request_timeout_s,
        s3={"addressing_style": "path" if config.s3_path_style else "auto", "payload_signing_enabled": False},
        # We give the checksum ourselves, in a header: botocore would send it in a trailer, which not every store takes.
        request_checksum_calculation="when_required",
    )


@dataclass(frozen=True, slots=True)
class _Body:
    """Bytes to send and their CRC-32, as S3 writes it."""

    data: bytes
    crc32: str


class S3Store:
    """Objects of S3 buckets. Those above `s3_part_bytes` go in parts."""

    def __init__(self, client: Any, config: StorageConfig, *, executor: ThreadPoolExecutor) -> None:
        self._client = client
        self._part_bytes = config.s3_part_bytes
        self._timeout_s = config.request_timeout_s
        self._executor = executor

    async def write(self, location: str, data: Any) -> None:
        """Put an object; see ObjectStore."""
        target = _bucket_and_key(location)
        view = memoryview(data).cast("B")
        with _storage_errors("write", location):
            if len(view) > self._part_bytes:
                await self._write_parts(target, view)
            else:
                body = await self._body(view)
                await self._ask(self._client.put_object(**target, Body=body.data, ChecksumCRC32=body.crc32))

    async def read(self, location: str) -> bytes:
        """Get an object; see ObjectStore."""
        target = _bucket_and_key(location)
        with _storage_errors("read", location):
            return await self._ask(self._get(target))

    async def delete(self, location: str) -> None:
        """Delete an object; see ObjectStore."""
        target = _bucket_and_key(location)
        with _storage_errors("delete", location):
            await self._ask(self._client.delete_object(**target))

    async def _get(self, target: dict[str, str]) -> bytes:
        answer = await self._client.get_object(**target)
        async with answer["Body"] as stream:
            data: bytes = await stream.read()
            return data

    async def _write_parts(self, target: dict[str, str], view: memoryview) -> None:
        """Upload in parts, and give the parts up if anything goes wrong; the object appears with the last request."""
        created = await self._ask(self._client.create_multipart_upload(**target, ChecksumAlgorithm="CRC32"))
        upload = {**target, "UploadId": created["UploadId"]}
        try:
            parts = await self._upload_parts(upload, view)
            await self._ask(self._client.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts}))
        except BaseException:
            await self._abort(upload)
            raise

    async def _upload_parts(self, upload: dict[str, str], view: memoryview) -> list[dict[str, Any]]:
        slots = asyncio.Semaphore(PARALLEL_PARTS)
        starts = range(0, len(view), self._part_bytes)

        async def upload_part(number: int, start: int) -> dict[str, Any]:
            async with slots:
                body = await self._body(view[start : start + self._part_bytes])
                request = self._client.upload_part(
                    **upload, PartNumber=number, Body=body.data, ChecksumCRC32=body.crc32
                )
                answer = await self._ask(request)
            return {"PartNumber": number, "ETag": answer["ETag"], "ChecksumCRC32": body.crc32}

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(upload_part(number, start)) for number, start in enumerate(starts, 1)]
        return [task.result() for task in tasks]

    async def _abort(self, upload: dict[str, str]) -> None:
        try:
            async with asyncio.timeout(ABORT_TIMEOUT_S):
                await self._client.abort_multipart_upload(**upload)
        except _FAILURES:
            pass  # the error that led here is the one to tell; a bucket rule for unfinished uploads cleans up

    async def _body(self, view: memoryview) -> _Body:
        return await asyncio.get_running_loop().run_in_executor(self._executor, _build_body, view)

    async def _ask(self, request: Awaitable[T]) -> T:
        async with asyncio.timeout(self._timeout_s):
            return await request


def _build_body(view: memoryview) -> _Body:
    data = bytes(view)
    return _Body(data, base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode())


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
