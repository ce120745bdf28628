"""Repair of a damaged log: it opens again, without the damaged records. inspect.py finds the damage.

Every damaged segment is rewritten with all its good records, under their old offsets. A mark takes the place of missing
records and gives the next offset (records.py), so offsets keep rising. Nothing is deleted: the damaged file stays under
damaged/, beside a report of what is missing. The steps for each segment, and what a crash after each one leaves:

    1 write NUMBER.wal.repaired, sync               the damaged log, and a file that open() ignores
    2 link NUMBER.wal to damaged/TIME/, sync that   the same
    3 rename NUMBER.wal.repaired to NUMBER.wal      the damaged segment or the repaired one, whichever the disk kept
    4 sync directory                                the repaired one

Each segment is repaired by itself, so an interrupted repair can be started again.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson

from lakefeed.contract.errors import WriterError
from lakefeed.writer.wal.directory import Filesystem, fill_zeros, take_lock, write_all
from lakefeed.writer.wal.inspect import (
    FoundRecord,
    HeadCodec,
    LogReport,
    Loss,
    ScanItem,
    SegmentReport,
    TornTail,
    inspect_log,
    load_view,
    scan_segment,
)
from lakefeed.writer.wal.records import (
    HEADER_BYTES,
    MARK_BYTES,
    Header,
    aligned,
    encode_group,
    encode_header,
    encode_mark,
)

DAMAGED_NAME = "damaged"
REPORT_NAME = "report.json"

_REPAIRED_SUFFIX = ".repaired"
_SALT_BITS = 64


@dataclass(frozen=True, slots=True)
class Rewrite:
    """One segment to be rewritten, with this header."""

    segment: SegmentReport
    header: Header

    def describe(self) -> str:
        """Describe the rewrite in one line."""
        segment = self.segment
        gaps = ", ".join(offsets_text(damage.offset, damage.next_offset) for damage in segment.damages)
        kept = f"keep {segment.records:,} good records" if segment.exists else "make it, without records"
        head = "" if segment.header or not segment.exists else f", {segment.sources:,} sources in its new head"
        return f"{segment.path.name}: {kept}{head}{f', leave a gap for {gaps}' if gaps else ''}"


@dataclass(frozen=True, slots=True)
class RepairPlan:
    """What a repair will do; nothing if `rewrites` is empty."""

    report: LogReport
    rewrites: tuple[Rewrite, ...]
    target: Path

    def losses(self) -> list[Loss]:
        """Return what is missing because of the current damage, not of earlier repairs."""
        return [loss for loss in self.report.losses if any(not gap.repaired for gap in loss.gaps)]

    @property
    def is_unsettled(self) -> bool:
        """Whether more may be missing than `losses` has."""
        return any(not gap.repaired for gap in self.report.unsettled_gaps)


def offsets_text(offset: int, next_offset: int) -> str:
    """Return a range of offsets as text."""
    return f"offset {offset}" if next_offset == offset + 1 else f"offsets {offset} to {next_offset - 1}"


@contextlib.contextmanager
def locked(directory: Path, files: Filesystem | None = None) -> Iterator[None]:
    """Hold the log's lock, so that no service opens it. Raise WalLocked if a service has it open."""
    files = files or Filesystem()
    if not directory.is_dir():
        raise WriterError(f"there is no log here: directory={directory}")
    descriptor = take_lock(directory, files)
    try:
        yield
    finally:
        files.close(descriptor)


def plan_repair(report: LogReport, *, name: str) -> RepairPlan:
    """Decide which segments to rewrite; `name` is that of a new directory under damaged/."""
    rewrites = [Rewrite(segment, _header_for(segment)) for segment in report.segments if segment.needs_repair]
    return RepairPlan(report, tuple(rewrites), report.directory / DAMAGED_NAME / name)


def _header_for(segment: SegmentReport) -> Header:
    header = Header(
        number=segment.number,
        base_offset=segment.base_offset,
        file_bytes=0,
        salt=secrets.randbits(_SALT_BITS),
        head=segment.head,
    )
    needed_bytes = header.records_start + segment.records_bytes + MARK_BYTES * (segment.gap_count + 1)
    return replace(header, file_bytes=max(segment.size_bytes, aligned(needed_bytes)))


def apply_repair(plan: RepairPlan, heads: HeadCodec, *, files: Filesystem | None = None) -> LogReport:
    """Carry out the plan, and inspect the log again. It must be `locked` since before the first inspection. Blocks.

    Raises:
        OSError: a step failed. Finished segments are repaired, the others are unchanged.
        WriterError: the log is still damaged.
    """
    files = files or Filesystem()
    directory = plan.report.directory
    for path in (plan.target.parent, plan.target):
        if not path.exists():
            files.make_directory(path)
            files.sync_directory(path.parent)
    document = orjson.dumps(report_document(plan), option=orjson.OPT_INDENT_2)
    _write_file(plan.target / REPORT_NAME, [document], len(document), files)
    files.sync_directory(plan.target)
    for rewrite in plan.rewrites:
        _replace(rewrite, plan.target, files)
    after = inspect_log(directory, heads, files=files)
    if after.needs_repair:
        raise WriterError(f"log is still damaged after the repair, repair it again: directory={directory}")
    return after


def report_document(plan: RepairPlan) -> dict[str, Any]:
    """Return what a repair did and what is missing, for people and programs."""
    return {
        "segments": [
            {
                "segment": segment.path.name,
                "problem": segment.problem,
                "keptRecords": segment.records,
                "missing": damage_documents(segment),
            }
            for segment in (rewrite.segment for rewrite in plan.rewrites)
        ],
        "missing": [loss_document(loss) for loss in plan.losses()],
        "perhapsMissing": perhaps_missing(plan.report) if plan.is_unsettled else [],
        "note": (
            "What the tables had committed is not lost to them: look there for these sequences, by _cdc_source and"
            " _cdc_sequence. Whatever they lack can be sent again under a higher epoch or another source's name, for"
            " later changes of the source are kept."
        ),
    }


def damage_documents(segment: SegmentReport) -> list[dict[str, int]]:
    """Return where a segment is damaged, and the offsets that are missing there."""
    return [
        {
            "position": damage.position,
            "endPosition": damage.end_position,
            "firstOffset": damage.offset,
            "lastOffset": damage.next_offset - 1,
        }
        for damage in segment.damages
    ]


def loss_document(loss: Loss) -> dict[str, Any]:
    """Return one source's missing changes as a document."""
    return {
        "source": loss.source,
        "epoch": loss.epoch,
        "afterSequence": loss.after_sequence,
        "lastSequence": loss.last_sequence,
        "certain": loss.is_certain,
        "offsets": [[gap.offset, gap.next_offset - 1] for gap in loss.gaps if gap.next_offset > gap.offset],
    }


def perhaps_missing(report: LogReport) -> list[dict[str, Any]]:
    """Return the sources without a record since a gap, with their positions before it."""
    return [
        {"source": source, "epoch": mark.epoch, "afterSequence": mark.sequence}
        for source, mark in sorted(report.unsettled.items())
    ]


def _replace(rewrite: Rewrite, target: Path, files: Filesystem) -> None:
    """Replace one segment, by the four steps."""
    path = rewrite.segment.path
    repaired = path.with_name(path.name + _REPAIRED_SUFFIX)
    _write_file(repaired, _contents(rewrite, files), rewrite.header.file_bytes, files)
    if rewrite.segment.exists:
        files.link(path, target / path.name)
        files.sync_directory(target)
    files.rename(repaired, path)
    files.sync_directory(path.parent)


def _write_file(path: Path, parts: Iterable[bytes], size_bytes: int, files: Filesystem) -> None:
    """Write a file whole, with zeros up to its size, and sync it."""
    with files.opened(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC) as descriptor:
        position = 0
        for part in parts:
            position = write_all(files, descriptor, [part], position)
        fill_zeros(files, descriptor, position, size_bytes)
        files.sync(descriptor)


def _contents(rewrite: Rewrite, files: Filesystem) -> Iterator[bytes]:
    segment, salt = rewrite.segment, rewrite.header.salt
    yield encode_header(rewrite.header)
    view = load_view(segment.path, segment.size_bytes, files) if segment.exists else memoryview(b"")
    assert view is not None, "the log is locked"
    items: Iterable[ScanItem] = scan_segment(view, segment.bounds) if segment.exists else segment.damages
    for item in items:
        if isinstance(item, FoundRecord) and item.length:
            start = item.position + HEADER_BYTES
            payload = (bytes(view[start : start + item.length]),)
            # `synced` covers the record itself, as the file is synced before it is used.
            yield b"".join(encode_group([payload], first_offset=item.offset, synced=item.offset, salt=salt))
        elif not isinstance(item, TornTail) and item.next_offset > item.offset:
            yield encode_mark(item.offset, item.next_offset, salt=salt)
    yield encode_mark(segment.end_offset, segment.end_offset, salt=salt)
