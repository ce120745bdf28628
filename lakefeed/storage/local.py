"""Local files as an object store: durable writes.

    1. create the file, exclusively     a crash leaves an empty file that nothing refers to
    2. write the bytes                  ... a truncated file that nothing refers to
    3. sync the file                    ... a whole file, whose name may be lost
    4. sync its directory               the object is durable

The file is not written under a hidden name first and renamed: nothing reads a name before its write has returned, and
the rename would cost a second commit of the file system's journal.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from lakefeed.contract.errors import FileMissing, StorageError
from lakefeed.storage.store import ObjectStore

T = TypeVar("T")

# Syncs of different files overlap; more threads than this only queue at the disk.
THREADS = 4

# O_CLOEXEC: processes that the service starts do not inherit the descriptor.
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
# The same mode as open() uses: the process's umask decides.
_FILE_MODE = 0o666


class LocalStore(ObjectStore):
    """Files on this machine or on a mounted disk. Refuses to overwrite."""

    def __init__(self, *, timeout_s: float = 60.0) -> None:
        self._timeout_s = timeout_s
        self._executor = ThreadPoolExecutor(THREADS, thread_name_prefix="storage")

    async def close(self) -> None:
        """Wait for running work, then end the threads."""
        await asyncio.to_thread(self._executor.shutdown)

    async def write(self, location: str, data: Any) -> None:
        """Write a new file; see ObjectStore. After a cancellation or timeout the thread finishes the write."""
        await self._run("write", location, lambda path: _write(path, data))

    def blocking_write(self, location: str, data: Any) -> Callable[[], None]:
        """Return a function that writes a new file; see ObjectStore."""
        path = local_path(location)

        def write() -> None:
            try:
                _write(path, data)
            except OSError as error:
                raise _storage_error("write", path, error) from error

        return write

    async def read(self, location: str, *, max_bytes: int | None = None) -> bytes:
        """Read a file; see ObjectStore."""
        return await self._run("read", location, lambda path: _read(path, max_bytes))

    async def exists(self, location: str) -> bool:
        """Return whether a file exists. Not in a thread: a stat is faster than the hand-over."""
        return os.path.isfile(local_path(location))  # noqa: ASYNC240, PTH113 - takes microseconds

    async def list_names(self, directory: str) -> list[str]:
        """Return the names of the files in a directory; see ObjectStore."""
        return await self._run("list", directory, _list_names)

    async def delete(self, location: str) -> None:
        """Delete a file; see ObjectStore."""
        await self._run("delete", location, lambda path: path.unlink(missing_ok=True))

    async def make_directory(self, location: str) -> None:
        """Create a directory durably; see ObjectStore."""
        await self._run("create directory", location, _make_directory)

    async def _run(self, verb: str, location: str, action: Callable[[Path], T]) -> T:
        path = local_path(location)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.get_running_loop().run_in_executor(self._executor, action, path)
        except OSError as error:  # TimeoutError is an OSError
            raise _storage_error(verb, path, error) from error


def local_path(location: str) -> Path:
    """Return the path of `file:///path`, `file:/path` or a plain path.

    Raises: StorageError if the location is not on this machine.
    """
    scheme, colon, rest = location.partition(":")
    if not colon or "/" in scheme:
        return Path(location)
    if scheme != "file" or (rest.startswith("//") and not rest.startswith("///")):
        raise StorageError(f"not a local location: location={location}")
    return Path(rest.removeprefix("//"))


def _storage_error(verb: str, path: Path, error: OSError) -> StorageError:
    is_missing = verb == "read" and isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError)
    kind = FileMissing if is_missing else StorageError
    return kind(f"cannot {verb} file: {error.strerror or 'timed out'}: path={path}")


def _read(path: Path, max_bytes: int | None) -> bytes:
    with path.open("rb") as file:
        data = file.read(-1 if max_bytes is None else max_bytes + 1)
    if max_bytes is not None and len(data) > max_bytes:
        raise StorageError(f"file is larger than {max_bytes} bytes: path={path}")
    return data


def _list_names(path: Path) -> list[str]:
    try:
        return [each.name for each in path.iterdir() if each.is_file()]
    except FileNotFoundError:
        return []


def _write(path: Path, data: Any) -> None:
    view = memoryview(data).cast("B")
    try:
        descriptor = os.open(path, _NEW_FILE, _FILE_MODE)
    except FileNotFoundError:
        _make_directory(path.parent)
        descriptor = os.open(path, _NEW_FILE, _FILE_MODE)
    try:
        with open(descriptor, "wb") as file:  # noqa: PTH123 - a descriptor, not a path
            _write_all(file, view)
            os.fsync(descriptor)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    _sync_directory(path.parent)


def _write_all(file: BinaryIO, view: memoryview) -> None:
    file.write(view)
    file.flush()


def _make_directory(path: Path) -> None:
    """Create a directory and its parents, and sync the parent of each so that it survives a crash."""
    missing = [each for each in (path, *path.parents) if not each.is_dir()]
    for directory in reversed(missing):
        directory.mkdir(exist_ok=True)
        _sync_directory(directory.parent)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
