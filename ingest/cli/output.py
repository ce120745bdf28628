"""Errors as the command line shows them. Owns which of them a user can act on: those are one line, without a traceback.

A wrong setting is a wrong use of the command (click's exit code 2), everything else that was foreseen is a failure (1).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import click

from lakefeed.contract.errors import LakefeedError
from lakefeed.settings import SettingsError


@contextmanager
def readable_errors() -> Iterator[None]:
    """Show errors that a user can act on without a traceback."""
    try:
        yield
    except SettingsError as error:
        raise click.UsageError(str(error)) from error
    except LakefeedError as error:
        raise click.ClickException(str(error)) from error
    except PermissionError as error:
        raise click.ClickException(f"no permission, run as the service's user: {error}") from error
