"""What a batch must hold to be offered to the log, in either encoding. When a batch may come is protocol.py's."""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ingest.errors import ProtocolError
from ingest.offers import NackReason
from writer.arrow.frames import ArrowFrame, ArrowHead, RowTooLarge
from writer.envelope import BatchHead, BatchMalformed, decode_batch
from writer.frames import Encoding
from writer.quarantine import names as quarantine

# Longer names do not fit the object keys and file names that are built from them.
NAME_MAX_CHARS = 255

_NAME_PART = re.compile(r"[^\x00-\x1f\x7f./\\%?#]{1,255}")
_NAME_RULE = (
    f"expected a name of at most {NAME_MAX_CHARS} characters, "
    "its parts between dots not empty and without control characters or any of / \\ % ? #, "
    f"the last one not {quarantine.TABLE}"
)

# A batch whose head is decoded.
AnyBatch: TypeAlias = BatchHead | ArrowFrame


@dataclass(frozen=True, slots=True)
class CheckedChanges:
    """The changes of a batch that passed. `expanded_bytes` is what they may take once decoded, where that is more."""

    encoding: Encoding
    sequences: Sequence[int]
    tables: frozenset[str]
    expanded_bytes: int = 0


def invalid(message: str) -> ProtocolError:
    """Refuse a message that breaks a rule of the format."""
    return ProtocolError(NackReason.INVALID_FORMAT.value, message)


def head_of(batch: AnyBatch) -> BatchHead | ArrowHead:
    """Give what a batch says of itself, whatever its encoding."""
    return batch.head if isinstance(batch, ArrowFrame) else batch


def check_changes(batch: AnyBatch, body: bytes, *, event_max_bytes: int) -> CheckedChanges:
    """Check everything that the changes of a batch say beside their rows, and of Arrow those too.

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
        _check_table_name(batch, table)
    return sequences


def _check_table_name(batch: BatchHead, table: str) -> None:
    """Refuse table names that no catalog could hold: they would be acked and then never written."""
    if not _is_table_name(table):
        index = next(i for i, event in enumerate(batch.events) if event.table == table)
        raise invalid(f"events[{index}].table: {_NAME_RULE}")


def _is_table_name(table: str) -> bool:
    parts = table.split(".")
    is_ours = parts[-1] == quarantine.TABLE  # where rows go that other tables cannot take
    return len(table) <= NAME_MAX_CHARS and not is_ours and all(_NAME_PART.fullmatch(part) for part in parts)


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
