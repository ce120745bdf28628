"""How the pipeline's log lines look: JSON for machines, `event key=value` on a terminal. Owns the format.

Standard library only: on a cluster the driver has little else.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

# Attributes that every LogRecord has; what is left in its __dict__ came from `extra` and is the event's fields.
_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


class LineFormatter(logging.Formatter):
    """One line per event, and the traceback where there is one."""

    def __init__(self, *, as_json: bool) -> None:
        super().__init__()
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        """Render one record."""
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        level = record.levelname.lower()
        fields = {key: value for key, value in record.__dict__.items() if key not in _STANDARD}
        trace = self.formatException(record.exc_info) if record.exc_info and record.exc_info[0] else ""
        if self._as_json:
            line: dict[str, Any] = {"time": time, "level": level, "logger": record.name, "event": record.getMessage()}
            return json.dumps(line | fields | ({"traceback": trace} if trace else {}), default=str)
        shown = " ".join(f"{key}={value}" for key, value in fields.items())
        return f"{time[11:19]} {level:7} {record.getMessage()} {shown}".rstrip() + (f"\n{trace}" if trace else "")


def set_up_logging(level: str) -> None:
    """Send all log lines to standard error, in the form that fits it."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(as_json=not sys.stderr.isatty()))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
