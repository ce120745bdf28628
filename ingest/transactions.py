"""Which transaction of its source goes on behind a batch. Owns how batches say so; what follows is the writer's.

An event may name its transaction in its metadata, the last event of the transaction also says that it is the last:

    {"sequence": 7, ..., "metadata": {"transaction": {"id": "t-2041"}}}
    {"sequence": 8, ..., "metadata": {"transaction": {"id": "t-2041", "end": true}}}

A source's transactions come one after the other, so the last event of a batch tells. An Arrow frame says it in its
schema's metadata instead, where no row has to be looked at: `lakefeed.transaction` has the id if more of it follows.
Adapters know by themselves. What has not this form says nothing: metadata is the source's own.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from ingest.offers import Offer
from writer.arrow.frames import open_stream
from writer.frames import Encoding

# It stands in the header of every record that it is open behind.
TRANSACTION_ID_MAX_CHARS = 255

ARROW_KEY = b"lakefeed.transaction"


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
    """Name the transaction that goes on behind an offer; empty if none does."""
    if offer.origin:
        return offer.open_transaction
    if offer.encoding is Encoding.ARROW_STREAM:
        return _open_behind_stream(offer.body)
    return _open_behind_batch(offer.body)


def _open_behind_batch(body: bytes) -> str:
    metadata = _decode_batch(body).events[-1].metadata
    try:
        transaction = _decode_metadata(metadata).transaction if metadata else None
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return ""
    return "" if transaction is None or transaction.end else str(transaction.id)


def _open_behind_stream(body: bytes) -> str:
    with open_stream(body) as reader:
        name: bytes = (reader.schema.metadata or {}).get(ARROW_KEY, b"")
    return name.decode(errors="replace")[:TRANSACTION_ID_MAX_CHARS]
