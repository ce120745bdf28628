"""The search for duplicates finds each of them once, whatever it holds at a time."""

from __future__ import annotations

import random
from collections import Counter

import pyarrow as pa
import pytest

from lakefeed.contract import changes as cdc
from lakefeed.writer import verify
from lakefeed.writer.files.scan import READ_ROW, LiveFile
from lakefeed.writer.verify import DuplicateSearch, count_parts

# Source, sequence, moment of receipt, and of rows that were only read their id.
Row = tuple[str, int, int] | tuple[str, int, int, str]


def keys(rows: list[Row]) -> pa.Table:
    columns = zip(*((*row, None)[:4] for row in rows), strict=True)
    types = {
        cdc.SOURCE: pa.string(),
        cdc.SEQUENCE: pa.int64(),
        cdc.INGESTED_AT: pa.timestamp("us", tz="UTC"),
        READ_ROW: pa.string(),
    }
    return pa.table({name: pa.array(each, type_) for (name, type_), each in zip(types.items(), columns, strict=True)})


def search(files: list[list[Row]], *, one_epoch: set[str], parts: int = 1) -> dict[str, int]:
    found: Counter[str] = Counter()
    ordered = sorted(files, key=lambda rows: min(row[1] for row in rows))
    for part in range(parts):
        one = DuplicateSearch(one_epoch=one_epoch, part=part, parts=parts)
        for rows in ordered:
            one.add(keys(rows), lowest=min(row[1] for row in rows))
        found.update({source: doubled.rows for source, doubled in one.finish().items()})
    return dict(found)


def test_a_sequence_twice_is_a_duplicate_of_a_source_that_never_started_over() -> None:
    files = [[("shop", 1, 10), ("shop", 2, 10), ("depot", 2, 10)], [("shop", 2, 99), ("shop", 3, 99)]]
    assert search(files, one_epoch={"shop", "depot"}) == {"shop": 1}


def test_a_sequence_of_another_epoch_is_none_unless_received_at_the_same_moment() -> None:
    files = [[("shop", 1, 10), ("shop", 1, 20)], [("shop", 1, 20)]]
    assert search(files, one_epoch=set()) == {"shop": 1}


@pytest.mark.parametrize("parts", [1, 3])
def test_rows_that_were_read_as_of_one_position_are_none_unless_one_came_twice_at_one_moment(parts: int) -> None:
    chunk: list[Row] = [("shop", 7, 10, str(n)) for n in range(100)]
    live: list[Row] = [("shop", 7, 10), ("shop", 8, 10)]
    later: list[Row] = [("shop", 7, 20, str(n)) for n in range(100)]
    assert search([chunk, live, later], one_epoch={"shop"}, parts=parts) == {}
    assert search([chunk, live, later, later[:3]], one_epoch={"shop"}, parts=parts) == {"shop": 3}


def test_examples_are_named_up_to_a_limit_and_all_are_counted() -> None:
    one = DuplicateSearch(one_epoch={"shop"})
    one.add(keys([("shop", n, 0) for n in range(100)] * 2), lowest=0)
    found = one.finish()["shop"]
    assert (found.rows, len(found.examples)) == (100, verify.EXAMPLES_MAX)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("seed", range(10))
def test_every_duplicate_is_found_once_in_files_that_overlap_at_random(seed: int, parts: int) -> None:
    chance = random.Random(seed)
    files = []
    for start in range(0, 300, 10):
        rows = [(chance.choice("ab"), start + chance.randint(0, 25), 0) for _ in range(chance.randint(1, 30))]
        files.append(rows)
    counts = Counter((source, sequence) for rows in files for source, sequence, _ in rows)
    wanted: Counter[str] = Counter()
    for (source, _), count in counts.items():
        wanted[source] += count - 1
    assert search(files, one_epoch={"a", "b"}, parts=parts) == {source: n for source, n in wanted.items() if n}


def test_rows_that_can_have_no_more_duplicates_are_not_held() -> None:
    one = DuplicateSearch(one_epoch={"shop"})
    most = 0
    for start in range(0, 100_000, 100):
        one.add(keys([("shop", start + n, 0) for n in range(100)]), lowest=start)
        most = max(most, one._held_rows)
    assert most <= 500


def test_rows_are_dealt_out_where_too_many_overlap() -> None:
    apart = [LiveFile("", 0, rows=10, lowest=n, highest=n + 9) for n in range(0, 100, 10)]
    assert count_parts(apart, held_max=20) == 1
    assert count_parts([LiveFile("", 0, rows=10, lowest=0, highest=100)] * 10, held_max=20) == 5
    assert count_parts([], held_max=20) == 1
