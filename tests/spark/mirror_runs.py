"""Mirrors in tests: run up to now, and read."""

from __future__ import annotations

import dataclasses
from typing import Any

from pyspark.sql import SparkSession

from lakefeed.pipeline.mirrors.commands import run_mirrors
from lakefeed.pipeline.mirrors.settings import MirrorConfig


def mirrored(spark: SparkSession, table: str, *columns: str) -> list[tuple[Any, ...]]:
    return sorted(tuple(row) for row in spark.table(table).select(*columns).collect())


def keyed(config: MirrorConfig, table: str, **settings: Any) -> MirrorConfig:
    return dataclasses.replace(config, tables={table: {"key": ("id",), **settings}})


def run_once(spark: SparkSession, table: str, config: MirrorConfig) -> None:
    assert run_mirrors(spark, [table], config, once=True) == {}
