"""What a flush of several tables committed, and what not. Owns the JSON that /flush and flush_response send."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from writer.table_flush import Flushed


@dataclass(frozen=True, slots=True)
class FlushReport:
    """What one flush of several tables committed."""

    tables: Mapping[str, Flushed]
    duration_s: float

    @property
    def problems(self) -> dict[str, str]:
        """The tables that did not commit everything, and why."""
        return {name: item.problem for name, item in self.tables.items() if item.problem is not None}

    def to_json(self) -> dict[str, Any]:
        """Render as /flush and flush_response send it."""
        flushed, problems = self.tables.values(), self.problems
        told = {"error": "; ".join(f"{name}: {problem}" for name, problem in problems.items())} if problems else {}
        return {
            "success": not problems,
            **told,
            "batchesFlushed": sum(item.files for item in flushed),
            "eventsFlushed": sum(item.rows for item in flushed),
            "bytesWritten": sum(item.bytes for item in flushed),
            "paths": [path for item in flushed for path in item.paths],
            "durationMs": round(self.duration_s * 1_000, 3),
            "usedFallback": False,
            "tables": {name: _table_json(item) for name, item in self.tables.items()},
        }


def _table_json(item: Flushed) -> dict[str, Any]:
    done = {"snapshotId": item.snapshot_id, "rows": item.rows, "files": item.files}
    return done if item.problem is None else {**done, "success": False, "error": item.problem}
