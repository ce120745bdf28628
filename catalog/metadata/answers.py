"""What a load shows of a document. A view for one answer: a commit must never start from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from catalog.fields import JsonObject


def only_referenced_snapshots(document: Mapping[str, Any]) -> JsonObject:
    """Leave out snapshots that no branch or tag points at, and the statistics of those left out."""
    referenced = {ref["snapshot-id"] for ref in document["refs"].values()}
    shown = dict(document)
    for key in ("snapshots", "statistics", "partition-statistics"):
        shown[key] = [item for item in document[key] if item["snapshot-id"] in referenced]
    return shown
