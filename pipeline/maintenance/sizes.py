"""What a plan knows of a table, as plain values. Core: facts.py reads them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.consumers.tags import History

# As Iceberg's own planner has it: a file of this share of the target size is neither small nor large.
SMALL_SHARE = 0.75
LARGE_SHARE = 1.8


@dataclass(frozen=True, slots=True)
class PartitionFiles:
    """The data files of a partition whose size is wrong: those too small, and those too large."""

    count: int
    bytes: int
    largest_bytes: int


@dataclass(frozen=True, slots=True)
class Sizes:
    """A table in numbers, to be held against those from before."""

    data_files: int
    data_bytes: int
    small_files: int
    delete_files: int
    manifests: int
    snapshots: int

    def to_json(self) -> dict[str, int]:
        """Give the numbers by name."""
        return dataclasses.asdict(self)


@dataclass(frozen=True, slots=True)
class TableFacts:
    """All that a plan needs to know of a table."""

    properties: Mapping[str, str]
    sizes: Sizes
    wrong_sizes: Sequence[PartitionFiles]
    position_deletes: int
    history: History
