"""Settings of backfills: [pipeline.backfill]."""

from __future__ import annotations

from dataclasses import dataclass

from lakefeed.settings import MIB, Settings, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class BackfillConfig(Settings):
    """Section [pipeline.backfill]."""

    chunk_max_bytes: int = setting(
        512 * MIB,
        "Size of the input files of one chunk, in bytes. A chunk is one snapshot; a crash repeats one chunk.",
        minimum=1,
    )
    chunk_max_rows: int = setting(
        1_000_000, "Rows of one chunk of a database table, if its keys are evenly distributed.", minimum=1
    )
    parallel_reads: int = setting(
        4, "Number of database connections at a time. Each reads a part of a chunk.", minimum=1
    )
    ledger: bool = setting(
        True, "Record the rows of each chunk for `lakefeed verify`. Costs a copy on the disks of the executors."
    )
