"""Commands `lakefeed verify --spark` and, for spark-submit, `verify`: options, exit codes and output."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from lakefeed.command_line import print_json
from lakefeed.contract.verification import Range, report_document, report_lines
from lakefeed.pipeline.spark.options import opened_session, readable_errors, spark_options
from lakefeed.pipeline.spark.session import JobKind
from lakefeed.pipeline.spark.tables import TableIdentifier, catalog_of, change_tables
from lakefeed.settings import SettingsError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from lakefeed.contract.verification import Report


# Exit codes, as grep has them: a difference was found; the comparison was not possible.
DIFFERENT = 1
NOT_VERIFIED = 2


@click.command()
@click.argument("tables", nargs=-1, metavar="[TABLE]...")
@click.option("--from", "after_id", type=int, metavar="SNAPSHOT", help="Only what came after this snapshot.")
@click.option("--to", "to_id", type=int, metavar="SNAPSHOT", help="The table as of this snapshot  [the newest]")
@click.option("--mirrors/--no-mirrors", default=True, show_default=True, help="Compare the tables' mirrors too.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@spark_options
def verify_tables(
    tables: tuple[str, ...],
    *,
    after_id: int | None,
    to_id: int | None,
    mirrors: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Check in Spark that TABLES, or all change tables, hold exactly the rows that their snapshots recorded.

    Exit codes: 0 all is as it was recorded, 1 something is not, 2 that could not be found out.

    \b
      spark-submit deploy/spark/job.py verify sales.orders
    """
    run_verification(tables, Range(after_id, to_id), options, with_mirrors=mirrors, as_json=as_json)


def run_verification(
    tables: Sequence[str], wanted: Range, options: Mapping[str, Any], *, with_mirrors: bool, as_json: bool
) -> None:
    """Verify some tables or all, print the reports, and end the command with its exit code."""
    context = click.get_current_context()
    is_one = len(tables) == 1
    try:
        with readable_errors():
            if wanted != Range() and not is_one:
                raise SettingsError("--from and --to are snapshots of one table: name it")
            opened = opened_session(options, job_kind=JobKind.LONG, app_name="lakefeed verify")
            with opened as spark, _steps() as on_step:
                reports = verify_all(spark, tables, wanted, options, with_mirrors=with_mirrors, on_step=on_step)
    except click.UsageError:
        raise
    except click.ClickException as error:
        error.show()
        context.exit(NOT_VERIFIED)
    if as_json:
        documents = [report_document(report) for report in reports]
        print_json(documents[0] if is_one else documents)
    else:
        click.echo("\n".join(line for report in reports for line in report_lines(report)))
    if not all(report.is_sound for report in reports):
        context.exit(DIFFERENT)


def verify_all(
    spark: SparkSession,
    tables: Sequence[str],
    wanted: Range,
    options: Mapping[str, Any],
    *,
    with_mirrors: bool = True,
    on_step: Callable[[str], object] = lambda _: None,
) -> list[Report]:
    """Verify tables one after the other, and their mirrors unless only a part of a table's history is wanted.

    Raises: PipelineError, WriterError; Spark's error for a table that does not exist.
    """
    from lakefeed.pipeline.verification.mirrors import compare_mirror  # noqa: PLC0415 - Spark is optional
    from lakefeed.pipeline.verification.scan import verify_table  # noqa: PLC0415

    catalog = catalog_of(spark)
    reports = []
    for name in [TableIdentifier.parse(table) for table in tables] or change_tables(spark, catalog):
        on_step(f"verifying {name}")
        report = verify_table(spark, name, catalog, wanted, on_step=on_step)
        if with_mirrors and wanted == Range():
            on_step(f"comparing the mirror of {name}")
            compare_mirror(spark, name, catalog, report=report, options=options)
        reports.append(report)
    return reports


@contextmanager
def _steps() -> Iterator[Callable[[str], object]]:
    """Show the current step on a terminal; show nothing elsewhere."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _: None
        return
    with console.status("starting") as status:
        yield status.update
