"""How the crash tests are run: their seed, how many rounds they take, and the service that they kill."""

from __future__ import annotations

import os
import random

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


def choose_seed() -> int:
    """Take the seed that is asked for, or a new one, and say which: the same seed makes the same choices again."""
    given = os.environ.get("CRASH_TEST_SEED")
    seed = int(given) if given else random.SystemRandom().randrange(2**32)
    print(f"seed: CRASH_TEST_SEED={seed}", flush=True)
    return seed


def rounds(usual: int) -> int:
    """Tell how many rounds to take: as many as usual, or so many times more."""
    return usual * int(os.environ.get("CRASH_TEST_ROUNDS_TIMES", "1"))
