"""`lakefeed spark`: Spark that is already connected to the catalog. Owns what is printed and opened."""

from __future__ import annotations

import code
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from pipeline import pasted_conf, sql_shell
from pipeline.config import JobKind, SessionConfig
from pipeline.errors import SparkUnavailable
from pipeline.options import opened_session, session_config, spark_options
from pipeline.spark_conf import VARIABLES, session_conf
from pipeline.spark_versions import KNOWN, SPARK_3_5, SparkVersion, installed_version
from pipeline.sql_text import split_statements


@click.group()
def spark() -> None:
    """Open a Spark that is connected to the catalog, or print the settings that connect one."""


@spark.command()
@click.option(
    "--format",
    "form",
    type=click.Choice([form.value for form in pasted_conf.Form]),
    default="properties",
    show_default=True,
    help="For spark-defaults.conf, for the command line of spark-submit or spark-sql, or for a Python program.",
)
@click.option("--spark-version", type=click.Choice(list(KNOWN)), help="Spark of the cluster  [the one installed here]")
@click.option("--s3", is_flag=True, help="Add what Spark needs for s3://  [where the settings name an S3 store]")
@click.option("--show-secrets", is_flag=True, help="Print token and keys, too.")
@spark_options
def conf(form: str, *, spark_version: str | None, s3: bool, show_secrets: bool, **options: Any) -> None:
    """Print the settings that connect any Spark to the catalog.

    They name the Iceberg runtime by its Maven coordinates, so that Spark downloads it.

    \b
      lakefeed spark conf >> $SPARK_HOME/conf/spark-defaults.conf
      spark-sql $(lakefeed spark conf --format args)
    """
    config = session_config(options, job_kind=JobKind.LONG)
    version = KNOWN[spark_version] if spark_version else _version_here()
    wanted = _packages(config, version, s3=s3 or "s3.endpoint" in config.catalog.properties)
    settings = session_conf(
        replace(config, master="", remote="", packages=wanted), jars=config.extra_jars, scratch_dir=Path()
    )
    del settings["spark.app.name"]  # each program has a name of its own
    if VARIABLES not in config.extra_conf:
        del settings[VARIABLES]  # what people write for their own Spark may have variables
    shown = settings if show_secrets else pasted_conf.hide_secrets(settings)
    click.echo(pasted_conf.paste(shown, pasted_conf.Form(form)))


def _version_here() -> SparkVersion:
    try:
        return installed_version()
    except SparkUnavailable:
        return SPARK_3_5


def _packages(config: SessionConfig, version: SparkVersion, *, s3: bool) -> tuple[str, ...]:
    ours = [version.iceberg_package, *([version.aws_package, version.s3a_package] if s3 else [])]
    named = {package.rpartition(":")[0] for package in config.packages}
    return (*(package for package in ours if package.rpartition(":")[0] not in named), *config.packages)


@spark.command()
@click.option("-e", "--execute", "queries", multiple=True, help="Run this and end; can be repeated.")
@click.option("-f", "--file", type=click.File("r"), help="Run the statements of a file (- for standard input) and end.")
@click.option(
    "--format",
    "form",
    type=click.Choice([form.value for form in sql_shell.Form]),
    default="table",
    show_default=True,
    help="How results are printed.",
)
@click.option(
    "--rows",
    "max_rows",
    default=sql_shell.SHOWN_MAX_ROWS,
    show_default=True,
    type=click.IntRange(min=0),
    help="Rows printed of one result; 0 prints all.",
)
@spark_options
def sql(queries: tuple[str, ...], *, file: Any, form: str, max_rows: int, **options: Any) -> None:
    """Run SQL on the catalog's tables: what -e and -f give, or what is typed.

    \b
      lakefeed spark sql
      lakefeed spark sql -e 'SELECT count(*) FROM default.users'
      lakefeed spark sql -e 'SHOW TABLES IN default' --format json
    """
    texts = [*queries, *([file.read()] if file else [])]
    if not texts and not sys.stdin.isatty():
        texts = [sys.stdin.read()]
    with opened_session(options, job_kind=JobKind.SHORT, app_name="lakefeed spark sql") as session:
        if not texts:
            sql_shell.interact(session, form=sql_shell.Form(form), max_rows=max_rows)
        for text in texts:
            finished, last = split_statements(text)
            for statement in [*finished, *filter(None, [last])]:
                sql_shell.run_statement(session, statement, form=sql_shell.Form(form), max_rows=max_rows)


@spark.command()
@spark_options
def shell(**options: Any) -> None:
    """Open a Python prompt with `spark`, a session on the catalog.

    \b
      lakefeed spark shell
      >>> spark.table("default.users").show()
    """
    with opened_session(options, job_kind=JobKind.SHORT, app_name="lakefeed spark shell") as session:
        banner = f"Spark {session.version} as `spark`, the catalog's tables as spark.table('namespace.name')"
        code.interact(banner=banner, local={"spark": session}, exitmsg="")
