"""Log lines: one JSON object per event, whatever its fields hold, and the same in plain words on a terminal."""

from __future__ import annotations

import io
import json
import logging
import sys
from pathlib import Path

import pytest

from lakefeed.logs import LineFormatter, set_up_logging

JSON, TERMINAL = LineFormatter(as_json=True), LineFormatter(as_json=False)


def record(message: str = "flush_committed", level: int = logging.INFO, **fields: object) -> logging.LogRecord:
    made = logging.LogRecord("lakefeed.writer.tables.feed", level, "feed.py", 1, message, None, None)
    made.created = 1_763_251_200.25
    made.__dict__.update(fields)
    return made


def failed_record() -> logging.LogRecord:
    try:
        int("broken")
    except ValueError:
        return logging.LogRecord("writer", logging.ERROR, "x.py", 1, "part_failed", None, sys.exc_info())


def test_json_line_has_time_level_logger_event_and_fields():
    line = json.loads(JSON.format(record(table="orders", rows=5000)))
    assert line == {
        "time": "2025-11-16T00:00:00.250+00:00",
        "level": "info",
        "logger": "lakefeed.writer.tables.feed",
        "event": "flush_committed",
        "table": "orders",
        "rows": 5000,
    }


def test_json_line_is_one_line_with_the_traceback_inside():
    text = JSON.format(failed_record())
    assert "\n" not in text
    assert 'int("broken")' in json.loads(text)["traceback"]


@pytest.mark.parametrize("value", [2**70, "caf\udce9", Path("/tmp"), {1: {2}}, {(1, 2): 3}, float("nan"), object()])
def test_line_is_written_for_every_value(value):
    line = json.loads(JSON.format(record(odd=value)))
    assert line["event"] == "flush_committed"
    assert "odd" in line


def test_terminal_line_is_for_people():
    assert TERMINAL.format(record(table="orders", rows=5)) == ("00:00:00 info    flush_committed table=orders rows=5")
    assert TERMINAL.format(failed_record()).endswith("with base 10: 'broken'")


def test_lines_go_to_standard_error_as_json_without_a_terminal(monkeypatch):
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    try:
        set_up_logging("warning")
        logging.getLogger("ingest.test").warning("thing_happened", extra={"table": "orders"})
        logging.getLogger("ingest.test").info("not_shown")
        logging.getLogger("websockets.server").info("connection open")
    finally:
        root.handlers[:] = before
        root.setLevel(level)
    (line,) = stream.getvalue().splitlines()
    assert (json.loads(line)["event"], json.loads(line)["table"]) == ("thing_happened", "orders")
