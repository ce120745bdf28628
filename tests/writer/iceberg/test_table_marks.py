"""The tables' word on sources: which marks count, and that every table of a real catalog is asked."""

from __future__ import annotations

import pytest

from tests.fakes import CatalogFault, FlakyCatalog
from tests.writer.examples import NESTED
from writer.changes import Position, SourceId, TableName
from writer.errors import CatalogUnavailable
from writer.iceberg.catalog_client import open_catalog
from writer.iceberg.partitions import parse_partition
from writer.iceberg.progress import PROGRESS_PROPERTY, Progress
from writer.iceberg.table_marks import load_lowest_marks, lowest_marks

A, B = SourceId("a"), SourceId("b")


def test_lowest_mark_of_the_newest_epoch_counts():
    tables = [
        {A: Position(1, 40), B: Position(0, 7)},
        {A: Position(0, 3)},
        {A: Position(1, 100)},
        {A: Position(1, 60), B: Position(0, 9)},
    ]
    assert lowest_marks(tables) == {A: Position(1, 40), B: Position(0, 7)}
    assert lowest_marks(reversed(tables)) == lowest_marks(tables)


def test_tables_without_marks_say_nothing():
    assert lowest_marks([{}, {}]) == {}


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
        assert await load_lowest_marks(catalog) == {A: Position(0, 20), B: Position(2, 5)}


async def test_catalog_that_does_not_answer_is_an_error_and_not_an_empty_lake(local_lake):
    name = TableName(("sales",), "orders")
    async with FlakyCatalog(local_lake.catalog_url) as flaky, open_catalog(flaky.url) as catalog:
        await catalog.ensure_namespace(name.namespace)
        spec = parse_partition("none", NESTED)
        await catalog.create_table(name, schema=NESTED, spec=spec, properties={})
        flaky.load_faults.append(CatalogFault.ERROR_BEFORE)
        with pytest.raises(CatalogUnavailable):
            await load_lowest_marks(catalog)
        assert await load_lowest_marks(catalog) == {}
