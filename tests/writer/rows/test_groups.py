import pytest

from lakefeed.contract.changes import Position, Span
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
    assert (users.sequences, users.row_ids, users.timestamps) == ([1, 3, 4], ["", "", "r"], [0, 0, 9])
    assert [(run.start, run.stop, run.offset) for run in users.runs] == [(0, 2, 3), (2, 3, 4)]
    assert (users.first_offset, users.last_offset) == (3, 4)


def test_changes_that_admission_had_taken_before_are_dropped():
    overlapping = frame([event(sequence, after={}) for sequence in (4, 5, 6)], after_sequence=5)
    assert json_groups([(0, overlapping)])["users"].sequences == [6]


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


def test_befores_are_kept_only_when_asked_for():
    frames = [(0, frame([event(1, before={"a": 1}), event(2)]))]
    assert json_groups(frames)["users"].befores is None
    assert [bytes(b) for b in json_groups(frames, keep_before=True)["users"].befores] == [b'{"a": 1}', b""]


def test_unchanged_columns_are_kept_where_any_change_names_some():
    assert json_groups([(0, frame([event(1), event(2)]))])["users"].unchanged is None
    named = json_groups([(0, frame([event(1), event(2, unchanged=["photo"])]))])["users"]
    assert named.unchanged == [None, ["photo"]]


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
    assert left.sequences == [3, 9, 4, 5]
    assert images(left) == [b'{"n": 3}', b'{"n": 9}', b'{"n": 4}', b'{"n": 5}']
    assert [(run.source, run.start, run.stop, run.offset) for run in left.runs] == [
        ("a", 0, 1, 0),
        ("b", 1, 2, 1),
        ("a", 2, 4, 2),
    ]


def test_marks_of_other_epochs_decide_by_the_epoch():
    group = two_sources()
    assert group.after({"b": Position(3, 0)}).sequences == [1, 2, 3, 4, 5]
    assert group.after({"b": Position(1, 99)}) is group


def test_a_group_below_all_marks_is_the_group_itself():
    group = two_sources()
    assert group.after({}) is group
    assert group.after({"a": Position(0, 0), "c": Position(9, 9)}) is group


def test_a_group_wholly_below_its_marks_is_empty():
    left = two_sources().after({"a": Position(0, 5), "b": Position(2, 9)})
    assert (len(left), left.runs, left.spans()) == (0, (), {})


def test_received_at_is_kept_per_run():
    assert {run.received_at_us for run in two_sources().runs} == {RECEIVED_AT_US}


def test_metadata_is_kept_where_any_change_has_some():
    assert json_groups([(0, frame([event(1), event(2)]))])["users"].metadata is None
    named = json_groups([(0, frame([event(1), event(2, metadata={"lsn": 5})]))])["users"]
    assert [bytes(each) for each in named.metadata] == [b"", b'{"lsn": 5}']
