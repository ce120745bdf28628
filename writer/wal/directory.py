"""The log's directory: segments, spares and the lock. Owns what names mean and which order of steps survives a crash.

Every method blocks; log.py decides when each is called, and on which thread. What is in the directory:

    lock               held (flock) by the one process that has the log open, whose id is written in it
    0000000042.wal     a segment; their numbers have no holes
    0000000007.spare   a file of a segment's size with anything in it, for a later segment
    damaged/           what repair.py has moved aside

A file's way, and what a crash after each step leaves. Only steps that change names need the directory synced.

    prepare  1 create NAME.spare         a spare that is too short: open() removes it
             2 fill with zeros, sync     a spare
    begin    3 write header, sync        still a spare, whatever is in it: the next begin() writes over it
             4 rename to NUMBER.wal      the spare or an empty segment, whichever the disk kept. Both are sound: the
                                         header is durable before the name, and no record is there yet
             5 sync directory            an empty segment, the newest. Only now may records be written
    retire   6 rename to NAME.spare      the segment or a spare; the segment is merely trimmed again later
             7 sync directory            a spare. Only now may begin() have it: a header written any earlier could show
                                         up under the old segment's name. One segment at a time, oldest first, so that
                                         no crash leaves a hole in the numbers

So a file with a segment's name always has a whole header, and what a recycled file still holds behind its new records
belongs to another salt and to lower offsets. Whatever the sync mode, all records of the segment before are synced ahead
of step 3: only the newest segment can hold some that are not.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
from dataclasses import dataclass
from pathlib import Path

from writer.errors import WalCorrupt, WalLocked
from writer.wal.files import Filesystem, allocate_zeros, fill_zeros, read_bytes, read_into, write_all
from writer.wal.record import End, find_end
from writer.wal.segment import (
    HEADER_MIN_BYTES,
    SEGMENT_SUFFIX,
    SPARE_SUFFIX,
    Header,
    Segment,
    decode_header,
    encode_header,
    header_bytes,
    numbers_of,
    segment_name,
    spare_name,
)

# A flush trims the segments of its last seconds in one go. Ten seconds at 100 MB/s are 16 segments of 64 MiB: enough
# that a steady flow is written to recycled files, and little enough to give the disk back after an outage.
SPARES_MAX = 16

_LOCK_NAME = "lock"
_PID_CHARS = 20


@dataclass(frozen=True, slots=True)
class Newest:
    """The segment that is appended to, open for writing. `marked` tells that nothing follows its last mark."""

    number: int
    segment: Segment
    head: bytes
    descriptor: int
    marked: bool


@dataclass(frozen=True, slots=True)
class Contents:
    """What a directory holds at open: segments in order, the newest apart, and files that may become segments."""

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
        """Let another process open the log."""
        self.files.close(self._lock)

    def load(self, *, files_max: int) -> Contents:
        """Check all segments' headers and the newest one's records, cut off a torn tail, and sort out the spares.

        `files_max` is how many segments and spares the budget has room for together.

        Records of older segments are checked when they are read: those that nobody reads again need not be whole.

        Raises:
            WalCorrupt: a segment is missing, its header is damaged, or the newest has a damaged durable record.
            WalVersionUnknown: another version of Lakefeed has written a segment.

        """
        # A process that was killed may have left names that this one sees but the disk does not have yet.
        self.files.sync_directory(self.path)
        names = self.files.names(self.path)
        numbers = numbers_of(names, SEGMENT_SUFFIX)
        self._check_no_holes(numbers)
        headers = [self._load_header(number) for number in numbers]
        older = tuple(self._older_segment(*pair) for pair in itertools.pairwise(headers))
        newest = self._recover_newest(headers[-1]) if headers else None
        spares_max = min(SPARES_MAX, files_max - len(headers))
        return Contents(older, newest, self._sort_spares(numbers_of(names, SPARE_SUFFIX), spares_max))

    def prepare_spare(self) -> Path:
        """Make a new spare: steps 1 and 2. If there is no room, nothing is left of it."""
        path = self.path / spare_name(next(self._spare_numbers))
        descriptor = self.files.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            allocate_zeros(self.files, descriptor, self._segment_bytes)
        except OSError:
            with contextlib.suppress(OSError):  # the first error is the one that matters; open() removes what is left
                self.files.unlink(path)
            raise
        finally:
            self.files.close(descriptor)
        return path

    def begin(self, spare: Path, header: Header) -> Newest:
        """Turn a spare into the newest segment: steps 3 and 4. `sync_names` has to follow before the first record.

        If this raises, the spare is still one.
        """
        descriptor = self.files.open(spare, os.O_RDWR)
        path = self.path / segment_name(header.number)
        try:
            write_all(self.files, descriptor, [encode_header(header)], 0)
            self.files.sync(descriptor)
            self.files.rename(spare, path)
        except OSError:
            self.files.close(descriptor)
            raise
        segment = _segment(path, header, end_offset=header.base_offset, end_position=header.records_start)
        return Newest(header.number, segment, header.head, descriptor, marked=True)

    def sync_names(self) -> None:
        """Make renames durable: step 5."""
        self.files.sync_directory(self.path)

    def retire(self, segment: Segment, *, keep: bool) -> Path | None:
        """Turn the oldest segment into a spare, or remove it: steps 6 and 7."""
        if not keep:
            self.files.unlink(segment.path)
            self.files.sync_directory(self.path)
            return None
        spare = self.path / spare_name(next(self._spare_numbers))
        self.files.rename(segment.path, spare)
        self.files.sync_directory(self.path)
        return spare

    def _make(self, path: Path) -> None:
        if not path.exists():
            self._make(path.parent)
            with contextlib.suppress(FileExistsError):  # another process was faster: the lock decides between us
                self.files.make_directory(path)
            self.files.sync_directory(path.parent)

    def _check_no_holes(self, numbers: list[int]) -> None:
        for before, after in itertools.pairwise(numbers):
            if after != before + 1:
                missing = self.path / segment_name(before + 1)
                raise WalCorrupt("segment is missing", segment=str(missing), before=segment_name(after))

    def _load_header(self, number: int) -> Header:
        path = self.path / segment_name(number)
        descriptor = self.files.open(path, os.O_RDONLY)
        try:
            size_bytes = self.files.size(descriptor)
            header = load_header(self.files, descriptor, path=str(path), number=number)
        finally:
            self.files.close(descriptor)
        if size_bytes < header.file_bytes:
            raise WalCorrupt("segment was cut short", segment=str(path), bytes=size_bytes, of=header.file_bytes)
        return header

    def _older_segment(self, header: Header, following: Header) -> Segment:
        path = self.path / segment_name(header.number)
        if following.base_offset < header.base_offset:
            following_path = self.path / segment_name(following.number)
            raise WalCorrupt("offsets run backwards", segment=str(following_path), offset=following.base_offset)
        return _segment(path, header, end_offset=following.base_offset, end_position=header.file_bytes)

    def _recover_newest(self, header: Header) -> Newest:
        path = self.path / segment_name(header.number)
        descriptor = self.files.open(path, os.O_RDWR)
        try:
            end = self._recover_records(path, header, descriptor)
        except BaseException:
            self.files.close(descriptor)
            raise
        segment = _segment(path, header, end_offset=end.offset, end_position=end.position)
        return Newest(header.number, segment, header.head, descriptor, marked=end.marked)

    def _recover_records(self, path: Path, header: Header, descriptor: int) -> End:
        """Find the end of the newest segment's records and make it so on disk.

        What was not synced is written once more: after a failed sync the system may hold it in memory as clean
        although the disk never got it, and a sync alone would not bring it there. Everything behind it becomes zeros:
        a good record of a torn group could otherwise pass as part of the group that is written over its beginning.
        A crash in between changes nothing that the next open would decide.
        """
        with memoryview(bytearray(header.file_bytes)) as view:
            read_into(self.files, descriptor, view, 0)
            end = find_end(
                view,
                start=header.records_start,
                base_offset=header.base_offset,
                salt=header.salt,
                path=str(path),
            )
            write_all(self.files, descriptor, [view[end.unsynced_position : end.position]], end.unsynced_position)
        fill_zeros(self.files, descriptor, end.position, header.file_bytes)
        self.files.sync(descriptor)
        return end

    def _sort_spares(self, numbers: list[int], spares_max: int) -> tuple[Path, ...]:
        """Keep spares of the right size, up to the limit, and remove the others."""
        kept: list[Path] = []
        for number in numbers:
            path = self.path / spare_name(number)
            if len(kept) < spares_max and self._size(path) == self._segment_bytes:
                self._settle_size(path)
                kept.append(path)
            else:
                self.files.unlink(path)
        return tuple(kept)

    def _settle_size(self, path: Path) -> None:
        """Have the disk know a spare's size, which a sync that failed may have left in memory only."""
        descriptor = self.files.open(path, os.O_RDWR)
        try:
            write_all(self.files, descriptor, [b"\0"], self._segment_bytes - 1)
            self.files.sync(descriptor)
        finally:
            self.files.close(descriptor)

    def _size(self, path: Path) -> int:
        descriptor = self.files.open(path, os.O_RDONLY)
        try:
            return self.files.size(descriptor)
        finally:
            self.files.close(descriptor)


def take_lock(directory: Path, files: Filesystem) -> int:
    """Lock the log for this process until the descriptor is closed.

    Raises:
        WalLocked: another process has it.

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
    with contextlib.suppress(OSError):  # a full disk: the lock is what counts
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


def _segment(path: Path, header: Header, *, end_offset: int, end_position: int) -> Segment:
    return Segment(
        path=path,
        base_offset=header.base_offset,
        file_bytes=header.file_bytes,
        salt=header.salt,
        records_start=header.records_start,
        end_offset=end_offset,
        end_position=end_position,
    )
