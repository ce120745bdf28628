"""Chunks cover the input, each row once, and are the same the next time."""

from __future__ import annotations

import random

import pytest

from lakefeed.contract.changes import Position
from lakefeed.pipeline.backfill.inputs import (
    BEFORE_ALL,
    InputFile,
    ReadPosition,
    default_run,
    parse_position,
    plan_files,
    plan_range,
    range_facts,
)
from lakefeed.settings import SettingsError


def meets(condition: str, key: int | None) -> bool:
    """Evaluate a condition as SQL would, for a key that may be null."""
    if key is None:
        return "IS NULL" in condition or condition == "1 = 1"
    spelled = condition.replace("k IS NULL", "False").replace("OR", "or").replace("AND", "and").replace("1 = 1", "True")
    return bool(eval(spelled, {"k": key}))


@pytest.mark.parametrize("seed", range(20))
def test_every_key_is_read_by_one_condition_of_one_chunk(seed: int) -> None:
    chance = random.Random(seed)
    low = chance.randrange(-1000, 1000)
    high = low + chance.choice([0, 1, 7, 1000, 10**12])
    rows = chance.choice([1, 10, 999])
    facts = range_facts("k", low, high, rows, chunk_max_rows=chance.choice([1, 3, 1000]), parallel_reads=4)
    plan = plan_range(facts)
    keys = [None, low - 5, high + 5, *(chance.randint(low, high) for _ in range(50)), low, high]
    for key in keys:
        readers = [chunk.number for chunk in plan.chunks for each in chunk.conditions if meets(each, key)]
        assert len(readers) == 1, (key, facts)
    assert len(plan.chunks) == facts["cut"]
    assert plan_range(facts) == plan


def test_without_a_column_all_of_a_table_is_one_chunk() -> None:
    plan = plan_range(range_facts(chunk_max_rows=10, parallel_reads=4))
    assert [chunk.conditions for chunk in plan.chunks] == [("1 = 1",)]


def test_files_are_grouped_up_to_a_size_and_each_is_in_one_chunk() -> None:
    files = [InputFile(f"f{number}", size) for number, size in enumerate([5, 5, 5, 30, 1])]
    plan = plan_files(reversed(files), chunk_max_bytes=10)
    assert [[file.path for file in chunk.files] for chunk in plan.chunks] == [["f0", "f1"], ["f2"], ["f3"], ["f4"]]
    assert plan_files(files, chunk_max_bytes=10).facts == plan.facts


@pytest.mark.parametrize("change", [InputFile("f1", 6), InputFile("f2", 5)])
def test_other_files_have_other_facts(change: InputFile) -> None:
    files = [InputFile("f0", 5), InputFile("f1", 5)]
    assert plan_files(files, chunk_max_bytes=10).facts != plan_files([files[0], change], chunk_max_bytes=10).facts


def test_another_grouping_of_the_same_files_has_other_facts() -> None:
    files = [InputFile(name, size) for name, size in zip("abcd", [6, 5, 5, 6], strict=True)]
    two = [plan_files(files, chunk_max_bytes=size) for size in (11, 16)]
    assert [len(plan.chunks) for plan in two] == [2, 2]
    assert two[0].facts != two[1].facts


def test_another_input_source_or_table_is_another_run() -> None:
    runs = {
        default_run(table=table, source=source, address=address)
        for table in ("a", "b")
        for source in ("s", "t")
        for address in ("/x", "/y")
    }
    assert len(runs) == 8


def test_rows_have_the_mark_or_the_given_position_but_never_one_ahead_of_the_table() -> None:
    mark = Position(1, 50)
    assert parse_position("mark").resolve(mark) == mark
    assert parse_position("mark").resolve(None) == BEFORE_ALL
    assert parse_position("start").resolve(mark) == BEFORE_ALL
    assert parse_position("start").resolve(None) == BEFORE_ALL
    assert parse_position("1:20").resolve(mark) == Position(1, 20)
    assert parse_position("20") == ReadPosition(Position(0, 20))
    for ahead in ("1:51", "2:0"):
        with pytest.raises(SettingsError, match="has not reached this position"):
            parse_position(ahead).resolve(mark)
    with pytest.raises(SettingsError, match="EPOCH:SEQUENCE"):
        parse_position("yesterday")
