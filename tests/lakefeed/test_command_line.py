"""Errors that a user can act on are one line; unexpected ones keep their traceback."""

from __future__ import annotations

import click
import pytest

from lakefeed.command_line import readable_errors
from lakefeed.contract.errors import WriterError
from lakefeed.ingest.errors import PushError
from lakefeed.settings import SettingsError


@pytest.mark.parametrize(
    ("error", "shown", "exit_code"),
    [
        (SettingsError("unknown setting: key=a.b"), "unknown setting: key=a.b", 2),
        (PushError("refused"), "refused", 1),
        (WriterError("log is damaged"), "log is damaged", 1),
        (PermissionError(13, "Permission denied"), "permission denied, run this as the service's user: ", 1),
    ],
)
def test_foreseen_error_is_one_line_with_an_exit_code(error, shown, exit_code):
    with pytest.raises(click.ClickException) as caught, readable_errors():
        raise error
    assert caught.value.message.startswith(shown)
    assert caught.value.exit_code == exit_code


def test_unexpected_error_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError), readable_errors():
        raise ZeroDivisionError
