"""Placeholder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from pipeline.tables import TableName
    from writer.verification.findings import Report


def compare_mirror(
    spark: SparkSession, name: TableName, catalog: str, *, report: Report, options: Mapping[str, Any]
) -> None:
    """Compare a mirror with the fold of its change table."""
