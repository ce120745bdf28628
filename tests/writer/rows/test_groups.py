import datetime as dt

import pytest

from lakefeed.contract import changes as names
from lakefeed.contract.changes import Position, Span
from lakefeed.iceberg.arrow import to_arrow_schema
from lakefeed.iceberg.types import Schema
from lakefeed.writer.rows.evolution import initial_columns
from lakefeed.writer.rows.groups import Expected
from tests.writer.sample_rows import RECEIVED_AT_US, event, frame, json_groups


def images(group) -> list[bytes]:
    return [bytes(image) for image in group.images]


def test_changes_are_grouped_by_table_in_log_order():
    groups = json_groups(
        [
            (3, frame([event(1, after={"a": 1}), event(2, table="orders"), event(3, after={"a": 3})])),
            (4, frame([event(4, after={"a": 4}, rowId="r", timestamp=9)])),
        ]
    )
    assert list(groups) == ["users", "orders"]
    users = groups["users"]
    assert [(event.sequence, event.row_id, event.timestamp) for event in users.events] == [
        (1, "", None),
        (3, "", None),
        (4, "r", 9),
    ]
    assert users.sequences.tolist() == [1, 3, 4]
    assert [(run.start, run.stop, run.offset) for run in users.runs] == [(0, 2, 3), (2, 3, 4)]
    assert (users.first_offset, users.last_offset) == (3, 4)


def test_changes_that_admission_had_taken_before_are_dropped():
    overlapping = frame([event(sequence, after={}) for sequence in (4, 5, 6)], after_sequence=5)
    assert json_groups([(0, overlapping)])["users"].sequences.tolist() == [6]


def test_a_frame_that_was_all_taken_before_leaves_no_group():
    assert json_groups([(0, frame([event(1)], after_sequence=1)), (1, frame([]))]) == {}


@pytest.mark.parametrize(
    ("change", "image"),
    [
        ({"operation": "INSERT", "after": {"a": 1}, "before": {"a": 0}}, b'{"a": 1}'),
        ({"operation": "DELETE", "after": {"a": 1}, "before": {"a": 0}}, b'{"a": 0}'),
        ({"operation": "DELETE", "after": {"a": 1}}, b'{"a": 1}'),
        ({"operation": "DELETE", "after": {"a": 1}, "before": None}, b'{"a": 1}'),
        ({"operation": "UPDATE", "after": None, "before": {"a": 0}}, b'{"a": 0}'),
        ({"operation": "UPDATE", "after": None, "before": None}, b"{}"),
        ({"operation": "UPDATE"}, b"{}"),
        ({"operation": "UPDATE", "after": {}, "before": {"a": 0}}, b"{}"),
        ({"operation": "UPDATE", "after": 5, "before": {"a": 0}}, b"5"),
    ],
)
def test_the_image_of_a_change_is_its_row_after_or_for_deletes_before(change, image):
    assert images(json_groups([(0, frame([event(1, **change)]))])["users"]) == [image]


def change_column(group, name):
    return group.change_columns(to_arrow_schema(Schema(0, initial_columns(keep_before=True))))[name].to_pylist()


def test_images_from_before_are_written_only_for_tables_that_keep_them():
    users = json_groups([(0, frame([event(1, before={"a": 1}, after={}), event(2)]))])["users"]
    columns = initial_columns(keep_before=True)
    kept, left_out = (users.strict(Expected(columns, keep_before=keep)) for keep in (True, False))
    assert kept[names.BEFORE].to_pylist() == ['{"a": 1}', None]
    assert left_out[names.BEFORE].to_pylist() == [None, None]


@pytest.mark.parametrize(
    ("given", "name", "expected"),
    [
        ({"unchanged": ["photo"]}, names.UNCHANGED, ["photo"]),
        ({"metadata": {"lsn": 5}}, names.METADATA, '{"lsn": 5}'),
        ({"before": {"a": 1}}, names.BEFORE, '{"a": 1}'),
    ],
)
def test_what_only_some_changes_have_is_null_for_the_others(given, name, expected):
    assert change_column(json_groups([(0, frame([event(1), event(2)]))])["users"], name) == [None, None]
    assert change_column(json_groups([(0, frame([event(1), event(2, **given)]))])["users"], name) == [None, expected]


def two_sources():
    return json_groups(
        [
            (0, frame([event(n, after={"n": n}) for n in (1, 2, 3)], source="a")),
            (1, frame([event(n, after={"n": n}) for n in (7, 9)], source="b", epoch=2)),
            (2, frame([event(n, after={"n": n}) for n in (4, 5)], source="a")),
        ]
    )["users"]


def test_positions_are_the_first_and_last_of_each_source():
    assert two_sources().spans() == {
        "a": Span(Position(0, 1), Position(0, 5)),
        "b": Span(Position(2, 7), Position(2, 9)),
    }


def test_changes_at_or_below_their_sources_mark_are_dropped():
    group = two_sources()
    left = group.after({"a": Position(0, 2), "b": Position(2, 8)})
    assert left.sequences.tolist() == [3, 9, 4, 5]
    assert images(left) == [b'{"n": 3}', b'{"n": 9}', b'{"n": 4}', b'{"n": 5}']
    assert [(run.source, run.start, run.stop, run.offset) for run in left.runs] == [
        ("a", 0, 1, 0),
        ("b", 1, 2, 1),
        ("a", 2, 4, 2),
    ]


def test_marks_of_other_epochs_decide_by_the_epoch():
    group = two_sources()
    assert group.after({"b": Position(3, 0)}).sequences.tolist() == [1, 2, 3, 4, 5]
    assert group.after({"b": Position(1, 99)}) is group


def test_a_group_below_all_marks_is_the_group_itself():
    group = two_sources()
    assert group.after({}) is group
    assert group.after({"a": Position(0, 0), "c": Position(9, 9)}) is group


def test_a_group_whose_changes_are_all_below_their_marks_is_empty():
    left = two_sources().after({"a": Position(0, 5), "b": Position(2, 9)})
    assert (len(left), left.runs, left.spans()) == (0, (), {})


def test_timestamp_0_is_a_time_and_a_missing_one_is_the_time_of_receipt():
    events = [event(1, timestamp=0), event(2), event(3, timestamp=None), event(4, timestamp=-5)]
    times = change_column(json_groups([(0, frame(events))])["users"], names.TIMESTAMP)
    received = dt.datetime.fromtimestamp(RECEIVED_AT_US / 1e6, dt.UTC)
    epoch = dt.datetime.fromtimestamp(0, dt.UTC)
    assert times == [epoch, received, received, epoch - dt.timedelta(milliseconds=5)]


def test_received_at_is_kept_per_run():
    assert {run.received_at_us for run in two_sources().runs} == {RECEIVED_AT_US}
