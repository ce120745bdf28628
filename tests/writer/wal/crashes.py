"""A filesystem that can lose power: it keeps a journal of what was done to it and builds what a disk may hold after.

What was synced is there. Of what was not, each block of a file is in any state that it had since the last sync of the
file, and each change of a name has happened or not, independently of all others. Real filesystems keep more promises.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from writer.wal.files import Filesystem

BLOCK_BYTES = 512


@dataclass(frozen=True)
class Written:
    file: int
    position: int
    data: bytes


@dataclass(frozen=True)
class Synced:
    file: int


@dataclass(frozen=True)
class Renamed:
    """Names that changed together; None for a name that is gone."""

    names: dict[str, int | None]


@dataclass(frozen=True)
class NamesSynced:
    pass


@dataclass
class Disk:
    """What is on disk for sure, and what may be."""

    names: dict[str, int] = field(default_factory=dict)
    files: dict[int, bytearray] = field(default_factory=dict)
    pending_names: list[Renamed] = field(default_factory=list)
    pending_writes: dict[int, list[Written]] = field(default_factory=dict)

    def apply(self, event: Written | Synced | Renamed | NamesSynced) -> None:
        match event:
            case Written(file=file):
                self.pending_writes.setdefault(file, []).append(event)
            case Synced(file):
                for written in self.pending_writes.pop(file, []):
                    self._put(written)
            case Renamed():
                self.pending_names.append(event)
            case NamesSynced():
                for renamed in self.pending_names:
                    self._rename(renamed)
                self.pending_names.clear()

    def lose_power(self, chance: random.Random) -> None:
        """Decide what becomes of everything that was not synced."""
        for renamed in self.pending_names:
            if chance.random() < 0.5:
                self._rename(renamed)
        for writes in self.pending_writes.values():
            # All, nothing and anything between are all worth trying.
            kept = chance.choice([0.0, 0.1, 0.5, 0.9, 1.0])
            last_kept: dict[int, int] = {}
            for index, written in enumerate(writes):
                for block in _blocks(written):
                    if chance.random() < kept:
                        last_kept[block] = index
            for index, written in enumerate(writes):
                for block in _blocks(written):
                    if index <= last_kept.get(block, -1):
                        self._put(_part_in_block(written, block))

    def _put(self, written: Written) -> None:
        data = self.files.setdefault(written.file, bytearray())
        end = written.position + len(written.data)
        if len(data) < end:
            data.extend(bytes(end - len(data)))
        data[written.position : end] = written.data

    def _rename(self, renamed: Renamed) -> None:
        for name, file in renamed.names.items():
            if file is None:
                self.names.pop(name, None)
            else:
                self.names[name] = file


def _blocks(written: Written) -> range:
    return range(written.position // BLOCK_BYTES, -(-(written.position + len(written.data)) // BLOCK_BYTES))


def _part_in_block(written: Written, block: int) -> Written:
    start = max(block * BLOCK_BYTES, written.position)
    end = min((block + 1) * BLOCK_BYTES, written.position + len(written.data))
    return Written(written.file, start, written.data[start - written.position : end - written.position])


class CrashingFilesystem(Filesystem):
    """A real directory, with a journal from which its state after a power loss at any moment can be built."""

    def __init__(self, directory: Path) -> None:
        self._turn = threading.Lock()
        self._journal: list[Written | Synced | Renamed | NamesSynced] = []
        self._by_descriptor: dict[int, int] = {}
        self._before = Disk()
        for file, path in enumerate(sorted(directory.iterdir())):
            self._before.names[path.name] = file
            self._before.files[file] = bytearray(path.read_bytes())
        self._by_name = dict(self._before.names)

    def moment(self) -> int:
        """Return now, as a point in the journal."""
        return len(self._journal)

    def crash(self, target: Path, *, moment: int, chance: random.Random) -> None:
        """Write to `target` what the disk may hold if power is lost at that moment."""
        disk = self._before
        for event in self._journal[:moment]:
            disk.apply(event)
        disk.lose_power(chance)
        target.mkdir()
        for name, file in disk.names.items():
            (target / name).write_bytes(disk.files.get(file, b""))

    def open(self, path: Path, flags: int) -> int:
        with self._turn:
            descriptor = super().open(path, flags)
            if path.name not in self._by_name:
                self._by_name[path.name] = len(self._by_name) + 1_000_000 + len(self._journal)
                self._journal.append(Renamed({path.name: self._by_name[path.name]}))
            self._by_descriptor[descriptor] = self._by_name[path.name]
            return descriptor

    def write(self, descriptor: int, parts: Sequence[bytes | memoryview], position: int) -> int:
        with self._turn:
            written = super().write(descriptor, parts, position)
            self._journal.append(Written(self._by_descriptor[descriptor], position, b"".join(parts)[:written]))
            return written

    def allocate(self, descriptor: int, size_bytes: int) -> None:
        with self._turn:
            os.truncate(descriptor, size_bytes)
            last_byte = Written(self._by_descriptor[descriptor], size_bytes - 1, b"\0")
            self._journal.append(last_byte)

    def sync(self, descriptor: int) -> None:
        with self._turn:  # a real sync would only make the test slower
            self._journal.append(Synced(self._by_descriptor[descriptor]))

    def sync_directory(self, directory: Path) -> None:
        with self._turn:
            self._journal.append(NamesSynced())

    def rename(self, source: Path, target: Path) -> None:
        with self._turn:
            super().rename(source, target)
            file = self._by_name.pop(source.name)
            self._by_name[target.name] = file
            self._journal.append(Renamed({source.name: None, target.name: file}))

    def unlink(self, path: Path) -> None:
        with self._turn:
            super().unlink(path)
            del self._by_name[path.name]
            self._journal.append(Renamed({path.name: None}))
