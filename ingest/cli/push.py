"""Command `lakefeed push`: a WebSocket client that sends a file of rows or changes.

The sequence of a line is its number and a checksum of everything up to it, so that a position tells the file:

    line number * 1,000,000,000 + crc32(table, key, lines 1 to this one) % 1,000,000,000

A push asks where its source is. If that is the sequence of one of its own lines, the file was pushed up to there, from
whichever machine and to whichever node, and only the lines after it are sent. If not, the source has another file: the
push is refused, or sends its lines under the next epoch (--append). Without --source the source is named by the
content, so the same file has the same source. All lines are read before the first one is sent.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import shutil
import tempfile
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import click
import msgspec
import orjson
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidURI

from lakefeed.command_line import progress_bar, readable_errors, token_option
from lakefeed.contract.changes import Operation
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

SEQUENCES_PER_LINE = 1_000_000_000

# By their JSON text, in upper case.
OPERATIONS = {b'"%s"' % each.value.encode(): each.value for each in Operation}
CHANGE_FIELDS = frozenset(
    ("operation", "sequence", "timestamp", "table", "rowId", "before", "after", "unchanged", "metadata")
)

_NULL = msgspec.Raw(b"null")

# Rows are sent as they were written: decoding and encoding them would round large numbers.
_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class PushRequest:
    """Where to send the lines, and as what. Without a source, the content names it."""

    url: str
    source: str | None
    table: str | None
    key: str
    flush: bool = True
    append: bool = False
    again: bool = False
    token: str = field(default="", repr=False)

    def numbered(self, file: BinaryIO) -> Iterator[tuple[int, int, bytes]]:
        """Read the file from its beginning: each line's number, its sequence, and the line."""
        file.seek(0)
        checksum = zlib.crc32(orjson.dumps((self.table, self.key)))
        for number, line in enumerate(file, start=1):
            checksum = zlib.crc32(b"%s\n" % line.strip(), checksum)  # the last line may get its line feed later
            yield number, number * SEQUENCES_PER_LINE + checksum % SEQUENCES_PER_LINE, line

    def lines_up_to(self, position: int, file: BinaryIO) -> int | None:
        """Return how many lines of the file a position of its source covers; None if it is that of another file."""
        for number, sequence, _ in self.numbered(file):
            if sequence == position:
                return number
            if sequence == position + 1:  # all that lies below this line is committed, says a table
                return number - 1
        return None


@dataclass(slots=True)
class PushReport:
    """Counts of a push. `resumed` is how many lines earlier pushes have sent.

    `tables` maps each table to its flush: snapshot id and committed rows.
    """

    source: str
    resumed: int = 0
    skipped: int = 0
    sent: int = 0
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
@click.option("--source", help="Name of this source: a file that has grown sends only its new lines.  [by content]")
@click.option("--append", is_flag=True, help="Send the file although the source has sent another one.")
@click.option("--again", is_flag=True, help="Send the whole file although it was sent before.")
@click.option("--key", default="id", show_default=True, help="Column that identifies a row, for `_cdc_row_id`.")
@click.option("--url", default=DEFAULT_WS_URL, show_default=True, help="WebSocket address of the service.")
@token_option
@click.option("--flush/--no-flush", default=True, show_default=True, help="Wait until everything is committed.")
def push(file: BinaryIO, **options: Any) -> None:
    """Send a file of JSON lines to the service.

    FILE is a path, or - for standard input, which is read to its end first. A line with an `operation` and an `after`
    or `before`, or with no other fields than those of a change, is a change; any other object is a row to insert. The
    command ends when every line is durable and, with --flush, committed. It fails if a line was not accepted.

    The same file is sent once, unless --again is given. Another file under the same --source needs --append.

    \b
      lakefeed push users.ndjson --table users
      lakefeed push changes.ndjson --source shop-db     # run it again: only new lines are sent
    """
    request = PushRequest(**options)
    acked = 0
    with readable_errors(), _seekable(file) as content, progress_bar("pushing", in_bytes=True, keep=True) as bar:
        bar.set_total(content.seek(0, io.SEEK_END))

        def on_acked(changes: int, input_bytes: int) -> None:
            nonlocal acked
            acked += changes
            bar.advance(input_bytes, description=f"{acked:,} changes acked")

        report = asyncio.run(push_file(request, content, on_acked))
    click.echo(f"acked {report.acked:,} changes ({report.duplicates:,} duplicates, {report.skipped:,} lines skipped)")
    if report.resumed and not report.sent:
        click.echo(f"this file was pushed before as source {report.source}: --again sends it anyway")
    print_flushed(report.tables)
    if report.duplicates:
        raise click.ClickException(
            "lines were not accepted, because another client sends changes of the same source:"
            f" source={report.source} lines={report.duplicates}"
        )
    if request.flush and not report.committed:
        raise click.ClickException("all changes are durable, but not all are committed yet: see `lakefeed status`")


@contextmanager
def _seekable(file: BinaryIO) -> Iterator[BinaryIO]:
    """Return the file, or a copy of an input that can be read only once."""
    if file.seekable():
        yield file
        return
    with tempfile.TemporaryFile() as copy:
        shutil.copyfileobj(file, copy)
        yield copy


async def push_file(request: PushRequest, file: BinaryIO, progress: Progress) -> PushReport:
    """Send the lines that the service does not have; `progress(changes, input_bytes)` is called as they are acked.

    Raises: PushError.
    """
    content = hashlib.blake2b(orjson.dumps((request.table, request.key)), digest_size=16)
    for number, sequence, line in request.numbered(file):
        content.update(line)
        if line.strip():
            read_change(line, number, sequence, table=request.table, key=request.key)
    report = PushReport(request.source or f"push-{content.hexdigest()}")
    try:
        async with connect(
            request.url,
            additional_headers=bearer_headers(request.token),
            compression=None,
            max_size=None,
            open_timeout=OPEN_TIMEOUT_S,
        ) as socket:
            await _push(socket, request, file, report, progress)
            return report
    except (OSError, InvalidHandshake, InvalidURI, TimeoutError) as error:
        raise PushError(f"cannot reach the service: url={request.url} error={error}") from error
    except (ConnectionClosed, PushError) as error:
        closed = "the service closed the connection: " if isinstance(error, ConnectionClosed) else ""
        rest = (
            f"; lines before may be durable: to send only the others, use --source {report.source}"
            if report.sent
            else ""
        )
        raise PushError(f"{closed}{error}{rest}") from error


async def _push(
    socket: ClientConnection, request: PushRequest, file: BinaryIO, report: PushReport, progress: Progress
) -> None:
    report.resumed = await _resume(socket, request, file, report.source)
    in_flight: deque[_Batch] = deque()
    for batch in _batches(request, file, report):
        if len(in_flight) >= WINDOW_BATCHES:
            await _settle_first(socket, in_flight, report, progress)
        report.sent += batch.changes
        await socket.send(batch.frame, text=True)
        in_flight.append(batch)
    while in_flight:
        await _settle_first(socket, in_flight, report, progress)
    if request.flush:
        await _flush(socket, report)


async def _resume(socket: ClientConnection, request: PushRequest, file: BinaryIO, source: str) -> int:
    """Connect as the source, under the next epoch if the whole file is to be sent; return how many lines are not.

    Raises: PushError if the source has sent another file.
    """
    status = await _hello(socket, source, epoch=0)
    if status["type"] == "nack":  # an earlier push has started a later epoch
        status = await _hello(socket, source, epoch=status["epoch"])
    epoch, durable = status["epoch"], status.get("lastDurableSequence")
    if durable is None and epoch == 0:
        return 0
    done = request.lines_up_to(durable, file) if durable is not None else None
    if done is not None and not request.again:
        return done
    if done is None and not request.append:
        raise PushError(
            f"another file was pushed under this source: source={source} epoch={epoch} position={durable}:"
            " choose another --source, or send this file as well with --append"
        )
    await _hello(socket, source, epoch=epoch + 1)
    return 0


async def _hello(socket: ClientConnection, source: str, *, epoch: int) -> dict[str, Any]:
    message = {"type": "connect", "timestamp": _now_ms(), "sourceDoId": source, "epoch": epoch}
    await socket.send(orjson.dumps(message), text=True)
    answer = await _receive(socket, "status", "nack")
    if answer["type"] == "nack" and "epoch" not in answer:
        raise _refused(answer)
    return answer


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


async def _flush(socket: ClientConnection, report: PushReport) -> None:
    message = {"type": "flush_request", "timestamp": _now_ms(), "sourceDoId": report.source, "reason": "manual"}
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


def _batches(request: PushRequest, file: BinaryIO, report: PushReport) -> Iterator[_Batch]:
    events: list[msgspec.Raw] = []
    input_bytes = batch_number = 0
    previous: int | None = None  # the last change before the batch
    last: int | None = None

    def batch() -> _Batch:
        kind = {"type": "cdc_batch", "timestamp": _now_ms(), "sourceDoId": report.source}
        numbers = {"sequenceNumber": batch_number, "previousSequence": previous}
        return _Batch(len(events), input_bytes, _encode({**kind, **numbers, "events": events}))

    for number, sequence, line in request.numbered(file):
        input_bytes += len(line)
        if number <= report.resumed or not line.strip():
            report.skipped += 1
            if line.strip():
                previous = sequence
            continue
        last = sequence
        events.append(read_change(line, number, sequence, table=request.table, key=request.key))
        if len(events) >= BATCH_MAX_CHANGES or input_bytes >= BATCH_MAX_BYTES:
            yield batch()
            batch_number, previous, events, input_bytes = batch_number + 1, last, [], 0
    if events:
        yield batch()


def read_change(line: bytes, number: int, sequence: int, *, table: str | None, key: str) -> msgspec.Raw:
    """Return a line as a change, with its sequence. A line that is not a change is a row to insert.

    Raises: PushError.
    """
    try:
        fields = _decode_fields(line)
    except msgspec.ValidationError as error:
        raise PushError(f"expected a JSON object: line={number} error={error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PushError(f"not valid JSON: line={number} error={error}") from error
    is_change = "operation" in fields and ("after" in fields or "before" in fields or fields.keys() <= CHANGE_FIELDS)
    change: dict[str, Any] = fields if is_change else {"operation": b'"INSERT"', "after": msgspec.Raw(line.strip())}
    operation = OPERATIONS.get(bytes(change["operation"]).upper())
    if operation is None:
        raise PushError(
            f"unknown operation: line={number} expected={','.join(OPERATIONS.values())};"
            ' a row with a column `operation` can be sent as {"operation": "INSERT", "after": {...}}'
        )
    own_table = change.get("table", _NULL)
    if own_table == _NULL and table is None:
        raise PushError(f"no table: give --table, or a `table` in the change: line={number}")
    event = {
        "operation": operation,
        "sequence": sequence,
        "timestamp": change.get("timestamp", _now_ms()),
        "table": own_table if own_table != _NULL else table,
        "rowId": change["rowId"] if "rowId" in change else _row_id(change, key),
    }
    images = {name: change[name] for name in ("before", "after", "unchanged", "metadata") if name in change}
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
