"""Directory of the log: segments, spares and the lock, and the order of steps that survives a crash.

All methods block; log.py calls them on its threads. The directory has:

    lock               held (flock) by the process that has the log open; contains its id
    0000000042.wal     a segment; the numbers have no holes
    0000000007.spare   a file of a segment's size with anything in it, for a later segment
    damaged/           damaged segments that repair.py has replaced

The steps of a file's life, and what a crash after each one leaves:

    prepare  1 create NAME.spare         a spare that is too short: open() removes it
             2 fill with zeros, sync     a spare
    begin    3 write header, sync        still a spare: the next begin() overwrites it
             4 rename to NUMBER.wal      the spare or an empty segment, whichever the disk kept. Both are valid: the
                                         header is durable before the name, and there is no record yet
             5 sync directory            an empty segment, the newest. Only now may records be written
    retire   6 rename to NAME.spare      the segment or a spare; the segment is trimmed again later
             7 sync directory            a spare. Only now may begin() use it: a header written earlier could appear
                                         under the old segment's name. One segment at a time, oldest first, so that no
                                         crash leaves a hole in the numbers

So a file with a segment's name always has a whole header, and old records of a recycled file have another salt and
lower offsets. In every sync mode the records of the previous segment are synced before step 3: only the newest segment
can have unsynced records.

`Filesystem` is the seam for tests: each method is one system call, so that a test can make it fail.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lakefeed.contract.errors import WalCorrupt, WalLocked
from lakefeed.writer.wal.records import (
    HEADER_MIN_BYTES,
    SEGMENT_SUFFIX,
    SPARE_SUFFIX,
    End,
    Header,
    Segment,
    decode_header,
    encode_header,
    find_end,
    header_bytes,
    numbers_of,
    segment_name,
    spare_name,
)

# Parts that one call of pwritev takes.
_PARTS_MAX: Final = os.sysconf("SC_IOV_MAX")

# New files are filled in writes of this size: large enough to be fast, small enough not to delay an append.
_FILL: Final = bytes(1024 * 1024)

_DISK_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_CANNOT_ALLOCATE: Final = frozenset({errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS})


class Filesystem:
    """The operating system's calls."""

    def open(self, path: Path, flags: int) -> int:
        """Open or create a file; the descriptor is not inherited."""
        return os.open(path, flags | os.O_CLOEXEC, 0o640)

    def close(self, descriptor: int) -> None:
        """Close a descriptor."""
        os.close(descriptor)

    @contextlib.contextmanager
    def opened(self, path: Path, flags: int) -> Iterator[int]:
        """Open a file for the length of a block."""
        descriptor = self.open(path, flags)
        try:
            yield descriptor
        finally:
            self.close(descriptor)

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
        """Reserve space, so that a full disk is known before anything is written."""
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
        """Rename a file."""
        source.rename(target)

    def link(self, source: Path, target: Path) -> None:
        """Add a second name for a file."""
        target.hardlink_to(source)

    def unlink(self, path: Path) -> None:
        """Remove a file."""
        path.unlink()


def is_disk_full(error: OSError) -> bool:
    """Return whether an error means a full disk or quota, not a failing disk."""
    return error.errno in _DISK_FULL


def write_all(files: Filesystem, descriptor: int, parts: Sequence[bytes | memoryview], position: int) -> int:
    """Write all parts from `position` on and return the position after them."""
    first = 0
    while first < len(parts):
        batch = parts[first : first + _PARTS_MAX]
        written = files.write(descriptor, batch, position)
        if written == 0 and any(batch):  # parts may be empty
            raise OSError(errno.EIO, "nothing was written")
        position += written
        while first < len(parts) and written >= len(parts[first]):
            written -= len(parts[first])
            first += 1
        if written:  # the part after these was written up to here
            parts = [memoryview(parts[first])[written:], *parts[first + 1 :]]
            first = 0
    return position


def fill_zeros(files: Filesystem, descriptor: int, start: int, end: int) -> None:
    """Overwrite the range with zeros."""
    while start < end:
        start = write_all(files, descriptor, [memoryview(_FILL)[: end - start]], start)


def allocate_zeros(files: Filesystem, descriptor: int, size_bytes: int) -> None:
    """Allocate, write and sync all blocks of a new file, so that later syncs have no metadata to write.

    Each write is synced by itself, because one large sync would block the syncs of appends for its whole length.
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
    """Fill the buffer from `position` on; return how many bytes were read before the file's end."""
    filled = 0
    while filled < len(buffer):
        count = files.read(descriptor, buffer[filled:], position + filled)
        if count == 0:
            break
        filled += count
    return filled


def read_bytes(files: Filesystem, descriptor: int, size_bytes: int, position: int) -> bytes:
    """Return up to `size_bytes` bytes; fewer only at the file's end."""
    buffer = bytearray(size_bytes)
    return bytes(memoryview(buffer)[: read_into(files, descriptor, memoryview(buffer), position)])


# A flush trims the segments of its last seconds at once. Ten seconds at 100 MB/s are 16 segments of 64 MiB: enough that
# a steady flow is written to recycled files, and few enough to free the disk after an outage.
SPARES_MAX = 16

_LOCK_NAME = "lock"
_PID_CHARS = 20


@dataclass(frozen=True, slots=True)
class Newest:
    """The segment that is appended to, open for writing. `marked` is whether it ends with a mark."""

    number: int
    segment: Segment
    head: bytes
    descriptor: int
    marked: bool

    @property
    def free_bytes(self) -> int:
        """The bytes that can still be written."""
        return self.segment.file_bytes - self.segment.end_position


@dataclass(frozen=True, slots=True)
class DirectoryContents:
    """The contents of a directory at open: older segments in order, the newest, and spares."""

    older: tuple[Segment, ...]
    newest: Newest | None
    spares: tuple[Path, ...]


class LogDirectory:
    """The files of one log, locked for this process from `__init__` to `close`."""

    def __init__(self, path: Path, *, segment_bytes: int, files: Filesystem) -> None:
        self.path = path
        self.files = files
        self._segment_bytes = segment_bytes
        self._make(path)
        self._lock = take_lock(path, files)
        numbers = numbers_of(files.names(path), SPARE_SUFFIX)
        self._spare_numbers = itertools.count(numbers[-1] + 1 if numbers else 1)

    def close(self) -> None:
        """Release the lock."""
        self.files.close(self._lock)

    def load(self, *, files_max: int) -> DirectoryContents:
        """Check all segments' headers and the newest one's records, cut off a torn tail, and remove unusable spares.

        `files_max` is how many segments and spares fit in the budget together. Records of older segments are checked
        when they are read.

        Raises:
            WalCorrupt: a segment is missing, its header is damaged, or the newest has a damaged durable record.
            WalVersionUnknown: another version of Lakefeed has written a segment.
        """
        # A killed process may have left names that this one sees but that are not on disk yet.
        self.files.sync_directory(self.path)
        names = self.files.names(self.path)
        numbers = numbers_of(names, SEGMENT_SUFFIX)
        for before, after in itertools.pairwise(numbers):
            if after != before + 1:
                missing = self.path / segment_name(before + 1)
                raise WalCorrupt("segment is missing", segment=str(missing), before=segment_name(after))
        headers = [self._load_header(number) for number in numbers]
        older = []
        for header, following in itertools.pairwise(headers):
            if following.base_offset < header.base_offset:
                path = self.path / segment_name(following.number)
                raise WalCorrupt("offsets run backwards", segment=str(path), offset=following.base_offset)
            older.append(self._segment(header, end_offset=following.base_offset, end_position=header.file_bytes))
        newest = self._recover_newest(headers[-1]) if headers else None
        spares_max = min(SPARES_MAX, files_max - len(headers))
        return DirectoryContents(tuple(older), newest, self._usable_spares(numbers_of(names, SPARE_SUFFIX), spares_max))

    def prepare_spare(self) -> Path:
        """Make a new spare: steps 1 and 2. If the disk is full, nothing remains of it."""
        path = self.path / spare_name(next(self._spare_numbers))
        with self.files.opened(path, os.O_RDWR | os.O_CREAT | os.O_EXCL) as descriptor:
            try:
                allocate_zeros(self.files, descriptor, self._segment_bytes)
            except OSError:
                with contextlib.suppress(OSError):  # the first error matters; open() removes what is left
                    self.files.unlink(path)
                raise
        return path

    def begin(self, spare: Path, header: Header) -> Newest:
        """Turn a spare into the newest segment: steps 3 and 4. Call `sync_names` before the first record.

        If this raises, the spare is still a spare.
        """
        descriptor = self.files.open(spare, os.O_RDWR)
        try:
            write_all(self.files, descriptor, [encode_header(header)], 0)
            self.files.sync(descriptor)
            self.files.rename(spare, self.path / segment_name(header.number))
        except OSError:
            self.files.close(descriptor)
            raise
        segment = self._segment(header, end_offset=header.base_offset, end_position=header.records_start)
        return Newest(header.number, segment, header.head, descriptor, marked=True)

    def sync_names(self) -> None:
        """Make renames durable: steps 5 and 7."""
        self.files.sync_directory(self.path)

    def retire(self, segment: Segment, *, keep: bool) -> Path | None:
        """Turn the oldest segment into a spare, or remove it: step 6. Call `sync_names` before the spare is used.

        If this raises, the segment is still there.
        """
        spare = self.path / spare_name(next(self._spare_numbers)) if keep else None
        if spare is None:
            self.files.unlink(segment.path)
        else:
            self.files.rename(segment.path, spare)
        return spare

    def _make(self, path: Path) -> None:
        if not path.exists():
            self._make(path.parent)
            with contextlib.suppress(FileExistsError):  # another process was faster: the lock decides
                self.files.make_directory(path)
            self.files.sync_directory(path.parent)

    def _load_header(self, number: int) -> Header:
        path = self.path / segment_name(number)
        with self.files.opened(path, os.O_RDONLY) as descriptor:
            size_bytes = self.files.size(descriptor)
            header = load_header(self.files, descriptor, path=str(path), number=number)
        if size_bytes < header.file_bytes:
            raise WalCorrupt("segment was cut short", segment=str(path), bytes=size_bytes, of=header.file_bytes)
        return header

    def _segment(self, header: Header, *, end_offset: int, end_position: int) -> Segment:
        return Segment(
            path=self.path / segment_name(header.number),
            base_offset=header.base_offset,
            file_bytes=header.file_bytes,
            salt=header.salt,
            records_start=header.records_start,
            end_offset=end_offset,
            end_position=end_position,
        )

    def _recover_newest(self, header: Header) -> Newest:
        path = self.path / segment_name(header.number)
        descriptor = self.files.open(path, os.O_RDWR)
        try:
            end = self._recover_records(path, header, descriptor)
        except BaseException:
            self.files.close(descriptor)
            raise
        segment = self._segment(header, end_offset=end.offset, end_position=end.position)
        return Newest(header.number, segment, header.head, descriptor, marked=end.marked)

    def _recover_records(self, path: Path, header: Header, descriptor: int) -> End:
        """Find the end of the newest segment's records and make the disk agree.

        Unsynced records are written again: after a failed sync the system may hold them in memory as clean although
        they are not on disk, and a sync alone would not write them. Everything after the end becomes zeros, because a
        good record of a torn group could otherwise pass as part of the group that overwrites its beginning. After a
        crash in between, the next open decides the same.
        """
        with memoryview(bytearray(header.file_bytes)) as view:
            read_into(self.files, descriptor, view, 0)
            start, base_offset = header.records_start, header.base_offset
            end = find_end(view, start=start, base_offset=base_offset, salt=header.salt, path=str(path))
            write_all(self.files, descriptor, [view[end.unsynced_position : end.position]], end.unsynced_position)
        fill_zeros(self.files, descriptor, end.position, header.file_bytes)
        self.files.sync(descriptor)
        return end

    def _usable_spares(self, numbers: list[int], spares_max: int) -> tuple[Path, ...]:
        """Keep spares of the right size, up to the limit, and remove the others."""
        kept: list[Path] = []
        for number in numbers:
            path = self.path / spare_name(number)
            with self.files.opened(path, os.O_RDWR) as descriptor:
                is_kept = len(kept) < spares_max and self.files.size(descriptor) == self._segment_bytes
                if is_kept:
                    # Writes the size to disk again, because a failed sync may have left it in memory only.
                    write_all(self.files, descriptor, [b"\0"], self._segment_bytes - 1)
                    self.files.sync(descriptor)
            if is_kept:
                kept.append(path)
            else:
                self.files.unlink(path)
        return tuple(kept)


def take_lock(directory: Path, files: Filesystem) -> int:
    """Lock the log for this process until the descriptor is closed.

    Raises: WalLocked if another process holds the lock.
    """
    descriptor = files.open(directory / _LOCK_NAME, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = read_bytes(files, descriptor, _PID_CHARS, 0).decode("ascii", "replace").strip()
        files.close(descriptor)
        raise WalLocked(
            f"log is in use by another process, stop that one first (or give this one its own data directory):"
            f" directory={directory} pid={holder or 'unknown'}"
        ) from error
    with contextlib.suppress(OSError):  # a full disk: only the lock matters
        write_all(files, descriptor, [str(os.getpid()).ljust(_PID_CHARS - 1).encode() + b"\n"], 0)
    return descriptor


def load_header(files: Filesystem, descriptor: int, *, path: str, number: int) -> Header:
    """Read and check the header of an open segment.

    Raises:
        WalCorrupt: it is damaged.
        WalVersionUnknown: it is of another version.
    """
    prefix = read_bytes(files, descriptor, HEADER_MIN_BYTES, 0)
    size_bytes = min(header_bytes(prefix), files.size(descriptor))
    return decode_header(read_bytes(files, descriptor, size_bytes, 0), path=path, number=number)
