"""Settings of backfills: [pipeline.backfill]."""

from __future__ import annotations

from dataclasses import dataclass, field

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class BackfillConfig:
    """Section [pipeline.backfill]."""

    chunk_max_bytes: int = field(
        default=512 * MIB,
        metadata={"why": "files of one chunk, which is one snapshot; what a crash costs is one chunk"},
    )
    chunk_max_rows: int = field(
        default=1_000_000, metadata={"why": "rows of one chunk of a database's table, if its keys are evenly spread"}
    )
    parallel_reads: int = field(
        default=4, metadata={"why": "connections to a database at a time; each reads a part of a chunk"}
    )
    ledger: bool = field(
        default=True,
        metadata={"why": "record the rows of each chunk for lakefeed verify; costs a copy on the executors' disks"},
    )

    def __post_init__(self) -> None:
        for name in ("chunk_max_bytes", "chunk_max_rows", "parallel_reads"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0: {getattr(self, name)}")
