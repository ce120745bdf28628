"""What is in quarantine and open: every change that was put there and is neither replayed nor dropped. Core.

Owns the reading of the quarantine as a whole, without the rows' images, which stay in their files until one is needed.
Entries are an Arrow table with one row per time that a change was put there, in the order of commits:

    id  kind  table_name  source  mark  epoch  sequence  reason  reason_text  recorded_at  file

A change that is there twice (two nodes put it there) is one change all the same, by its id.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from writer import columns as cdc
from writer.errors import WriterError
from writer.quarantine import names
from writer.quarantine.names import Kind

ID = "id"
MARK = "mark"
FILE = "file"

# What is read of each file of the quarantine, and what it is called here.
READ_COLUMNS = {
    cdc.ROW_ID: ID,
    names.KIND: names.KIND,
    names.TABLE_NAME: names.TABLE_NAME,
    names.SOURCE: names.SOURCE,
    cdc.SOURCE: MARK,
    names.EPOCH: names.EPOCH,
    names.SEQUENCE: names.SEQUENCE,
    names.REASON: names.REASON,
    names.REASON_TEXT: names.REASON_TEXT,
    names.RECORDED_AT: names.RECORDED_AT,
}

# Few values in many rows.
_REPEATING = (names.KIND, names.TABLE_NAME, names.SOURCE, MARK, names.REASON, names.REASON_TEXT)


_TYPES = {names.EPOCH: pa.int64(), names.SEQUENCE: pa.int64(), names.RECORDED_AT: pa.timestamp("us", "UTC")}
NO_ENTRIES = pa.schema(
    [(name, _TYPES.get(name, pa.string())) for name in READ_COLUMNS.values()] + [(FILE, pa.int32())]
).empty_table()


class NotInQuarantine(WriterError):
    """No open change, or more than one, has the id that was given: look it up again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Which changes a command is about; what is None does not matter. Times are those of the quarantining."""

    table: str | None = None
    source: str | None = None
    reason: str | None = None
    since: dt.datetime | None = None
    until: dt.datetime | None = None
    ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Summary:
    """The open changes of one table that were refused for one reason; `text` is the newest one's."""

    table: str
    reason: str
    changes: int
    sources: int
    oldest: dt.datetime
    newest: dt.datetime
    text: str


def entries_of(parts: Sequence[pa.Table]) -> pa.Table:
    """Gather what was read of each file, one or more of them, in their order."""
    numbered = [
        part.rename_columns([READ_COLUMNS[name] for name in part.column_names]).append_column(
            FILE, pa.repeat(pa.scalar(number, pa.int32()), part.num_rows)
        )
        for number, part in enumerate(parts)
    ]
    return pa.concat_tables(_compact(part) for part in numbered).unify_dictionaries()


def _compact(part: pa.Table) -> pa.Table:
    for name in _REPEATING:
        index = part.column_names.index(name)
        part = part.set_column(index, name, part.column(name).dictionary_encode())
    return part


def open_entries(entries: pa.Table) -> pa.Table:
    """Leave those that nothing has become of yet."""
    kinds = entries.column(names.KIND).cast(pa.string())
    is_kept = pc.equal(kinds, Kind.QUARANTINED.value)
    resolved = entries.filter(pc.invert(is_kept)).column(ID).combine_chunks()
    return entries.filter(pc.and_(is_kept, pc.invert(pc.is_in(entries.column(ID), resolved))))


def with_ids(entries: pa.Table, ids: Sequence[str]) -> pa.Table:
    """Keep changes by their ids."""
    return entries.filter(pc.is_in(entries.column(ID), pa.array(ids, pa.string())))


def without(entries: pa.Table, ids: Sequence[str]) -> pa.Table:
    """Leave out changes by their ids."""
    return entries.filter(pc.invert(pc.is_in(entries.column(ID), pa.array(ids, pa.string()))))


def apply_filter(entries: pa.Table, wanted: Filter) -> pa.Table:
    """Keep what a filter asks for.

    Raises:
        NotInQuarantine: an id names no entry, or several.
    """
    for name, value in ((names.TABLE_NAME, wanted.table), (names.SOURCE, wanted.source), (names.REASON, wanted.reason)):
        if value is not None:
            entries = entries.filter(pc.equal(entries.column(name).cast(pa.string()), value))
    recorded = entries.column(names.RECORDED_AT)
    if wanted.since is not None:
        entries = entries.filter(pc.greater_equal(recorded, _moment(wanted.since)))
        recorded = entries.column(names.RECORDED_AT)
    if wanted.until is not None:
        entries = entries.filter(pc.less(recorded, _moment(wanted.until)))
    if wanted.ids:
        entries = with_ids(entries, [find_id(entries, start) for start in wanted.ids])
    return entries


def _moment(time: dt.datetime) -> pa.Scalar:
    return pa.scalar(time.astimezone(dt.UTC), pa.timestamp("us", "UTC"))


def find_id(entries: pa.Table, start: str) -> str:
    """Find the one id that starts so.

    Raises:
        NotInQuarantine: none does, or several do.
    """
    column = entries.column(ID)
    found = pc.unique(column.filter(pc.starts_with(column, pattern=start.lower()))).to_pylist()
    if len(found) != 1:
        rule = "several changes have an id that starts so" if found else "no open change has an id that starts so"
        raise NotInQuarantine(f"{rule}: id={start}")
    only: str = found[0]
    return only


def concat(loaded: Sequence[pa.Table]) -> pa.Table:
    """Put entries of several quarantines together; their file numbers then mean nothing."""
    return pa.concat_tables(loaded) if loaded else NO_ENTRIES


def change_ids(entries: pa.Table) -> list[str]:
    """Name each change once, in the order of commits."""
    ids: list[str] = pc.unique(entries.column(ID)).to_pylist()
    return ids


def count_changes(entries: pa.Table) -> int:
    """Count changes; one that is there twice is one."""
    count: int = pc.count_distinct(entries.column(ID)).as_py()
    return count


def summarise(entries: pa.Table) -> list[Summary]:
    """Sum entries up by table and reason."""
    names_only = pa.table(
        {
            "table": entries.column(names.TABLE_NAME).cast(pa.string()),
            "reason": entries.column(names.REASON).cast(pa.string()),
            "id": entries.column(ID),
            "source": entries.column(names.SOURCE).cast(pa.string()),
            "at": entries.column(names.RECORDED_AT),
            "text": entries.column(names.REASON_TEXT).cast(pa.string()),
        }
    )
    grouped = names_only.sort_by("at").group_by(["table", "reason"], use_threads=False)
    wanted = [("id", "count_distinct"), ("source", "count_distinct"), ("at", "min"), ("at", "max"), ("text", "last")]
    rows = grouped.aggregate(wanted).sort_by([("table", "ascending"), ("reason", "ascending")])
    return [_summary(row) for row in rows.to_pylist()]


def _summary(row: dict[str, Any]) -> Summary:
    return Summary(
        table=row["table"],
        reason=row["reason"],
        changes=row["id_count_distinct"],
        sources=row["source_count_distinct"],
        oldest=row["at_min"],
        newest=row["at_max"],
        text=row["text_last"] or "",
    )


def files_with(entries: pa.Table) -> list[int]:
    """Find the files that hold these entries, by their numbers, in the order of commits."""
    return sorted(int(number) for number in np.unique(entries.column(FILE).to_numpy()))
