"""How far a mirror has come, as it says itself. Owns the marker's form and which of several counts.

    {"snapshot": 12, "stream": "5f..", "batch": 7, "run": "a1..", "merges": 19}

Each merge writes it into the summary of its own snapshot, so that rows and marker are one act. A copy stands among the
table's properties, now and then, for when snapshots with markers have expired behind a compaction; being older, it only
lets some changes be merged again, which changes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from pipeline.mirrors.lineage import MARKER, Version

MIRROR_KEY = "lakefeed.mirror.key"
MIRROR_MODE = "lakefeed.mirror.mode"


@dataclass(frozen=True, slots=True, kw_only=True)
class Marker:
    """The change table's snapshot up to which all changes are in, and which batch of which stream brought the last.

    `batch` is -1 where no stream has brought any yet. `run` is the application, so that two of them notice each other.
    """

    snapshot: int
    stream: str
    batch: int
    run: str
    merges: int = 0

    def to_text(self) -> str:
        """Write it for a summary or a property."""
        return json.dumps(asdict(self), separators=(",", ":"))


def read_marker(text: str | None) -> Marker | None:
    """Read a marker; None where there is none, or none of ours."""
    try:
        return Marker(**json.loads(text)) if text else None
    except (ValueError, TypeError):
        return None


def find_marker(lineage: Sequence[Version], properties: Mapping[str, str]) -> Marker | None:
    """Find the newest marker of a mirror; a table that was rolled back has the one of its present rows."""
    markers = (read_marker(version.summary.get(MARKER)) for version in lineage)
    return next((marker for marker in markers if marker is not None), None) or read_marker(properties.get(MARKER))
