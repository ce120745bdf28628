"""Command `lakefeed push`: a WebSocket client that sends a file of rows or changes.

Line N of the input is sequence N of its source. A push that is repeated under the same source name therefore sends only
what the service does not have yet. A push under a new name sends everything.
"""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import click
import msgspec
import orjson
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidURI

from lakefeed.command_line import progress_bar, readable_errors, token_option
from lakefeed.ingest.admission.auth import bearer_headers
from lakefeed.ingest.cli.service import DEFAULT_WS_URL, print_flushed
from lakefeed.ingest.errors import PushError

BATCH_MAX_CHANGES = 1_000
BATCH_MAX_BYTES = 1024 * 1024
WINDOW_BATCHES = 16
OPEN_TIMEOUT_S = 10.0
ANSWER_TIMEOUT_S = 120.0

# For a refusal without a delay of its own.
RETRY_DELAY_MS = 200

OPERATIONS = tuple(msgspec.Raw(b'"%s"' % name) for name in (b"INSERT", b"UPDATE", b"DELETE"))

_NULL = msgspec.Raw(b"null")

# Rows are sent as they were written: decoding and encoding them would round large numbers.
_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class PushRequest:
    """Where to send the lines, and the name of their source."""

    url: str
    source: str
    table: str | None
    key: str
    flush: bool = True
    token: str = field(default="", repr=False)


@dataclass(slots=True)
class PushReport:
    """Counts of a push. `tables` maps each table to its flush: snapshot id and committed rows."""

    skipped: int = 0
    acked: int = 0
    duplicates: int = 0
    committed: bool = False
    tables: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Batch:
    changes: int
    input_bytes: int
    frame: bytes


Progress = Callable[[int, int], None]


@click.command()
@click.argument("file", type=click.File("rb"))
@click.option("--table", help="Table of every line that does not name one itself.")
@click.option("--source", help="Name of this source. Pushing again under the same name sends only new lines.")
@click.option("--key", default="id", show_default=True, help="Column that identifies a row, for `_cdc_row_id`.")
@click.option("--url", default=DEFAULT_WS_URL, show_default=True, help="WebSocket address of the service.")
@token_option
@click.option("--flush/--no-flush", default=True, show_default=True, help="Wait until everything is committed.")
def push(file: BinaryIO, *, source: str | None, **options: Any) -> None:
    """Send a file of JSON lines to the service.

    FILE is a path, or - for standard input. A line with an `operation` and an `after` or `before` is a change; any
    other object is a row to insert. The command ends when every line is durable and, with --flush, committed.

    \b
      lakefeed push users.ndjson --table users
      lakefeed push changes.ndjson --source shop-db     # run it again: only new lines are sent
    """
    request = PushRequest(source=source or f"push-{uuid.uuid4()}", **options)
    try:
        size_bytes = os.fstat(file.fileno()).st_size or None
    except OSError:
        size_bytes = None
    sent = 0
    with readable_errors(), progress_bar("pushing", size_bytes, in_bytes=True, keep=True) as bar:

        def on_acked(changes: int, input_bytes: int) -> None:
            nonlocal sent
            sent += changes
            bar.advance(input_bytes, description=f"{sent:,} changes acked")

        report = asyncio.run(push_lines(request, file, on_acked))
    click.echo(f"acked {report.acked:,} changes ({report.duplicates:,} duplicates, {report.skipped:,} lines skipped)")
    print_flushed(report.tables)
    if request.flush and not report.committed:
        raise click.ClickException("all changes are durable, but not all are committed yet: see `lakefeed status`")


async def push_lines(request: PushRequest, lines: Iterable[bytes], progress: Progress) -> PushReport:
    """Send all lines; `progress(changes, input_bytes)` is called as they are acked.

    Raises: PushError.
    """
    try:
        async with connect(
            request.url,
            additional_headers=bearer_headers(request.token),
            compression=None,
            max_size=None,
            open_timeout=OPEN_TIMEOUT_S,
        ) as socket:
            return await _push(socket, request, lines, progress)
    except (OSError, InvalidHandshake, InvalidURI, TimeoutError) as error:
        raise PushError(f"cannot reach the service: url={request.url} error={error}") from error
    except ConnectionClosed as error:
        raise PushError(f"the service closed the connection: {error}") from error


async def _push(
    socket: ClientConnection, request: PushRequest, lines: Iterable[bytes], progress: Progress
) -> PushReport:
    report = PushReport()
    hello = {"type": "connect", "timestamp": _now_ms(), "sourceDoId": request.source}
    await socket.send(orjson.dumps(hello), text=True)
    durable = (await _receive(socket, "status")).get("lastDurableSequence") or 0
    in_flight: deque[_Batch] = deque()
    for batch in _batches(request, lines, after=durable, report=report):
        if len(in_flight) >= WINDOW_BATCHES:
            await _settle_first(socket, in_flight, report, progress)
        await socket.send(batch.frame, text=True)
        in_flight.append(batch)
    while in_flight:
        await _settle_first(socket, in_flight, report, progress)
    if request.flush:
        await _flush(socket, request, report)
    return report


async def _settle_first(
    socket: ClientConnection, in_flight: deque[_Batch], report: PushReport, progress: Progress
) -> None:
    """Wait until the oldest batch is acked. If it is refused for now, send it and all batches after it again."""
    answer = await _receive(socket, "ack", "nack")
    while answer["type"] == "nack":
        if answer["shouldRetry"]:
            for _ in range(len(in_flight) - 1):  # the batches after a refused one are refused as well
                await _receive(socket, "ack", "nack")
        await _wait_to_retry(answer)
        for batch in in_flight:
            await socket.send(batch.frame, text=True)
        answer = await _receive(socket, "ack", "nack")
    acked, details = in_flight.popleft(), answer.get("details", {})
    new = details.get("eventsProcessed", 0)
    report.acked += new
    report.duplicates += acked.changes - new
    progress(acked.changes, acked.input_bytes)
    if delay_ms := details.get("suggestedDelayMs"):
        await asyncio.sleep(delay_ms / 1_000)


async def _flush(socket: ClientConnection, request: PushRequest, report: PushReport) -> None:
    message = {"type": "flush_request", "timestamp": _now_ms(), "sourceDoId": request.source, "reason": "manual"}
    await socket.send(orjson.dumps(message), text=True)
    answer = await _receive(socket, "flush_response", "nack")
    while answer["type"] == "nack":
        await _wait_to_retry(answer)
        await socket.send(orjson.dumps(message), text=True)
        answer = await _receive(socket, "flush_response", "nack")
    report.committed = bool(answer["result"]["success"])
    report.tables = answer["result"]["tables"]


async def _receive(socket: ClientConnection, *kinds: str) -> dict[str, Any]:
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            message = orjson.loads(await socket.recv())
            while message.get("status") == "persisted":  # the flush response says the same
                message = orjson.loads(await socket.recv())
    except TimeoutError as error:
        raise PushError(f"no answer: waited_for={kinds[0]} seconds={ANSWER_TIMEOUT_S:g}") from error
    if message["type"] in kinds:
        return dict(message)
    if message["type"] == "nack":
        raise _refused(message)
    raise PushError(f"unexpected answer: waited_for={kinds[0]} got={message['type']}")


async def _wait_to_retry(nack: dict[str, Any]) -> None:
    """Wait for as long as a refusal says.

    Raises: PushError if a retry cannot succeed.
    """
    if not nack["shouldRetry"]:
        raise _refused(nack)
    await asyncio.sleep(nack.get("retryDelayMs", RETRY_DELAY_MS) / 1_000)


def _refused(nack: dict[str, Any]) -> PushError:
    return PushError(f"refused: {nack['errorMessage']} (reason: {nack['reason']})")


def _batches(request: PushRequest, lines: Iterable[bytes], *, after: int, report: PushReport) -> Iterator[_Batch]:
    events: list[msgspec.Raw] = []
    input_bytes = number = 0

    def batch() -> _Batch:
        kind = {"type": "cdc_batch", "timestamp": _now_ms(), "sourceDoId": request.source}
        return _Batch(len(events), input_bytes, _encode({**kind, "sequenceNumber": number, "events": events}))

    for line_number, line in enumerate(lines, start=1):
        input_bytes += len(line)
        if line_number <= after or not line.strip():
            report.skipped += 1
            continue
        events.append(read_line(line, line_number, table=request.table, key=request.key))
        if len(events) >= BATCH_MAX_CHANGES or input_bytes >= BATCH_MAX_BYTES:
            yield batch()
            number, events, input_bytes = number + 1, [], 0
    if events:
        yield batch()


def read_line(line: bytes, line_number: int, *, table: str | None, key: str) -> msgspec.Raw:
    """Return a line as a change: as it is if it has an operation and a row image, else as a row to insert.

    Raises: PushError.
    """
    try:
        fields = _decode_fields(line)
    except msgspec.ValidationError as error:
        raise PushError(f"expected a JSON object: line={line_number} error={error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PushError(f"not valid JSON: line={line_number} error={error}") from error
    is_change = fields.get("operation") in OPERATIONS and ("after" in fields or "before" in fields)
    change: dict[str, Any] = fields if is_change else {"operation": "INSERT", "after": msgspec.Raw(line.strip())}
    own_table = change.get("table", _NULL)
    if own_table == _NULL and table is None:
        raise PushError(f"no table: give --table, or a `table` in the change: line={line_number}")
    event = {
        "operation": change["operation"],
        "sequence": line_number,
        "timestamp": change.get("timestamp", _now_ms()),
        "table": own_table if own_table != _NULL else table,
        "rowId": change["rowId"] if "rowId" in change else _row_id(change, key),
    }
    images = {name: change[name] for name in ("before", "after", "unchanged") if name in change}
    return msgspec.Raw(_encode(event | images))


def _row_id(change: Mapping[str, msgspec.Raw], key: str) -> str:
    """Return the key's value in the row, as text."""
    image = next((change[name] for name in ("after", "before") if bytes(change.get(name, _NULL))[:1] == b"{"), b"{}")
    value = _decode_fields(image).get(key, _NULL)
    if value == _NULL:
        return ""
    return str(msgspec.json.decode(value)) if bytes(value)[:1] == b'"' else bytes(value).decode()


def _now_ms() -> int:
    return int(time.time() * 1_000)
