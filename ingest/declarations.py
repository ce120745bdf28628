"""What a connection's source declares of its tables, until that is durable. Owns when a declaration travels.

    connect {"tables": {...}} --checked--> waiting --with each batch of its table--> log
                                              +------ until one such batch is durable ------> done

A declaration lies in the log beside the first rows it speaks for, in one record: whoever reads those rows, now or
after a crash, has read it before. Its form is writer/rows/declared.py's.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import msgspec

from ingest.batch_checks import AnyBatch, invalid
from writer.arrow.frames import ArrowFrame
from writer.rows.declared import DECLARATIONS_MAX_BYTES, DeclarationMalformed, parse_declarations

_decode_tables = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_encode = msgspec.json.Encoder().encode


@dataclass(slots=True)
class Declarations:
    """The declarations of one connection that are not durable yet, by table."""

    waiting: dict[str, msgspec.Raw] = field(default_factory=dict)

    def of_batch(self, batch: AnyBatch) -> str:
        """Give, for a batch's record, what waits for one of its tables."""
        if not self.waiting:
            return ""
        wanted = {table: self.waiting[table] for table in _tables_of(batch) if table in self.waiting}
        return _encode(wanted).decode() if wanted else ""

    def on_durable(self, declared: str) -> None:
        """Forget what has become durable with a batch, unless something else was declared since."""
        for table, text in _decode_tables(declared).items():
            if self.waiting.get(table) == text:
                del self.waiting[table]


def read_declarations(tables: msgspec.Raw) -> Declarations:
    """Check what `connect` declares.

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
    # Copies, because a raw value keeps the whole message that it is part of.
    return Declarations({table: msgspec.Raw(bytes(text)) for table, text in _decode_tables(tables).items()})


def _tables_of(batch: AnyBatch) -> Collection[str]:
    return (batch.head.table,) if isinstance(batch, ArrowFrame) else {event.table for event in batch.events}
