"""`lakefeed verify`: a table's files against what its snapshots recorded. Owns options and exit codes.

writer/verification does the work, verify_report.py prints; both are imported where they are used. With --spark all of
it is pipeline/verification's.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lakefeed.contract.changes import table_name_of
from lakefeed.ingest.admission.auth import CLIENT_TOKEN_VARIABLE
from lakefeed.ingest.cli.output import readable_errors
from lakefeed.ingest.config import Config, load_config
from lakefeed.pipeline.spark.options import cluster_options
from lakefeed.pipeline.verification.commands import Selection, run_verification
from lakefeed.writer.config import IcebergConfig

if TYPE_CHECKING:
    from lakefeed.contract.verification import Report
    from lakefeed.writer.verify import Range


DEFAULT_URL = "http://127.0.0.1:8181"

# Exit codes, as grep's: found, and could not look.
DIFFERENT = 1
NOT_VERIFIED = 2


@click.command()
@click.argument("table")
@click.option("--from", "after_id", type=int, metavar="SNAPSHOT", help="Only what came after this snapshot.")
@click.option("--to", "to_id", type=int, metavar="SNAPSHOT", help="The table as of this snapshot  [the newest]")
@click.option("--url", "--catalog", "url", help=f"Iceberg REST catalog, before /v1  [iceberg.uri, or {DEFAULT_URL}]")
@click.option(
    "--token",
    default="",
    envvar=CLIENT_TOKEN_VARIABLE,
    show_envvar=True,
    help="Bearer token, where the catalog asks for one.",
)
@click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path),
    help="Settings file, for storage and catalog  [lakefeed.toml if it exists]",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
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
    """Check that TABLE holds exactly the rows that its snapshots recorded: none lost, doubled or changed.

    Every data file is read and counted again, beside a running service. The exit code is 0 if all is as it
    was recorded, 1 if something is not, and 2 if that could not be found out. See docs/verification.md.

    \b
      lakefeed verify default.users
      lakefeed verify default.users --from 8206912839712345678    # only what came since
      lakefeed verify default.users --spark --master spark://host:7077
    """
    selection = Selection(tables=[table], after_id=after_id, to_id=to_id, mirrors=spark_options.pop("mirrors"))
    if spark_options.pop("in_spark"):
        # What is not given comes from [pipeline.spark], as for all commands of the pipeline.
        options = {"url": url, "token": token or None, "config_path": config_path, **spark_options}
        run_verification(selection, options, as_json=as_json)
        return
    if given := [name for name, value in spark_options.items() if value]:
        raise click.UsageError(f"--{given[0].replace('_', '-')} is for verification in Spark: add --spark")
    from lakefeed.ingest.cli.verify_report import print_report  # noqa: PLC0415  (see above)
    from lakefeed.writer.verify import Range  # noqa: PLC0415

    try:
        with readable_errors():
            config = load_config(config_path, os.environ).config
            iceberg = _catalog(config, url=url, token=token)
            report = asyncio.run(_verify(table, config, iceberg, Range(after_id, to_id)))
    except click.UsageError:
        raise
    except click.ClickException as error:
        error.show()
        click.get_current_context().exit(NOT_VERIFIED)
    print_report(report, as_json=as_json)
    if not report.is_sound:
        click.get_current_context().exit(DIFFERENT)


def _catalog(config: Config, *, url: str | None, token: str) -> IcebergConfig:
    iceberg = replace(config.iceberg, uri=url or config.iceberg.uri or DEFAULT_URL)
    return replace(iceberg, token=token, credential="") if token else iceberg


async def _verify(table: str, config: Config, iceberg: IcebergConfig, wanted: Range) -> Report:
    from lakefeed.ingest.cli.verify_report import RowsBar  # noqa: PLC0415  (see above)
    from lakefeed.writer.verify import open_verifier  # noqa: PLC0415

    name = table_name_of(table, config.writer.default_namespace)
    with RowsBar() as bar:
        async with open_verifier(iceberg, name, storage=config.storage, on_rows=bar.advance) as verifier:
            plan = await verifier.plan(wanted)
            bar.set_total(plan.rows)
            return await verifier.run(plan)
