"""The tables' word on sources: which marks count, and that every table of a real catalog is asked."""

from __future__ import annotations

import pytest

from lakefeed.contract.changes import Position, SourceId, TableName
from lakefeed.contract.errors import CatalogUnavailable
from lakefeed.contract.progress import PROGRESS_PROPERTY, Progress
from lakefeed.iceberg.layout import parse_partition
from lakefeed.writer.commit.rest_catalog import open_catalog
from lakefeed.writer.commit.sources import load_resume_positions, resume_positions
from tests.fakes import CatalogFault, FlakyCatalog
from tests.writer.examples import NESTED

A, B = SourceId("a"), SourceId("b")


def test_highest_word_of_what_is_complete_counts_whatever_single_tables_have():
    tables = [
        Progress(sources={A: Position(0, 40), B: Position(0, 7)}, complete={A: Position(0, 30), B: Position(0, 7)}),
        Progress(sources={A: Position(0, 3)}, complete={A: Position(0, 3)}),
        Progress(sources={A: Position(0, 100)}, complete={A: Position(0, 39)}),
        Progress(),
    ]
    assert resume_positions(tables) == {A: Position(0, 39), B: Position(0, 7)}
    assert resume_positions(reversed(tables)) == resume_positions(tables)


def test_epoch_of_which_nothing_is_known_to_be_complete_is_resumed_from_its_beginning():
    tables = [
        Progress(sources={A: Position(1, 40)}, complete={A: Position(0, 30)}),
        Progress(sources={A: Position(0, 31)}, complete={A: Position(0, 20)}),
    ]
    assert resume_positions(tables) == {A: Position(1, -1)}
    tables.append(Progress(sources={A: Position(1, 5)}, complete={A: Position(1, 4)}))
    assert resume_positions(tables) == {A: Position(1, 4)}


def test_a_word_of_all_tables_counts_though_others_were_written_by_versions_before_it():
    tables = [
        Progress(sources={A: Position(0, 3)}),
        Progress(sources={A: Position(0, 9)}, complete={A: Position(0, 8)}),
    ]
    assert resume_positions(tables) == {A: Position(0, 8)}


def test_of_tables_from_before_that_word_the_lowest_mark_of_the_newest_epoch_counts():
    tables = [
        Progress(sources={A: Position(1, 40), B: Position(0, 7)}),
        Progress(sources={A: Position(0, 3)}),
        Progress(sources={A: Position(1, 100)}),
        Progress(sources={A: Position(1, 60), B: Position(0, 9)}),
    ]
    assert resume_positions(tables) == {A: Position(1, 40), B: Position(0, 7)}
    assert resume_positions(reversed(tables)) == resume_positions(tables)


def test_tables_without_marks_say_nothing():
    assert resume_positions([Progress(), Progress()]) == {}


async def test_every_table_of_every_namespace_is_asked_and_those_of_others_are_passed_over(local_lake):
    marks = {
        TableName(("sales",), "orders"): Progress(sources={A: Position(0, 40)}).to_text(),
        TableName(("sales", "eu"), "orders"): Progress(sources={A: Position(0, 20), B: Position(2, 5)}).to_text(),
        TableName(("other",), "damaged"): "not a marker",
        TableName(("other",), "foreign"): None,
    }
    async with open_catalog(local_lake.catalog_url) as catalog:
        for name, text in marks.items():
            await catalog.ensure_namespace(name.namespace)
            spec = parse_partition("none", NESTED)
            properties = {} if text is None else {PROGRESS_PROPERTY: text}
            await catalog.create_table(name, schema=NESTED, spec=spec, properties=properties)
        assert await load_resume_positions(catalog) == {A: Position(0, 20), B: Position(2, 5)}


async def test_catalog_that_does_not_answer_is_an_error_and_not_an_empty_lake(local_lake):
    name = TableName(("sales",), "orders")
    async with FlakyCatalog(local_lake.catalog_url) as flaky, open_catalog(flaky.url) as catalog:
        await catalog.ensure_namespace(name.namespace)
        spec = parse_partition("none", NESTED)
        await catalog.create_table(name, schema=NESTED, spec=spec, properties={})
        flaky.load_faults.append(CatalogFault.ERROR_BEFORE)
        with pytest.raises(CatalogUnavailable):
            await load_resume_positions(catalog)
        assert await load_resume_positions(catalog) == {}
