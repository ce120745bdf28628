"""Runs `lakefeed backfill`, and kills itself while it commits a chunk: `killed_backfill CHUNK DELAY_S ARGUMENT...`."""

from __future__ import annotations

import os
import signal
import sys
import threading

from lakefeed.contract.ledger import ChunkMark
from lakefeed.pipeline.backfill import runner
from lakefeed.pipeline.backfill.commands import backfill
from lakefeed.pipeline.backfill.runner import CommittedChunk, StagedChunk, commit_chunk
from lakefeed.pipeline.backfill.target import TargetTable


def main() -> None:
    chunk, delay_s = int(sys.argv[1]), float(sys.argv[2])

    def commit(into: TargetTable, staged: StagedChunk, mark: ChunkMark) -> CommittedChunk:
        if mark.chunk == chunk:
            threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
        return commit_chunk(into, staged, mark)

    runner.commit_chunk = commit
    backfill(sys.argv[3:])


if __name__ == "__main__":
    main()
