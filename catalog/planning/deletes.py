"""Which delete files apply to a data file. Core: owns the specification's rules of scan planning for them.

deletion vector     to the one file it names, and then no position deletes of other files do
position deletes    to the file it names, or to all of its partition, not newer than itself
equality deletes    to all older files of its partition; of an unpartitioned spec, to all older files
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from catalog.planning.manifests import Content, Entry, column_value
from catalog.planning.partitions import Spec

# Reserved field id of the column of position deletes that names the data file.
FILE_PATH_ID = 2147483546

_Place: TypeAlias = tuple[int, tuple[Any, ...]]


class DeleteIndex:
    """Delete files by what they apply to."""

    def __init__(self, entries: Iterable[Entry], specs: Mapping[int, Spec]) -> None:
        self._vectors: dict[str, Entry] = {}
        self._by_path: dict[str, list[Entry]] = {}
        self._by_partition: dict[_Place, list[Entry]] = {}
        self._equality: dict[_Place | None, list[Entry]] = {}
        for entry in entries:
            self._add(entry, specs[entry.spec_id])

    def find(self, entry: Entry) -> list[Entry]:
        """Return the delete files that apply to a data file."""
        sequence, path, place = entry.sequence_number, entry.file["file_path"], _place(entry)
        found = [
            delete
            for key in (None, place)
            for delete in self._equality.get(key, ())
            if delete.sequence_number > sequence
        ]
        vector = self._vectors.get(path)
        if vector is not None:
            return [*found, vector]
        positions = (*self._by_partition.get(place, ()), *self._by_path.get(path, ()))
        return found + [delete for delete in positions if delete.sequence_number >= sequence]

    def _add(self, entry: Entry, spec: Spec) -> None:
        if entry.content is Content.EQUALITY_DELETES:
            self._equality.setdefault(_place(entry) if spec.is_partitioned else None, []).append(entry)
            return
        path = entry.file.get("referenced_data_file")
        if path is not None and entry.file.get("content_offset") is not None:
            self._vectors[path] = entry
            return
        path = path or _path_by_bounds(entry.file)
        if path is None:
            self._by_partition.setdefault(_place(entry), []).append(entry)
        else:
            self._by_path.setdefault(path, []).append(entry)


def _place(entry: Entry) -> _Place:
    return entry.spec_id, tuple("nan" if value != value else value for value in entry.partition)  # noqa: PLR0124


def _path_by_bounds(file: Mapping[str, Any]) -> str | None:
    """Find the one data file that position deletes are of, if their bounds tell that it is one."""
    lower, upper = (column_value(file, name, FILE_PATH_ID) for name in ("lower_bounds", "upper_bounds"))
    return lower.decode() if lower is not None and lower == upper else None
