"""Rows, one a line, wrapped as a batch that the writer can decode."""

from __future__ import annotations

import json

import pytest

from lakefeed.ingest.errors import ProtocolError
from lakefeed.ingest.intake.rows import has_rows, wrap_rows
from lakefeed.writer.wire.json_batch import decode_batch


def wrap(body: bytes, **options: object) -> tuple[bytes, int]:
    return wrap_rows(body, **{"key": "id", "table": "users", "first_sequence": 7, "row_max_bytes": 1_000, **options})


def test_rows_become_inserts_that_are_numbered_on():
    batch, count = wrap(b'{"id": 1}\n\r\n  {"id": "a\\u00e4\\"b"} \r{"name": "no id"}')
    events = decode_batch(batch).events
    assert count == 3
    assert [(event.sequence, event.operation, event.table, event.row_id) for event in events] == [
        (7, "INSERT", "users", "1"),
        (8, "INSERT", "users", 'aä"b'),
        (9, "INSERT", "users", ""),
    ]
    assert [json.loads(bytes(event.after)) for event in events] == [{"id": 1}, {"id": 'aä"b'}, {"name": "no id"}]


@pytest.mark.parametrize("table", ['a"b', "\\", "täble", "a\nb"])
def test_table_of_any_characters_stays_one_string(table):
    (event,) = decode_batch(wrap(b"{}", table=table)[0]).events
    assert event.table == table


@pytest.mark.parametrize("rows_max", [0, 1, 2, 3, 99])
def test_only_the_first_rows_are_wrapped_where_others_are_durable(rows_max):
    batch, count = wrap(b'{"id":1}\n\n{"id":2}\n{"id":3}\n', rows_max=rows_max)
    assert count == min(rows_max, 3)
    assert [event.row_id for event in decode_batch(batch).events] == ["1", "2", "3"][:rows_max]


@pytest.mark.parametrize(("body", "there_are"), [(b"", False), (b" \r\n\t\n", False), (b"\n{}", True), (b"x", True)])
def test_blank_lines_are_no_rows(body, there_are):
    assert has_rows(body) is there_are
    if not there_are:
        assert wrap(body)[1] == 0


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b'{"id":1}\n\r\n\n5', "line 4: expected a JSON object"),
        (b'{"id":1}\r{"id":"\xff"}', "line 2: expected UTF-8"),
        (b'\n{"a": "' + b"x" * 2_000 + b'"}', "line 2: expected at most 1000 bytes, got 2009"),
        (b"{}" + b"\n{}" * 50 + b"{}", "line 51: expected a JSON object"),
    ],
)
def test_bad_row_is_named_by_its_line(body, error):
    with pytest.raises(ProtocolError, match=error):
        wrap(body)


def test_row_that_the_writer_could_not_decode_is_refused():
    deepest = max(depth for depth in range(1, 1_500) if is_accepted(b'{"a":' + b"[" * depth + b"]" * depth + b"}"))
    row = b'{"a":' + b"[" * deepest + b"]" * deepest + b"}"
    assert decode_batch(wrap(row, row_max_bytes=10_000)[0]).events
    assert deepest > 100


def is_accepted(row: bytes) -> bool:
    try:
        return wrap(row, row_max_bytes=10_000)[1] == 1
    except ProtocolError:
        return False
