"""Command `lakefeed verify`: compare a table's files with what its snapshots recorded.

Without --spark the files are read in this process (writer/verify.py), with it by Spark (pipeline/verification).
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import click

from lakefeed.command_line import json_option, print_json, progress_bar, readable_errors
from lakefeed.contract.verification import Range, Report, report_document, report_lines
from lakefeed.ingest.cli.lake import Lake, lake_options, load_lake
from lakefeed.pipeline.spark.options import cluster_options
from lakefeed.pipeline.verification.commands import run_verification
from lakefeed.storage.store import open_store
from lakefeed.writer.verify import Verifier

# Exit codes, as grep has them: a difference was found; the comparison was not possible.
DIFFERENT = 1
NOT_VERIFIED = 2


@click.command()
@click.argument("table")
@click.option("--from", "after_id", type=int, metavar="SNAPSHOT", help="Check only rows added after this snapshot.")
@click.option("--to", "to_id", type=int, metavar="SNAPSHOT", help="Check the table as of this snapshot  [the newest]")
@lake_options
@json_option
@click.option("--spark", "in_spark", is_flag=True, help="Read the table with Spark, and compare its mirror too.")
@click.option("--mirrors/--no-mirrors", default=True, help="With --spark: compare the mirror  [yes, if there is one]")
@cluster_options
def verify(
    table: str,
    *,
    after_id: int | None,
    to_id: int | None,
    url: str | None,
    token: str,
    config_path: Path | None,
    as_json: bool,
    **spark_options: Any,
) -> None:
    """Check that a table holds exactly the recorded rows.

    Every data file of TABLE is read and its rows are counted and hashed again: none may be lost, duplicated or changed.
    The service may be running. The exit code is 0 if everything is as recorded, 1 if something differs, and 2 if the
    table could not be checked. See docs/verification.md.

    \b
      lakefeed verify default.users
      lakefeed verify default.users --from 8206912839712345678    # only rows added since
      lakefeed verify default.users --spark --master spark://host:7077
    """
    wanted, with_mirrors = Range(after_id, to_id), spark_options.pop("mirrors")
    if spark_options.pop("in_spark"):
        # Options that are not given come from [pipeline.spark], as for all commands of the pipeline.
        options = {"url": url, "token": token or None, "config_path": config_path, **spark_options}
        run_verification([table], wanted, options, with_mirrors=with_mirrors, as_json=as_json)
        return
    if given := [name for name, value in spark_options.items() if value]:
        raise click.UsageError(f"--{given[0].replace('_', '-')} needs --spark")
    try:
        with readable_errors():
            lake = load_lake(config_path, url=url, token=token)
            report = asyncio.run(_verify(table, lake, wanted))
    except click.UsageError:
        raise
    except click.ClickException as error:
        error.show()
        click.get_current_context().exit(NOT_VERIFIED)
    if as_json:
        print_json(report_document(report))
    else:
        click.echo("\n".join(report_lines(report)))
    if not report.is_sound:
        click.get_current_context().exit(DIFFERENT)


async def _verify(table: str, lake: Lake, wanted: Range) -> Report:
    """Verify a table as it is now. Other processes may commit to it meanwhile."""
    name = lake.table_name(table)
    async with lake.open_catalog() as catalog:
        document = await catalog.load_table(name)
    storage = lake.storage_of(document)
    with progress_bar("rows") as bar:
        async with open_store(storage) as store:
            verifier = Verifier(name, document, store, on_rows=bar.advance, storage=storage)
            plan = await verifier.plan(wanted)
            bar.set_total(plan.rows)
            return await verifier.run(plan)
