from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakefeed.iceberg.types import Field
from lakefeed.writer.rows.comments import (
    FORMER_NAMES_MAX,
    Notes,
    as_key,
    former_names,
    is_json,
    is_key,
    name_in,
    read_notes,
    with_former_names,
    write_notes,
)


@pytest.mark.parametrize(
    ("doc", "notes"),
    [
        (None, Notes()),
        ("json", Notes(is_json=True)),
        ("key", Notes(is_key=True)),
        ('formerly ["a","b; key"]', Notes(former_names=("a", "b; key"))),
        ('the customer; json; key; formerly ["c"]', Notes("the customer", True, True, ("c",))),
        ("what a key is", Notes("what a key is")),
        ("not json", Notes("not json")),
        ("formerly known", Notes("formerly known")),
        ("formerly [1]", Notes("formerly [1]")),
    ],
)
def test_notes_follow_the_rest_of_the_comment(doc, notes):
    assert read_notes(doc) == notes
    assert write_notes(notes) == doc


@given(
    st.builds(
        Notes,
        own=st.sampled_from(["", "about orders", "a; b"]),
        is_json=st.booleans(),
        is_key=st.booleans(),
        former_names=st.lists(st.text(min_size=1, max_size=5), max_size=3).map(tuple),
    )
)
def test_what_is_written_is_read_back(notes):
    assert read_notes(write_notes(notes)) == notes


def test_marks_are_added_and_the_comment_stays():
    field = as_key(with_former_names(Field(1, "customer", "string", doc="who buys"), ("client",)))
    assert field.doc == 'who buys; key; formerly ["client"]'
    assert (is_key(field), is_json(field.doc), former_names(field)) == (True, False, ("client",))


def test_own_name_is_no_former_one_and_the_oldest_are_forgotten():
    field = with_former_names(Field(1, "b", "string", doc='formerly ["a"]'), ("b", "c"))
    assert former_names(field) == ("c", "a")
    many = with_former_names(field, tuple(f"n{number}" for number in range(FORMER_NAMES_MAX)))
    assert former_names(many) == tuple(f"n{number}" for number in range(FORMER_NAMES_MAX))


def test_a_field_is_meant_by_its_own_name_first():
    field = Field(1, "customer", "string", doc='formerly ["client"]')
    assert name_in(field, {"client", "customer"}) == "customer"
    assert name_in(field, {"client"}) == "client"
    assert name_in(field, {"id"}) is None
