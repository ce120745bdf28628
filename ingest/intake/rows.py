"""NDJSON rows of HTTP requests as inserts, and sequence numbers for changes whose source gives them none.

    {"id": 1, "name": "Ada"}
    {"id": 2, "name": "Grace"}      --wrap_rows--> a batch of inserts like any other --> intake

Rows are wrapped one after the other and never kept as objects: many small ones would take many times their bytes. Only
the request's body waits. It is read again each time it is offered, when there is room for what it becomes.

Numbers continue from the durable position, one request of a source at a time. Another client of the same source may
still take them before they are durable; the rows that the log then skips are numbered again. A source that is new here
begins at the time in microseconds since 1970: its tables may hold rows that another node numbered, or a log that was
lost since, and they skip what is not above those. No source makes a million changes a second for as long as it lives,
so the time is above every number that was ever given out.
"""

from __future__ import annotations

import asyncio
import re
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice

import msgspec

from lakefeed.contract.changes import INT64_MAX, Position, SourceId
from lakefeed.ingest.errors import ProtocolError
from lakefeed.ingest.intake.intake import Intake
from lakefeed.ingest.protocol.batch import invalid
from lakefeed.ingest.protocol.offers import Durable, NackReason, Offer, Refused, Verdict
from lakefeed.ingest.protocol.session import Session
from lakefeed.writer.wire.json_batch import BatchHead, EventHead, decode_deeper

# How often the rows of a request are numbered at most. A second time is rare, so a tenth means that another client
# keeps taking the numbers.
NUMBERINGS_MAX = 10

_BATCH_HEAD, _BATCH_END = b'{"type":"cdc_batch","events":[', b"]}"
_NULL = msgspec.Raw(b"null")
_QUOTE = b'"'

_LINE = re.compile(rb"[^\r\n]+")

_decode_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_text = msgspec.json.Decoder(str).decode
_read_over = msgspec.json.Decoder(msgspec.Raw).decode
_encode = msgspec.json.Encoder().encode


def has_rows(body: bytes) -> bool:
    """Return whether a body has anything but blank lines."""
    return bool(body) and not body.isspace()


def wrap_rows(
    body: bytes, *, key: str, table: str, first_sequence: int, row_max_bytes: int, rows_max: int | None = None
) -> tuple[bytes, int]:
    """Wrap the rows of a request, or the first `rows_max`, as a batch of inserts numbered from `first_sequence`.

    Returns the batch and the number of its rows. Raises: ProtocolError.
    """
    batch, sequence = bytearray(_BATCH_HEAD), first_sequence
    middle = b',"operation":"INSERT","table":%b,"rowId":' % _encode(table)
    lines = (line for line in _LINE.finditer(body) if not line.group().isspace())
    for line in islice(lines, rows_max):
        size_bytes = line.end() - line.start()
        if size_bytes > row_max_bytes:
            rule = f"expected at most {row_max_bytes} bytes, got {size_bytes}"
            raise ProtocolError(NackReason.EVENT_TOO_LARGE.value, f"{_line_number(line)}: {rule}")
        batch += b'{"sequence":%d%b%b,"after":%b},' % (sequence, middle, _encode(_row_id_of(line, key)), line.group())
        sequence += 1
    batch[-1 if sequence > first_sequence else len(batch) :] = _BATCH_END
    wrapped = bytes(batch)
    try:
        decode_deeper(_read_over, wrapped)  # the writer decodes the rows inside their batch
    except RecursionError:
        raise invalid("a value is nested too deeply") from None
    return wrapped, sequence - first_sequence


def _row_id_of(line: re.Match[bytes], key: str) -> str:
    """Check that a line is a row, and return the text of its key; empty if it has none."""
    try:
        line.group().decode()
        value = _decode_object(line.group()).get(key, _NULL)
        text = bytes(value)
        if text.startswith(_QUOTE):
            return _decode_text(text)
        return "" if value == _NULL else text.decode()
    except UnicodeDecodeError:
        raise invalid(f"{_line_number(line)}: expected UTF-8") from None
    except RecursionError:
        raise invalid(f"{_line_number(line)}: a value is nested too deeply") from None
    except msgspec.MsgspecError:
        raise invalid(f"{_line_number(line)}: expected a JSON object") from None


def _line_number(line: re.Match[bytes]) -> str:
    return f"line {len(line.string[: line.start()].splitlines()) + 1}"


def next_position(intake: Intake, source: SourceId, *, count: int, now_us: int) -> Position:
    """Return the first position of a source's next `count` changes. One caller per source, until they are durable.

    Raises: ProtocolError if its numbers are used up.
    """
    durable = intake.durable_position(source)
    if durable is None or durable.sequence < 0:
        # Refused rows must not block it: they return under other numbers, because time has passed.
        intake.resume(source)
        return Position(durable.epoch if durable is not None else 0, now_us)
    if durable.sequence + count > INT64_MAX:
        raise ProtocolError(
            NackReason.INVALID_SEQUENCE.value,
            f"the source has used up its sequences: lastDurableSequence={durable.sequence}; begin a higher epoch",
        )
    return Position(durable.epoch, durable.sequence + 1)


@dataclass(slots=True)
class Rows:
    """The rows of a request, at least one. Without an epoch they belong to their source's current one.

    `count` is known once they were offered. The last `accepted` of them are durable.
    """

    source: SourceId
    table: str
    body: bytes
    key: str
    epoch: int | None = None
    previous_sequence: int | None = None
    count: int | None = None
    accepted: int = 0

    @property
    def left(self) -> int | None:
        """Return how many rows are not durable yet; None before they were counted."""
        return None if self.count is None else self.count - self.accepted


class RowIntake:
    """Makes rows durable as inserts."""

    def __init__(self, intake: Intake, *, event_max_bytes: int, clock: Callable[[], float]) -> None:
        self._intake = intake
        self._event_max_bytes = event_max_bytes
        self._clock = clock
        self._locks: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()

    async def accept(self, rows: Rows, first_sequence: int | None = None) -> Verdict:
        """Make rows durable. If rows without numbers are refused, all but `left` of them may be durable.

        Rows that are numbered from `first_sequence` and were accepted before are skipped.

        Raises: ProtocolError.
        """
        if first_sequence is not None:
            await self._intake.wait_for_room()
            return await self._intake.offer_and_wait(self.offer_of(rows, Position(rows.epoch or 0, first_sequence)))
        lock = self._locks.setdefault(rows.source, asyncio.Lock())
        async with lock:
            if (refused := await self._intake.look_up_source(rows.source)) is not None:
                return refused
            for _ in range(NUMBERINGS_MAX):
                await self._intake.wait_for_room()
                verdict = await self._intake.offer_and_wait(self._numbered(rows))
                if isinstance(verdict, Durable):
                    rows.accepted += verdict.changes
                if isinstance(verdict, Refused) or not rows.left:
                    return Durable(verdict.offset, rows.accepted) if isinstance(verdict, Durable) else verdict
        return Refused(NackReason.INVALID_SEQUENCE, "another client numbers the changes of this source", retry=True)

    def _numbered(self, rows: Rows) -> Offer:
        # Before they are counted, there are at most as many as bytes.
        count = len(rows.body) if rows.left is None else rows.left
        position = next_position(self._intake, rows.source, count=count, now_us=self._now_us())
        return self.offer_of(rows, position if rows.epoch is None else Position(rows.epoch, position.sequence))

    def offer_of(self, rows: Rows, first: Position) -> Offer:
        """Return an offer of the rows that are left.

        Raises: ProtocolError.
        """
        # Source and table are the same for all rows, so checking the first row is enough.
        checked = self._offer_of_first(rows, first)
        batch, count = wrap_rows(
            rows.body,
            key=rows.key,
            table=rows.table,
            first_sequence=first.sequence,
            row_max_bytes=self._event_max_bytes,
            rows_max=rows.left,
        )
        if rows.count is None:
            rows.count = count
        if first.sequence + count - 1 > INT64_MAX:
            raise invalid(f"sequence: expected a whole number of at most {INT64_MAX} for every row")
        return replace(checked, sequences=range(first.sequence, first.sequence + count), body=batch)

    def _offer_of_first(self, rows: Rows, first: Position) -> Offer:
        session = Session(event_max_bytes=self._event_max_bytes, default_source=rows.source, epoch=first.epoch)
        event = EventHead(sequence=first.sequence, operation="INSERT", table=rows.table)
        batch = BatchHead(events=[event], previous_sequence=rows.previous_sequence)
        try:
            offer = session.on_batch(batch, b"", received_at_us=self._now_us())
        except ProtocolError as error:
            raise ProtocolError(error.reason, str(error).removeprefix("events[0].")) from None
        assert offer is not None
        return offer

    def _now_us(self) -> int:
        return int(self._clock() * 1_000_000)
