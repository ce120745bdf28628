"""`lakefeed mirror`: keep mirrors, and show how far behind they are."""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from lakefeed.command_line import json_option, print_json, print_table, progress_bar
from lakefeed.logs import set_up_logging
from lakefeed.pipeline.errors import PipelineError
from lakefeed.pipeline.mirrors.settings import MirrorConfig
from lakefeed.pipeline.spark.options import driver_options, opened_session, session_config, spark_options
from lakefeed.pipeline.spark.session import JobKind
from lakefeed.pipeline.spark.tables import TableIdentifier, catalog_of, change_tables, is_change_table, properties
from lakefeed.settings import SettingsError, load_section

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


_FAIR = "spark.scheduler.mode=FAIR"

# Fields of MirrorStatus, and their headings.
STATUS_COLUMNS = {
    "table": "table",
    "mirror": "mirror",
    "mode": "mode",
    "snapshots_behind": "snapshots behind",
    "rows_behind": "changes behind",
    "seconds_behind": "seconds behind",
}


@click.group()
def mirror() -> None:
    """Keep the current rows of change tables, or their history, with Spark."""


@mirror.command("run")
@click.argument("tables", nargs=-1)
@click.option("--once", is_flag=True, help="Stop when the mirrors have everything that the tables have now.")
@click.option(
    "--checkpoints", help="Where streams store their checkpoints: a directory, or s3a://...  [data/checkpoints]"
)
@driver_options
def run_command(tables: tuple[str, ...], *, once: bool, checkpoints: str | None, **options: Any) -> None:
    """Merge changes into mirrors, of all change tables or the given ones, until Ctrl-C.

    The mirror of sales.orders is sales.orders_current: one row per key, as of its last change. With --once the exit
    code is 1 if a table failed; the others are still merged.

    \b
      lakefeed mirror run                              # all tables, continuously
      lakefeed mirror run sales.orders users --once
      lakefeed mirror run --master spark://host:7077 --checkpoints s3a://lake/checkpoints
    """
    config = load_section(options.get("config_path"), os.environ, "pipeline.mirror", MirrorConfig)
    if checkpoints is not None:
        config = dataclasses.replace(config, checkpoints=checkpoints)
    if remote := session_config(options).remote:
        raise SettingsError(
            "mirrors need a driver of their own, which Spark Connect lacks, set a master and no remote in "
            f"[pipeline.spark] or use spark-submit: remote={remote}"
        )
    set_up_logging("warning" if once and sys.stderr.isatty() else "info")
    # py4j logs each error of a batch with its traceback; the mirror logs them itself.
    logging.getLogger("py4j").setLevel(logging.CRITICAL)
    options["conf"] = (_FAIR, *options["conf"])
    kind = JobKind.SHORT if once else JobKind.LONG
    with opened_session(options, job_kind=kind, app_name="lakefeed-mirror") as spark:
        failures = run_mirrors(spark, tables, config, once=once)
    for table, reason in failures.items():
        click.echo(f"{table}: {reason}", err=True)
    if failures:
        raise click.ClickException(f"some mirrors could not be brought up to date: failed={len(failures)}")


def run_mirrors(spark: SparkSession, tables: Sequence[str], config: MirrorConfig, *, once: bool) -> Mapping[str, str]:
    """Keep the mirrors of some tables, or of all, and return the tables that failed with the reason."""
    from lakefeed.pipeline.mirrors.runner import MirrorRun  # noqa: PLC0415 - Spark is optional, and slow to import

    catalog = catalog_of(spark)
    chosen = choose_tables(spark, catalog, tables, config)
    if not chosen:
        raise PipelineError("no change table to mirror")
    with progress_bar(f"{len(chosen)} tables", keep=True, hidden=not once) as bar:
        run = MirrorRun(
            spark,
            catalog,
            chosen,
            config,
            on_merge=lambda names, merged: bar.advance(merged.rows, description=f"{names.table}: changes merged"),
        )
        with _stopping_on_signals(run.stop):
            return run.run(once=once)


def choose_tables(
    spark: SparkSession, catalog: str, names: Sequence[str], config: MirrorConfig
) -> list[TableIdentifier]:
    """Return the tables to mirror: the given ones, or all change tables that settings do not skip."""
    if not names:
        return [table for table in change_tables(spark, catalog) if not config.settings_of(str(table)).skip]
    chosen = [TableIdentifier.parse(name) for name in names]
    for table in chosen:
        if not is_change_table(properties(spark, table.sql(catalog))):
            raise PipelineError(f"not a change table, only change tables can be mirrored: table={table}")
    return chosen


@contextmanager
def _stopping_on_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Finish running batches on SIGTERM and Ctrl-C; a second Ctrl-C ends at once."""

    def on_signal(_number: int, _frame: Any) -> None:
        stop()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@mirror.command("status")
@click.argument("tables", nargs=-1)
@json_option
@spark_options
def status_command(tables: tuple[str, ...], *, as_json: bool, **options: Any) -> None:
    """Show how far each mirror is behind its change table.

    \b
      lakefeed mirror status
      lakefeed mirror status sales.orders --json
    """
    from lakefeed.pipeline.mirrors.runner import load_status  # noqa: PLC0415 - as above

    config = load_section(options.get("config_path"), os.environ, "pipeline.mirror", MirrorConfig)
    with opened_session(options, job_kind=JobKind.SHORT) as spark:
        catalog = catalog_of(spark)
        found = load_status(spark, catalog, choose_tables(spark, catalog, tables, config), config)
    rows = [dataclasses.asdict(each) for each in found]
    if as_json:
        print_json(rows)
    else:
        print_table(rows, STATUS_COLUMNS)
