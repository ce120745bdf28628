"""A planned scan in pages, and the files of one page. Core: decides which manifests and files a scan reads.

Planning has two steps, so that its memory does not grow with the table:

    1. the manifests that the filter leaves, and the delete files of the scan       held for as long as the plan
    2. a page: some manifests, or a part of one, read entry by entry into tasks     made when a client asks for it
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from typing import Any

import orjson

from catalog.errors import Unplannable
from catalog.fields import JsonObject
from catalog.manifest_records import Status
from catalog.planning.columns import Column
from catalog.planning.content_files import STATISTICS, show_data_file, show_delete_file
from catalog.planning.deletes import FILE_PATH_ID, DeleteIndex
from catalog.planning.expressions import referenced_columns
from catalog.planning.facts import Facts
from catalog.planning.judging import FactsOf, judge
from catalog.planning.manifests import Entry, Manifest, decode_entries
from catalog.planning.partitions import Spec, metrics_facts, summary_facts, tuple_facts
from catalog.planning.requests import Scan

# An answer's bytes, roughly, at most; the filter is repeated in each of its tasks.
_PAGE_MAX_BYTES = 64 * 1024 * 1024
_TASK_BYTES = 1024
# Each is a file to read, and a client waits for all of a page.
_PAGE_MAX_PARTS = 64


@dataclass(frozen=True, slots=True)
class Part:
    """Entries of one manifest, from the first one on up to the end; no end means all."""

    manifest: Manifest
    first: int
    end: int | None


@dataclass(frozen=True, slots=True)
class PreparedScan:
    """A scan with the manifests it reads, in pages, and the delete files that may apply."""

    scan: Scan
    pages: tuple[tuple[Part, ...], ...]
    deletes: DeleteIndex
    filter_json: orjson.Fragment
    held_files: int


@dataclass(frozen=True, slots=True)
class TaskPage:
    """The tasks of a page with the delete files they refer to; `is_enough` if the client needs no further page."""

    tasks: list[JsonObject]
    deletes: list[JsonObject]
    is_enough: bool


def keep_manifests(scan: Scan, manifests: Iterable[Manifest]) -> list[Manifest]:
    """Leave out the manifests that, by their summaries, have no file with a row that the filter wants.

    Raises: Unplannable if a manifest is of a spec that the table does not have.
    """
    columns = referenced_columns(scan.filter_)
    return [manifest for manifest in manifests if _manifest_may_match(scan, manifest, columns)]


def read_deletes(scan: Scan, data: bytes, manifest: Manifest) -> list[Entry]:
    """Read the delete files of a manifest.

    Raises: Unplannable.
    """
    spec = scan.specs[manifest.spec_id]
    return [_slim(entry) for entry in decode_entries(data, manifest, spec.read_tuple)]


def prepare_scan(scan: Scan, manifests: Sequence[Manifest], deletes: Sequence[Entry], page_files: int) -> PreparedScan:
    """Cut a scan into pages of so many entries at most, and of fewer where the filter is long."""
    filter_json = orjson.dumps(scan.filter_.json)
    entries = max(1, min(page_files, _PAGE_MAX_BYTES // (_TASK_BYTES + len(filter_json))))
    return PreparedScan(
        scan=scan,
        pages=tuple(_cut_pages(manifests, entries)),
        deletes=DeleteIndex(deletes, scan.specs),
        filter_json=orjson.Fragment(filter_json),
        held_files=1 + len(manifests) + len(deletes),
    )


def read_page(prepared: PreparedScan, page: Sequence[Part], bodies: Iterable[bytes]) -> TaskPage:
    """Read the entries of a page, whose parts' manifests are given, into tasks.

    Raises: Unplannable.
    """
    tasks: list[JsonObject] = []
    deletes: dict[str, tuple[int, Entry]] = {}
    scan, settled_rows = prepared.scan, 0
    for entry, residual in _matching_entries(scan, page, bodies):
        applying = [] if scan.added_by is not None else prepared.deletes.find(entry)
        task = {
            "data-file": show_data_file(entry, scan.specs[entry.spec_id], scan.stats_fields),
            "residual-filter": prepared.filter_json if residual is scan.filter_.json else residual,
        }
        if applying:
            task["delete-file-references"] = [_reference(delete, deletes) for delete in applying]
        tasks.append(task)
        settled_rows += entry.file["record_count"] if residual is True and not applying else 0
        if scan.min_rows is not None and settled_rows >= scan.min_rows:
            break
    shown = [show_delete_file(delete, scan.specs[delete.spec_id]) for _, delete in deletes.values()]
    return TaskPage(tasks, shown, is_enough=scan.min_rows is not None and settled_rows >= scan.min_rows)


def _manifest_may_match(scan: Scan, manifest: Manifest, columns: Mapping[int, Column]) -> bool:
    spec = scan.specs.get(manifest.spec_id)
    if spec is None:
        raise Unplannable(f"Cannot find partition spec {manifest.spec_id} of manifest: {manifest.location}")
    if scan.added_by is not None and manifest.snapshot_id not in (None, *scan.added_by):
        return False
    if manifest.files_count == 0:
        return False
    return judge(scan.filter_, lambda field_id: summary_facts(spec, manifest.summaries, columns[field_id])).may_match


def _matching_entries(scan: Scan, page: Sequence[Part], bodies: Iterable[bytes]) -> Iterator[tuple[Entry, Any]]:
    """Yield the files with a row that may match, and what of the filter is left to check in them."""
    columns = referenced_columns(scan.filter_)
    for part, body in zip(page, bodies, strict=True):
        spec = scan.specs[part.manifest.spec_id]
        for entry in islice(decode_entries(body, part.manifest, spec.read_tuple), part.first, part.end):
            if scan.added_by is not None and not _is_added(entry, scan.added_by):
                continue
            judgement = judge(scan.filter_, _file_facts(entry, spec, columns))
            if judgement.may_match:
                yield entry, judgement.residual


def _is_added(entry: Entry, added_by: frozenset[int]) -> bool:
    return entry.status is Status.ADDED and entry.snapshot_id in added_by


def _file_facts(entry: Entry, spec: Spec, columns: Mapping[int, Column]) -> FactsOf:
    """Look facts up when they are asked for, each once: a filter often asks several things of one column."""

    @cache
    def facts_of(field_id: int) -> Facts:
        column = columns[field_id]
        return tuple_facts(spec, entry.partition, column) & metrics_facts(entry.file, column)

    return facts_of


def _cut_pages(manifests: Sequence[Manifest], page_files: int) -> Iterator[tuple[Part, ...]]:
    page: list[Part] = []
    room = page_files
    for manifest in manifests:
        for part in _cut_manifest(manifest, page_files):
            # An old list does not count: such a manifest is a page of its own.
            size = page_files if part.end is None else part.end - part.first
            if page and (size > room or len(page) == _PAGE_MAX_PARTS):
                yield tuple(page)
                page, room = [], page_files
            page.append(part)
            room -= size
    if page:
        yield tuple(page)


def _cut_manifest(manifest: Manifest, page_files: int) -> Iterator[Part]:
    if manifest.files_count is None:
        yield Part(manifest, 0, None)
        return
    for first in range(0, manifest.files_count, page_files):
        yield Part(manifest, first, min(first + page_files, manifest.files_count))


def _reference(delete: Entry, deletes: dict[str, tuple[int, Entry]]) -> int:
    """Give the place of a delete file among those of this page. One Puffin file holds several deletion vectors."""
    key = f"{delete.file.get('content_offset')} {delete.file['file_path']}"
    return deletes.setdefault(key, (len(deletes), delete))[0]


def _slim(entry: Entry) -> Entry:
    """Drop the statistics of a delete file, as it is held for long, but for those that tell its data file."""
    kept = {name: value for name, value in entry.file.items() if name not in STATISTICS}
    for name in ("lower_bounds", "upper_bounds"):
        kept[name] = [pair for pair in entry.file.get(name) or () if pair["key"] == FILE_PATH_ID]
    return replace(entry, file=kept)
