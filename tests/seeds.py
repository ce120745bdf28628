"""Seeds of random tests, and how long they search. Whoever sees a failure can see the same one again.

A variable of the environment sets a seed: a number, or `random` for a new one; `make soak` asks for that.
"""

from __future__ import annotations

import os
import random


def choose_seed(variable: str, usual: int | None = None) -> int:
    """Take the seed that is asked for, else the usual one, else a new one; and say which."""
    given = os.environ.get(variable) or ("random" if usual is None else str(usual))
    seed = random.SystemRandom().randrange(2**32) if given == "random" else int(given)
    print(f"seed: {variable}={seed}", flush=True)
    return seed


def choose_count(variable: str, usual: int) -> int:
    """Tell how often to do something."""
    return int(os.environ.get(variable) or usual)
