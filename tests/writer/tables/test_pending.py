"""The open buffer of a table: what it holds, and what is left after the table's own marks."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakefeed.contract import changes
from lakefeed.contract.changes import Position, SourceId, Span
from lakefeed.writer.tables.pending import Chunk, FlushReason, Pending, TableBuffer

A, B = SourceId("a"), SourceId("b")


def rows(*sequences: int, source: str = "a") -> pa.Table:
    return pa.table(
        {
            changes.SEQUENCE: pa.array(sequences, pa.int64()),
            changes.SOURCE: pa.array([source] * len(sequences), pa.string()),
        }
    )


def span(first: int, last: int, *, epoch: int = 0) -> Span:
    return Span(Position(epoch, first), Position(epoch, last))


def chunk(first: int, last: int, *, source: str = "a", offset: int = 0, epoch: int = 0) -> Chunk:
    return Chunk(
        rows=rows(*range(first, last + 1), source=source),
        log_from=offset,
        log_to=offset + 1,
        spans={SourceId(source): span(first, last, epoch=epoch)},
    )


def filled(*chunks: Chunk) -> TableBuffer:
    buffer = TableBuffer()
    for each in chunks:
        buffer.add(each, now=0.0)
    return buffer


def sequences_of(gathered: TableBuffer) -> list[int]:
    return [value for table in gathered.tables for value in table[changes.SEQUENCE].to_pylist()]


# -- gathering


def test_buffer_hands_over_rows_in_the_order_of_the_log():
    gathered = filled(chunk(1, 2, offset=4), chunk(3, 4, offset=5), chunk(5, 6, offset=9))
    assert sequences_of(gathered) == [1, 2, 3, 4, 5, 6]
    assert (gathered.rows, gathered.log_from, gathered.log_to) == (6, 4, 10)
    assert gathered.bytes == sum(table.nbytes for table in gathered.tables)
    assert gathered.spans == {A: span(1, 6)}


def test_spans_of_several_sources_grow_on_their_own():
    buffer = filled(chunk(1, 2), chunk(7, 9, source="b"), chunk(3, 4), chunk(10, 12, source="b"))
    assert buffer.spans == {A: span(1, 4), B: span(7, 12)}


def test_buffer_is_empty_after_it_was_taken_and_starts_anew():
    pending = Pending(buffer=filled(chunk(1, 2, offset=4)))
    taken = pending.take(FlushReason.AGE, now=40.0).rows
    assert (pending.buffer.rows, pending.buffer.bytes, pending.buffer.spans) == (0, 0, {})
    pending.buffer.add(chunk(3, 3, offset=8), now=50.0)
    assert (pending.buffer.log_from, pending.buffer.oldest_at, pending.needed_offset) == (8, 50.0, 4)
    assert (taken.rows, taken.spans) == (2, {A: span(1, 2)})


def test_age_counts_from_the_oldest_row():
    buffer = TableBuffer()
    buffer.add(chunk(1, 1), now=100.0)
    buffer.add(chunk(2, 2), now=105.0)
    assert buffer.oldest_at == 100.0


def test_only_a_new_epoch_of_a_buffered_source_begins_an_epoch():
    buffer = filled(chunk(5, 6))
    assert not buffer.begins_epoch(chunk(7, 8))
    assert not buffer.begins_epoch(chunk(1, 2, source="b", epoch=3))
    assert buffer.begins_epoch(chunk(1, 2, epoch=1))
    assert not TableBuffer().begins_epoch(chunk(1, 2, epoch=1))


# -- after the table's own marks


def test_rows_at_or_below_the_mark_are_left_out():
    gathered = filled(chunk(1, 4), chunk(5, 8), chunk(1, 3, source="b"))
    left = gathered.after({A: Position(0, 5)})
    assert sequences_of(left) == [6, 7, 8, 1, 2, 3]
    assert left.rows == 6
    assert left.bytes == sum(table.nbytes for table in left.tables)
    assert left.spans == {A: span(6, 8), B: span(1, 3)}
    assert (left.log_from, left.log_to) == (gathered.log_from, gathered.log_to)


def test_nothing_is_left_where_the_table_has_everything():
    left = filled(chunk(1, 4)).after({A: Position(0, 9)})
    assert (left.rows, left.bytes, left.tables, left.spans) == (0, 0, [], {})


@pytest.mark.parametrize("marks", [{}, {B: Position(0, 99)}, {A: Position(0, 0)}])
def test_marks_below_or_of_others_leave_everything(marks):
    gathered = filled(chunk(1, 4))
    assert sequences_of(gathered.after(marks)) == [1, 2, 3, 4]


def test_later_epoch_in_the_table_makes_all_rows_history_and_an_earlier_one_none():
    gathered = filled(chunk(5, 6, epoch=1))
    assert gathered.after({A: Position(2, 0)}).rows == 0
    assert gathered.after({A: Position(0, 999)}).rows == 2


@given(
    lengths=st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 5)), min_size=1, max_size=8),
    marks=st.dictionaries(st.sampled_from([A, B]), st.integers(0, 25)),
)
def test_marks_cut_exactly_the_rows_that_a_set_says(lengths, marks):
    buffer, next_sequence, expected = TableBuffer(), {"a": 1, "b": 1}, []
    for offset, (source, length) in enumerate(lengths):
        first = next_sequence[source]
        next_sequence[source] = first + length
        buffer.add(chunk(first, first + length - 1, source=source, offset=offset), now=0.0)
        expected += [(source, each) for each in range(first, first + length) if each > marks.get(SourceId(source), 0)]
    left = buffer.after({source: Position(0, mark) for source, mark in marks.items()})
    found = [
        pair
        for table in left.tables
        for pair in zip(table[changes.SOURCE].to_pylist(), table[changes.SEQUENCE].to_pylist(), strict=True)
    ]
    assert found == expected
    assert left.rows == len(expected)
    assert set(left.spans) == {source for source, _ in expected}
