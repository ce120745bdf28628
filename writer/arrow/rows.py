"""Rows that came as Arrow columns, in their table's columns. Owns the order of the steps; each has its own module.

    columns --declare--> wider columns --split--> kept, left --widen for what is left--> --relax--> rows, `_cdc_rescued`

There is one path for all groups, because values that fit are never looked at. A group that asks for no change of the
columns is decoded by many threads at once; one that does waits for its table's turn (decoding.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from writer.arrow.checks import CHANGE_COLUMNS
from writer.arrow.groups import ArrowGroup, arrow_change_columns
from writer.arrow.relaxation import relax_columns
from writer.arrow.split import Left, split_fields
from writer.arrow.types import declared_fields
from writer.decode import own_fields
from writer.rows.column_notes import former_names
from writer.rows.declaring import declare_fields
from writer.rows.evolution import Room, StructWatch
from writer.rows.misfits import WHOLE_ROW, to_json
from writer.rows.parse_types import NO_VACANCIES, Vacancies
from writer.schema import Fitted, with_own
from writer.types import Field, Schema, StructType, to_arrow_schema

# Rows are copied out of their frames where those hold more than this many times the rows' own size.
HELD_MAX_RATIO = 2


def fit_arrow_group(
    group: ArrowGroup,
    columns: StructType,
    *,
    next_field_id: int,
    vacant: Vacancies = NO_VACANCIES,
    nanoseconds: bool = False,
) -> Fitted:
    """Put any group into its table's columns, which may evolve; each value is in its column or in `_cdc_rescued`.

    `nanoseconds` tells that the table's format has types for them.
    """
    brought = [field for field in group.rows.schema if field.name not in CHANGE_COLUMNS]
    room = Room(columns, next_field_id)
    own = declare_fields(own_fields(columns), declared_fields(brought, nanoseconds=nanoseconds), room)
    parts = _split_rows(group, own)
    if any(part.left is not None for part in parts):
        wider = _widen_for_left(own, parts, room)
        if wider != own:
            own, parts = wider, _split_rows(group, wider)
    relaxed = relax_columns(own, [[part.kept[index] for part in parts] for index in range(len(own))], room)
    if relaxed != own:
        own, parts = relaxed, _split_rows(group, relaxed)
    evolved = with_own(columns, own)
    table = _assemble(group, evolved, own=own, parts=parts)
    return Fitted(evolved, room.last_field_id, table, tuple(room.changes), vacant)


@dataclass(frozen=True, slots=True)
class _Part:
    """The rows of one batch: what their columns keep, and what is left over."""

    rows: int
    kept: list[pa.Array]
    left: Left | None

    def render_left(self) -> list[dict[str, object]]:
        return [] if self.left is None else self.left.render(np.flatnonzero(self.left.misfits))


def _split_rows(group: ArrowGroup, own: Sequence[Field]) -> list[_Part]:
    """Split the rows batch by batch, so that columns stay in their frames' bytes."""
    brought = [name for name in group.rows.column_names if name not in CHANGE_COLUMNS]
    return [
        _Part(batch.num_rows, *split_fields(brought, [batch.column(name) for name in brought], own, batch.num_rows))
        for batch in group.rows.to_batches()
    ]


def _widen_for_left(own: Sequence[Field], parts: Sequence[_Part], room: Room) -> tuple[Field, ...]:
    """Let known columns grow for single values that did not fit, by the rules that rows in JSON go by."""
    known = {name for field in own for name in (field.name, *former_names(field))}
    watch = StructWatch(StructType(tuple(own)))
    for part in parts:
        for row in part.render_left():
            watch.add({name: value for name, value in row.items() if name in known})
    return watch.evolved(room, ()).fields


def _assemble(group: ArrowGroup, columns: StructType, *, own: Sequence[Field], parts: Sequence[_Part]) -> pa.Table:
    schema = to_arrow_schema(Schema(0, columns))
    every = dict(arrow_change_columns(group, schema, rescued=_rescued(parts)))
    for index, field in enumerate(own):
        target = schema.field(field.name).type
        every[field.name] = pa.chunked_array([part.kept[index] for part in parts], type=target)
    table = pa.table([every[name] for name in schema.names], schema=schema)
    if table.nbytes * HELD_MAX_RATIO < group.held_bytes:
        return table.take(pa.array(np.arange(table.num_rows)))
    return table


def _rescued(parts: Sequence[_Part]) -> pa.Array | None:
    if all(part.left is None for part in parts):
        return None
    return pa.array([text for part in parts for text in _rescued_texts(part)], pa.string())


def _rescued_texts(part: _Part) -> list[str | None]:
    texts: list[str | None] = [None] * part.rows
    if part.left is not None:
        for row, members in zip(np.flatnonzero(part.left.misfits), part.render_left(), strict=True):
            texts[row] = _rescued_text(members)
    return texts


def _rescued_text(members: dict[str, object]) -> str:
    if WHOLE_ROW in members:
        members = members | {WHOLE_ROW: {WHOLE_ROW: members[WHOLE_ROW]}}
    return to_json(members).decode()
