"""Rows of a group to Arrow columns, strictly: all of the group's rows exactly, or a refusal. Never row by row.

Owns the fast path. What it refuses goes through schema.fit_group, which sees each value. It refuses, rather than lose
or change anything: fields that the table has no column for, values of another type, numbers that a double would round,
times without their zone, text that is not UTF-8, a key written twice, nulls in required columns.

    images --join--> JSON lines --pyarrow.json--> parsed columns --refine--> the table's columns, beside the _cdc_ ones

pyarrow.json releases the interpreter's lock, so that several groups decode at once; groups of 4 to 8 MB are best.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import pyarrow as pa
import pyarrow.json as pj

from writer import columns as names
from writer.rows.change_columns import change_columns
from writer.rows.groups import ChangeGroup, Image
from writer.rows.number_check import NumberCheck, number_check_of
from writer.rows.parse_types import NO_VACANCIES, Vacancies, parse_struct, refine_column
from writer.rows.text_values import Misfit
from writer.types import Field, Schema, StructType, to_arrow_schema, written_fields

# Measured best from 128 KiB to 512 KiB; larger blocks leave the processor's cache.
PARSE_BLOCK_BYTES = 256 * 1024

# Versions of tables' schemas whose parse plan is kept. One plan is a few kilobytes per hundred columns.
PLANS_MAX = 1024

# A big integer that JavaScript had to send as text, where a value stands (not a key, not inside another string).
_BIGINT_MARK = b'"__bigint__:'
_BIGINT_VALUE = re.compile(rb'(?<=[:,\[\s])"__bigint__:(-?(?:0|[1-9][0-9]*))"(?=\s*[,}\]])')


def decode_group(group: ChangeGroup, columns: StructType, vacant: Vacancies = NO_VACANCIES) -> pa.Table:
    """Decode a group into its table's columns.

    Raises: Misfit unless every value of every row has its exact place.
    """
    plan = _plan(columns, vacant, lifted=False)
    if not group.images:
        return plan.schema.empty_table()
    lines = b"\n".join(group.images)
    try:
        own = _decode_lines(lines, group.images, plan)
    except Misfit:
        if _BIGINT_MARK not in lines:
            raise
        images = [_BIGINT_VALUE.sub(rb"\1", bytes(image)) for image in group.images]
        own = _decode_lines(b"\n".join(images), images, plan)
    return _assemble(group, plan, own=own, rescued=None)


def decode_lifted(
    group: ChangeGroup, columns: StructType, *, images: Sequence[Image], rescued: Sequence[str | None]
) -> pa.Table:
    """Decode images that misfits.py has rewritten to fit, with what it could not make fit beside them.

    Raises: Misfit.
    """
    plan = _plan(columns, NO_VACANCIES, lifted=True)
    return _assemble(group, plan, own=_decode_lines(b"\n".join(images), images, plan), rescued=rescued)


def own_fields(columns: StructType) -> tuple[Field, ...]:
    """Give the columns that the rows themselves bring, and that can be written."""
    return tuple(field for field in written_fields(columns) if not field.name.startswith(names.RESERVED_PREFIX))


@dataclass(frozen=True, slots=True)
class _Plan:
    """What one version of a table's schema needs for decoding."""

    schema: pa.Schema
    own: tuple[Field, ...]
    parse: pj.ParseOptions
    numbers: NumberCheck


@lru_cache(maxsize=PLANS_MAX)
def _plan(columns: StructType, vacant: Vacancies, *, lifted: bool) -> _Plan:
    own = own_fields(columns)
    parse_type = parse_struct(own, vacant, lifted=lifted)
    options = pj.ParseOptions(explicit_schema=pa.schema(parse_type.fields), unexpected_field_behavior="error")
    return _Plan(to_arrow_schema(Schema(0, columns)), own, options, number_check_of(parse_type))


def _decode_lines(lines: bytes, images: Sequence[Image], plan: _Plan) -> dict[str, pa.ChunkedArray]:
    if not plan.numbers.decimals_are_safe(images):
        raise Misfit("a decimal is not written plainly")
    # A row may span two blocks but not three.
    block_bytes = max(PARSE_BLOCK_BYTES, max(map(len, images)) + 1)
    try:
        parsed = pj.read_json(
            pa.BufferReader(lines), pj.ReadOptions(use_threads=False, block_size=block_bytes), plan.parse
        )
        # pyarrow.json takes any bytes for text.
        parsed.validate(full=True)
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise Misfit(f"rows do not fit their table: {error}") from error
    if parsed.num_rows != len(images):
        raise Misfit(f"rows were not read one for one: expected={len(images)} read={parsed.num_rows}")
    if not plan.numbers.doubles_are_exact(lines, images, parsed):
        raise Misfit("a number has more digits than a double holds")
    return {field.name: refine_column(parsed.column(field.name), field) for field in plan.own}


def _assemble(
    group: ChangeGroup, plan: _Plan, *, own: dict[str, pa.ChunkedArray], rescued: Sequence[str | None] | None
) -> pa.Table:
    every = own | change_columns(group, plan.schema, rescued=rescued)
    return pa.table([every[name] for name in plan.schema.names], schema=plan.schema)
