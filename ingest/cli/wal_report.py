"""What `lakefeed wal` prints: a log's report as text and as JSON. Never a row's value."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.table import Table

from lakefeed.contract.changes import Position, SourceId
from lakefeed.ingest.intake.sources import decode_head, encode_head
from lakefeed.writer.wal.inspect import HeadCodec, LogReport, Loss, RecordReport, SegmentReport
from lakefeed.writer.wal.payload import Frame
from lakefeed.writer.wal.repair import RepairPlan, loss_document, offsets_text, perhaps_missing

# Wide enough for every column when the output is not a terminal, whose width would be guessed.
_PLAIN_WIDTH = 160


def _marks(head: bytes) -> Mapping[SourceId, Position]:
    try:
        return decode_head(head)[0]
    except msgspec.MsgspecError as error:
        raise ValueError("not the head of a segment") from error


def _advance_head(head: bytes | None, frames: Iterable[Frame]) -> bytes:
    marks, origins = ({}, {}) if head is None else decode_head(head)
    for frame in frames:
        position = Position(frame.epoch, frame.last_sequence)
        marks[frame.source] = max(position, marks.get(frame.source, position))
        if frame.origin:
            origins[frame.source] = frame.origin
    return encode_head(marks, origins)


HEADS = HeadCodec(marks=_marks, advance=_advance_head)


def record_document(record: RecordReport) -> dict[str, Any]:
    """Lay out one record."""
    document: dict[str, Any] = {
        "segment": record.segment,
        "position": record.position,
        "offset": record.offset,
        "bytes": record.payload_bytes,
    }
    if record.frame is not None:
        frame = record.frame
        document |= {
            "source": frame.source,
            "epoch": frame.epoch,
            "afterSequence": frame.after_sequence,
            "lastSequence": frame.last_sequence,
            "encoding": frame.encoding.name.lower(),
        }
    return document


def print_record_json(record: RecordReport) -> None:
    """Print one record as a line of JSON."""
    click.echo(json.dumps(record_document(record)))


def print_record(record: RecordReport) -> None:
    """Print one record as a line of text."""
    document = record_document(record)
    click.echo(" ".join(f"{name}={value}" for name, value in document.items()))


def log_document(report: LogReport) -> dict[str, Any]:
    """Lay out a whole log."""
    segments = report.segments
    return {
        "directory": str(report.directory),
        "needsRepair": report.needs_repair,
        "firstOffset": segments[0].base_offset if segments else 0,
        "nextOffset": segments[-1].end_offset if segments else 0,
        "records": sum(segment.records for segment in segments),
        "segments": [_segment_document(segment) for segment in segments],
        "spares": {"files": report.spares, "bytes": report.spare_bytes},
        "gaps": [
            {"firstOffset": gap.offset, "lastOffset": gap.next_offset - 1, "repaired": gap.repaired}
            for gap in report.gaps
            if gap.next_offset > gap.offset
        ],
        "missing": [loss_document(loss) for loss in report.losses],
        "perhapsMissing": perhaps_missing(report),
    }


def _segment_document(segment: SegmentReport) -> dict[str, Any]:
    return {
        "segment": segment.path.name,
        "firstOffset": segment.base_offset,
        "nextOffset": segment.end_offset,
        "records": segment.records,
        "recordBytes": segment.records_bytes,
        "fileBytes": segment.size_bytes,
        "sourcesInHead": segment.sources if segment.header else None,
        "problem": segment.problem,
        "damage": [
            {
                "position": damage.position,
                "endPosition": damage.end_position,
                "firstOffset": damage.offset,
                "lastOffset": damage.next_offset - 1,
            }
            for damage in segment.damages
        ],
        "tornTail": {"position": segment.torn.position, "offset": segment.torn.offset} if segment.torn else None,
    }


def print_log(report: LogReport) -> None:
    """Print a whole log as text."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=_PLAIN_WIDTH)
    table = Table("segment", "offsets", "records", "record bytes", "file bytes", "sources in head", "state", box=None)
    for segment in report.segments:
        table.add_row(*_row(segment))
    console.print(table)
    records = sum(segment.records for segment in report.segments)
    click.echo(
        f"{report.directory}: {len(report.segments):,} segments, {records:,} records,"
        f" {report.spares:,} spare files of {report.spare_bytes:,} bytes"
    )
    unsettled = report.unsettled if report.unsettled_gaps else None
    for line in [*_damage_lines(report), *_missing_lines(report.losses, unsettled)]:
        click.echo(line)
    if report.needs_repair:
        click.echo("damaged: `lakefeed wal repair --dry-run` says what can be done")


def _row(segment: SegmentReport) -> list[str]:
    return [
        segment.path.name,
        f"{segment.base_offset} to {segment.end_offset - 1}" if segment.end_offset > segment.base_offset else "none",
        f"{segment.records:,}",
        f"{segment.records_bytes:,}",
        f"{segment.size_bytes:,}",
        f"{segment.sources:,}" if segment.header else "lost",
        _state(segment),
    ]


def _state(segment: SegmentReport) -> str:
    if segment.problem is not None:
        return segment.problem
    if segment.damages:
        return "damaged"
    # Beside a running service this is a write under way; else the next start cuts it off.
    return "good, with an unfinished end" if segment.torn else "good"


def _damage_lines(report: LogReport) -> list[str]:
    lines = [
        f"damaged: {segment.path.name} from byte {damage.position} to {damage.end_position},"
        f" {offsets_text(damage.offset, damage.next_offset)}"
        for segment in report.segments
        for damage in segment.damages
    ]
    earlier = [gap for gap in report.gaps if gap.repaired]
    return lines + [f"gap of an earlier repair: {offsets_text(gap.offset, gap.next_offset)}" for gap in earlier]


def _missing_lines(losses: Iterable[Loss], unsettled: Mapping[SourceId, Position] | None) -> list[str]:
    """Say what is missing; `unsettled` is None if every source was heard of behind the last gap."""
    lines = [_loss_line(loss) for loss in losses]
    if unsettled is not None:
        lines += [
            f"perhaps missing: source {source} epoch {mark.epoch}, sequences above {mark.sequence}"
            for source, mark in sorted(unsettled.items())
        ]
        lines.append("perhaps missing: sources that only the damaged records knew")
    return lines


def _loss_line(loss: Loss) -> str:
    missing = "missing" if loss.is_certain else "perhaps missing"
    upper = "above" if loss.last_sequence is None else f"up to {loss.last_sequence}, above"
    return f"{missing}: source {loss.source} epoch {loss.epoch}, sequences {upper} {loss.after_sequence}"


def print_plan(plan: RepairPlan) -> None:
    """Say exactly what a repair will do, and what it cannot bring back."""
    if not plan.rewrites:
        click.echo(f"nothing to repair: {plan.report.directory}")
        return
    click.echo("segments that are written anew:")
    for rewrite in plan.rewrites:
        click.echo(f"  {rewrite.describe()}")
    click.echo(f"damaged files move, whole, to {plan.target}")
    losses = plan.losses()
    for line in _missing_lines(losses, plan.report.unsettled if plan.is_unsettled else None):
        click.echo(line)
    if losses or plan.is_unsettled:
        click.echo(
            "what the tables have committed already is not lost; the rest the sources have to send again, under a"
            " higher epoch"
        )
