"""The pushing client: what a line becomes, and a push against the whole service."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Iterable
from dataclasses import replace

import pytest

from lakefeed.ingest.cli.push import (
    BATCH_MAX_CHANGES,
    SEQUENCES_PER_LINE,
    PushReport,
    PushRequest,
    _batches,
    push_file,
    read_change,
)
from lakefeed.ingest.errors import PushError
from lakefeed.ingest.service import Addresses, serving
from tests.clients import open_duckdb
from tests.ingest.conftest import small_config
from tests.ingest.ws_client import connected


def read(line: str | bytes, *, table: str | None = "users", key: str = "id") -> dict:
    """What the server would see of the line."""
    raw = line.encode() if isinstance(line, str) else line
    return json.loads(bytes(read_change(raw, 7, 7, table=table, key=key)))


def image(line: str, name: str = "after") -> str:
    """The text of an image as it is sent."""
    sent = bytes(read_change(line.encode(), 7, 7, table="users", key="id")).decode()
    return sent[sent.index(f'"{name}":') + len(name) + 3 :]


# -- lines


def test_row_becomes_an_insert():
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


def test_change_keeps_its_fields_but_gets_the_sequence_of_its_line():
    change = {
        "operation": "UPDATE",
        "sequence": 999,
        "timestamp": 1_763_251_200_000,
        "table": "orders",
        "rowId": "r-9",
        "before": {"id": 9, "total": 1},
        "after": {"id": 9, "total": 2},
        "unchanged": ["photo"],
        "metadata": {"user": "ada"},
    }
    assert read(json.dumps(change)) == change | {"sequence": 7}


def test_delete_takes_its_key_from_the_image_before():
    event = read('{"operation": "DELETE", "before": {"id": 5}, "after": null, "table": "t"}')
    assert (event["operation"], event["rowId"], event["before"]) == ("DELETE", "5", {"id": 5})


@pytest.mark.parametrize("line", ['{"operation": "INSERT", "amount": 5}', '{"after": {"id": 1}}'])
def test_row_that_only_looks_like_a_change_is_a_row(line):
    event = read(line)
    assert (event["operation"], event["after"]) == ("INSERT", json.loads(line))


@pytest.mark.parametrize("operation", ["insert", "Update", "delete", "READ", "truncate", "MESSAGE"])
def test_operation_may_be_in_lower_case(operation):
    event = read(json.dumps({"operation": operation, "before": {"id": 1}, "after": {"id": 1}}))
    assert event["operation"] == operation.upper()
    assert event["after"] == {"id": 1}


@pytest.mark.parametrize("line", ['{"operation": "delete", "rowId": "5"}', '{"operation": "TRUNCATE", "table": "t"}'])
def test_line_with_no_other_fields_than_those_of_a_change_is_a_change(line):
    event = read(line)
    assert event["operation"] == json.loads(line)["operation"].upper()
    assert "after" not in event


@pytest.mark.parametrize(
    "line",
    [
        '{"operation": "appendectomy", "after": "lunch"}',
        '{"operation": "UPSERT", "before": null, "more": 1}',
        '{"operation": ["INSERT"], "after": 1}',
        '{"operation": null, "after": {}}',
        '{"operation": "c", "rowId": "5"}',
    ],
)
def test_unknown_operation_is_refused_with_its_line(line):
    with pytest.raises(PushError, match=r"^unknown operation: line=7 "):
        read(line)


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


# -- files


def test_file_is_recognised_at_the_position_of_a_line_and_right_below_one():
    """Tables report the latter: everything below a line that waits is committed."""
    request = PushRequest("ws://", source="file", table="users", key="id")
    file = io.BytesIO(b"".join(rows(5)))
    sequences = [sequence for _, sequence, _ in request.numbered(file)]
    assert [request.lines_up_to(sequence, file) for sequence in sequences] == [1, 2, 3, 4, 5]
    assert [request.lines_up_to(sequence - 1, file) for sequence in sequences] == [0, 1, 2, 3, 4]
    assert request.lines_up_to(sequences[4] + 1, file) is None
    assert request.lines_up_to(3, file) is None
    assert replace(request, key="name").lines_up_to(sequences[2], file) is None


def test_each_batch_names_the_change_before_it():
    request = PushRequest("ws://", source="file", table="users", key="id")
    file = io.BytesIO(b"".join([*rows(3), b"\n", *rows(BATCH_MAX_CHANGES + 1)]))
    sequences = [sequence for _, sequence, _ in request.numbered(file)]

    def previous(resumed: int) -> list[int | None]:
        found = _batches(request, file, PushReport("file", resumed=resumed))
        return [json.loads(batch.frame)["previousSequence"] for batch in found]

    assert previous(0) == [None, sequences[BATCH_MAX_CHANGES]], "an empty line is no change"
    assert previous(3) == previous(4) == [sequences[2], sequences[BATCH_MAX_CHANGES + 3]]
    assert previous(5) == [sequences[4]]


# -- against the service


def rows(count: int) -> list[bytes]:
    return [b'{"id": %d, "name": "row %d"}\n' % (number, number) for number in range(1, count + 1)]


async def send(service: Addresses, lines: Iterable[bytes], **fields: object) -> PushReport:
    request = PushRequest(**{"url": service.ws_url, "source": "file", "table": "users", "key": "id", **fields})
    return await push_file(request, io.BytesIO(b"".join(lines)), lambda changes, input_bytes: None)


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
    file = io.BytesIO(b"".join(rows(count)))
    report = await push_file(request, file, lambda changes, input_bytes: told.append((changes, input_bytes)))
    assert (report.acked, report.duplicates, report.skipped) == (count, 0, 0)
    assert report.committed
    assert report.tables["default.users"]["rows"] == count
    assert [changes for changes, _ in told] == [BATCH_MAX_CHANGES, BATCH_MAX_CHANGES, 10]
    assert sum(input_bytes for _, input_bytes in told) == sum(map(len, rows(count)))
    assert await count_of(service, "users") == (count, count, count)


@pytest.mark.parametrize("source", ["file", None])
async def test_same_file_is_sent_once_and_again_if_asked(service, source):
    assert (await send(service, rows(3), source=source)).acked == 3
    repeated = await send(service, rows(3), source=source)
    assert (repeated.acked, repeated.skipped, repeated.source) == (0, 3, source or repeated.source)
    assert (await send(service, rows(3), source=source, again=True)).acked == 3
    assert (await send(service, rows(3), source=source)).acked == 0
    assert (await count_of(service, "users"))[0] == 6


async def test_file_that_has_grown_sends_only_its_new_lines(service):
    await send(service, [b"".join(rows(10)).rstrip()])  # the last line has no line feed yet
    report = await send(service, rows(15))
    assert (report.acked, report.skipped, report.duplicates) == (5, 10, 0)
    assert await count_of(service, "users") == (15, 15, 15)


@pytest.mark.parametrize("count", [2, 3, 4], ids=["shorter", "as long", "longer"])
async def test_another_file_under_a_used_source_is_refused_unless_it_is_appended(service, count):
    await send(service, rows(3))
    other = [b'{"id": %d, "name": "other"}\n' % number for number in range(1, count + 1)]
    with pytest.raises(PushError, match=r"another file was pushed under this source: source=file .*--append"):
        await send(service, other)
    assert (await count_of(service, "users"))[0] == 3
    assert (await send(service, other, append=True)).acked == count
    assert (await send(service, other)).skipped == count  # recognised, also without --append
    assert (await count_of(service, "users"))[0] == 3 + count


async def test_same_lines_for_another_table_are_another_file(service):
    await send(service, rows(3))
    with pytest.raises(PushError, match="another file was pushed"):
        await send(service, rows(3), table="people")
    assert (await send(service, rows(3), table="people", source=None)).acked == 3


async def test_source_of_another_client_is_not_taken_for_a_pushed_file(service):
    async with connected(service.ws_url) as client:
        assert (await client.batch(3))["status"] == "ok"
    with pytest.raises(PushError, match="another file was pushed"):
        await send(service, rows(3), source="shop")


async def test_file_with_a_bad_line_is_refused_before_anything_is_sent(service):
    with pytest.raises(PushError, match=rf"not valid JSON: line={BATCH_MAX_CHANGES * 3 + 1} "):
        await send(service, [*rows(BATCH_MAX_CHANGES * 3), b"{"])
    assert (await send(service, rows(1))).acked == 1


async def test_push_that_is_refused_halfway_names_the_source_to_continue_with(service):
    lines = rows(BATCH_MAX_CHANGES * 20)
    bad = [*lines, b'{"operation": "insert", "after": {"id": 0}, "table": "a/b"}\n']
    with pytest.raises(PushError, match=r"reason: invalid_format.*--source push-") as caught:
        await send(service, bad, source=None)
    source = str(caught.value).rpartition("--source ")[2]
    await send(service, [*lines, *rows(1)], source=source)
    count = len(lines)
    assert await count_of(service, "users") == (count + 1, count + 1, count)


async def test_sequence_of_a_line_shows_its_number(service):
    await send(service, [b"\n", *rows(2)])

    def query() -> list:
        with open_duckdb(service.http_url) as connection:
            sql = f"SELECT _cdc_sequence // {SEQUENCES_PER_LINE} FROM lake.default.users ORDER BY 1"
            return connection.execute(sql).fetchall()

    assert await asyncio.to_thread(query) == [(2,), (3,)]


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
    request = PushRequest(url, source="s", table="t", key="id")
    with pytest.raises(PushError, match="cannot reach the service: url="):
        await push_file(request, io.BytesIO(), lambda changes, input_bytes: None)


async def test_batches_that_are_refused_for_now_are_sent_again_until_they_are_taken(tmp_path):
    config = small_config(tmp_path)
    slow = replace(config, ingest=replace(config.ingest, message_rate_per_s=20.0, message_burst=2))
    async with serving(slow) as service:
        count = 5 * BATCH_MAX_CHANGES
        report = await send(service, rows(count))
        assert (report.acked, report.duplicates, report.committed) == (count, 0, True)
        assert await count_of(service, "users") == (count, count, count)
