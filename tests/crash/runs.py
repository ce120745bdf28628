"""How the crash tests are run: their seed, how many rounds they take, and the service that they kill."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from tests.seeds import choose_count, choose_seed

# Small enough that every kill has a fair chance to meet a rotation, a trim, a flush or a commit.
SETTINGS = {
    "ingest.frame_max_bytes": "256KiB",
    "ingest.event_max_bytes": "64KiB",
    "log.segment_max_bytes": "1MiB",
    "log.max_bytes": "32MiB",
    "writer.flush_max_changes": 200,
    "writer.flush_max_age_s": 0.2,
    "writer.flush_check_interval_s": 0.05,
}


def rounds(directory: Path) -> Iterator[tuple[Path, random.Random]]:
    """Take as many rounds as asked for, each with a directory and choices of its own, all from one seed."""
    rng = random.Random(choose_seed("CRASH_TEST_SEED"))
    count = choose_count("CRASH_TEST_ROUNDS", 1)
    for number in range(1, count + 1):
        print(f"round {number} of {count}", flush=True)
        own = directory / str(number)
        own.mkdir()
        yield own, random.Random(rng.random())
