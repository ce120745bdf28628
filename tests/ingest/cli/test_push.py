"""The pushing client: what a line becomes, and a push against the whole service."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from dataclasses import replace

import pytest

from lakefeed.ingest.cli.push import BATCH_MAX_CHANGES, PushReport, PushRequest, push_lines, read_line
from lakefeed.ingest.errors import PushError
from lakefeed.ingest.service import Addresses, serving
from tests.clients import open_duckdb
from tests.ingest.conftest import small_config


def read(line: str | bytes, *, table: str | None = "users", key: str = "id") -> dict:
    """What the server would see of the line."""
    raw = line.encode() if isinstance(line, str) else line
    return json.loads(bytes(read_line(raw, 7, table=table, key=key)))


def image(line: str, name: str = "after") -> str:
    """The text of an image as it is sent."""
    sent = bytes(read_line(line.encode(), 7, table="users", key="id")).decode()
    return sent[sent.index(f'"{name}":') + len(name) + 3 :]


# -- lines


def test_row_becomes_an_insert_numbered_by_its_line():
    event = read('{"id": 1, "name": "Ada"}\n')
    assert event["timestamp"] > 1_700_000_000_000
    del event["timestamp"]
    assert event == {
        "operation": "INSERT",
        "sequence": 7,
        "table": "users",
        "rowId": "1",
        "after": {"id": 1, "name": "Ada"},
    }


def test_change_keeps_its_fields_but_gets_the_lines_number():
    change = {
        "operation": "UPDATE",
        "sequence": 999,
        "timestamp": 1_763_251_200_000,
        "table": "orders",
        "rowId": "r-9",
        "before": {"id": 9, "total": 1},
        "after": {"id": 9, "total": 2},
        "unchanged": ["photo"],
    }
    assert read(json.dumps(change)) == change | {"sequence": 7}


def test_delete_takes_its_key_from_the_image_before():
    event = read('{"operation": "DELETE", "before": {"id": 5}, "after": null, "table": "t"}')
    assert (event["operation"], event["rowId"], event["before"]) == ("DELETE", "5", {"id": 5})


@pytest.mark.parametrize(
    "line",
    [
        '{"operation": "INSERT", "amount": 5}',
        '{"operation": "appendectomy", "after": "lunch"}',
        '{"after": {"id": 1}}',
        '{"operation": ["INSERT"], "after": 1}',
    ],
)
def test_row_that_only_looks_like_a_change_is_a_row(line):
    event = read(line)
    assert (event["operation"], event["after"]) == ("INSERT", json.loads(line))


@pytest.mark.parametrize(
    ("row", "row_id"),
    [
        ('{"id": "u-1"}', "u-1"),
        ('{"id": "\\u00fc"}', "ü"),
        ('{"id": 12345678901234567890123}', "12345678901234567890123"),
        ('{"id": 1.50}', "1.50"),
        ('{"id": true}', "true"),
        ('{"id": null}', ""),
        ("{}", ""),
    ],
)
def test_key_becomes_the_row_id(row, row_id):
    assert read(row)["rowId"] == row_id


def test_key_column_can_be_chosen():
    assert read('{"id": 1, "code": "x"}', key="code")["rowId"] == "x"


@pytest.mark.parametrize("number", ["12345678901234567890123", "0.12345678901234567890123", "1.10", "1e400", "-0"])
def test_numbers_are_sent_digit_for_digit(number):
    assert image(f'{{"n": {number}}}') == f'{{"n": {number}}}}}'
    assert image(f'{{"operation": "INSERT", "after": {{"n": {number}}}}}') == f'{{"n": {number}}}}}'


def test_tables_of_lines_beat_the_option():
    assert read('{"operation": "INSERT", "after": {}, "table": "orders"}')["table"] == "orders"
    assert read('{"operation": "INSERT", "after": {}}')["table"] == "users"
    assert read('{"table": "a column", "id": 1}')["table"] == "users"


@pytest.mark.parametrize(
    ("line", "table", "words"),
    [
        ("{", "users", "not valid JSON: line=7"),
        ("", "users", "not valid JSON: line=7"),
        ("[1]", "users", "expected a JSON object: line=7"),
        ("5", "users", "expected a JSON object: line=7"),
        ('{"id": NaN}', "users", "not valid JSON: line=7"),
        ('{"id": 1}', None, "no table: give --table, or a `table` in the change: line=7"),
    ],
)
def test_line_that_cannot_be_sent_is_named(line, table, words):
    with pytest.raises(PushError) as caught:
        read(line, table=table)
    assert str(caught.value).startswith(words)


# -- against the service


def rows(count: int) -> list[bytes]:
    return [b'{"id": %d, "name": "row %d"}\n' % (number, number) for number in range(1, count + 1)]


async def send(service: Addresses, lines: Iterable[bytes], **fields: object) -> PushReport:
    request = PushRequest(**{"url": service.ws_url, "source": "file", "table": "users", "key": "id", **fields})
    return await push_lines(request, lines, lambda changes, input_bytes: None)


async def count_of(service: Addresses, table: str) -> tuple:
    def query() -> tuple:
        with open_duckdb(service.http_url) as connection:
            sql = f"SELECT count(*), count(DISTINCT _cdc_sequence), max(id) FROM lake.default.{table}"
            return connection.execute(sql).fetchone()

    return await asyncio.to_thread(query)


async def test_push_ends_with_every_line_committed_and_progress_told(service):
    count = 2 * BATCH_MAX_CHANGES + 10
    told = []
    request = PushRequest(service.ws_url, source="file", table="users", key="id")
    report = await push_lines(request, rows(count), lambda changes, input_bytes: told.append((changes, input_bytes)))
    assert (report.acked, report.duplicates, report.skipped) == (count, 0, 0)
    assert report.committed
    assert report.tables["default.users"]["rows"] == count
    assert [changes for changes, _ in told] == [BATCH_MAX_CHANGES, BATCH_MAX_CHANGES, 10]
    assert sum(input_bytes for _, input_bytes in told) == sum(map(len, rows(count)))
    assert await count_of(service, "users") == (count, count, count)


async def test_push_that_is_repeated_sends_only_new_lines(service):
    await send(service, rows(10))
    report = await send(service, rows(15))
    assert (report.acked, report.skipped, report.duplicates) == (5, 10, 0)
    assert await count_of(service, "users") == (15, 15, 15)


async def test_push_under_another_name_sends_everything(service):
    await send(service, rows(3))
    assert (await send(service, rows(3), source="again")).acked == 3


async def test_empty_lines_are_skipped(service):
    report = await send(service, [b"\n", *rows(2), b"  \n"])
    assert (report.acked, report.skipped) == (2, 2)


async def test_push_without_flush_is_durable_and_not_waited_for(service):
    report = await send(service, rows(2), flush=False)
    assert (report.acked, report.committed, report.tables) == (2, False, {})


async def test_refusal_is_shown_with_its_reason(service):
    with pytest.raises(PushError, match=r"refused: events\[0\].table: .* \(reason: invalid_format\)"):
        await send(service, rows(1), table="a/b")


async def test_line_too_large_for_a_frame_is_an_error_not_a_hang(tmp_path):
    config = small_config(tmp_path)
    async with serving(config) as service:
        line = b'{"blob": "%s"}' % (b"x" * 2 * config.ingest.frame_max_bytes)
        with pytest.raises(PushError, match="the service closed the connection"):
            await send(service, [line])


@pytest.mark.parametrize("url", ["ws://127.0.0.1:1/ws", "nonsense", "http://127.0.0.1:1", "ws://"])
async def test_service_that_cannot_be_reached_is_an_error_with_its_address(url):
    with pytest.raises(PushError, match="cannot reach the service: url="):
        await push_lines(PushRequest(url, source="s", table="t", key="id"), [], lambda changes, input_bytes: None)


async def test_batches_that_are_refused_for_now_are_sent_again_until_they_are_taken(tmp_path):
    config = small_config(tmp_path)
    slow = replace(config, ingest=replace(config.ingest, message_rate_per_s=20.0, message_burst=2))
    async with serving(slow) as service:
        count = 5 * BATCH_MAX_CHANGES
        report = await send(service, rows(count))
        assert (report.acked, report.duplicates, report.committed) == (count, 0, True)
        assert await count_of(service, "users") == (count, count, count)
