"""The columns of a change table, and the exact way into them for rows that the strict decoder refuses.

Owns the `_cdc_` columns' types and the slow path: see every value, let the columns evolve, rescue what still does not
fit. Inference, evolution and rescue have their own modules; this one puts them in order. Afterwards the strict decoder
takes rows of the same shape, so the next group is fast again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa

from writer import columns as names
from writer.decode import decode_group, decode_lifted, own_fields
from writer.rows.conform import conform
from writer.rows.declared import without_nanoseconds
from writer.rows.declaring import declare_fields, rename_fields
from writer.rows.evolution import FIELDS_MAX, Room, StructWatch
from writer.rows.groups import ChangeGroup
from writer.rows.misfits import KeptRow, keep_row, parse_row, row_keeper
from writer.rows.parse_types import NO_VACANCIES, Vacancies
from writer.rows.relaxation import relax_fields
from writer.rows.text_values import Misfit
from writer.types import Field, ListType, StructType, Type

__all__ = ["Evolved", "Fitted", "conform", "declare_columns", "fit_group", "initial_columns", "with_own"]

# Rows that the strict decoder is offered again together. Where misfits are rare, only their neighbours are slow too.
FIT_CHUNK_ROWS = 500
# Paths that may come and are null. Beyond it rows that have others take the slow path, which needs no memory of them.
VACANCIES_MAX = FIELDS_MAX


def initial_columns(*, keep_before: bool, is_routed: bool = False) -> StructType:
    """Give the columns of a table before any row has come: Lakefeed's own."""
    left_out = {names.BEFORE} if not keep_before else set()
    left_out |= {names.PARTITION} if not is_routed else set()
    wanted = [name for name in names.ALL if name not in left_out]
    element_id = len(wanted) + 1
    types: dict[str, Type] = {
        names.SEQUENCE: "long",
        names.TIMESTAMP: "timestamptz",
        names.INGESTED_AT: "timestamptz",
        names.UNCHANGED: ListType(element_id, "string"),
        names.EPOCH: "long",
    }
    optional = (names.BEFORE, names.UNCHANGED, names.METADATA, names.RESCUED, names.PARTITION, names.EPOCH)
    return StructType(
        tuple(
            Field(field_id, name, types.get(name, "string"), required=name not in optional)
            for field_id, name in enumerate(wanted, start=1)
        )
    )


@dataclass(frozen=True, slots=True)
class Evolved:
    """A table's columns after a declaration. `changes` names what is new, `refusals` what is not followed."""

    columns: StructType
    last_field_id: int
    changes: tuple[str, ...] = ()
    refusals: tuple[str, ...] = ()


def declare_columns(columns: StructType, declared: StructType, *, last_field_id: int, nanoseconds: bool) -> Evolved:
    """Give a table's columns with what is declared beyond them; `nanoseconds` tells whether its format has them."""
    fields = declared.fields if nanoseconds else without_nanoseconds(declared.fields)
    renaming = Room(columns, last_field_id + 1)
    renamed = rename_fields(own_fields(columns), fields, renaming)
    room = Room(with_own(columns, renamed), last_field_id + 1)
    own = declare_fields(renamed, fields, room)
    changes, refusals = (*renaming.changes, *room.changes), (*renaming.refusals, *room.refusals)
    return Evolved(with_own(columns, own), room.last_field_id, changes, refusals)


@dataclass(frozen=True, slots=True)
class Fitted:
    """A group in its table's columns, which may have evolved for it.

    `added` names what is new, `refused` what was declared with it and is not followed; both for the log.
    """

    columns: StructType
    last_field_id: int
    table: pa.Table
    added: tuple[str, ...]
    vacant: Vacancies
    refused: tuple[str, ...] = ()


def fit_group(
    group: ChangeGroup, columns: StructType, *, next_field_id: int, vacant: Vacancies = NO_VACANCIES
) -> Fitted:
    """Decode any group, whatever its rows hold; each value is in its column or in `_cdc_rescued`."""
    # 1. What the strict decoder takes need not be looked at: it asks for no change of the columns.
    parts = list(_offer_again(group, columns, vacant))
    slow = [_Slow(part) for part in parts if isinstance(part, ChangeGroup)]
    # 2. See every value of the others, and let the columns evolve.
    watch, room = StructWatch(StructType(own_fields(columns))), Room(columns, next_field_id)
    for part in slow:
        part.show(watch)
    own = watch.evolved(room, ()).fields
    # 3. Keep what fits now. Where that leaves required columns empty, they become optional.
    for part in slow:
        part.keep(own)
    own = tuple(relax_fields(own, [row.members for part in slow for row in part.kept], room))
    evolved = with_own(columns, own)
    # 4. Decode all parts under the same columns, in their order.
    decoded = iter([part.decode(evolved) for part in slow])
    tables = [next(decoded) if isinstance(part, ChangeGroup) else conform(part, evolved) for part in parts]
    known = sorted(vacant.union(watch.vacancies(())))[:VACANCIES_MAX]
    return Fitted(evolved, room.last_field_id, pa.concat_tables(tables), tuple(room.changes), frozenset(known))


def _offer_again(group: ChangeGroup, columns: StructType, vacant: Vacancies) -> Iterator[pa.Table | ChangeGroup]:
    """Cut a group into chunks and decode those that the strict decoder takes."""
    for start in range(0, max(len(group), 1), FIT_CHUNK_ROWS):
        chunk = group.between(start, min(start + FIT_CHUNK_ROWS, len(group)))
        try:
            yield decode_group(chunk, columns, vacant)
        except Misfit:
            yield chunk


def with_own(columns: StructType, own: Sequence[Field]) -> StructType:
    """Put evolved columns in the place of the old ones, and new ones at the end."""
    by_id = {field.id: field for field in own}
    kept = [by_id.pop(field.id, field) for field in columns.fields]
    return StructType((*kept, *by_id.values()))


class _Slow:
    """A chunk on its way through the slow path."""

    def __init__(self, group: ChangeGroup) -> None:
        self._group = group
        self._parsed = [parse_row(image) for image in group.images]
        self.kept: list[KeptRow] = []

    def show(self, watch: StructWatch) -> None:
        for row in self._parsed:
            watch.add(row)

    def keep(self, own: Sequence[Field]) -> None:
        keep = row_keeper(own)
        self.kept = [keep_row(keep, image, row) for image, row in zip(self._group.images, self._parsed, strict=True)]

    def decode(self, columns: StructType) -> pa.Table:
        images, rescued = [row.image for row in self.kept], [row.rescued for row in self.kept]
        return decode_lifted(self._group, columns, images=images, rescued=rescued)
