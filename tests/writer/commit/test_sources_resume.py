"""Resume positions: which records count, and that every table of a real catalog is read."""

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


def test_the_highest_record_of_what_is_complete_counts_whatever_single_tables_have():
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


def test_a_source_without_any_record_resumes_at_the_beginning_of_its_newest_epoch():
    tables = [Progress(sources={A: Position(0, 3)}), Progress(sources={A: Position(2, 9)}), Progress()]
    assert resume_positions(tables) == {A: Position(2, -1)}
    tables.append(Progress(sources={A: Position(2, 9)}, complete={A: Position(2, 8)}))
    assert resume_positions(tables) == {A: Position(2, 8)}


def test_tables_without_marks_have_no_sources():
    assert resume_positions([Progress(), Progress()]) == {}


async def test_every_table_of_every_namespace_is_read_and_foreign_ones_are_skipped(local_lake):
    marks = {
        TableName(("sales",), "orders"): Progress(
            sources={A: Position(0, 40)}, complete={A: Position(0, 20)}
        ).to_text(),
        TableName(("sales", "eu"), "orders"): Progress(
            sources={B: Position(2, 5)}, complete={B: Position(2, 5)}
        ).to_text(),
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
