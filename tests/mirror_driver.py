"""A process that keeps mirrors and is killed at a moment that a test has chosen: `python -m tests.mirror_driver JSON`.

It kills its whole process group, Spark's JVM with it, after the n-th time that a merge has reached a certain step. The
product knows nothing of it: the steps are wrapped here.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

from lakefeed.logs import set_up_logging
from lakefeed.pipeline.mirrors import follower, merge
from lakefeed.pipeline.mirrors.runner import MirrorRun
from lakefeed.pipeline.mirrors.settings import MirrorConfig, MirrorMode
from lakefeed.pipeline.spark.session import SessionConfig, build_session
from lakefeed.pipeline.spark.tables import TableIdentifier

# Where a merge is killed: its tombstones are written and the merge is not; it is committed and not in the checkpoint.
STEPS = ("before the merge", "after the merge")


def mirror_config(modes: dict[str, str], checkpoints: str) -> MirrorConfig:
    tables = {table: {"key": ("id",), "mode": MirrorMode(mode)} for table, mode in modes.items()}
    return MirrorConfig(checkpoints=checkpoints, interval_s=0.5, tables=tables)


def killing(action: Callable[..., Any], *, before: bool, countdown: int) -> Callable[..., Any]:
    left = [countdown]
    lock = threading.Lock()

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = None if before else action(*args, **kwargs)
        with lock:
            left[0] -= 1
            if left[0] == 0:
                os.killpg(0, signal.SIGKILL)
        return action(*args, **kwargs) if before else result

    return wrapped


def main(order: dict[str, Any]) -> None:
    set_up_logging("info")
    countdown = order["countdown"]
    if order["step"] == STEPS[0]:
        merge.commit_marked = killing(merge.commit_marked, before=True, countdown=countdown)
    else:
        follower.merge_changes = killing(follower.merge_changes, before=False, countdown=countdown)
    conf = {"spark.log.level": "ERROR", "spark.scheduler.mode": "FAIR"}
    spark = build_session(SessionConfig(master="local[2]", url=order["url"], conf=conf))
    tables = [TableIdentifier.parse(name) for name in order["modes"]]
    MirrorRun(spark, "lake", tables, mirror_config(order["modes"], order["checkpoints"])).run(once=False)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
