"""Batches: the checks before one is offered to the log, declarations of columns, and source transactions.

A source declares columns in `connect`. A declaration is checked there and then travels with every batch of its table
until one such batch is durable:

    connect {"tables": {...}} --checked--> waiting --with each batch of its table--> log
                                              `------ until one such batch is durable ------> forgotten

It lies in the log in the same record as the first rows it applies to, so a reader of those rows has read it before.

An event may name its source transaction in its metadata, and the last event of the transaction says so:

    {"sequence": 7, ..., "metadata": {"transaction": {"id": "t-2041"}}}
    {"sequence": 8, ..., "metadata": {"transaction": {"id": "t-2041", "end": true}}}

The transactions of a source follow one another, so the last event of a batch is enough to know which one continues.
An Arrow frame names it in `lakefeed.transaction` of its schema's metadata, so that no row has to be read. Metadata in
any other form is the source's own and says nothing.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, TypeAlias

import msgspec

from lakefeed.contract import properties as quarantine
from lakefeed.ingest.errors import ProtocolError
from lakefeed.ingest.protocol.offers import NackReason, Offer
from lakefeed.writer.rows.declaration import DECLARATIONS_MAX_BYTES, DeclarationMalformed, parse_declarations
from lakefeed.writer.wal.payload import Encoding
from lakefeed.writer.wire.arrow_frame import ArrowFrame, ArrowHead, RowTooLarge, open_stream
from lakefeed.writer.wire.json_batch import BatchHead, BatchMalformed, decode_batch

# Longer names do not fit the object keys and file names that are built from them.
NAME_MAX_CHARS = 255

_NAME_PART = re.compile(r"[^\x00-\x1f\x7f./\\%?#]{1,255}")
_NAME_RULE = (
    f"expected a name of at most {NAME_MAX_CHARS} characters, "
    "its parts between dots not empty and without control characters or any of / \\ % ? #, "
    f"the last one not {quarantine.TABLE}"
)

# The id is in the header of every record after which the transaction continues.
TRANSACTION_ID_MAX_CHARS = 255

ARROW_TRANSACTION = b"lakefeed.transaction"

# A batch whose head is decoded.
AnyBatch: TypeAlias = BatchHead | ArrowFrame

_decode_tables = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class CheckedChanges:
    """The changes of a checked batch. `expanded_bytes` is what they may take once decoded, if that is more."""

    encoding: Encoding
    sequences: Sequence[int]
    tables: frozenset[str]
    expanded_bytes: int = 0


def invalid(message: str) -> ProtocolError:
    """Return the error for a message that breaks a rule of the format."""
    return ProtocolError(NackReason.INVALID_FORMAT.value, message)


def head_of(batch: AnyBatch) -> BatchHead | ArrowHead:
    """Return the head of a batch in either encoding."""
    return batch.head if isinstance(batch, ArrowFrame) else batch


def check_changes(batch: AnyBatch, body: bytes, *, event_max_bytes: int) -> CheckedChanges:
    """Check all of a batch but its JSON rows; Arrow rows are checked too.

    Raises: ProtocolError.
    """
    if isinstance(batch, ArrowFrame):
        return _check_arrow(batch, event_max_bytes)
    tables = frozenset(event.table for event in batch.events)
    sequences = _check_events(batch, tables)
    if len(body) > event_max_bytes:  # only then can a single event be too large
        _check_event_sizes(body, event_max_bytes)
    return CheckedChanges(Encoding.JSON_BATCH, sequences, tables)


def _check_arrow(frame: ArrowFrame, event_max_bytes: int) -> CheckedChanges:
    if not _is_table_name(frame.head.table):
        raise invalid(f"lakefeed.table: {_NAME_RULE}")
    try:
        batch = frame.read(row_max_bytes=event_max_bytes)
    except RowTooLarge as error:
        raise ProtocolError(
            NackReason.EVENT_TOO_LARGE.value, str(error), max_size=event_max_bytes, actual_size=error.size_bytes
        ) from None
    except BatchMalformed as error:
        raise invalid(str(error)) from None
    return CheckedChanges(
        Encoding.ARROW_STREAM, batch.sequences, frozenset((frame.head.table,)), expanded_bytes=batch.expanded_bytes
    )


def _check_events(batch: BatchHead, tables: frozenset[str]) -> list[int]:
    events = batch.events
    sequences = [event.sequence for event in events]
    if not events:
        return sequences
    if not all(map(operator.lt, sequences, sequences[1:])):
        index = next(i for i in range(1, len(sequences)) if sequences[i] <= sequences[i - 1])
        raise invalid(f"events[{index}].sequence: expected more than that of the event before")
    if batch.first_event_sequence not in (None, sequences[0]):
        raise invalid(f"firstEventSequence: expected {sequences[0]}, that of the first event")
    if batch.last_event_sequence not in (None, sequences[-1]):
        raise invalid(f"lastEventSequence: expected {sequences[-1]}, that of the last event")
    for table in tables:
        if not _is_table_name(table):
            index = next(i for i, event in enumerate(events) if event.table == table)
            raise invalid(f"events[{index}].table: {_NAME_RULE}")
    return sequences


def _is_table_name(table: str) -> bool:
    """Return whether a catalog can hold a table of this name. If not, its rows would be acked and never written."""
    parts = table.split(".")
    is_quarantine = parts[-1] == quarantine.TABLE
    return len(table) <= NAME_MAX_CHARS and not is_quarantine and all(_NAME_PART.fullmatch(part) for part in parts)


def _check_event_sizes(body: bytes, event_max_bytes: int) -> None:
    for index, event in enumerate(decode_batch(body).events):
        size = len(event.before) + len(event.after) + len(event.metadata)
        if size > event_max_bytes:
            raise ProtocolError(
                NackReason.EVENT_TOO_LARGE.value,
                f"events[{index}]: expected at most {event_max_bytes} bytes, got {size}",
                max_size=event_max_bytes,
                actual_size=size,
            )


@dataclass(slots=True)
class Declarations:
    """The declarations of one connection that are not durable yet, by table."""

    waiting: dict[str, msgspec.Raw] = field(default_factory=dict)

    def of_tables(self, tables: Iterable[str]) -> str:
        """Return the waiting declarations of a batch's tables, as the text for its record."""
        wanted = {table: self.waiting[table] for table in tables if table in self.waiting}
        return _encode(wanted).decode() if wanted else ""

    def on_durable(self, declared: str) -> None:
        """Forget declarations that became durable with a batch, unless the table was declared anew since."""
        for table, text in _decode_tables(declared).items():
            if self.waiting.get(table) == text:
                del self.waiting[table]


def read_declarations(tables: msgspec.Raw) -> Declarations:
    """Check the declarations of a `connect` message and return them.

    Raises: ProtocolError; the message names the table, the column and the rule.
    """
    if not tables:
        return Declarations()
    if len(tables) > DECLARATIONS_MAX_BYTES:
        raise invalid(f"tables: expected at most {DECLARATIONS_MAX_BYTES} bytes")
    try:
        parse_declarations(msgspec.json.decode(tables), path="tables")
    except DeclarationMalformed as error:
        raise invalid(str(error)) from None
    except UnicodeDecodeError:
        raise invalid("tables: expected text in UTF-8") from None
    # Copied, because a raw value keeps its whole message in memory.
    return Declarations({table: msgspec.Raw(bytes(text)) for table, text in _decode_tables(tables).items()})


class _Transaction(msgspec.Struct):
    id: Annotated[str, msgspec.Meta(max_length=TRANSACTION_ID_MAX_CHARS)] | int
    end: bool = False


class _Metadata(msgspec.Struct):
    transaction: _Transaction | None = None


class _Event(msgspec.Struct):
    metadata: msgspec.Raw = msgspec.Raw()


class _Batch(msgspec.Struct):
    events: list[_Event]


_decode_batch = msgspec.json.Decoder(_Batch).decode
_decode_metadata = msgspec.json.Decoder(_Metadata).decode


def open_transaction(offer: Offer) -> str:
    """Return the id of the transaction that continues after an offer; empty if none does."""
    if offer.adapter_state:
        return offer.open_transaction
    if offer.encoding is Encoding.ARROW_STREAM:
        with open_stream(offer.body) as reader:
            name: bytes = (reader.schema.metadata or {}).get(ARROW_TRANSACTION, b"")
        return name.decode(errors="replace")[:TRANSACTION_ID_MAX_CHARS]
    metadata = _decode_batch(offer.body).events[-1].metadata
    try:
        transaction = _decode_metadata(metadata).transaction if metadata else None
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return ""
    return "" if transaction is None or transaction.end else str(transaction.id)
