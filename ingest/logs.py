"""How log lines look: JSON for machines, `event key=value` on a terminal. Owns the format, not the events."""

from __future__ import annotations

import logging
import sys
import traceback
from datetime import UTC, datetime
from typing import Any

import orjson

# Attributes that every LogRecord has; what is left in its __dict__ came from `extra` and is the event's fields.
_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, logger, event, fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Render one record."""
        line: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info and record.exc_info[0] is not None:
            line["traceback"] = "".join(traceback.format_exception(*record.exc_info))
        return _to_json(line)


class TerminalFormatter(logging.Formatter):
    """The same for a person: time, level, event, fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Render one record."""
        fields = " ".join(f"{key}={value}" for key, value in _fields(record).items())
        line = f"{_time(record)[11:19]} {record.levelname.lower():7} {record.getMessage()} {fields}".rstrip()
        if record.exc_info and record.exc_info[0] is not None:
            line += "\n" + "".join(traceback.format_exception(*record.exc_info)).rstrip()
        return line


def set_up_logging(level: str) -> None:
    """Send all log lines to standard error, in the form that fits it."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(TerminalFormatter() if sys.stderr.isatty() else JsonFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # Their `info` is a line per request or connection, which is a line per change for small batches.
    for name in ("websockets", "aiohttp.access", "botocore", "aiobotocore"):
        logging.getLogger(name).setLevel(logging.WARNING)


def _to_json(line: dict[str, Any]) -> str:
    try:
        return orjson.dumps(line, default=str, option=orjson.OPT_NON_STR_KEYS).decode()
    except TypeError:  # text that is no text, or a number beyond 64 bits: every value as text, but shown
        return orjson.dumps({key: _as_text(value) for key, value in line.items()}).decode()


def _as_text(value: Any) -> str:
    return str(value).encode("ascii", "backslashreplace").decode()


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return {key: value for key, value in record.__dict__.items() if key not in _STANDARD}


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
