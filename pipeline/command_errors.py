"""Errors as the pipeline's commands show them. Owns which of them a user can act on: those are one line.

A wrong setting is a wrong use of the command (click's exit code 2), everything else that was foreseen is a failure (1).
Spark's own errors come with pages of Java frames; their first lines say what is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import click

from pipeline.errors import ConfigError, PipelineError
from pipeline.spark_errors import is_spark_error, message_of


@contextmanager
def readable_errors() -> Iterator[None]:
    """Show errors that a user can act on without a traceback."""
    try:
        yield
    except ConfigError as error:
        raise click.UsageError(str(error)) from error
    except PipelineError as error:
        raise click.ClickException(str(error)) from error
    except Exception as error:
        if not is_spark_error(error):
            raise
        raise click.ClickException(f"Spark refused or failed: {message_of(error)}") from error
