"""A filesystem that can lose power: it keeps a journal of what was done to it and builds what may be left after.

When only the process dies, the system still holds everything that was written, synced or not. When power is lost, what
was synced is there; of what was not, each block of a file is in any state that it had since the file's last sync, and
each change of a name has happened or not, independently of all others. Real filesystems keep more promises.
"""

from __future__ import annotations

import copy
import errno
import itertools
import os
import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from lakefeed.writer.wal.directory import Filesystem

BLOCK_BYTES = 512

_file_ids = itertools.count()


@dataclass(frozen=True)
class Written:
    file: int
    position: int
    data: bytes

    def blocks(self) -> range:
        return range(self.position // BLOCK_BYTES, -(-(self.position + len(self.data)) // BLOCK_BYTES))

    def in_block(self, block: int) -> Written:
        start = max(block * BLOCK_BYTES, self.position)
        end = min((block + 1) * BLOCK_BYTES, self.position + len(self.data))
        return Written(self.file, start, self.data[start - self.position : end - self.position])


@dataclass(frozen=True)
class Synced:
    file: int


@dataclass(frozen=True)
class SyncFailed:
    """The system takes the writes for done from now on, but the disk never got them."""

    file: int


@dataclass(frozen=True)
class Renamed:
    """Names that changed together; None for a name that is gone."""

    names: dict[str, int | None]


@dataclass(frozen=True)
class NamesSynced:
    pass


Event = Written | Synced | SyncFailed | Renamed | NamesSynced


@dataclass
class Contents:
    """Names and the bytes behind them."""

    names: dict[str, int] = field(default_factory=dict)
    files: dict[int, bytearray] = field(default_factory=dict)

    def rename(self, renamed: Renamed) -> None:
        for name, file in renamed.names.items():
            if file is None:
                self.names.pop(name, None)
            else:
                self.names[name] = file

    def put(self, written: Written) -> None:
        data = self.files.setdefault(written.file, bytearray())
        end = written.position + len(written.data)
        data.extend(bytes(max(0, end - len(data))))
        data[written.position : end] = written.data

    def store(self, target: Path) -> None:
        target.mkdir()
        for name, file in self.names.items():
            (target / name).write_bytes(self.files.get(file, b""))


@dataclass
class Machine:
    """What the system holds in memory, what is on disk for sure, and what is on its way between them."""

    memory: Contents = field(default_factory=Contents)
    disk: Contents = field(default_factory=Contents)
    pending_names: list[Renamed] = field(default_factory=list)
    pending_writes: dict[int, list[Written]] = field(default_factory=dict)

    def apply(self, event: Event) -> None:
        match event:
            case Written(file=file):
                self.memory.put(event)
                self.pending_writes.setdefault(file, []).append(event)
            case Synced(file):
                for written in self.pending_writes.pop(file, []):
                    self.disk.put(written)
            case SyncFailed(file):
                self.pending_writes.pop(file, None)
            case Renamed():
                self.memory.rename(event)
                self.pending_names.append(event)
            case NamesSynced():
                for renamed in self.pending_names:
                    self.disk.rename(renamed)
                self.pending_names.clear()

    def lose_power(self, chance: random.Random) -> None:
        """Decide what becomes of everything that is on its way, and forget what was in memory."""
        for renamed in self.pending_names:
            if chance.random() < 0.5:
                self.disk.rename(renamed)
        for writes in self.pending_writes.values():
            # All, nothing and anything between are all worth trying.
            self._keep_some_blocks(writes, chance, part=chance.choice([0.0, 0.1, 0.5, 0.9, 1.0]))
        self.pending_names.clear()
        self.pending_writes.clear()
        self.memory = copy.deepcopy(self.disk)

    def _keep_some_blocks(self, writes: list[Written], chance: random.Random, *, part: float) -> None:
        last_kept: dict[int, int] = {}
        for index, written in enumerate(writes):
            for block in written.blocks():
                if chance.random() < part:
                    last_kept[block] = index
        for index, written in enumerate(writes):
            for block in written.blocks():
                if index <= last_kept.get(block, -1):
                    self.disk.put(written.in_block(block))


class CrashingFilesystem(Filesystem):
    """A real directory, with a journal from which a crash at any moment can be played."""

    def __init__(self, directory: Path, machine: Machine | None = None) -> None:
        self.directory = directory
        self.sync_fails = False
        self._turn = threading.Lock()
        self._journal: list[Event] = []
        self._by_descriptor: dict[int, int] = {}
        self._machine = machine or Machine()
        self._by_name = dict(self._machine.memory.names)
        if machine is None:
            directory.mkdir()
        else:
            machine.memory.store(directory)

    def moment(self) -> int:
        """Return now, as a point in the journal."""
        return len(self._journal)

    def crash(self, directory: Path, *, moment: int, power_loss: random.Random | None) -> Self:
        """Return a filesystem as the next process finds it, after a crash at that moment."""
        machine = copy.deepcopy(self._machine)
        for event in self._journal[:moment]:
            machine.apply(event)
        if power_loss is not None:
            machine.lose_power(power_loss)
        return type(self)(directory, machine)

    def open(self, path: Path, flags: int) -> int:
        with self._turn:
            descriptor = super().open(path, flags)
            if path.name not in self._by_name:
                self._by_name[path.name] = next(_file_ids)
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
            self._journal.append(Written(self._by_descriptor[descriptor], size_bytes - 1, b"\0"))

    # The journal knows what is synced; to have the real disk do it too would only make the tests slower.

    def sync(self, descriptor: int) -> None:
        with self._turn:
            file = self._by_descriptor[descriptor]
            self._journal.append(SyncFailed(file) if self.sync_fails else Synced(file))
            if self.sync_fails:
                raise OSError(errno.EIO, "injected into sync")

    def sync_directory(self, directory: Path) -> None:
        with self._turn:
            if directory == self.directory:
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
