"""Runs SQL that people type and shows what comes back. Owns the prompt and the forms of a result."""

from __future__ import annotations

import contextlib
import csv
import enum
import json
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table

from pipeline.spark_errors import is_spark_error, message_of
from pipeline.sql_text import split_statements

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

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
