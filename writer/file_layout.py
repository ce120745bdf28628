"""How the rows of one flush lie in data files. Owns the order of the steps; each has its own module.

    buffered tables --join: conform, route--> one table --split by partition--> --sort--> --cut near the target--> files

Rows stay together until their flush: however many partitions a table has, none is open meanwhile, and the only small
files are those of partitions that got few rows. A partition's rows keep the order of the log unless the table has a
sort order. Rows of one partition without an order are never copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa

from writer.iceberg.manifests import TableShape
from writer.iceberg.partitions import Partition, split_by_partition
from writer.iceberg.sort_orders import UNSORTED, SortOrder, apply_order, check_order
from writer.iceberg.terms import SortRejected
from writer.routing import fill_route
from writer.rows.conform import conform
from writer.types import to_arrow_schema


@dataclass(frozen=True, slots=True)
class FileRows:
    """What one data file will hold, and the order that its rows lie in."""

    partition: Partition
    rows: pa.Table
    sort_order_id: int


def join_rows(tables: Sequence[pa.Table], shape: TableShape) -> pa.Table:
    """Bring the rows of a flush to the columns of its table.

    Raises:
        pa.ArrowInvalid: rows do not fit the table's columns.
    """
    parts = [conform(table, shape.schema.columns) for table in tables] or [to_arrow_schema(shape.schema).empty_table()]
    return fill_route(pa.concat_tables(parts))


def lay_out(rows: pa.Table, shape: TableShape, *, order: SortOrder, files_for: Callable[[int], int]) -> list[FileRows]:
    """Decide what each file holds; `files_for` tells into how many files so many Arrow bytes of one partition go.

    Raises:
        PartitionRejected: the table's spec cannot be computed here.
    """
    if not rows.num_rows:
        return []
    order = usable_order(order, shape)
    row_bytes = rows.nbytes / max(1, rows.num_rows)
    return [
        FileRows(partition, piece, order.order_id)
        for partition, part in split_by_partition(rows, shape.spec, shape.schema)
        for piece in _cut(apply_order(part, order, shape.schema), files_for(int(part.num_rows * row_bytes)))
    ]


def usable_order(order: SortOrder, shape: TableShape) -> SortOrder:
    """Give the order, or none where another engine's cannot be computed here: rows are more than their order."""
    try:
        check_order(order, shape.schema)
    except SortRejected:
        return UNSORTED
    return order


def _cut(rows: pa.Table, files: int) -> Iterator[pa.Table]:
    """Cut rows into parts of the same length, give or take one row."""
    files = min(files, rows.num_rows)
    for number in range(files):
        start, end = rows.num_rows * number // files, rows.num_rows * (number + 1) // files
        yield rows.slice(start, end - start)
