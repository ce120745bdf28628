"""The operating system's calls that the log makes, and what is safe to build on them. Owns short reads and writes.

`Filesystem` is the seam: each method is one call, so that a test can stand in between and make it fail.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

# Parts that one call of pwritev takes.
_PARTS_MAX: Final = os.sysconf("SC_IOV_MAX")

# New files are filled in writes of this size: large enough to be fast, small enough not to crowd out an append.
_FILL: Final = bytes(1024 * 1024)

_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_CANNOT_ALLOCATE: Final = frozenset({errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS})


class Filesystem:
    """The real thing."""

    def open(self, path: Path, flags: int) -> int:
        """Open or create a file; the descriptor is not inherited."""
        return os.open(path, flags | os.O_CLOEXEC, 0o640)

    def close(self, descriptor: int) -> None:
        """Close a descriptor."""
        os.close(descriptor)

    def size(self, descriptor: int) -> int:
        """Return the size of an open file."""
        return os.fstat(descriptor).st_size

    def read(self, descriptor: int, buffer: memoryview, position: int) -> int:
        """Read into the buffer; may read less than it holds."""
        return os.preadv(descriptor, [buffer], position)

    def write(self, descriptor: int, parts: Sequence[bytes | memoryview], position: int) -> int:
        """Write parts one after the other; may write less than they hold."""
        return os.pwritev(descriptor, parts, position)

    def allocate(self, descriptor: int, size_bytes: int) -> None:
        """Reserve room, so that a full disk is known before anything is written."""
        os.posix_fallocate(descriptor, 0, size_bytes)

    def sync(self, descriptor: int) -> None:
        """Make the file's bytes durable."""
        os.fdatasync(descriptor)

    def sync_directory(self, directory: Path) -> None:
        """Make the names in a directory durable."""
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def make_directory(self, directory: Path) -> None:
        """Make one directory."""
        directory.mkdir(mode=0o750)

    def names(self, directory: Path) -> list[str]:
        """List the names in a directory."""
        return os.listdir(directory)  # noqa: PTH208 - names are what is wanted, not paths

    def rename(self, source: Path, target: Path) -> None:
        """Give a file another name."""
        source.rename(target)

    def link(self, source: Path, target: Path) -> None:
        """Give a file a second name."""
        target.hardlink_to(source)

    def unlink(self, path: Path) -> None:
        """Remove a file."""
        path.unlink()


def is_no_room(error: OSError) -> bool:
    """Tell a full disk or quota from a disk that fails."""
    return error.errno in _NO_ROOM


def write_all(files: Filesystem, descriptor: int, parts: Sequence[bytes | memoryview], position: int) -> int:
    """Write all parts from `position` on and return the position behind them."""
    first = 0
    while first < len(parts):
        batch = parts[first : first + _PARTS_MAX]
        written = files.write(descriptor, batch, position)
        if written == 0 and any(batch):  # parts may be empty
            raise OSError(errno.EIO, "nothing was written")
        position += written
        whole = _whole_parts(batch, written)
        first += whole
        rest = written - sum(map(len, batch[:whole]))
        if rest:
            parts = [memoryview(parts[first])[rest:], *parts[first + 1 :]]
            first = 0
    return position


def _whole_parts(parts: Sequence[bytes | memoryview], written: int) -> int:
    for index, part in enumerate(parts):
        written -= len(part)
        if written < 0:
            return index
    return len(parts)


def fill_zeros(files: Filesystem, descriptor: int, start: int, end: int) -> None:
    """Overwrite the range with zeros."""
    while start < end:
        start = write_all(files, descriptor, [memoryview(_FILL)[: end - start]], start)


def allocate_zeros(files: Filesystem, descriptor: int, size_bytes: int) -> None:
    """Give a new file all its blocks, written and synced, so that later syncs have no metadata to write.

    Each write is synced by itself: one large sync would keep the disk from those of appends for its whole length.
    """
    try:
        files.allocate(descriptor, size_bytes)
    except OSError as error:
        if error.errno not in _CANNOT_ALLOCATE:
            raise
    for start in range(0, size_bytes, len(_FILL)):
        fill_zeros(files, descriptor, start, min(start + len(_FILL), size_bytes))
        files.sync(descriptor)


def read_into(files: Filesystem, descriptor: int, buffer: memoryview, position: int) -> int:
    """Fill the buffer from `position` on; return how much there was before the file's end."""
    filled = 0
    while filled < len(buffer):
        count = files.read(descriptor, buffer[filled:], position + filled)
        if count == 0:
            break
        filled += count
    return filled


def read_bytes(files: Filesystem, descriptor: int, size_bytes: int, position: int) -> bytes:
    """Read up to so many bytes; fewer only at the file's end."""
    buffer = bytearray(size_bytes)
    return bytes(memoryview(buffer)[: read_into(files, descriptor, memoryview(buffer), position)])
