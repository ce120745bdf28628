"""Frames that are wrong in every way that chance finds: valid messages with bytes, fields and types exchanged.

Everything follows from the random generator that is passed in.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import orjson
import pyarrow as pa

from tests.writer.wire.arrow_batches import changes, stream_of

# Above 2**53, 2**63 and 2**64, and what no table holds as a number.
HUGE_NUMBERS = (2**53 + 1, 2**63, -(2**63) - 1, 2**64, 10**30, 1e308, -1e-308, 10**400)
STRANGE_VALUES = (None, True, -1, 0.5, "", "ü\u0000☃", [], {}, [[]], {"": {"": None}}, "2026-11-16T00:00:00Z", "NaN")
DEPTH = 5_000
SWOLLEN_BYTES = 300_000


def _event(sequence: int) -> dict[str, Any]:
    return {
        "sequence": sequence,
        "timestamp": 1_794_700_800_000 + sequence,
        "operation": ("INSERT", "UPDATE", "DELETE", "READ")[sequence % 4],
        "table": "hostile_clients",
        "rowId": str(sequence),
        "before": {"id": sequence, "name": "before"},
        "after": {
            "id": sequence,
            "name": f"name {sequence}",
            "score": sequence / 8,
            "tags": ["a", "b"],
            "deep": {"x": 1},
        },
        "unchanged": ["blob"],
        "metadata": {"transaction": sequence},
    }


def _debezium(sequence: int) -> dict[str, Any]:
    source = {"connector": "postgresql", "name": "shop", "db": "shop", "schema": "public", "table": "hostile_clients"}
    position = {"lsn": 1_000 + sequence, "ts_ms": 1_794_700_800_000, "snapshot": "false", "txId": sequence}
    return {
        "op": "c",
        "before": None,
        "after": {"id": sequence},
        "source": source | position,
        "ts_ms": 1_794_700_800_000,
    }


def json_message(rng: random.Random, source: str, sequence: int) -> dict[str, Any]:
    """Make a message that is right."""
    events = [_event(sequence + number) for number in range(rng.randint(1, 4))]
    if rng.random() < 0.01:
        return rng.choice([{"type": "flush_request", "reason": "manual"}, {"type": "disconnect", "reason": "done"}])
    return rng.choice(
        [
            {"type": "connect", "sourceDoId": source, "epoch": 0, "ackLevel": "durable", "capabilities": {"a": [1]}},
            {"type": "cdc_batch", "sourceDoId": source, "events": events},
            {"type": "cdc_batch", "events": events},
            {"type": "cdc_batch", "sourceDoId": source, "sequenceNumber": 0, "events": events},
            {"type": "cdc_batch", "firstEventSequence": sequence, "lastEventSequence": sequence, "events": events[:1]},
            {"type": "debezium_batch", "sourceDoId": source, "events": [_debezium(sequence)], "headers": {"a": "b"}},
            {"type": "heartbeat", "timestamp": 1, "correlationId": "mutated"},
        ]
    )


def arrow_stream(rng: random.Random, source: str, sequence: int) -> bytes:
    """Make an Arrow frame that is right."""
    rows = rng.randint(1, 20)
    own = {
        "id": pa.array(range(rows)),
        "name": pa.array([f"name {number}" for number in range(rows)]),
        "score": pa.array([number / 8 if number % 3 else None for number in range(rows)]),
        "tags": pa.array([["a"] * (number % 3) for number in range(rows)]),
    }
    compression = rng.choice([None, None, "lz4", "zstd"])
    operations = pa.array(["INSERT"] * rows)
    return stream_of(
        changes(own, first=sequence, operation=operations),
        table="hostile_clients",
        compression=compression,
        source=source,
    )


def mutated_frame(rng: random.Random, source: str, sequence: int) -> tuple[bytes, bool]:
    """Make a frame that is most likely wrong; with it, whether it is to be sent as text."""
    if rng.random() < 0.3:
        return _spoil_bytes(rng, arrow_stream(rng, source, sequence)), rng.random() < 0.05
    message = json_message(rng, source, sequence)
    if rng.random() < 0.5:
        for _ in range(rng.randint(1, 3)):
            _exchange_value(rng, message)
        frame = _dumps(message)
    else:
        frame = _spoil_bytes(rng, _dumps(message))
    return frame, rng.random() < 0.7


def _dumps(message: Any) -> bytes:
    """Encode also what JSON libraries refuse: numbers without end."""
    numbers: list[int] = []

    def replace_huge(value: Any) -> Any:
        if isinstance(value, dict):
            return {str(name): replace_huge(item) for name, item in value.items()}
        if isinstance(value, list):
            return [replace_huge(item) for item in value]
        if isinstance(value, int) and abs(value) >= 2**63:
            numbers.append(value)
            return f"@{len(numbers) - 1}@"
        return value

    text = orjson.dumps(replace_huge(message))
    for index, number in enumerate(numbers):
        text = text.replace(f'"@{index}@"'.encode(), str(number).encode())
    return text


def _exchange_value(rng: random.Random, message: dict[str, Any]) -> None:
    """Put something else in the place of one value, at any depth, or take it away; mostly among the events."""
    events = message.get("events")
    place: Any = events if isinstance(events, list) and rng.random() < 0.8 else message
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            return
        key = rng.choice(keys)
        if not isinstance(place[key], dict | list) or rng.random() < 0.15:
            break
        place = place[key]
    if key == "type" and rng.random() < 0.8:
        return
    match rng.randrange(5):
        case 0:
            place[key] = rng.choice(HUGE_NUMBERS)
        case 1:
            del place[key]
        case 2:
            place[key] = [place[key]]
        case _:
            place[key] = copy.deepcopy(rng.choice(STRANGE_VALUES))


def _spoil_bytes(rng: random.Random, frame: bytes) -> bytes:
    if rng.random() < 0.005:
        return frame * (SWOLLEN_BYTES // len(frame) + 1)
    spoil: Callable[[random.Random, bytes], bytes] = rng.choice(
        [_flip, _flip, _flip, _cut, _splice, _repeat, _insert_bytes, _nest]
    )
    return spoil(rng, frame)


def _flip(rng: random.Random, frame: bytes) -> bytes:
    data = bytearray(frame)
    for _ in range(rng.randint(1, 4)):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


def _cut(rng: random.Random, frame: bytes) -> bytes:
    return frame[: rng.randrange(len(frame))]


def _splice(rng: random.Random, frame: bytes) -> bytes:
    start, other = rng.randrange(len(frame)), rng.randrange(len(frame))
    return frame[:start] + frame[other:]


def _repeat(rng: random.Random, frame: bytes) -> bytes:
    start = rng.randrange(len(frame))
    stop = min(len(frame), start + rng.randint(1, 64))
    return frame[:stop] + frame[start:stop] * rng.randint(1, 8) + frame[stop:]


def _insert_bytes(rng: random.Random, frame: bytes) -> bytes:
    start = rng.randrange(len(frame))
    return frame[:start] + rng.choice([b"\xff\xfe", b"\x00", b"\xed\xa0\x80", b'"', b"\\u", b"\xc3"]) + frame[start:]


def _nest(rng: random.Random, frame: bytes) -> bytes:
    """Put a value that is nested beyond all reason somewhere."""
    start = rng.randrange(len(frame))
    opening, closing = rng.choice([(b"[", b"]"), (b'{"a":', b"}")])
    return frame[:start] + opening * DEPTH + b"1" + closing * DEPTH + frame[start:]
