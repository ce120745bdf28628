"""Seeds of random tests, and how long they search. A failure can be repeated by its seed.

A variable of the environment sets a seed: a number, or `random` for a new one, which `make soak` sets.
"""

from __future__ import annotations

import os
import random


def choose_seed(variable: str, usual: int | None = None) -> int:
    """Return the seed of the environment, else the usual one, else a new one; and print it."""
    given = os.environ.get(variable) or ("random" if usual is None else str(usual))
    seed = random.SystemRandom().randrange(2**32) if given == "random" else int(given)
    print(f"seed: {variable}={seed}", flush=True)
    return seed


def choose_count(variable: str, usual: int) -> int:
    """Return the count of the environment, else the usual one."""
    return int(os.environ.get(variable) or usual)
