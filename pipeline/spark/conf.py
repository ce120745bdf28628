"""`lakefeed spark`: Spark that is already connected to the catalog. Owns what is printed and opened."""

from __future__ import annotations

import code
import contextlib
import csv
import enum
import json
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table

from lakefeed.pipeline.errors import SparkUnavailable
from lakefeed.pipeline.spark.failures import is_spark_error, message_of
from lakefeed.pipeline.spark.options import opened_session, session_config, spark_options
from lakefeed.pipeline.spark.runtime import KNOWN, SPARK_3_5, SparkVersion, installed_version
from lakefeed.pipeline.spark.session import VARIABLES, session_conf
from lakefeed.pipeline.spark.settings import JobKind, SessionConfig

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


# --- pipeline.sql_text ------------------------------------------------------------------------------------------------
#
# SQL as people type it: several statements in one text. Owns where one ends and the next begins.


# What may hold a semicolon that ends nothing: text in quotes (with its escapes), quoted names, comments.
_TOKEN = re.compile(
    r"""(?P<quoted>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|`[^`]*`)"""
    r"""|(?P<comment>--[^\n]*|/\*.*?\*/)"""
    r"""|(?P<open>'|"|`|/\*)"""
    r"""|(?P<end>;)""",
    re.DOTALL,
)


def split_statements(text: str) -> tuple[list[str], str]:
    """Give the finished statements and what is begun after them."""
    statements, begin = [], 0
    for match in _TOKEN.finditer(text):
        if match["open"]:
            break  # a quote or comment that is not closed yet: nothing after it is known to end
        if match["end"]:
            statements.append(text[begin : match.start()].strip())
            begin = match.end()
    rest = text[begin:].strip()
    return [statement for statement in statements if _says_something(statement)], rest if _says_something(rest) else ""


def _says_something(statement: str) -> bool:
    without_comments = _TOKEN.sub(lambda match: "" if match["comment"] else match[0], statement)
    return bool(without_comments.strip())


# --- pipeline.sql_shell -----------------------------------------------------------------------------------------------
#
# Runs SQL that people type and shows what comes back. Owns the prompt and the forms of a result.


# More rows than anybody reads; whoever wants them all takes --rows 0.
SHOWN_MAX_ROWS = 1_000

_PROMPT, _CONTINUED = "sql> ", "  -> "
_LEAVE = ("exit", "quit")


class Form(enum.Enum):
    """How a result is printed."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"


def run_statement(spark: SparkSession, statement: str, *, form: Form, max_rows: int) -> None:
    """Run one statement and print its rows, `max_rows` of them; 0 prints all."""
    result = spark.sql(statement)
    rows = result.take(max_rows + 1) if max_rows else result.collect()
    shown = [row.asDict(recursive=True) for row in (rows[:max_rows] if max_rows else rows)]
    _print_rows(result.columns, shown, form)
    if len(rows) > len(shown):
        click.echo(f"({len(shown):,} rows shown, there are more: --rows 0 prints all)", err=True)


def interact(spark: SparkSession, *, form: Form, max_rows: int) -> None:
    """Read statements from the terminal until its end; an error is shown and the next one is awaited."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401, PLC0415 - gives input() a history and the arrow keys
    click.echo("end a statement with a semicolon; leave with exit or Ctrl-D", err=True)
    for statement in _typed_statements():
        try:
            run_statement(spark, statement, form=form, max_rows=max_rows)
        except Exception as error:
            if not is_spark_error(error):
                raise
            click.echo(f"Error: {message_of(error)}", err=True)


def _typed_statements() -> Iterator[str]:
    text = ""
    while True:
        try:
            line = input(_CONTINUED if text else _PROMPT)
        except EOFError:
            return
        except KeyboardInterrupt:
            text = ""
            click.echo(err=True)
            continue
        if not text and line.strip().rstrip(";").lower() in _LEAVE:
            return
        statements, text = split_statements(f"{text}\n{line}" if text else line)
        yield from statements


def _print_rows(columns: Sequence[str], rows: Sequence[dict[str, Any]], form: Form) -> None:
    if not columns:
        return
    match form:
        case Form.JSON:
            for row in rows:
                click.echo(json.dumps(row, default=_as_text, ensure_ascii=False))
        case Form.CSV:
            writer = csv.writer(sys.stdout, lineterminator="\n")
            writer.writerow(columns)
            writer.writerows([_as_text(value) for value in row.values()] for row in rows)
        case Form.TABLE:
            _print_table(columns, rows)


def _print_table(columns: Sequence[str], rows: Sequence[dict[str, Any]]) -> None:
    table = Table(*columns)
    for row in rows:
        table.add_row(*(_as_text(value) for value in row.values()))
    Console(width=None if sys.stdout.isatty() else 200, markup=False, highlight=False).print(table)


def _as_text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bytes | bytearray):
        return value.hex()
    return json.dumps(value, default=str, ensure_ascii=False) if isinstance(value, dict | list) else str(value)


# --- pipeline.pasted_conf ---------------------------------------------------------------------------------------------
#
# Settings of Spark as text to paste: into a file, onto a command line, into a program. Owns the three forms.


_HIDDEN = "(hidden)"
_SECRET_ENDS = (".token", "secret-access-key", "session-token", "secret.key", "session.token")


class PastedConfForm(enum.Enum):
    """Where the text goes."""

    PROPERTIES = "properties"
    ARGS = "args"
    PYTHON = "python"


def paste(conf: Mapping[str, str], form: PastedConfForm) -> str:
    """Write settings for spark-defaults.conf, for a command line, or for a Python program."""
    match form:
        case PastedConfForm.PROPERTIES:
            return "\n".join(f"{key} {value}" for key, value in conf.items())
        case PastedConfForm.ARGS:
            # On one line, so that it can also stand in a command as $(lakefeed spark conf --format args).
            return " ".join(f"--conf {shlex.quote(f'{key}={value}')}" for key, value in conf.items())
        case PastedConfForm.PYTHON:
            return _as_python(conf)


def _as_python(conf: Mapping[str, str]) -> str:
    settings = (f'    .config("{key}", {json.dumps(value)})' for key, value in conf.items())
    lines = ("from pyspark.sql import SparkSession", "", "spark = (", "    SparkSession.builder")
    return "\n".join([*lines, *settings, "    .getOrCreate()", ")"])


def hide_secrets(conf: Mapping[str, str]) -> dict[str, str]:
    """Put a placeholder where a token or key stands."""
    return {key: _HIDDEN if key.endswith(_SECRET_ENDS) else value for key, value in conf.items()}


# --- pipeline.spark_commands ------------------------------------------------------------------------------------------


@click.group()
def spark() -> None:
    """Open a Spark that is connected to the catalog, or print the settings that connect one."""


@spark.command()
@click.option(
    "--format",
    "form",
    type=click.Choice([form.value for form in PastedConfForm]),
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
    shown = settings if show_secrets else hide_secrets(settings)
    click.echo(paste(shown, PastedConfForm(form)))


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
    type=click.Choice([form.value for form in Form]),
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
            interact(session, form=Form(form), max_rows=max_rows)
        for text in texts:
            finished, last = split_statements(text)
            for statement in [*finished, *filter(None, [last])]:
                run_statement(session, statement, form=Form(form), max_rows=max_rows)


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
