"""`lakefeed backfill`: options, progress, and what is printed."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lakefeed.command_line import json_option, print_json, progress_bar
from lakefeed.pipeline.backfill.inputs import (
    FILE_FORMATS,
    BackfillConfig,
    FileInput,
    Input,
    JdbcInput,
    parse_position,
    position_text,
)
from lakefeed.pipeline.spark.options import opened_session, parse_pairs, spark_options
from lakefeed.pipeline.spark.session import JobKind
from lakefeed.pipeline.spark.tables import TableIdentifier, catalog_of
from lakefeed.settings import SettingsError, load_section

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from lakefeed.pipeline.backfill.runner import BackfillRequest, BackfillResult, PreparedRun
    from lakefeed.pipeline.backfill.target import TargetTable


JDBC = "jdbc"
PASSWORD_VARIABLE = "LAKEFEED_JDBC_PASSWORD"  # noqa: S105 - the name of a variable, not what is in it

# Maximum number of chunks that a plan prints.
SHOWN_MAX = 20


@click.command()
@click.argument("table")
@click.argument("address", metavar="PATH|URL")
@click.option("--from", "kind", required=True, type=click.Choice([*FILE_FORMATS, JDBC]), help="Format of the input.")
@click.option("--source", required=True, help="Source whose changes the table gets, now or later.")
@click.option("--key", "keys", multiple=True, required=True, help="Key column; can be repeated.")
@click.option(
    "--position",
    metavar="mark|start|EPOCH:SEQUENCE",
    help="Position of the rows: earlier changes lose against them, later ones win  [jdbc: mark, files: start]",
)
@click.option("--run", help="Name of the run, to resume it or to start another  [by source, table and input]")
@click.option("--option", "reader_options", multiple=True, metavar="NAME=VALUE", help="Option of Spark's reader.")
@click.option("--schema", "schema_ddl", help="csv, jsonl: types of the columns, as `id BIGINT, name STRING`.")
@click.option("--dbtable", help="jdbc: the table, or a query in brackets.")
@click.option("--user", help="jdbc: user of the database.")
@click.option(
    "--password", envvar=PASSWORD_VARIABLE, show_envvar=True, help="jdbc: password; better set as a variable."
)
@click.option("--driver", help="jdbc: class of the driver, if it is not known by the URL.")
@click.option("--split-by", help="jdbc: integer column that divides the table into chunks  [--key, if it is one]")
@click.option("--chunk-rows", type=int, help="jdbc: maximum rows of a chunk  [pipeline.backfill.chunk_max_rows]")
@click.option("--ledger/--no-ledger", default=None, help="Record the rows for `lakefeed verify`.")
@click.option("--dry-run", is_flag=True, help="Print the plan and change nothing.")
@json_option
@spark_options
def backfill(table: str, *, address: str, dry_run: bool, as_json: bool, **options: Any) -> None:
    """Fill TABLE with existing rows: from files under PATH, or from a table of the database at URL.

    Each row becomes a change with the operation READ, as of a position of the source: later changes win over it, also
    while the backfill runs. Rows are committed in chunks. After any failure the same command resumes with the next
    chunk. The table is created if it does not exist.

    \b
      lakefeed backfill sales.orders s3a://exports/orders/ --from parquet --source shop --key id
      lakefeed backfill sales.orders orders.csv --from csv --schema "id BIGINT, total DECIMAL(18, 2)" \\
          --source shop --key id --position 0:4711
      lakefeed backfill sales.orders jdbc:postgresql://db/shop --from jdbc --dbtable public.orders --user reader \\
          --source shop --key id --packages org.postgresql:postgresql:42.7.8
    """
    config = load_section(options["config_path"], os.environ, "pipeline.backfill", BackfillConfig)
    limits = {"chunk_max_rows": options["chunk_rows"], "ledger": options["ledger"]}
    try:
        config = replace(config, **{name: value for name, value in limits.items() if value is not None})
    except ValueError as error:
        raise SettingsError(str(error)) from error
    position = parse_position(options["position"] or ("mark" if options["kind"] == JDBC else "start"))
    with opened_session(options, job_kind=JobKind.LONG, app_name=f"lakefeed backfill {table}") as spark:
        from lakefeed.pipeline.backfill.runner import Backfill, BackfillRequest  # noqa: PLC0415 - optional, as all of Spark
        from lakefeed.pipeline.backfill.target import TargetTable  # noqa: PLC0415

        target = TargetTable(spark, catalog_of(spark), TableIdentifier.parse(table))
        request = BackfillRequest(
            source=options["source"], key=options["keys"], position=position, run=options["run"] or "", config=config
        )
        source_input = make_input(spark, address, options)
        if dry_run:
            _show_plan(target, Backfill(target, source_input, request).prepare(), request, as_json=as_json)
            return
        rows = 0
        with progress_bar("planning", keep=True, hidden=as_json) as bar:

            def advance(_number: int, new_rows: int) -> None:
                nonlocal rows
                rows += new_rows
                bar.advance(description=f"{rows:,} rows")

            work = Backfill(target, source_input, request, on_chunk=advance)
            prepared = work.prepare()
            bar.set_total(len(prepared.plan.chunks))
            outcome = work.run(prepared)
    _show_outcome(table, outcome, as_json=as_json)


def make_input(spark: SparkSession, address: str, options: dict[str, Any]) -> Input:
    """Build the input from the command's options. Raise SettingsError if they do not fit together."""
    reader_options = parse_pairs(options["reader_options"], rule="--option must be NAME=VALUE")
    is_jdbc = options["kind"] == JDBC
    for name in ("dbtable", "user", "driver", "split_by", "chunk_rows"):
        if options[name] is not None and not is_jdbc:
            raise SettingsError(f"--{name.replace('_', '-')} needs --from jdbc")
    if is_jdbc:
        if not options["dbtable"]:
            raise SettingsError("--from jdbc needs --dbtable")
        if options["schema_ddl"]:
            raise SettingsError("--schema is for csv and jsonl, a database has types of its own")
        keys = options["keys"]
        login = {name: options[name] for name in ("user", "password", "driver") if options[name]}
        return JdbcInput(
            url=address,
            table=options["dbtable"],
            column=options["split_by"] or (keys[0] if len(keys) == 1 else ""),
            must_split=options["split_by"] is not None,
            properties={**login, **reader_options},
        )
    declared = options["schema_ddl"]
    if declared and options["kind"] == "parquet":
        raise SettingsError("--schema is for csv and jsonl, Parquet has types of its own")
    # Spark takes URLs; a path of this machine is made absolute.
    path = address if "://" in address else str(Path(address).absolute())
    return FileInput(
        format=options["kind"],
        path=path,
        options=reader_options,
        declared=_parse_schema(spark, declared) if declared else None,
    )


def _parse_schema(spark: SparkSession, text: str) -> Any:
    try:
        return spark.createDataFrame([], text).schema
    except Exception as error:
        raise SettingsError(f"--schema must be a list of columns and types: {text}") from error


# -- output


def _show_plan(target: TargetTable, prepared: PreparedRun, request: BackfillRequest, *, as_json: bool) -> None:
    mark = None if prepared.is_new_table else target.mark(request.source)
    done = prepared.record.next if prepared.record else 0
    document = {
        "run": prepared.run,
        "table": str(target.name),
        "isNewTable": prepared.is_new_table,
        "changes": list(prepared.fitting.changes),
        "mark": position_text(mark),
        "position": position_text(request.position.resolve(mark)),
        "chunks": [chunk.description for chunk in prepared.plan.chunks],
        "done": done,
    }
    if as_json:
        print_json(document)
        return
    click.echo(f"run {prepared.run}: {len(prepared.plan.chunks):,} chunks, {done:,} done")
    click.echo(f"  table {target.name}{' (new)' if prepared.is_new_table else ''}")
    for change in prepared.fitting.changes:
        click.echo(f"  {change}")
    click.echo(f"  mark of {request.source}: {document['mark']}, rows are as of {document['position']}")
    for chunk in prepared.plan.chunks[:SHOWN_MAX]:
        click.echo(f"  chunk {chunk.number}: {chunk.description}")
    if len(prepared.plan.chunks) > SHOWN_MAX:
        click.echo(f"  and {len(prepared.plan.chunks) - SHOWN_MAX:,} more")


def _show_outcome(table: str, outcome: BackfillResult, *, as_json: bool) -> None:
    if as_json:
        document = {"run": outcome.run, "table": table, "rows": outcome.rows, "chunks": outcome.chunks}
        own = {"newRows": outcome.own_rows, "newChunks": outcome.own_chunks}
        print_json({**document, **own})
    elif not outcome.own_chunks:
        click.echo(f"run {outcome.run} was done already: {outcome.rows:,} rows in {outcome.chunks:,} chunks")
    else:
        click.echo(
            f"committed {outcome.own_rows:,} rows in {outcome.own_chunks:,} chunks to {table};"
            f" run {outcome.run} is done with {outcome.rows:,} rows in {outcome.chunks:,} chunks"
        )
