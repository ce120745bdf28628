"""Settings of Spark as text to paste: into a file, onto a command line, into a program. Owns the three forms."""

from __future__ import annotations

import enum
import json
import shlex
from collections.abc import Mapping

_HIDDEN = "(hidden)"
_SECRET_ENDS = (".token", "secret-access-key", "session-token", "secret.key", "session.token")


class Form(enum.Enum):
    """Where the text goes."""

    PROPERTIES = "properties"
    ARGS = "args"
    PYTHON = "python"


def paste(conf: Mapping[str, str], form: Form) -> str:
    """Write settings for spark-defaults.conf, for a command line, or for a Python program."""
    match form:
        case Form.PROPERTIES:
            return "\n".join(f"{key} {value}" for key, value in conf.items())
        case Form.ARGS:
            # On one line, so that it can also stand in a command as $(lakefeed spark conf --format args).
            return " ".join(f"--conf {shlex.quote(f'{key}={value}')}" for key, value in conf.items())
        case Form.PYTHON:
            return _as_python(conf)


def _as_python(conf: Mapping[str, str]) -> str:
    settings = (f'    .config("{key}", {json.dumps(value)})' for key, value in conf.items())
    lines = ("from pyspark.sql import SparkSession", "", "spark = (", "    SparkSession.builder")
    return "\n".join([*lines, *settings, "    .getOrCreate()", ")"])


def hide_secrets(conf: Mapping[str, str]) -> dict[str, str]:
    """Put a placeholder where a token or key stands."""
    return {key: _HIDDEN if key.endswith(_SECRET_ENDS) else value for key, value in conf.items()}
