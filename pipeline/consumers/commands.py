"""`lakefeed consumers`: list the consumers of tables, and drop one."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import click

from lakefeed.command_line import json_option, print_json, print_table
from lakefeed.contract.consumers import describe
from lakefeed.contract.errors import ConsumerError
from lakefeed.pipeline.consumers.registry import drop as drop_consumer
from lakefeed.pipeline.consumers.registry import load_history
from lakefeed.pipeline.spark.options import opened_session, spark_options
from lakefeed.pipeline.spark.session import JobKind
from lakefeed.pipeline.spark.tables import TableIdentifier, all_tables, catalog_of

# Keys of a described consumer, and their headings.
COLUMNS = {
    "table": "table",
    "name": "consumer",
    "snapshotsBehind": "snapshots behind",
    "secondsBehind": "seconds behind",
    "kept": "kept for hours",
    "snapshotId": "snapshot",
}


@click.group()
def consumers() -> None:
    """List the registered readers of tables, and drop one that will not come back.

    Snapshots that a consumer has not read yet do not expire, for some days after its last registration.
    """


@consumers.command("list")
@click.argument("tables", nargs=-1)
@json_option
@spark_options
def list_consumers(tables: Sequence[str], *, as_json: bool, **options: Any) -> None:
    """List consumers and how far behind they are, for all tables or the given ones.

    The service's /status has the same without Spark.

    \b
    Examples:
      lakefeed consumers list
      lakefeed consumers list sales.orders --json
    """
    names = [TableIdentifier.parse(text) for text in tables]
    with opened_session(options, job_kind=JobKind.SHORT, app_name="lakefeed-consumers") as spark:
        catalog, now_ms = catalog_of(spark), int(time.time() * 1000)
        found = [
            {"table": str(table), **describe(consumer, now_ms=now_ms)}
            for table in names or [name for name, own in all_tables(spark, catalog).items() if own]
            for consumer in load_history(spark, table.sql(catalog)).consumers()
        ]
    if as_json:
        print_json({"consumers": found})
    elif not found:
        click.echo("no consumers")
    else:
        print_table([{**each, "kept": _kept_text(each)} for each in found], COLUMNS)


def _kept_text(consumer: Mapping[str, Any]) -> str:
    if consumer["isExpired"]:
        return "expired"
    kept_s = consumer["keptForSeconds"]
    return "no limit" if kept_s is None else f"{kept_s / 3600:.1f}"


@consumers.command("drop")
@click.argument("table")
@click.argument("name")
@spark_options
def drop_command(table: str, name: str, **options: Any) -> None:
    """Drop a consumer of a table, so that snapshots which it has not read may expire.

    A reader that is still running registers itself again.

    \b
    Example:
      lakefeed consumers drop sales.orders dashboard
    """
    identifier = TableIdentifier.parse(table)
    with opened_session(options, job_kind=JobKind.SHORT, app_name="lakefeed-consumers") as spark:
        if not drop_consumer(spark, identifier.sql(catalog_of(spark)), name):
            raise ConsumerError(f"no such consumer: table={table} name={name}")
    click.echo(f"dropped {name} of {table}")
