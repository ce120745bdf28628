"""Room for tables: what counts, and what is refused."""

from __future__ import annotations

from lakefeed.contract.changes import Position, SourceId, TableName
from lakefeed.contract.properties import command_mark
from lakefeed.writer.tables.limit import TableLimit

USERS = TableName(("default",), "users")


def room_for(tables_max: int, *, sources_max: int = 10) -> TableLimit:
    return TableLimit(tables_max=tables_max, sources_max=sources_max, default_namespace="default")


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


def take(room: TableLimit, source: str, *tables: str) -> str | None:
    assert room.take(tables) is None
    return room.take_source(SourceId(source), tables)


def test_sources_of_a_table_are_accepted_up_to_the_limit_and_known_ones_always():
    room = room_for(9, sources_max=2)
    assert [take(room, source, "users") for source in ("a", "b", "c")] == [None, None, "users"]
    assert [take(room, source, "default.users", "orders") for source in ("a", "c")] == [None, "default.users"]
    assert take(room, "c", "orders") is None, "a refused batch adds its source to no table"
    assert [problem.partition(";")[0] for problem in room.problems()] == [
        "table has no room for another source, new ones are refused"
    ] * 2


def test_sources_that_a_table_has_count_whether_its_writer_or_a_look_up_has_read_them():
    room = room_for(9, sources_max=3)
    marks = {SourceId("a"): Position(0, 1), command_mark("replay"): Position(0, 1)}
    room.note(USERS, marks=lambda: marks)
    room.note_sources(USERS, [SourceId("b")])
    marks[SourceId("c")] = Position(0, 1)
    assert [take(room, source, "users") for source in ("d", "c", "a", "b")] == ["users", None, None, None]


def test_a_long_name_counts_several_times():
    room = room_for(9, sources_max=10)
    assert take(room, '"' * 255, "users") == "users"
    assert take(room, "x" * 255, "users") is None
    assert take(room, "y" * 255, "users") is None
    assert take(room, "z", "users") == "users"
