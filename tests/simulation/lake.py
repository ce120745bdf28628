"""What the tables held after each commit, read from metadata, manifests and data files as an engine would.

Real: metadata documents, manifest lists and manifests, as writer and catalog wrote them. Fake: data files (storage.py).

A row counts as committed from the moment the catalog's pointer moved. Rows that another client dropped or rolled back
stay counted: they were delivered, and must not come back. Rows that a restored backup has lost do not count any more:
the log has to bring them again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from lakefeed.catalog.names import EntryId, Pointer, TableId
from lakefeed.iceberg.manifests import Manifest, Status, list_manifests, read_entries
from tests.simulation.storage import Objects


@dataclass(frozen=True, slots=True)
class Row:
    """A change as a table or a quarantine has it."""

    uid: str
    source: str
    epoch: int
    sequence: int

    @property
    def position(self) -> tuple[int, int]:
        return self.epoch, self.sequence


@dataclass(slots=True)
class Table:
    """One table since it was created."""

    uuid: str
    location: str = ""
    files: tuple[str, ...] = ()
    # All files that were ever in it: one that was rolled back may come back.
    counted: set[str] = field(default_factory=set)
    newest: dict[str, tuple[int, int]] = field(default_factory=dict)


class Lake:
    """All tables, and how often each change was committed."""

    def __init__(self, objects: Objects) -> None:
        self.committed: dict[str, list[str]] = defaultdict(list)
        self.problems: list[str] = []
        self.commits = 0
        self._objects = objects
        self._tables: dict[str, Table] = {}
        self._files: dict[str, tuple[Row, ...]] = {}
        self._manifests: dict[str, list[str]] = {}

    def has(self, uid: str) -> bool:
        """Return whether a change was committed."""
        return bool(self.committed.get(uid))

    def observe(self, entries: Mapping[EntryId, Pointer], *, restored: bool = False) -> None:
        """Follow the catalog's pointers after a change; `restored` says that a backup took their place."""
        pointers = {str(entry): pointer for entry, pointer in entries.items() if isinstance(entry, TableId)}
        for name in [name for name in self._tables if name not in pointers]:
            gone = self._tables.pop(name)
            if restored:
                self._forget(gone.files)
        for name, pointer in pointers.items():
            table = self._tables.get(name)
            if table is None or table.location != pointer.location:
                self._follow(name, pointer.location, restored=restored)

    def _follow(self, name: str, location: str, *, restored: bool) -> None:
        document = orjson.loads(self._objects.held[location])
        table = self._tables.get(name)
        if table is None or table.uuid != document["table-uuid"]:
            if table is not None and restored:
                self._forget(table.files)
            table = self._tables[name] = Table(document["table-uuid"])
        snapshot = _main_snapshot(document)
        files = () if snapshot is None else tuple(self._files_of(snapshot))
        added = [file for file in files if file not in table.counted]
        is_rewrite = snapshot is not None and snapshot["summary"]["operation"] == "replace"
        if restored:
            self._forget([file for file in table.files if file not in set(files)])
            table.newest, table.counted = {}, set()
        elif not is_rewrite:
            for file in added:
                self._commit(name, table, file)
        table.counted.update(files)
        table.files, table.location = files, location
        self.commits += 1

    def _commit(self, name: str, table: Table, file: str) -> None:
        for row in self._rows_of(file):
            if row.position <= table.newest.get(row.source, (-1, -1)):
                self.problems.append(f"out of order: {row} in {name} after {table.newest[row.source]}")
            table.newest[row.source] = row.position
            self.committed[row.uid].append(name)

    def _forget(self, files: Iterable[str]) -> None:
        for file in files:
            for row in self._rows_of(file):
                self.committed[row.uid].pop()

    def _files_of(self, snapshot: Mapping[str, Any]) -> list[str]:
        """Return the data files of a snapshot, oldest first."""
        location = snapshot["manifest-list"]
        manifests = list_manifests(self._objects.held[location], location)
        return [file for manifest in reversed(manifests) for file in self._live_files(manifest)]

    def _live_files(self, manifest: Manifest) -> list[str]:
        if manifest.location not in self._manifests:
            self._manifests[manifest.location] = live_files(self._objects.held[manifest.location], manifest)
        return self._manifests[manifest.location]

    def _rows_of(self, file: str) -> tuple[Row, ...]:
        if file not in self._files:
            self._files[file] = tuple(map(_row, orjson.loads(self._objects.held[file])))
        return self._files[file]

    def live_rows(self) -> dict[str, list[Row]]:
        """Return what each table holds now."""
        return {
            name: [row for file in table.files for row in self._rows_of(file)] for name, table in self._tables.items()
        }


def live_files(body: bytes, manifest: Manifest) -> list[str]:
    """Return the data files of a manifest, oldest first."""
    live = [entry for entry in read_entries(body, manifest) if entry.status is not Status.DELETED]
    return [entry.file["file_path"] for entry in sorted(live, key=lambda entry: entry.sequence_number)]


def _row(columns: Mapping[str, Any]) -> Row:
    image = columns.get("row_image")
    uid = columns["uid"] if image is None else orjson.loads(image)["uid"]
    return Row(uid, columns["_cdc_source"], int(uid.split(":")[1]), columns["_cdc_sequence"])


def _main_snapshot(document: Mapping[str, Any]) -> Mapping[str, Any] | None:
    current = document.get("current-snapshot-id")
    return next((each for each in document.get("snapshots") or () if each["snapshot-id"] == current), None)
