"""`lakefeed spark`: run SQL on the catalog's tables, open a Python shell, print the settings for another Spark."""

from __future__ import annotations

import code
import csv
import enum
import json
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import click

from lakefeed.command_line import print_table
from lakefeed.pipeline.spark.options import opened_session, session_config, spark_options
from lakefeed.pipeline.spark.runtime import KNOWN, installed_version_or_default
from lakefeed.pipeline.spark.session import VARIABLES, JobKind, portable_conf
from lakefeed.settings import SettingsError


class ResultFormat(enum.Enum):
    """How `spark sql` prints a result."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"


class ConfFormat(enum.Enum):
    """What `spark conf` prints its settings for: spark-defaults.conf, a command line, a Python program."""

    PROPERTIES = "properties"
    ARGS = "args"
    PYTHON = "python"


# More rows than anyone reads on a terminal; --rows 0 prints all.
SHOWN_MAX_ROWS = 1_000

# What may contain a semicolon that ends no statement: quoted texts with their escapes, quoted names, comments.
_TOKEN = re.compile(
    r"""(?P<quoted>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|`[^`]*`)"""
    r"""|(?P<comment>--[^\n]*|/\*.*?\*/)"""
    r"""|(?P<open>'|"|`|/\*)"""
    r"""|(?P<end>;)""",
    re.DOTALL,
)

_HIDDEN = "(hidden)"
_SECRET_SUFFIXES = (".token", "secret-access-key", "session-token", "secret.key", "session.token")


@click.group()
def spark() -> None:
    """Use a Spark that is connected to the catalog, or print the settings that connect another one."""


# -- sql and shell


@spark.command()
@click.option("-e", "--execute", "queries", multiple=True, help="Statements to run; can be repeated.")
@click.option("-f", "--file", type=click.File("r"), help="File of statements to run; - is standard input.")
@click.option(
    "--format",
    "form",
    type=click.Choice([form.value for form in ResultFormat]),
    default="table",
    show_default=True,
    help="How results are printed.",
)
@click.option(
    "--rows",
    "max_rows",
    default=SHOWN_MAX_ROWS,
    show_default=True,
    type=click.IntRange(min=0),
    help="Maximum number of rows printed per result; 0 prints all.",
)
@spark_options
def sql(queries: tuple[str, ...], *, file: Any, form: str, max_rows: int, **options: Any) -> None:
    """Run SQL on the catalog's tables, from -e, from -f or from standard input.

    For an interactive session use `lakefeed spark shell`, or spark-sql with the settings of `lakefeed spark conf`.

    \b
      lakefeed spark sql -e 'SELECT count(*) FROM default.users'
      lakefeed spark sql -e 'SHOW TABLES IN default' --format json
      lakefeed spark sql < report.sql
    """
    texts = [*queries, *([file.read()] if file else [])]
    if not texts and not sys.stdin.isatty():
        texts = [sys.stdin.read()]
    statements = [statement for text in texts for statement in split_statements(text)]
    if not statements:
        raise SettingsError(
            "no statements: use -e or -f, or for a prompt run: spark-sql $(lakefeed spark conf --format args)"
        )
    with opened_session(options, job_kind=JobKind.SHORT, app_name="lakefeed spark sql") as session:
        for statement in statements:
            result = session.sql(statement)
            rows = result.take(max_rows + 1) if max_rows else result.collect()
            shown = rows[:max_rows] if max_rows else rows
            _print_rows(result.columns, [row.asDict(recursive=True) for row in shown], ResultFormat(form))
            if len(rows) > len(shown):
                click.echo(f"({len(shown):,} rows shown, there are more: --rows 0 prints all)", err=True)


def split_statements(text: str) -> list[str]:
    """Split a text at the semicolons that end a statement, and leave out statements that are only comments."""
    statements, start = [], 0
    for match in _TOKEN.finditer(text):
        if match["open"]:
            break  # an unclosed quote or comment: Spark reports it
        if match["end"]:
            statements.append(text[start : match.start()].strip())
            start = match.end()
    statements.append(text[start:].strip())
    return [each for each in statements if _TOKEN.sub(lambda found: "" if found["comment"] else found[0], each).strip()]


def _print_rows(columns: Sequence[str], rows: Sequence[dict[str, Any]], form: ResultFormat) -> None:
    if not columns:
        return
    match form:
        case ResultFormat.JSON:
            for row in rows:
                click.echo(json.dumps(row, default=_as_text, ensure_ascii=False))
        case ResultFormat.CSV:
            writer = csv.writer(sys.stdout, lineterminator="\n")
            writer.writerow(columns)
            writer.writerows([_as_text(value) for value in row.values()] for row in rows)
        case ResultFormat.TABLE:
            print_table([{name: _as_text(value) for name, value in row.items()} for row in rows], columns)


def _as_text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bytes | bytearray):
        return value.hex()
    return json.dumps(value, default=str, ensure_ascii=False) if isinstance(value, dict | list) else str(value)


@spark.command()
@spark_options
def shell(**options: Any) -> None:
    """Open a Python prompt with `spark`, a session on the catalog.

    \b
      lakefeed spark shell
      >>> spark.table("default.users").show()
    """
    with opened_session(options, job_kind=JobKind.SHORT, app_name="lakefeed spark shell") as session:
        banner = f"Spark {session.version} as `spark`; tables are spark.table('namespace.name')"
        code.interact(banner=banner, local={"spark": session}, exitmsg="")


# -- conf


@spark.command()
@click.option(
    "--format",
    "form",
    type=click.Choice([form.value for form in ConfFormat]),
    default="properties",
    show_default=True,
    help="For spark-defaults.conf, for the command line of spark-submit or spark-sql, or for a Python program.",
)
@click.option("--spark-version", type=click.Choice(list(KNOWN)), help="Spark of the cluster  [the one installed here]")
@click.option("--s3", is_flag=True, help="Add what Spark needs for s3://  [if the settings name an S3 store]")
@click.option("--show-secrets", is_flag=True, help="Print token and keys as well.")
@spark_options
def conf(form: str, *, spark_version: str | None, s3: bool, show_secrets: bool, **options: Any) -> None:
    """Print the settings that connect any Spark to the catalog.

    They name the Iceberg runtime by its Maven coordinates, so that Spark downloads it.

    \b
      lakefeed spark conf >> $SPARK_HOME/conf/spark-defaults.conf
      spark-sql $(lakefeed spark conf --format args)
    """
    config = session_config(options)
    version = KNOWN[spark_version] if spark_version else installed_version_or_default()
    wanted = [version.iceberg_package]
    if s3 or f"spark.sql.catalog.{config.catalog_name}.s3.endpoint" in config.conf:
        wanted += [version.aws_package, version.s3a_package]
    named = {package.rpartition(":")[0] for package in config.packages}
    ours = [package for package in wanted if package.rpartition(":")[0] not in named]
    settings = portable_conf(config, jars=config.other_jars, packages=(*ours, *config.packages))
    if VARIABLES not in config.conf:
        del settings[VARIABLES]  # users may have variables in their own SQL
    if not show_secrets:
        settings = {key: _HIDDEN if key.endswith(_SECRET_SUFFIXES) else value for key, value in settings.items()}
    click.echo(format_conf(settings, ConfFormat(form)))


def format_conf(settings: Mapping[str, str], form: ConfFormat) -> str:
    """Render settings of Spark for one of their uses."""
    match form:
        case ConfFormat.PROPERTIES:
            return "\n".join(f"{key} {value}" for key, value in settings.items())
        case ConfFormat.ARGS:
            # On one line, for use in a command as $(lakefeed spark conf --format args).
            return " ".join(f"--conf {shlex.quote(f'{key}={value}')}" for key, value in settings.items())
        case ConfFormat.PYTHON:
            calls = (f'    .config("{key}", {json.dumps(value)})' for key, value in settings.items())
            head = ("from pyspark.sql import SparkSession", "", "spark = (", "    SparkSession.builder")
            return "\n".join([*head, *calls, "    .getOrCreate()", ")"])
