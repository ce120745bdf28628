"""Debezium events, read as changes. Owns what Debezium says and how it says it; the log and the tables are not its.

    body, headers --read_events--> Change | TransactionMark | Heartbeat | Ignored
                                      |            |
                         Positions.plan            TransactionTally.observe
                     new, or sent before?          did all of a transaction arrive?

| module | owns |
| --- | --- |
| `envelope.py` | a request taken apart into events: which kind each one is, and what it becomes |
| `forms.py` | the three ways a change is written: envelope, unwrapped row, CloudEvent |
| `images.py` | rows: placeholders, trusted columns, row ids |
| `values.py`, `times.py` | single values: logical types to exact JSON |
| `schemas.py` | the schema that came with a value, understood once |
| `headers.py` | what the sink says beside the body |
| `positions.py` | which changes were taken before |
| `transactions.py` | what a transaction's end says against what arrived |

All of it is core. docs/debezium.md has the mapping of types and what a source has to be configured to.
"""

from __future__ import annotations

from ingest.debezium.config import DebeziumConfig, TableKeys
from ingest.debezium.envelope import read_events
from ingest.debezium.errors import DebeziumMalformed
from ingest.debezium.events import (
    Change,
    DebeziumEvent,
    Heartbeat,
    Ignored,
    Origin,
    SourceOperation,
    TransactionMark,
    TransactionStatus,
)
from ingest.debezium.headers import Context, read_context
from ingest.debezium.positions import Plan, Positions, decode_positions, digest_of, encode_positions
from ingest.debezium.transactions import Doubt, Report, TransactionTally, decode_tally, encode_tally

__all__ = [
    "Change",
    "Context",
    "DebeziumConfig",
    "DebeziumEvent",
    "DebeziumMalformed",
    "Doubt",
    "Heartbeat",
    "Ignored",
    "Origin",
    "Plan",
    "Positions",
    "Report",
    "SourceOperation",
    "TableKeys",
    "TransactionMark",
    "TransactionStatus",
    "TransactionTally",
    "decode_positions",
    "decode_tally",
    "digest_of",
    "encode_positions",
    "encode_tally",
    "read_context",
    "read_events",
]
