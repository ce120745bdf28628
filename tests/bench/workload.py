"""What the benchmark sends: frames of unique ten-column changes, built before any clock starts.

A row has an integer key, two texts of 20 characters and one of 60, a float, a boolean, a timestamp and a decimal as
text, a small nested object and a nullable integer. Of ten changes five are updates with both images, four inserts and
one a delete, about 600 bytes of JSON each. Text is random, so it compresses worse than real names and addresses would.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from tests.bench.arrow_workload import to_arrow

ENCODINGS = ("json", "arrow", "arrow-lz4", "arrow-zstd")

FIRST_ID = 1_000_000_000
FIRST_TIMESTAMP_MS = 1_794_787_200_000

_OPERATIONS = ("UPDATE", "INSERT") * 4 + ("UPDATE", "DELETE")
_TIERS = ("basic", "silver", "gold", "partner")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """Changes of one source for one table; `first_sequence` continues where an earlier stream of the source ended."""

    source: str
    table: str
    first_sequence: int
    first_number: int
    changes: int
    frame_changes: int
    seed: int
    encoding: str = "json"

    @property
    def end_sequence(self) -> int:
        """The first sequence behind this stream."""
        return self.first_sequence + self.changes


def build_frames(stream: Stream) -> Iterator[tuple[int, bytes]]:
    """Yield the stream as (number of changes, frame)."""
    rng = random.Random(f"{stream.seed}/{stream.source}/{stream.first_sequence}")
    starts = range(stream.first_sequence, stream.end_sequence, stream.frame_changes)
    for number, start in enumerate(starts, start=stream.first_number):
        stop = min(start + stream.frame_changes, stream.end_sequence)
        frame = _frame(stream, number, range(start, stop), rng)
        yield stop - start, frame if stream.encoding == "json" else to_arrow(frame, compression=_compression(stream))


def _compression(stream: Stream) -> str | None:
    return stream.encoding.partition("-")[2] or None


def _frame(stream: Stream, number: int, sequences: range, rng: random.Random) -> bytes:
    events = ",".join(_event(stream.table, sequence, rng) for sequence in sequences)
    return (
        f'{{"type":"cdc_batch","timestamp":{FIRST_TIMESTAMP_MS},"sourceDoId":"{stream.source}",'
        f'"sequenceNumber":{number},"firstEventSequence":{sequences[0]},"lastEventSequence":{sequences[-1]},'
        f'"events":[{events}]}}'
    ).encode()


def _event(table: str, sequence: int, rng: random.Random) -> str:
    operation = _OPERATIONS[sequence % len(_OPERATIONS)]
    row_id = FIRST_ID + sequence
    who = _who(row_id, rng)
    row = f"{{{who},{_state(sequence, rng)}}}"
    match operation:
        case "INSERT":
            images = f'"after":{row}'
        case "DELETE":
            images = f'"before":{row}'
        case _:
            images = f'"before":{{{who},{_state(sequence - 1, rng)}}},"after":{row}'
    return (
        f'{{"sequence":{sequence},"timestamp":{FIRST_TIMESTAMP_MS + sequence // 100},"operation":"{operation}",'
        f'"table":"{table}","rowId":"{row_id}",{images}}}'
    )


def _who(row_id: int, rng: random.Random) -> str:
    """Build the columns that an update leaves alone."""
    text = rng.randbytes(50).hex()
    return f'"id":{row_id},"first_name":"{text[:20]}","last_name":"{text[20:40]}","address":"{text[40:]}"'


def _state(moment: int, rng: random.Random) -> str:
    number = rng.getrandbits(30)
    visits = number % 1_000
    return (
        f'"score":{number / 1024},"active":{"true" if number & 1 else "false"},'
        f'"updated_at":"2026-11-16T{moment // 3600 % 24:02}:{moment // 60 % 60:02}:{moment % 60:02}.{visits:03}Z",'
        f'"balance":"{number // 100}.{number % 100:02}","profile":{{"tier":"{_TIERS[number & 3]}","visits":{visits}}},'
        f'"referrer":{number if number & 4 else "null"}'
    )
