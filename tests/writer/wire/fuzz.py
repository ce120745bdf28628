"""Damaged Arrow frames against admission and writer: `python -m tests.writer.wire.fuzz SEED COUNT [LAST]`.

Each frame is a good one with a few bytes, numbers or pieces changed, most often in its metadata. It must be refused
with BatchMalformed, or be written. Anything else ends the process, which is why it is one of its own. LAST is a file
for the frame in hand, which a crash leaves behind.
"""

from __future__ import annotations

import faulthandler
import random
import resource
import sys
import uuid
from decimal import Decimal
from pathlib import Path

import pyarrow as pa

from lakefeed.contract.changes import SourceId
from lakefeed.iceberg.types import Field, ListType, MapType, StructType
from lakefeed.writer.rows.comments import JSON_DOC
from lakefeed.writer.rows.groups import group_arrow
from lakefeed.writer.wal.payload import Encoding, Frame
from lakefeed.writer.wire.json_batch import BatchMalformed
from tests.writer.sample_rows import RECEIVED_AT_US, declared
from tests.writer.wire.arrow_batches import admit, changes, fit_arrow, stream_of

ROWS = 20
MEMORY_MAX_BYTES = 8 * 1024**3
EXPANDED_MAX_BYTES = 4 * 1024 * 1024
METADATA_BYTES = 1_500

NUMBERS = (
    0,
    1,
    -1,
    2,
    7,
    8,
    16,
    255,
    1 << 20,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**40,
    2**62,
    2**63 - 1,
    -(2**31),
    -(2**63),
)
STEPS = (-64, -16, -8, -4, -1, 1, 4, 8, 16, 64)

# A table whose columns have other types than most frames bring.
COLUMNS = declared(
    Field(20, "text", "long", required=True),
    Field(21, "struct", StructType((Field(22, "a", "int", required=True), Field(23, "b", "string")))),
    Field(24, "list", ListType(25, "string")),
    Field(26, "map", MapType(27, "string", 28, "int", value_required=True)),
    Field(29, "moment", "timestamp"),
    Field(30, "number", "string", doc=JSON_DOC),
)


def good_streams() -> list[bytes]:
    columns = {
        "text": pa.array([None if n % 3 == 0 else "x" * n for n in range(ROWS)]),
        "view": pa.array(["y" * (n * 2) for n in range(ROWS)], pa.string_view()),
        "large": pa.array(["z" * n for n in range(ROWS)], pa.large_string()),
        "list": pa.array([list(range(n % 4)) if n % 5 else None for n in range(ROWS)]),
        "pair": pa.array([[1, 2]] * ROWS, pa.list_(pa.int16(), 2)),
        "struct": pa.array([{"a": n, "b": {"c": "t"}} for n in range(ROWS)]),
        "map": pa.array([[("k", n)] for n in range(ROWS)], pa.map_(pa.string(), pa.int32())),
        "words": pa.array(["p", "q"] * (ROWS // 2)).dictionary_encode(),
        "inner": pa.array([["p", "q"]] * ROWS, pa.list_(pa.dictionary(pa.int8(), pa.string()))),
        "nothing": pa.nulls(ROWS),
        "nothings": pa.array([[None]] * ROWS, pa.list_(pa.null())),
        "number": pa.array([Decimal(n) for n in range(ROWS)], pa.decimal128(10, 2)),
        "wide": pa.array([Decimal(n) for n in range(ROWS)], pa.decimal256(38, 2)),
        "moment": pa.array(range(ROWS), pa.timestamp("ns", "UTC")),
        "day": pa.array(range(ROWS), pa.date32()),
        "flag": pa.array([True, False] * (ROWS // 2)),
        "id": pa.array([uuid.UUID(int=n).bytes for n in range(ROWS)], pa.uuid()),
        "bytes": pa.array([b"0123456789abcdefgh"] * ROWS, pa.binary_view()),
    }
    change = {"operation": pa.array(["UPDATE"] * ROWS).dictionary_encode(), "timestamp": [1_700_000_000_000] * ROWS}
    streams = []
    for compression in (None, "lz4", "zstd"):
        streams.append(stream_of(changes(columns, **change), compression=compression, batch_rows=7))
        for name, column in columns.items():
            streams.append(stream_of(changes({name: column}, **change), compression=compression, sequence_number=3))
    return streams


def damaged(stream: bytes, rng: random.Random) -> bytes:
    changed = bytearray(stream)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        at = rng.randrange(len(changed) if rng.random() < 0.4 else min(len(changed), METADATA_BYTES))
        _damage(changed, at, rng)
        changed = changed or bytearray(1)
    return bytes(changed)


def _damage(changed: bytearray, at: int, rng: random.Random) -> None:
    match rng.choices(("bit", "byte", "number", "step", "piece", "cut", "end"), (30, 15, 30, 15, 5, 4, 1))[0]:
        case "bit":
            changed[at] ^= 1 << rng.randrange(8)
        case "byte":
            changed[at] = rng.randrange(256)
        case "number":
            _put(changed, at, rng.choice((2, 4, 8)), lambda _: rng.choice(NUMBERS))
        case "step":
            _put(changed, at, rng.choice((4, 8)), lambda number: number + rng.choice(STEPS))
        case "piece":
            start, length = rng.randrange(len(changed)), rng.randrange(1, 64)
            changed[at : at + length] = changed[start : start + length]
        case "cut":
            del changed[at : at + rng.randrange(1, 16)]
        case "end":
            del changed[at + 1 :]


def _put(changed: bytearray, at: int, width: int, choose) -> None:
    at -= at % width
    if at + width <= len(changed):
        number = choose(int.from_bytes(changed[at : at + width], "little"))
        changed[at : at + width] = (number & ((1 << 8 * width) - 1)).to_bytes(width, "little")


def take(stream: bytes) -> bool:
    """Admit and write a frame; False if it is refused."""
    try:
        admit(stream, expanded_max_bytes=EXPANDED_MAX_BYTES, row_max_bytes=EXPANDED_MAX_BYTES)
    except BatchMalformed:
        return False
    frame = Frame(SourceId("s"), 0, -1, 2**62, RECEIVED_AT_US, Encoding.ARROW_STREAM, stream)
    for group in group_arrow([(0, frame)]):
        fit_arrow(group)
        fit_arrow(group, COLUMNS)
    return True


def main(seed: int, count: int, last_path: Path | None) -> None:
    faulthandler.enable()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_MAX_BYTES, MEMORY_MAX_BYTES))
    rng, streams = random.Random(seed), good_streams()
    assert all(map(take, streams))
    written = 0
    for _ in range(count):
        stream = damaged(rng.choice(streams), rng)
        if last_path is not None:
            last_path.write_bytes(stream)
        written += take(stream)
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(f"frames={count} written={written} refused={count - written} peak_mib={peak_mib}")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]) if len(sys.argv) > 3 else None)
