"""Room for tables: what counts, and what is refused."""

from __future__ import annotations

from lakefeed.contract.changes import TableName
from lakefeed.writer.tables.memory import TableLimit


def room_for(tables_max: int) -> TableLimit:
    return TableLimit(tables_max=tables_max, default_namespace="default")


def test_tables_are_accepted_up_to_the_limit_and_known_ones_always():
    room = room_for(2)
    assert room.take({"users", "sales.orders"}) is None
    assert room.take({"more"}) == "more"
    assert room.take({"users"}) is None
    assert room.count == 2


def test_a_batch_with_one_table_too_many_adds_none():
    room = room_for(2)
    assert room.take({"a", "b", "c"}) == "c"
    assert room.count == 0
    assert room.take({"a", "b"}) is None


def test_two_names_of_one_table_are_one_table():
    room = room_for(1)
    assert room.take({"users", "default.users"}) is None
    assert room.count == 1


def test_tables_of_the_log_are_known_beyond_the_limit_and_others_are_rejected():
    room = room_for(1)
    for name in ("a", "b", "c"):
        room.note(TableName(("default",), name))
    assert room.take({"a", "default.c"}) is None
    assert room.take({"d"}) == "d"
