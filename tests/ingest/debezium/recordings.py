"""The recorded requests, the rows that they must add up to, and the keys that their tables have."""

from __future__ import annotations

import functools
import gzip
import json
import re
from dataclasses import dataclass
from pathlib import Path

from lakefeed.ingest.debezium.envelope import read_events
from lakefeed.ingest.debezium.events import DebeziumConfig, DebeziumEvent, TableKeys

DATA = Path(__file__).parents[2] / "data" / "debezium"
NAMES = {path.name.split("-")[0]: path for path in sorted(DATA.glob("*.jsonl.gz"))}
EXPECTED = json.loads((DATA / "expected.json").read_text(encoding="utf-8"))
FAULTS = json.loads((DATA / "sink-faults.json").read_text(encoding="utf-8"))

_LINE = re.compile(rb'\{"headers":(.*?\}),"body":(.*),"raw_length":(\d+)\}')

# The replica identity is what tells rows apart: another index, and a primary key as it was before it got wider.
_IDENTITIES = {"public.by_index": ("code",), "public.evolving": ("id",)}

CONFIG = DebeziumConfig(
    tables={
        name: TableKeys(
            columns=_IDENTITIES.get(name, tuple(table["primary_key"])),
            replica_identity_full=table["replica_identity"] == "full",
        )
        for name, table in EXPECTED["tables"].items()
    }
)


@dataclass(frozen=True, slots=True)
class Request:
    headers: dict[str, str]
    body: bytes


@functools.cache
def load(variant: str) -> list[Request]:
    requests = []
    for line in gzip.decompress(NAMES[variant].read_bytes()).splitlines():
        headers, body, length = _LINE.fullmatch(line).groups()
        assert len(body) == int(length)
        requests.append(Request(json.loads(headers), body))
    return requests


@functools.cache
def load_events(variant: str) -> list[list[DebeziumEvent]]:
    return [read_events(request.body, request.headers, CONFIG) for request in load(variant)]
