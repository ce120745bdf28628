"""Offers for tests of dedup and intake: whole batches, as a session would make them."""

from __future__ import annotations

import orjson

from lakefeed.contract.changes import SourceId
from lakefeed.ingest.protocol.offers import BEFORE_ALL, Offer
from lakefeed.writer.wal.payload import Encoding


def body_of(sequences: list[int], *, table: str = "users", padding: int = 0) -> bytes:
    """A batch of one insert per sequence; `padding` makes each row that much larger."""
    events = [
        {
            "sequence": sequence,
            "operation": "INSERT",
            "table": table,
            "rowId": str(sequence),
            "after": {"id": sequence, "name": "x" * padding},
        }
        for sequence in sequences
    ]
    return orjson.dumps({"type": "cdc_batch", "events": events})


def offer_of(
    *sequences: int,
    source: str = "shop",
    epoch: int = 0,
    padding: int = 0,
    table: str = "users",
    previous: int | None = None,
    committed: int = BEFORE_ALL,
) -> Offer:
    return Offer(
        source=SourceId(source),
        epoch=epoch,
        sequences=list(sequences),
        received_at_us=1_763_251_200_000_000,
        encoding=Encoding.JSON_BATCH,
        body=body_of(list(sequences), table=table, padding=padding),
        tables=frozenset((table,)),
        previous_sequence=previous,
        committed_sequence=committed,
    )
