"""The store of local files. Owns how a file becomes durable: whole, synced, and under a name that is synced too."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from writer.errors import StorageError

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
        _sync_directory(path.parent)  # 4. the name is durable too

    def _ensure_directory(self, directory: Path) -> None:
        if directory in self._known_directories:
            return
        if not directory.exists():
            self._ensure_directory(directory.parent)
            directory.mkdir(exist_ok=True)
            _sync_directory(directory.parent)
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


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
