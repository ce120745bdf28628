"""Runs of the log taken apart: by table, by epoch, decoded where known columns fit."""

from __future__ import annotations

import orjson

from lakefeed.contract import changes
from lakefeed.contract.changes import Position, SourceId, Span
from lakefeed.iceberg.types import Field, StructType
from lakefeed.writer.rows.evolution import initial_columns
from lakefeed.writer.rows.groups import Expected, JsonGroup, group_json
from lakefeed.writer.rows.runs import decode_run, fit_or_bisect, split_epochs
from lakefeed.writer.wal.payload import Encoding, Frame, encode_frame
from lakefeed.writer.wal.records import Record

BASE = initial_columns(keep_before=False)
USERS = StructType((*BASE.fields, Field(100, "id", "long")))
KNOWN = Expected(USERS)


def body(*events: tuple[int, str, object]) -> bytes:
    return orjson.dumps(
        {
            "type": "cdc_batch",
            "events": [
                {"sequence": sequence, "operation": "INSERT", "table": table, "after": after}
                for sequence, table, after in events
            ],
        }
    )


def frame(*sequences: int, source: str = "a", epoch: int = 0, after: int = -1, table: str = "users") -> Frame:
    return Frame(
        source=SourceId(source),
        epoch=epoch,
        after_sequence=after,
        last_sequence=sequences[-1],
        received_at_us=1_763_251_200_000_000,
        encoding=Encoding.JSON_BATCH,
        body=body(*((sequence, table, {"id": sequence}) for sequence in sequences)),
    )


def record(offset: int, each: Frame) -> Record:
    return Record(offset, b"".join(encode_frame(each)))


def group_of(*frames: Frame) -> JsonGroup:
    (group,) = group_json(list(enumerate(frames)))
    return group


def parts_of(*frames: Frame) -> list[list[int]]:
    return [part.sequences.tolist() for part in split_epochs(group_of(*frames))]


# -- epochs


def test_group_of_one_epoch_stays_whole():
    group = group_of(frame(1, 2), frame(3), frame(1, source="b", epoch=7))
    assert list(split_epochs(group)) == [group]
    assert next(iter(split_epochs(group))) is group


def test_group_is_cut_where_a_source_starts_over():
    assert parts_of(frame(8, 9), frame(1, 2, epoch=1), frame(3, epoch=1)) == [[8, 9], [1, 2, 3]]


def test_each_new_epoch_is_a_cut():
    frames = [frame(5), frame(1, epoch=1), frame(1, epoch=2), frame(2, epoch=2), frame(0, epoch=3)]
    assert parts_of(*frames) == [[5], [1], [1, 2], [0]]


def test_other_sources_do_not_cut_but_are_cut_along():
    frames = [
        frame(50, source="b"),
        frame(8),
        frame(51, source="b"),
        frame(1, epoch=1),
        frame(52, source="b"),
        frame(1, source="b", epoch=4),
    ]
    assert parts_of(*frames) == [[50, 8, 51], [1, 52], [1]]


def test_within_a_part_each_source_has_one_epoch_and_offsets_stay():
    frames = [frame(8), frame(1, epoch=1), frame(9, source="b"), frame(1, source="b", epoch=1)]
    parts = list(split_epochs(group_of(*frames)))
    for part in parts:
        assert all(span.first.epoch == span.last.epoch for span in part.spans().values())
    assert [(part.first_offset, part.last_offset) for part in parts] == [(0, 0), (1, 2), (3, 3)]


def test_spans_name_the_first_and_last_position_of_each_source():
    assert group_of(frame(1, 2), frame(7, source="b", epoch=3), frame(5)).spans() == {
        "a": Span(Position(0, 1), Position(0, 5)),
        "b": Span(Position(3, 7), Position(3, 7)),
    }


# -- runs


def test_run_is_grouped_by_table_and_ends_after_its_last_record():
    records = [record(7, frame(1, 2)), record(8, frame(3, table="orders")), record(9, frame(4))]
    run = decode_run(records, {})
    assert run.next_offset == 10
    assert {each.group.table: each.group.sequences.tolist() for each in run.tables} == {
        "users": [1, 2, 4],
        "orders": [3],
    }
    assert [each.rows for each in run.tables] == [None, None], "their columns are not known yet"


def test_rows_that_fit_the_known_columns_are_decoded():
    run = decode_run([record(0, frame(1, 2))], {"users": KNOWN})
    (decoded,) = run.tables
    assert decoded.rows is not None
    assert decoded.rows["id"].to_pylist() == [1, 2]
    assert decoded.rows[changes.SEQUENCE].to_pylist() == [1, 2]
    assert decoded.rows[changes.SOURCE].to_pylist() == ["a", "a"]


def test_rows_that_do_not_fit_are_left_for_the_exact_path_of_their_table_alone():
    misfit = Frame(SourceId("a"), 0, -1, 2, 0, Encoding.JSON_BATCH, body((2, "users", {"id": "two"})))
    known = {"users": KNOWN, "orders": KNOWN}
    run = decode_run([record(0, frame(1, table="orders")), record(1, misfit)], known)
    rows = {each.group.table: each.rows for each in run.tables}
    assert rows["users"] is None
    assert rows["orders"] is not None


def test_changes_that_admission_had_taken_before_are_dropped():
    records = [record(0, frame(1, 2, 3, after=1)), record(1, frame(2, 3, after=3))]
    run = decode_run(records, {"users": KNOWN})
    (decoded,) = run.tables
    assert decoded.group.sequences.tolist() == [2, 3]
    assert run.next_offset == 2


def test_epochs_of_one_table_become_parts_in_their_order():
    records = [record(0, frame(8)), record(1, frame(1, epoch=1))]
    run = decode_run(records, {"users": KNOWN})
    assert [each.group.sequences.tolist() for each in run.tables] == [[8], [1]]
    assert all(each.rows is not None for each in run.tables)


# -- strictly, or exactly


def test_rows_that_fit_leave_the_columns_as_they_are():
    fitted = group_of(frame(1, 2)).fit(KNOWN, last_field_id=100)
    assert (fitted.columns, fitted.last_field_id, fitted.changes) == (USERS, 100, ())
    assert fitted.table["id"].to_pylist() == [1, 2]


def test_rows_with_a_new_field_give_the_columns_a_new_one_with_the_next_id():
    new = Frame(SourceId("a"), 0, -1, 2, 0, Encoding.JSON_BATCH, body((1, "users", {"id": 1, "name": "Ada"})))
    fitted = group_of(new).fit(KNOWN, last_field_id=100)
    assert fitted.columns.field("name") == Field(101, "name", "string")
    assert fitted.last_field_id == 101
    assert fitted.table["name"].to_pylist() == ["Ada"]


def test_a_group_that_was_refused_is_not_decoded_strictly_for_the_same_columns_again(monkeypatch):
    tried = []
    strict = JsonGroup.strict
    monkeypatch.setattr(JsonGroup, "strict", lambda group, expected: tried.append(1) or strict(group, expected))
    misfit = Frame(SourceId("a"), 0, -1, 2, 0, Encoding.JSON_BATCH, body((2, "users", {"id": "two"})))
    (decoded,) = decode_run([record(0, misfit)], {"users": KNOWN}).tables
    assert decoded.rows is None
    fitted = fit_or_bisect(decoded.group, KNOWN, last_field_id=100, refused_for=decoded.columns)
    assert (len(tried), len(fitted.kept), fitted.expected) == (1, 1, KNOWN)
    # For other columns it may fit, so it is tried.
    fit_or_bisect(decoded.group, KNOWN, last_field_id=100)
    assert len(tried) == 2
