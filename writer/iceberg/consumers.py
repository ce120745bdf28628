"""Consumers of a table: streaming readers that have registered with how far they have come. Core.

A consumer is a tag on the last snapshot that it has finished, so that it lives in the table itself and every engine can
read, set and drop it:

    lakefeed_consumer_<name>    type tag, snapshot-id, max-ref-age-ms

Readers follow `main` from snapshot to snapshot and need every one from their tag on. A tag whose snapshot is older than
`max-ref-age-ms` is over, by Iceberg's own rule: whoever registers counts in the age that the snapshot has then, so that
a consumer is kept for that long after it was last heard of. One that is over is passed over.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from writer.iceberg.table_state import MAIN_BRANCH

TAG_PREFIX = "lakefeed_consumer_"


@dataclass(frozen=True, slots=True)
class Consumer:
    """A registered reader. `until_ms` is when it is given up; None means never."""

    name: str
    snapshot_id: int
    until_ms: int | None

    def is_over(self, now_ms: int) -> bool:
        """Tell whether it was last heard of too long ago."""
        return self.until_ms is not None and now_ms > self.until_ms


def read_consumers(document: Mapping[str, Any]) -> list[Consumer]:
    """Find the consumers of a table, by name. The snapshots of its refs are all that is needed of its history."""
    moments = {snapshot["snapshot-id"]: snapshot["timestamp-ms"] for snapshot in document.get("snapshots") or ()}
    found = []
    for name, ref in sorted((document.get("refs") or {}).items()):
        if name.startswith(TAG_PREFIX) and ref["type"] == "tag" and ref["snapshot-id"] in moments:
            age_ms = ref.get("max-ref-age-ms")
            until_ms = None if age_ms is None else moments[ref["snapshot-id"]] + age_ms
            found.append(Consumer(name.removeprefix(TAG_PREFIX), ref["snapshot-id"], until_ms))
    return found


def snapshots_needed(
    chain: Sequence[Mapping[str, Any]], consumers: Sequence[Consumer], *, now_ms: int, most: int
) -> int:
    """Count how many of the newest snapshots consumers still need, at most `most`. `chain` has the newest first."""
    positions = {snapshot["snapshot-id"]: position for position, snapshot in enumerate(chain[:most])}
    needed = (positions.get(each.snapshot_id, -1) + 1 for each in consumers if not each.is_over(now_ms))
    return max(needed, default=0)


def describe_consumers(document: Mapping[str, Any], *, now_ms: int) -> list[dict[str, Any]]:
    """Describe the consumers of a table for /status, with how far each is behind `main`."""
    return list(_described(document, now_ms))


def _described(document: Mapping[str, Any], now_ms: int) -> Iterator[dict[str, Any]]:
    by_id = {snapshot["snapshot-id"]: snapshot for snapshot in document.get("snapshots") or ()}
    head = by_id.get((document.get("refs") or {}).get(MAIN_BRANCH, {}).get("snapshot-id"), {})
    for consumer in read_consumers(document):
        at = by_id[consumer.snapshot_id]
        left_ms = None if consumer.until_ms is None else consumer.until_ms - now_ms
        yield {
            "name": consumer.name,
            "snapshotId": consumer.snapshot_id,
            "snapshotsBehind": _difference(head, at, "sequence-number"),
            "secondsBehind": (_difference(head, at, "timestamp-ms") or 0) / 1000,
            "keptForSeconds": None if left_ms is None else max(0, left_ms) / 1000,
            "isPassedOver": consumer.is_over(now_ms),
        }


def _difference(head: Mapping[str, Any], at: Mapping[str, Any], key: str) -> int | None:
    """Tell how far a snapshot is behind; a table of format version 1 has no sequence numbers."""
    return max(0, head[key] - at[key]) if key in head and key in at else None
