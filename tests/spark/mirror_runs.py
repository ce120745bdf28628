"""Mirrors in tests: run them to the present end, read them, and choose modes."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

from pyspark.sql import SparkSession

from lakefeed.pipeline.mirrors.commands import run_mirrors
from lakefeed.pipeline.mirrors.settings import MirrorConfig


def some(every: Sequence[Any], *, briefly: Sequence[Any]) -> list[Any]:
    """Return the parameters of a test: all of them with MIRROR_MODES=all, as `make soak` sets it, else a few."""
    return list(every if os.environ.get("MIRROR_MODES") == "all" else briefly)


def mirrored(spark: SparkSession, table: str, *columns: str) -> list[tuple[Any, ...]]:
    return sorted(tuple(row) for row in spark.table(table).select(*columns).collect())


def keyed(config: MirrorConfig, table: str, **settings: Any) -> MirrorConfig:
    return dataclasses.replace(config, tables={table: {"key": ("id",), **settings}})


def run_once(spark: SparkSession, table: str, config: MirrorConfig) -> None:
    assert run_mirrors(spark, [table], config, once=True) == {}
