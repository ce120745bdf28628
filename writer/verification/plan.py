"""What one verification reads. Owns which snapshots and files are part of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from writer.storage import ObjectStore
from writer.verification.history import History, Recorded
from writer.verification.live_files import LiveFile, load_removed


@dataclass(frozen=True, slots=True)
class Range:
    """What to verify: the table as of a snapshot, and of that what came after another; both may be left open."""

    after_id: int | None = None
    to_id: int | None = None


class Plan:
    """What a verification reads: the snapshots to check, and the live files in the order of their lowest sequence."""

    def __init__(
        self, history: History, *, chosen: Sequence[Recorded], files: Sequence[LiveFile], is_whole: bool
    ) -> None:
        self.history = history
        self.chosen = chosen
        self.files = sorted(files, key=lambda file: (file.extent.lowest, file.location))
        self.is_whole = is_whole
        self._replaced: set[str] | None = None

    @property
    def rows(self) -> int:
        """Count the rows to read, by the manifests."""
        return sum(file.rows for file in self.files)

    async def load_replaced(self, store: ObjectStore) -> set[str]:
        """Read which files rewrites have replaced; once, as few verifications need it."""
        if self._replaced is None:
            parts = [
                await load_removed(store, each.manifest_list, snapshot_id=each.snapshot_id)
                for each in self.history.snapshots
                if each.is_rewrite
            ]
            self._replaced = set().union(*parts)
        return self._replaced
