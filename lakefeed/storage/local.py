"""Files by location, on a local disk or S3. Owns durability of a write; knows nothing of what the files hold."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import errno
import functools
import hashlib
import io
import os
import uuid
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, TypeVar

import aiohttp
from aiobotocore.config import AioConfig
from aiobotocore.session import AioSession
from botocore.exceptions import BotoCoreError, ClientError

from lakefeed.contract.errors import FileMissing, LocationInvalid, StorageError
from lakefeed.locations import parse_location
from lakefeed.storage.config import S3Settings

# --- writer.storage.local ---------------------------------------------------------------------------------------------
#
# The store of local files. Owns how a file becomes durable: whole, synced, and under a name that is synced too.


T = TypeVar("T")

# Directories known to exist, so that a write does not look for them again; each partition is one of them.
KNOWN_DIRECTORIES_MAX = 10_000


class LocalStore:
    """Files of this machine, or of a mounted disk. Refuses to overwrite."""

    def __init__(self, executor: ThreadPoolExecutor, *, timeout_s: float) -> None:
        self._executor = executor
        self._timeout_s = timeout_s
        self._known_directories: set[Path] = set()

    async def write(self, location: str, data: Any) -> None:
        """Write a file; see ObjectStore."""
        path = local_path(location)
        await self._run(lambda: self._write(path, data), verb="write", path=path)

    async def read(self, location: str) -> bytes:
        """Read a file; see ObjectStore."""
        path = local_path(location)
        return await self._run(path.read_bytes, verb="read", path=path)

    async def delete(self, location: str) -> None:
        """Delete a file; see ObjectStore."""
        path = local_path(location)
        await self._run(lambda: path.unlink(missing_ok=True), verb="delete", path=path)

    async def _run(self, action: Callable[[], T], *, verb: str, path: Path) -> T:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.get_running_loop().run_in_executor(self._executor, action)
        except OSError as error:  # TimeoutError is one of them
            raise StorageError(f"cannot {verb} file: {error.strerror or 'timed out'}: path={path}") from error

    def _write(self, path: Path, data: Any) -> None:
        """Write a file in steps; a crash before step 3 leaves a hidden file that nobody reads, after it the whole."""
        self._ensure_directory(path.parent)
        if path.exists():
            raise FileExistsError(0, "it exists already")
        hidden = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        try:
            with hidden.open("xb") as file:
                file.write(data)  # 1. the bytes
                file.flush()
                os.fsync(file.fileno())  # 2. durable, under a name that nobody looks for
            hidden.rename(path)  # 3. visible
        except BaseException:
            self._known_directories.clear()  # one of them may be gone, with a table that was dropped
            hidden.unlink(missing_ok=True)
            raise
        _writer_sync_directory(path.parent)  # 4. the name is durable too

    def _ensure_directory(self, directory: Path) -> None:
        if directory in self._known_directories:
            return
        if not directory.exists():
            self._ensure_directory(directory.parent)
            directory.mkdir(exist_ok=True)
            _writer_sync_directory(directory.parent)
        if len(self._known_directories) >= KNOWN_DIRECTORIES_MAX:
            self._known_directories.clear()
        self._known_directories.add(directory)


def local_path(location: str) -> Path:
    """Turn `file:///path`, `file:/path` or a plain path into a path.

    Raises:
        StorageError: the location is not on this machine.
    """
    scheme, colon, rest = location.partition(":")
    if not colon or "/" in scheme:
        return Path(location)
    if scheme != "file" or (rest.startswith("//") and not rest.startswith("///")):
        raise StorageError(f"not a local location: location={location}")
    return Path(rest.removeprefix("//"))


def _writer_sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- catalog.storage --------------------------------------------------------------------------------------------------


# Syncs of different tables overlap; more threads than this only queue at the disk.
_LOCAL_THREADS = 4
# On top of our own timeout: a request that the store drops is worth one more try, not many.
_S3_ATTEMPTS = 3

# Paths of current metadata files, of a few hundred bytes each.
_KNOWN_PATHS_MAX = 4_096
# O_CLOEXEC: no descriptor passes to a process that the service starts.
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
# As open() makes files: the process's mask decides.
_FILE_MODE = 0o666

_NOT_FOUND = ("404", "NoSuchKey", "NotFound")

_T = TypeVar("_T")


class Files(Protocol):
    """Whole files by location. Every method raises StorageError when the store does not do what was asked."""

    async def open(self) -> None:
        """Start; nothing else may be called before."""

    async def close(self) -> None:
        """Stop, after which nothing else may be called."""

    async def read(self, location: str, *, max_bytes: int) -> bytes:
        """Read a file.

        Raises: FileMissing; StorageError, also for a file larger than `max_bytes`.
        """

    async def write(self, location: str, body: bytes) -> None:
        """Write a new file; when this returns the file survives a crash."""

    def write_in_thread(self, location: str, body: bytes) -> Callable[[], None] | None:
        """Return what writes a new file when it is run in a thread; None where writing needs no thread.

        Raises, when it is run: StorageError.
        """

    async def delete(self, location: str) -> None:
        """Delete a file; one that is gone already is fine."""

    async def exists(self, location: str) -> bool:
        """Tell whether a file exists."""

    async def prepare(self, directory: str) -> None:
        """Make a directory with its parents, where there are directories."""


def missing(location: str) -> FileMissing:
    """Make the error for a file that is not there, in the words of Iceberg's clients."""
    return FileMissing(f"Failed to open input stream for file: {location}")


class LocalFiles:
    """Files on a local disk: written under new names, synced, then the directory synced."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(_LOCAL_THREADS, thread_name_prefix="catalog-files")

    async def open(self) -> None:
        """Nothing to open."""

    async def close(self) -> None:
        """Wait for running work, then end the threads."""
        await asyncio.to_thread(self._executor.shutdown)

    async def read(self, location: str, *, max_bytes: int) -> bytes:
        """Read a file."""
        return await self._run(location, lambda path: _read(path, max_bytes))

    async def write(self, location: str, body: bytes) -> None:
        """Write a file. Cancelling this leaves the work going on in its thread."""
        await self._run(location, lambda path: _write(path, body))

    def write_in_thread(self, location: str, body: bytes) -> Callable[[], None]:
        """Return what writes a file."""
        path = parse_location(location).path

        def write() -> None:
            with _storage_errors(location):
                _write(Path(path), body)

        return write

    async def delete(self, location: str) -> None:
        """Delete a file."""
        await self._run(location, lambda path: path.unlink(missing_ok=True))

    async def exists(self, location: str) -> bool:
        """Tell whether a file exists. At once: a stat takes less than handing it to a thread."""
        return os.path.isfile(_known_path(location))  # noqa: ASYNC240, PTH113 - blocks for microseconds

    async def prepare(self, directory: str) -> None:
        """Make a directory that survives a crash."""
        await self._run(directory, _make_directory)

    async def _run(self, location: str, work: Callable[[Path], _T]) -> _T:
        path = Path(parse_location(location).path)
        with _storage_errors(location):
            return await asyncio.get_running_loop().run_in_executor(self._executor, work, path)


@contextlib.contextmanager
def _storage_errors(location: str) -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, NotADirectoryError) as error:
        raise missing(location) from error
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:  # no disk would take it, so that it is the client's to change
            raise LocationInvalid(f"Invalid location, longer than a path may be: {location}") from error
        raise StorageError(f"Storage failed: {error.strerror}: {location}") from error


class S3Files:
    """Files on S3 or what speaks its protocol; one put is atomic and durable there."""

    def __init__(self, settings: S3Settings, *, timeout_s: float) -> None:
        self._settings = settings
        self._timeout_s = timeout_s
        self._client: Any = None
        self._exits = contextlib.AsyncExitStack()

    async def open(self) -> None:
        """Make the client; connections come with the first request."""
        settings = self._settings
        context = AioSession(profile=settings.profile or None).create_client(
            "s3",
            endpoint_url=settings.endpoint or None,
            region_name=settings.region or None,
            aws_access_key_id=settings.access_key_id or None,
            aws_secret_access_key=settings.secret_access_key or None,
            aws_session_token=settings.session_token or None,
            config=_client_config(settings),
        )
        self._client = await self._exits.enter_async_context(context)

    async def close(self) -> None:
        """Close connections."""
        await self._exits.aclose()

    async def read(self, location: str, *, max_bytes: int) -> bytes:
        """Read an object."""

        async def get(bucket: str, key: str) -> bytes:
            answer = await self._client.get_object(Bucket=bucket, Key=key)
            async with answer["Body"] as stream:
                if answer["ContentLength"] > max_bytes:
                    raise StorageError(f"File is larger than {max_bytes} bytes: {location}")
                body: bytes = await stream.read()
                return body

        content: bytes = await self._run(location, get)
        return content

    async def write(self, location: str, body: bytes) -> None:
        """Put an object. Cancelling this leaves it unknown whether the object is there."""
        digest = _digest(body, self._settings.checksum)
        await self._run(
            location, lambda bucket, key: self._client.put_object(Bucket=bucket, Key=key, Body=body, **digest)
        )

    def write_in_thread(self, location: str, body: bytes) -> None:
        """Return nothing: requests need no thread."""

    async def delete(self, location: str) -> None:
        """Delete an object."""
        await self._run(location, lambda bucket, key: self._client.delete_object(Bucket=bucket, Key=key))

    async def exists(self, location: str) -> bool:
        """Tell whether an object exists."""
        try:
            await self._run(location, lambda bucket, key: self._client.head_object(Bucket=bucket, Key=key))
        except FileMissing:
            return False
        return True

    async def prepare(self, directory: str) -> None:
        """Do nothing: S3 has no directories."""

    async def _run(self, location: str, call: Callable[[str, str], Any]) -> Any:
        place = parse_location(location)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await call(place.container, place.path.lstrip("/"))
        except ClientError as error:
            code = error.response.get("Error", {}).get("Code", "")
            if code in _NOT_FOUND:
                raise missing(location) from error
            raise StorageError(f"Storage failed: {code}: {location}") from error
        except (BotoCoreError, aiohttp.ClientError, OSError) as error:  # a body that breaks off is aiohttp's
            raise StorageError(f"Storage failed: {type(error).__name__}: {location}") from error


def _client_config(settings: S3Settings) -> AioConfig:
    return AioConfig(
        s3={"addressing_style": "path" if settings.path_style else "auto"},
        retries={"mode": "standard", "total_max_attempts": _S3_ATTEMPTS},
        # We give the checksum ourselves, in a header: botocore would send it in a trailer, which not every store takes.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_supported" if settings.checksum == "crc32" else "when_required",
    )


def _digest(body: bytes, checksum: str) -> dict[str, str]:
    """Give the parameter of a put that has the store compare what arrived."""
    if checksum == "crc32":
        return {"ChecksumCRC32": base64.b64encode(zlib.crc32(body).to_bytes(4, "big")).decode()}
    if checksum == "md5":
        return {"ContentMD5": base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode()}
    return {}


@functools.lru_cache(_KNOWN_PATHS_MAX)
def _known_path(location: str) -> str:
    """Find the path of a file that is asked for at every load."""
    return parse_location(location).path


def _read(path: Path, max_bytes: int) -> bytes:
    try:
        with path.open("rb") as file:
            body = file.read(max_bytes + 1)
    except IsADirectoryError as error:
        raise FileNotFoundError(path) from error
    if len(body) > max_bytes:
        raise StorageError(f"File is larger than {max_bytes} bytes: {path}")
    return body


def _write(path: Path, body: bytes) -> None:
    """Write and sync, first the file, then its directory. A crash leaves a file, maybe cut off, that nobody knows yet.

    In place, without the usual move: the name is new and nothing refers to it before this returns, and a move would
    be one more change of the directory to wait for.
    """
    try:
        descriptor = os.open(path, _NEW_FILE, _FILE_MODE)
    except FileNotFoundError:
        _make_directory(path.parent)
        descriptor = os.open(path, _NEW_FILE, _FILE_MODE)
    try:
        with open(descriptor, "wb", buffering=0) as file:  # noqa: PTH123 - a descriptor, not a path
            _write_all(file, body)
            os.fsync(descriptor)
    except OSError:
        path.unlink(missing_ok=True)
        raise
    _sync_directory(path.parent)


def _write_all(file: io.RawIOBase, body: bytes) -> None:
    rest = memoryview(body)
    while rest:
        rest = rest[file.write(rest) :]


def _make_directory(path: Path) -> None:
    """Make a directory and its parents, syncing the parent of each one made so that it survives a crash."""
    absent = [path] if not path.is_dir() else []
    while absent and not absent[-1].parent.is_dir():
        absent.append(absent[-1].parent)
    for directory in reversed(absent):
        directory.mkdir(exist_ok=True)
        _sync_directory(directory.parent)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
