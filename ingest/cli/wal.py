"""Command `lakefeed wal`: inspect the write-ahead log, and repair a damaged one. No value of a row is ever printed."""

from __future__ import annotations

import datetime as dt
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import msgspec

from lakefeed.command_line import config_option, print_json, print_table, progress_bar, readable_errors, with_options
from lakefeed.contract.changes import Position, SourceId
from lakefeed.ingest.config import load_config
from lakefeed.ingest.intake.sources import decode_head, encode_head
from lakefeed.writer.wal.inspect import (
    HeadCodec,
    LogReport,
    Loss,
    RecordReport,
    SegmentReport,
    ignore,
    inspect_log,
    log_bytes,
)
from lakefeed.writer.wal.payload import Frame
from lakefeed.writer.wal.repair import (
    RepairPlan,
    apply_repair,
    damage_documents,
    locked,
    loss_document,
    offsets_text,
    perhaps_missing,
    plan_repair,
)

LOG_NAME = "log"

# Exit code of `inspect` when the log needs repair. click itself uses 1 and 2.
DAMAGED = 3

_log_options = with_options(config_option(), click.option("--data-dir", help="Data directory of the service  [data]"))


@click.group()
def wal() -> None:
    """Inspect the write-ahead log, and repair a damaged one."""


@wal.command()
@_log_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON; with --records one line each, the summary last.")
@click.option("--records", is_flag=True, help="List every record: its source and sequences, never its rows.")
def inspect(config_path: Path | None, data_dir: str | None, *, as_json: bool, records: bool) -> None:
    """Show what the log holds, what is damaged, and which changes of which sources are missing.

    Reads everything and changes nothing, so it can run beside the service. The exit code is 3 if the log needs repair.
    """

    def print_record(record: RecordReport) -> None:
        document = _record_document(record)
        click.echo(json.dumps(document) if as_json else " ".join(f"{name}={value}" for name, value in document.items()))

    with readable_errors():
        directory = _log_directory(config_path, data_dir)
        with _reading(directory, hidden=records) as on_bytes:
            report = inspect_log(directory, HEADS, on_record=print_record if records else ignore, on_bytes=on_bytes)
    if not as_json:
        _print_log(report)
    elif records:
        click.echo(json.dumps(_log_document(report)))
    else:
        print_json(_log_document(report))
    if report.needs_repair:
        click.get_current_context().exit(DAMAGED)


@wal.command()
@_log_options
@click.option("--dry-run", is_flag=True, help="Print what would be done; can run beside the service.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
def repair(config_path: Path | None, data_dir: str | None, *, dry_run: bool, yes: bool) -> None:
    """Repair a damaged log so that the service can open it.

    Every good record is kept and nothing is deleted: damaged files move to log/damaged/, with a report of what is
    missing and which sources have to send it again. A torn tail needs no repair; the next start cuts it off.
    """
    with readable_errors():
        directory = _log_directory(config_path, data_dir)
        if dry_run:
            if _plan(directory).rewrites:
                click.echo("dry run: nothing was changed")
            return
        with locked(directory):
            plan = _plan(directory)
            if not plan.rewrites:
                return
            if not yes:
                click.confirm("repair the log?", abort=True)
            try:
                apply_repair(plan, HEADS)
            except OSError as error:
                raise click.ClickException(f"the repair was interrupted, run it again: {error}") from error
            click.echo(f"repaired; damaged files and the report are in {plan.target}")


def _plan(directory: Path) -> RepairPlan:
    with _reading(directory) as on_bytes:
        report = inspect_log(directory, HEADS, on_bytes=on_bytes)
    plan = plan_repair(report, name=f"{dt.datetime.now(dt.UTC):%Y%m%dT%H%M%S.%fZ}")
    _print_plan(plan)
    return plan


def _log_directory(config_path: Path | None, data_dir: str | None) -> Path:
    loaded = load_config(config_path, os.environ, {"server.data_dir": data_dir})
    return Path(loaded.config.server.data_dir).resolve() / LOG_NAME


@contextmanager
def _reading(directory: Path, *, hidden: bool = False) -> Iterator[Callable[[int], Any]]:
    with progress_bar("reading the log", log_bytes(directory), in_bytes=True, hidden=hidden) as bar:
        yield bar.advance


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


def _record_document(record: RecordReport) -> dict[str, Any]:
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


def _log_document(report: LogReport) -> dict[str, Any]:
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
        "damage": damage_documents(segment),
        "tornTail": {"position": segment.torn.position, "offset": segment.torn.offset} if segment.torn else None,
    }


def _print_log(report: LogReport) -> None:
    rows = [
        {
            "segment": segment.path.name,
            "offsets": f"{segment.base_offset} to {segment.end_offset - 1}" if segment.records else "none",
            "records": f"{segment.records:,}",
            "record bytes": f"{segment.records_bytes:,}",
            "file bytes": f"{segment.size_bytes:,}",
            "sources in head": f"{segment.sources:,}" if segment.header else "lost",
            "state": _state(segment),
        }
        for segment in report.segments
    ]
    print_table(rows, ("segment", "offsets", "records", "record bytes", "file bytes", "sources in head", "state"))
    records = sum(segment.records for segment in report.segments)
    click.echo(
        f"{report.directory}: {len(report.segments):,} segments, {records:,} records,"
        f" {report.spares:,} spare files of {report.spare_bytes:,} bytes"
    )
    for segment in report.segments:
        for damage in segment.damages:
            offsets = offsets_text(damage.offset, damage.next_offset)
            click.echo(f"damaged: {segment.path.name} from byte {damage.position} to {damage.end_position}, {offsets}")
    for gap in report.gaps:
        if gap.repaired:
            click.echo(f"gap of an earlier repair: {offsets_text(gap.offset, gap.next_offset)}")
    _print_missing(report.losses, report.unsettled if report.unsettled_gaps else None)
    if report.needs_repair:
        click.echo("damaged: `lakefeed wal repair --dry-run` shows what can be done")


def _state(segment: SegmentReport) -> str:
    if segment.problem is not None:
        return segment.problem
    if segment.damages:
        return "damaged"
    # Beside a running service the tail is a write in progress; otherwise the next start cuts it off.
    return "good, with an unfinished end" if segment.torn else "good"


def _print_missing(losses: Iterable[Loss], unsettled: Mapping[SourceId, Position] | None) -> None:
    """Print what is missing. `unsettled` is None if every source has records after the last gap."""
    for loss in losses:
        missing = "missing" if loss.is_certain else "perhaps missing"
        upper = "above" if loss.last_sequence is None else f"up to {loss.last_sequence}, above"
        click.echo(f"{missing}: source {loss.source} epoch {loss.epoch}, sequences {upper} {loss.after_sequence}")
    if unsettled is not None:
        for source, mark in sorted(unsettled.items()):
            click.echo(f"perhaps missing: source {source} epoch {mark.epoch}, sequences above {mark.sequence}")
        click.echo("perhaps missing: sources whose only records are damaged")


def _print_plan(plan: RepairPlan) -> None:
    if not plan.rewrites:
        click.echo(f"nothing to repair: {plan.report.directory}")
        return
    click.echo("segments that are rewritten:")
    for rewrite in plan.rewrites:
        click.echo(f"  {rewrite.describe()}")
    click.echo(f"damaged files move to {plan.target}")
    losses = plan.losses()
    _print_missing(losses, plan.report.unsettled if plan.is_unsettled else None)
    if losses or plan.is_unsettled:
        click.echo("committed changes are not lost; the sources have to send the others again, under a higher epoch")
