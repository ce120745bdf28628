"""The data files of snapshots, with the snapshot that added each. Owns how manifests are read for that."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from writer.iceberg.manifests import ManifestFile, decode_avro, decode_manifest_list
from writer.parallel import map_parallel
from writer.storage import ObjectStore
from writer.verification.duplicates import Extent

# Manifests are small and many: enough at once to hide a far store's delay.
PARALLEL_READS = 16

_DATA = 0
_DELETED = 2
_LONG_MIN, _LONG_MAX = -(1 << 63), (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class LiveFile:
    """A data file that is part of a table."""

    location: str
    snapshot_id: int
    extent: Extent

    @property
    def rows(self) -> int:
        """How many rows it has, by its manifest."""
        return self.extent.rows


@dataclass(frozen=True, slots=True)
class Contents:
    """What a snapshot's manifests name: data files, and how many delete files."""

    files: Sequence[LiveFile]
    delete_files: int


async def load_contents(store: ObjectStore, manifest_list: str, *, sequence_id: int) -> Contents:
    """Read which files are part of a snapshot; `sequence_id` is the field whose bounds are kept.

    Raises:
        WriterError: a manifest cannot be read.
    """
    manifests = decode_manifest_list(await store.read(manifest_list)).manifests
    entries = await _load_entries(store, [each for each in manifests if each["content"] == _DATA])
    files = [_live_file(entry, sequence_id) for entry in entries if entry["status"] != _DELETED]
    others = (each for each in manifests if each["content"] != _DATA)
    return Contents(files, sum(each["added_files_count"] + each["existing_files_count"] for each in others))


async def load_added(store: ObjectStore, manifest_list: str, *, snapshot_id: int) -> set[str]:
    """Read which files a snapshot added, from its own manifests."""
    return {_path(entry) for entry in await _load_own(store, manifest_list, snapshot_id) if entry["status"] != _DELETED}


async def load_removed(store: ObjectStore, manifest_list: str, *, snapshot_id: int) -> set[str]:
    """Read which files a snapshot says that it removed."""
    return {_path(entry) for entry in await _load_own(store, manifest_list, snapshot_id) if entry["status"] == _DELETED}


async def _load_own(store: ObjectStore, manifest_list: str, snapshot_id: int) -> list[dict[str, Any]]:
    manifests = decode_manifest_list(await store.read(manifest_list)).manifests
    own = [each for each in manifests if each["added_snapshot_id"] == snapshot_id and each["content"] == _DATA]
    return [entry for entry in await _load_entries(store, own) if entry["snapshot_id"] == snapshot_id]


async def _load_entries(store: ObjectStore, manifests: Iterable[ManifestFile]) -> list[dict[str, Any]]:
    async def load(manifest: ManifestFile) -> list[dict[str, Any]]:
        entries = decode_avro(await store.read(manifest["manifest_path"]))[1]
        inherited = {"snapshot_id": manifest["added_snapshot_id"]}
        return [{**entry, **inherited} if entry["snapshot_id"] is None else entry for entry in entries]

    parts = await map_parallel(load, manifests, at_once=PARALLEL_READS)
    return [entry for part in parts for entry in part]


def _live_file(entry: Mapping[str, Any], sequence_id: int) -> LiveFile:
    data_file = entry["data_file"]
    lowest = _bound(data_file["lower_bounds"], sequence_id)
    highest = _bound(data_file["upper_bounds"], sequence_id)
    extent = Extent(
        _LONG_MIN if lowest is None else lowest, _LONG_MAX if highest is None else highest, data_file["record_count"]
    )
    return LiveFile(data_file["file_path"], entry["snapshot_id"], extent)


def _bound(pairs: Sequence[Mapping[str, Any]] | None, field_id: int) -> int | None:
    value = next((pair["value"] for pair in pairs or () if pair["key"] == field_id), None)
    return None if value is None else int(struct.unpack("<q", value)[0])


def _path(entry: Mapping[str, Any]) -> str:
    return str(entry["data_file"]["file_path"])
